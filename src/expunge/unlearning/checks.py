"""How options are checked: early, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_args

from expunge.errors import RequestError


def require_choice(options: object, name: str, choice: object) -> None:
    """The option is one of a Literal's values."""
    if getattr(options, name) not in get_args(choice):
        known = ", ".join(get_args(choice))
        raise RequestError(f"The option {name} can be {known}, not {getattr(options, name)!r}.")


def require_whole(options: object, *names: str, least: int = 1) -> None:
    """These options are whole numbers of at least ``least``."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError(f"The option {name} must be at least {least}, a whole number, not {value!r}.")


def require_flag(options: object, *names: str) -> None:
    """These options are True or False."""
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise RequestError(f"The option {name} is True or False, not {getattr(options, name)!r}.")


def require_number(options: object, *names: str, may_be_none: bool = False) -> None:
    """These options are finite numbers of at least 0, or None where that has a meaning."""
    for name in names:
        value = getattr(options, name)
        if not (_is_number(value) and value >= 0) and not (may_be_none and value is None):
            raise RequestError(f"The option {name} must be a number of at least 0, not {value!r}.")


def require_falling(options: object, *names: str) -> None:
    """These options are lengths of a step, longest first, all above 0: backwards it would add what is to go."""
    for name in names:
        value = getattr(options, name)
        if not _are_numbers(value) or value[-1] <= 0 or not all(a > b for a, b in pairwise(value)):
            raise RequestError(f"The option {name} takes one or more numbers above 0, longest first, not {value!r}.")


def require_rising(options: object, *names: str) -> None:
    """These options are lengths of a repair: 0, beside which the others are judged, then longer and longer."""
    for name in names:
        value = getattr(options, name)
        if not _are_numbers(value) or value[0] != 0 or not all(a < b for a, b in pairwise(value)):
            raise RequestError(f"The option {name} takes numbers that begin with 0 and rise, not {value!r}.")


def refuse_idle(options: Any, names: Iterable[str], reason: str) -> None:
    """Refuse options that would change nothing; ``reason`` says why they would not."""
    defaults = {part.name: part.default for part in fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise RequestError(f"The option {name} would change nothing: {reason}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(map(_is_number, value))
