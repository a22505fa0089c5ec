"""Receipts: what was done about a request, signed, for anyone to check offline and without torch.

    receipts/R-0001.intoto.jsonl    two lines: the receipt, and in-toto's simple verification result (SVR)

No personal data stands in it, only salted digests; and no claim of proof: it says what was done and what was measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import write_whole
from expunge.ledger.canonical import digest
from expunge.ledger.cases import Case
from expunge.ledger.envelope import opened, sealed, statement
from expunge.ledger.keys import PublicKey
from expunge.ledger.log import Event, checked_events
from expunge.version import __version__

if TYPE_CHECKING:
    from expunge.ledger.ledger import Ledger

LARGEST = 10_000
"""Bytes of a receipt."""

RECEIPT = "https://pypi.org/project/expunge/deletion-receipt/v1"
SVR = "https://in-toto.io/attestation/svr/v0.1"
VERIFIER = "https://pypi.org/project/expunge/audit/v1"

LIMITS = (
    "This receipt says what was done and what was measured. It is no proof that nothing of the data is left, in the"
    " model or elsewhere."
)

_PROPERTIES = {"EQUIVALENT": "EXPUNGE_AUDIT_EQUIVALENT", "SUPPORTED": "EXPUNGE_EVIDENCE_SUPPORTED"}
_MAY_GO = (("work", "details"), ("work", "warnings"), ("audit", "margins"), ("erasure", "left"), ("work", "options"))
"""What is left out of a receipt that would be too large, in this order; the log has it all."""


@dataclass(frozen=True)
class Receipt:
    """A receipt that was checked.

    Attributes:
        content: of the receipt.
        subjects: digests of the models before and after.
        properties: what the verifier found to hold.
        notes: what was not checked.
    """

    content: Mapping[str, Any]
    subjects: Mapping[str, str]
    properties: tuple[str, ...]
    notes: tuple[str, ...] = ()


def make_receipt(ledger: Ledger, case: Case, untold: str = "") -> Path:
    """Write and sign the receipt of a request; the event that it was made has the file's digest."""
    head = ledger.head()
    content = predicate(case, head)
    models = case.facts["forgotten"]["models"]
    subjects = {"model": models["after"], "model before": models["before"]}
    result = statement({"model": models["after"]}, SVR, _svr(case))
    while True:
        lines = [sealed(part, ledger.signer) for part in (statement(subjects, RECEIPT, content), result)]
        text = b"\n".join([*lines, b""])
        if len(text) <= LARGEST:
            break
        content = _smaller(content)
    file = ledger.folder / "receipts" / f"{case.number}.intoto.jsonl"
    write_whole(file, text.decode())
    found = {"digest": hashlib.sha256(text).hexdigest(), "bytes": len(text), "head": head.number}

    def told(names: Any, _: object) -> dict[str, Any]:
        return {**found, **({"untold": names.add(untold, "reason", case.number)} if untold else {})}

    ledger.record("receipt", [case.number], told)
    return file


def predicate(case: Case, head: Event) -> dict[str, Any]:
    """What a receipt says, from the request's events."""
    facts = case.facts
    running, forgotten, erased = facts["running"], facts["forgotten"], facts["erased"]
    audited, overridden = facts.get("audited"), facts.get("overridden")
    times = {event.kind: event.time for event in case.events}
    scope = facts["received"]["scope"]
    recipients = running["recipients"]
    return {
        "request": {
            "number": case.number,
            **{name: facts["received"][name] for name in ("received", "ground")},
            "due": case.due,
            "extended": "extended" in facts,
            "accepted": times["accepted"],
            "finished": times["erased"],
        },
        "scope": {
            "clients": scope["clients"],
            "samples": [{"client": own["client"], "count": own["count"]} for own in scope["samples"]],
        },
        "models": forgotten["models"],
        "memory": forgotten["memory"],
        "work": {
            "begun": times["running"],
            **{name: running[name] for name in ("seed", "expunge")},
            **{name: forgotten[name] for name in ("method", "options", "cost", "details", "warnings")},
            "answered": {"count": len(forgotten["answered"]), "digest": digest(forgotten["answered"])},
            "together": len(running["together"]),
        },
        "audit": audited,
        "override": overridden,
        "erasure": {"time": times["erased"], **erased},
        "recipients": {
            "count": len(recipients),
            "told": len(set(case.told) & set(recipients)),
            "last": max(case.told.values(), default=None),
            "digest": digest(recipients),
        },
        "log": {"events": head.number, "hash": head.hash, "time": head.time},
        "expunge": __version__,
        "limits": LIMITS,
    }


