"""One text for one value: JSON with sorted keys, no spaces, UTF-8; whatever reads otherwise is refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from expunge.errors import DataError


def canonical(value: Any) -> bytes:
    """The one text of a value.

    Example:
        >>> canonical({"b": [1, 2.5], "a": "é"}).decode()
        '{"a":"é","b":[1,2.5]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parsed(text: bytes, what: str) -> dict[str, Any]:
    """The object that a canonical text stands for; any other text, and any other way to write it, is refused.

    Example:
        >>> parsed(b'{"a":1}', "The note")
        {'a': 1}
    """
    try:
        value = json.loads(text)
        same = isinstance(value, dict) and canonical(value) == text
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{what} cannot be read: it is damaged or cut short.") from problem
    if not same:
        raise DataError(f"{what} is not in canonical form: somebody has rewritten or damaged it.")
    return dict(value)


def digest(value: Any) -> str:
    """SHA-256 of a value's text.

    Example:
        >>> digest({})[:8]
        '44136fa3'
    """
    return hashlib.sha256(canonical(value)).hexdigest()
