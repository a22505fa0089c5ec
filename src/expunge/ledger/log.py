"""The event log: append-only, one line an event, each chained to the one before it and signed.

    log.jsonl    {"body": {number, previous, time, kind, requests, by, content}, "hash": ..., "signature": ...}
    head.json    how far the log goes: number, hash and bytes, signed

A removed, changed or reordered event breaks the chain; one cut off at the end is missed by the head, and by every
receipt made since. Names never stand in it, only salted digests (names.py): what was written here stays.

An event is on the disk before the head names it. A crash between the two leaves one event more than the head knows;
it is signed and chained like any other, and is taken over by the next writer. Half a line is cut off: nobody was told
that it was written.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import to_disk, write_whole
from expunge.ledger.canonical import canonical, digest, parsed
from expunge.ledger.keys import PublicKey, Signer

FIRST = "0" * 64
"""What stands for the event before the first."""

_EVENT, _HEAD = b"expunge event 1\n", b"expunge head 1\n"  # what a signature is of; so that none serves for another


@dataclass(frozen=True)
class Event:
    """One step of a request, or of the ledger itself.

    Attributes:
        number: from 1 on.
        time: when it was written, in UTC.
        kind: what happened.
        requests: whom it concerns.
        by: salted digest of who did it.
        content: what it says; no names.
        hash: of all that, and of the event before it.
    """

    number: int
    time: str
    kind: str
    requests: tuple[str, ...]
    by: str
    content: Mapping[str, Any] = field(default_factory=dict)
    hash: str = FIRST

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "requests": list(self.requests), "content": dict(self.content)}


class Log:
    """The two files; whoever appends holds the ledger's lock.

    Args:
        folder: where they are.
        key: with which everything that is read is checked.
    """

    def __init__(self, folder: Path, key: PublicKey) -> None:
        self.file, self.head = folder / "log.jsonl", folder / "head.json"
        self._key = key
        self._known: tuple[bytes, tuple[Event, ...]] = (b"", ())

    def read(self) -> tuple[Event, ...]:
        """Every event that counts, checked."""
        count, last, size = self._signed_head()
        content = self._content()
        if len(content) < size:
            raise DataError(f"{self.file} is cut off: {self.head} knows of {count} events; take it from a backup.")
        events = self._checked(content[:size])
        if len(events) != count or (events[-1].hash if events else FIRST) != last:
            raise DataError(f"{self.file} and {self.head} do not belong together: take both from a backup.")
        return events

    def append(self, signer: Signer, now: datetime, body: Mapping[str, Any]) -> Event:
        """Write one event; when this returns, it outlives a crash of the machine.

        Args:
            signer: the ledger's key.
            now: in UTC; an event never claims to be older than the one before it.
            body: kind, requests, by and content.
        """
        events = self.read()
        before = events[-1] if events else None
        time = stamp(now)
        if before is not None and time < before.time:
            time = before.time
        previous = before.hash if before is not None else FIRST
        whole = {**body, "number": len(events) + 1, "previous": previous, "time": time}
        line = _line(whole, signer)
        self._add(line)
        event = _event(whole)
        self._write_head(signer, event, len(self._content()))
        return event

    def _add(self, line: bytes) -> None:
        """Put a line behind the others; where the disk is full, half a line is left, which the next writer cuts off."""
        try:
            handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                written = 0
                while written < len(line):
                    written += os.write(handle, line[written:])
                os.fsync(handle)
            finally:
                os.close(handle)
            to_disk(self.file.parent)
        except OSError as problem:
            raise RequestError(f"{self.file} cannot be written: {problem.strerror}; nothing was changed.") from problem

    def recover(self, signer: Signer) -> None:
        """Take over the event of a writer that was cut off before the head, and cut off half a line; call it first."""
        count, last, size = self._signed_head()
        content = self._content()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content) and len(content) > size:
            os.truncate(self.file, max(size, len(whole)))
        if len(whole) <= size:
            return
        events = self._checked(whole)
        if len(events) != count + 1 or (count and events[count - 1].hash != last):
            raise DataError(f"{self.file} has events that {self.head} does not know: take both from a backup.")
        self._write_head(signer, events[-1], len(whole))

    def _signed_head(self) -> tuple[int, str, int]:
        """Number and hash of the last event, and the bytes up to there."""
        if not self.head.exists():
            if self.file.exists() and len(self._content().splitlines()) > 1:
                raise DataError(f"{self.head} is missing: take it from a backup.")
            return 0, FIRST, 0
        try:
            head = parsed(self.head.read_bytes().rstrip(b"\n"), str(self.head))
            body, signature = head["body"], _decoded(head["signature"])
            found = int(body["number"]), str(body["hash"]), int(body["bytes"])
        except (OSError, KeyError, TypeError, ValueError) as problem:
            raise DataError(f"{self.head} cannot be read: it is damaged, so take it from a backup.") from problem
        if not self._key.signed(_HEAD + canonical(body), signature):
            raise DataError(f"{self.head} is not signed by this ledger's key: it is damaged or not ours.")
        return found

    def _write_head(self, signer: Signer, event: Event, size: int) -> None:
        body = {"number": event.number, "hash": event.hash, "bytes": size}
        signed = {"body": body, "signature": _encoded(signer.sign(_HEAD + canonical(body)))}
        write_whole(self.head, canonical(signed).decode() + "\n", private=True)

    def _content(self) -> bytes:
        try:
            return self.file.read_bytes() if self.file.exists() else b""
        except OSError as problem:
            raise DataError(f"{self.file} cannot be read: {problem.strerror or problem}.") from problem

    def _checked(self, content: bytes) -> tuple[Event, ...]:
        """The events in a text; those that were checked before, and are the same, are not checked again."""
        text, events = self._known
        if not content.startswith(text):
            text, events = b"", ()
        events = (*events, *checked_events(content[len(text) :], self._key, str(self.file), events))
        self._known = (content, events)
        return events


def checked_events(content: bytes, key: PublicKey, name: str, before: Sequence[Event] = ()) -> list[Event]:
    """The events of a log, each checked against its signature and the one before it.

    Args:
        content: whole lines.
        key: the ledger's.
        name: of the file, for the sentence where something is wrong.
        before: events that come before these.
    """
    found = list(before)
    if content and not content.endswith(b"\n"):
        raise DataError(f"{name} ends in the middle of an event: it is cut off.")
    for line in content.split(b"\n")[:-1]:
        number, which = len(found) + 1, f"Event {len(found) + 1} of {name}"
        entry = parsed(line, which)
        try:
            body, signature = entry["body"], _decoded(entry["signature"])
            sound = entry["hash"] == digest(body) and set(entry) == {"body", "hash", "signature"}
            event, previous = _event(body), body["previous"]
        except (KeyError, TypeError, ValueError) as problem:
            raise DataError(f"{which} cannot be read: it is damaged.") from problem
        if event.number != number or previous != (found[-1].hash if found else FIRST):
            raise DataError(f"{which} does not follow on the one before it: an event was removed, added or moved.")
        if not sound or not key.signed(_EVENT + canonical(body), signature):
            raise DataError(f"{which} is not signed by this key: it was changed, or the key is another ledger's.")
        found.append(event)
    return found[len(before) :]


def stamp(moment: datetime) -> str:
    """A moment as events have it.

    Example:
        >>> stamp(datetime(2026, 11, 16, 12, 0, tzinfo=UTC))
        '2026-11-16T12:00:00.000000Z'
    """
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _line(body: Mapping[str, Any], signer: Signer) -> bytes:
    try:
        signature = _encoded(signer.sign(_EVENT + canonical(body)))
        return canonical({"body": body, "hash": digest(body), "signature": signature}) + b"\n"
    except ValueError as problem:  # half of a surrogate pair, a NaN
        raise RequestError(f"This cannot be written down: {problem}.") from problem


def _event(body: Mapping[str, Any]) -> Event:
    requests = tuple(map(str, body["requests"]))
    own = (int(body["number"]), str(body["time"]), str(body["kind"]), requests, str(body["by"]))
    return Event(*own, dict(body["content"]), digest(body))


def _encoded(signature: bytes) -> str:
    return base64.b64encode(signature).decode()


def _decoded(text: str) -> bytes:
    """The bytes of a text in base64, in its one form."""
    found = base64.b64decode(text, validate=True)
    if _encoded(found) != text:
        raise ValueError("not the one form of base64")
    return found