def verify(file: Path, key: Path, log: Path | None = None) -> Receipt:
    """Check a receipt with nothing but the issuer's public key, and where it is given beside the log.

    Args:
        file: the receipt.
        key: the public half of the ledger's key.
        log: a copy of the ledger's log.jsonl.

    Raises:
        DataError: the receipt is not, bit by bit, what was signed; or the log is not the one it belongs to.
    """
    text = _bytes(file, "receipt", LARGEST + 1)
    return verified(text, PublicKey.load(key), str(file), None if log is None else (log, _bytes(log, "log")))


def verified(text: bytes, key: PublicKey, name: str, log: tuple[Path, bytes] | None = None) -> Receipt:
    """The same for a text that was read already."""
    if len(text) > LARGEST:
        raise DataError(f"{name} is longer than any receipt, which has {LARGEST} bytes at the most.")
    lines = text.split(b"\n")
    if len(lines) != 3 or lines[2]:
        raise DataError(f"{name} is no receipt of two whole lines: it is cut short, or something was added.")
    receipt, result = (opened(line, key, name) for line in lines[:2])
    try:
        if receipt["predicateType"] != RECEIPT or result["predicateType"] != SVR:
            raise DataError(f"{name} holds statements of another kind: it is no receipt of a deletion.")
        content, properties = receipt["predicate"], tuple(result["predicate"]["properties"])
        subjects = {own["name"]: own["digest"]["sha256"] for own in receipt["subject"]}
        if [own["digest"]["sha256"] for own in result["subject"]] != [subjects["model"]]:
            raise DataError(f"{name} is put together from two receipts: its lines are of different models.")
        notes = () if log is None else _beside(content, text, checked_events(log[1], key, str(log[0])), str(log[0]))
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise DataError(
            f"{name} is signed, but is no receipt that this version reads: use a newer expunge."
        ) from problem
    return Receipt(content, subjects, properties, notes)


def _beside(content: Mapping[str, Any], text: bytes, events: list[Event], name: str) -> tuple[str, ...]:
    """Whether the log leads to the receipt, and knows it."""
    number = content["log"]["events"]
    if len(events) < number:
        raise DataError(f"{name} ends before the receipt: {len(events)} events, where the receipt knows of {number}.")
    if events[number - 1].hash != content["log"]["hash"]:
        raise DataError(f"{name} is not the log that the receipt was made from.")
    made = [event for event in events[number:] if event.kind == "receipt"]
    found = hashlib.sha256(text).hexdigest()
    if any(event.content["digest"] == found for event in made):
        return ()
    if len(events) > number:
        raise DataError(f"{name} goes on after the receipt, but does not know it: the receipt was replaced.")
    return ("The log ends where the receipt was made: whether the ledger knows it cannot be told from this copy.",)


def _svr(case: Case) -> dict[str, Any]:
    """In-toto's simple verification result: the properties that were found to hold, none where none was."""
    audited = case.facts.get("audited")
    held = [_PROPERTIES[audited["word"]]] if audited is not None and audited["word"] in _PROPERTIES else []
    held += ["EXPUNGE_OLD_MODEL_DELETED"] if case.erased else []
    time = next(event.time for event in reversed(case.events) if event.kind in ("audited", "overridden"))
    return {"verifier": {"id": VERIFIER}, "timeCreated": time, "properties": held}


def _smaller(content: dict[str, Any]) -> dict[str, Any]:
    """The same without the next part that may go: its digest stands in its place."""
    for outer, inner in _MAY_GO:
        part = (content.get(outer) or {}).get(inner)
        if part and not (isinstance(part, dict) and set(part) == {"sha256"}):
            return {**content, outer: {**content[outer], inner: {"sha256": digest(part)}}}
    if "digest" not in content["scope"]:
        scope = content["scope"]
        counts = {"clients": len(scope["clients"]), "samples": sum(own["count"] for own in scope["samples"])}
        return {**content, "scope": {**counts, "digest": digest(scope)}}
    raise RequestError(f"The receipt does not fit into {LARGEST} bytes: shorten the sentence of the override.")


def _bytes(file: Path, what: str, most: int = -1) -> bytes:
    """What is in a file, or so much of it; a device has no end, so it is none."""
    try:
        if file.exists() and not file.is_file():
            raise DataError(f"The {what} {file} cannot be read: it is no file.")
        with file.open("rb") as content:
            return content.read(most)
    except OSError as problem:
        raise DataError(f"The {what} {file} cannot be read: {problem.strerror or problem}.") from problem
