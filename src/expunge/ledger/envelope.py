"""Signed statements: in-toto Statements in DSSE envelopes, in canonical form only.

https://github.com/in-toto/attestation (Statement v1) and https://github.com/secure-systems-lab/dsse (v1). Other
tools may read them; this one accepts a single way to write each, so that no bit of a file is without meaning.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from expunge.errors import DataError
from expunge.ledger.canonical import canonical, parsed
from expunge.ledger.keys import PublicKey, Signer

PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"


def statement(subjects: Mapping[str, str], kind: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of files that are known by their SHA-256.

    Example:
        >>> statement({"model": "00"}, "https://example.org/v1", {})["subject"]
        [{'name': 'model', 'digest': {'sha256': '00'}}]
    """
    named = [{"name": name, "digest": {"sha256": found}} for name, found in subjects.items()]
    return {"_type": STATEMENT, "subject": named, "predicateType": kind, "predicate": dict(predicate)}


def sealed(content: Mapping[str, Any], signer: Signer) -> bytes:
    """The envelope of a statement, signed."""
    payload = canonical(content)
    signature = {"keyid": signer.public.fingerprint, "sig": _text(signer.sign(_to_sign(payload)))}
    return canonical({"payload": _text(payload), "payloadType": PAYLOAD, "signatures": [signature]})


def opened(envelope: bytes, key: PublicKey, what: str) -> dict[str, Any]:
    """The statement in an envelope; refused where anything in it is not as the key's owner wrote it."""
    outer = parsed(envelope, what)
    try:
        (signature,) = outer["signatures"]
        shape = set(outer) == {"payload", "payloadType", "signatures"} and set(signature) == {"keyid", "sig"}
        payload, sign = _bytes(outer["payload"]), _bytes(signature["sig"])
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(f"{what} is no envelope with one signature: it is damaged or of something else.") from problem
    if not shape or outer["payloadType"] != PAYLOAD:
        raise DataError(f"{what} is not an envelope of ours: it has other fields or another type.")
    if signature["keyid"] != key.fingerprint:
        raise DataError(f"{what} is signed by another key, or was changed: ask its issuer for the right one.")
    if not key.signed(_to_sign(payload), sign):
        raise DataError(f"{what} is not what was signed: it was changed.")
    content = parsed(payload, what)
    if content.get("_type") != STATEMENT:
        raise DataError(f"{what} holds no in-toto statement.")
    return content


def _to_sign(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding.

    Example:
        >>> _to_sign(b"{}")
        b'DSSEv1 28 application/vnd.in-toto+json 2 {}'
    """
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    found = base64.b64decode(text, validate=True)
    if _text(found) != text:
        raise ValueError("not the one form of base64")
    return found
