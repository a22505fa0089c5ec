"""The ledger of a federation: a folder beside its federation file.

    LEDGER/log.jsonl, head.json    what happened (log.py)
    LEDGER/names.json              whom it concerns; can be erased (names.py)
    LEDGER/key, key.pub            signs; the public half is for everybody
    LEDGER/.lock                   held while something is written: for a moment
    LEDGER/work/                   held by the one process that works on requests; what it needs on the way
    LEDGER/audits/, receipts/      one file a request

Every change is one event. A name is in the table before the event that has its digest; a table entry that no event
knows is of somebody who was cut off, and goes with the next change.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.durable import DurableFolder
from expunge.federation.keeping.files import private_folder, remove, tidy
from expunge.ledger.cases import Case, cases
from expunge.ledger.keys import PublicKey, Signer, passphrase_of
from expunge.ledger.log import Event, Log, stamp
from expunge.ledger.names import Names
from expunge.version import __version__

PATIENCE = 10.0
"""Seconds to wait while another process writes an event."""

VERSION = 1


def now() -> datetime:
    """This moment, in UTC."""
    return datetime.now(UTC)


def operator() -> str:
    """Who is at work, unless a command says otherwise: EXPUNGE_BY, or the user of this machine."""
    try:
        return os.environ.get("EXPUNGE_BY") or getpass.getuser()
    except (KeyError, OSError):  # a container without users
        return f"user {os.getuid()}"


class Ledger:
    """An open ledger.

    Args:
        folder: made by ``Ledger.create``.
        by: who is at work; stands in the log as a salted digest.
        clock: tells the time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     ledger = Ledger.create(Path(place) / "ledger", by="ada")
        ...     [event.kind for event in ledger.events()]
        ['opened']
    """

    def __init__(self, folder: Path, by: str | None = None, clock: Callable[[], datetime] = now) -> None:
        self.folder, self.clock = folder, clock
        self.by = by if by else operator()
        self.notes: list[str] = []
        if not (folder / "key.pub").exists():
            raise DataError(f"There is no ledger in {folder}: make one with `expunge init`.")
        self.key = PublicKey.load(folder / "key.pub")
        self._log = Log(folder, self.key)
        self._durable = DurableFolder(folder, "head.json")
        self._workplace = DurableFolder(folder / "work", "progress.json")

    @classmethod
    def create(
        cls, folder: Path, by: str | None = None, clock: Callable[[], datetime] = now, *, protected: bool = False
    ) -> Ledger:
        """A new ledger with keys of its own; one that is there already stays as it is.

        Args:
            folder: where it goes.
            by: who makes it.
            clock: tells the time.
            protected: whether the private key gets a passphrase, from EXPUNGE_PASSPHRASE or the terminal.
        """
        key = folder / "key"
        if protected and key.exists():
            raise RequestError(f"{key} is there already: `openssl pkey -aes256 -in {key}` makes one with a passphrase.")
        passphrase = passphrase_of(key, new=True) if protected else ""
        durable = DurableFolder(folder, "head.json")
        with durable.alone():
            tidy(folder, alone=True)
            if not (folder / "log.jsonl").exists():
                for part in ("work", "audits", "receipts"):
                    private_folder(folder / part)
                Signer.make(key, folder / "key.pub", passphrase)
        ledger = cls(folder, by, clock)
        if not ledger.events():
            ledger.record("opened", (), {"key": ledger.key.fingerprint, "version": VERSION, "expunge": __version__})
        return ledger

    @cached_property
    def signer(self) -> Signer:
        """The private half of the key; refused where it is not that of the public one."""
        found = Signer.load(self.folder / "key")
        if found.public.fingerprint != self.key.fingerprint:
            raise DataError(f"{self.folder / 'key'} is not the key of key.pub: take both from a backup.")
        return found

    def events(self) -> tuple[Event, ...]:
        """All that happened, checked."""
        return self._log.read()

    def cases(self) -> dict[str, Case]:
        """Every request as it stands, by its number."""
        return cases(self.events())

    def case(self, number: str) -> Case:
        """One request."""
        found = self.cases()
        if number not in found:
            known = ", ".join(found) if len(found) < 20 else f"R-0001 to {list(found)[-1]}"
            raise RequestError(f"There is no request {number[:40]!r}; there are {known or 'none yet'}.")
        return found[number]

    def names(self) -> Names:
        """The table of names as it is now; refused where it does not know whom an open request is about."""
        found = Names(self.folder / "names.json")
        if self.events() and not found.all():
            raise DataError(f"{found.file} is missing or empty: take it from a backup.")
        for case in self.cases().values():
            scope = case.facts["received"]["scope"]
            clients = [*scope["clients"], *(own["client"] for own in scope["samples"])]
            if case.is_open and not set(clients) <= set(found.all()):
                raise DataError(
                    f"{found.file} does not know whom {case.number} is about: it is older than the log, so take a newer"
                    " one from a backup."
                )
        return found

    def head(self) -> Event:
        """The last event."""
        return self.events()[-1]

    def record(
        self,
        kind: str,
        numbers: Sequence[str],
        content: Mapping[str, Any] | Callable[[Names, Mapping[str, Case]], Mapping[str, Any]],
    ) -> Event:
        """Write one event; refused where it does not follow on what the requests have become meanwhile.

        Args:
            kind: what happened.
            numbers: the requests that it concerns.
            content: what it says, or what makes that: given the table of names, to add to, and the requests.
        """
        signer = self.signer  # before the lock: somebody may have to type a passphrase
        with self._durable.alone(PATIENCE):
            tidy(self.folder, alone=True)
            self._log.recover(signer)
            events, names = self.events(), self.names()
            found = cases(events)
            if kind != "received":
                for number in numbers:
                    (found[number] if number in found else self.case(number)).require(kind)
            known = _mentioned(events)
            names.erase([digest for digest in names.all() if digest not in known])
            by = names.add(self.by, "person")
            told = content(names, found) if callable(content) else content
            names.write()
            moment = self._moment(events)
            body = {"kind": kind, "requests": list(numbers), "by": by, "content": dict(told)}
            return self._log.append(signer, moment, body)

    def erase_names(self, digests: Sequence[str]) -> None:
        """Take names out of the table for good."""
        with self._durable.alone(PATIENCE):
            names = self.names()
            names.erase(digests)
            names.write()

    @contextmanager
    def working(self) -> Iterator[Path]:
        """Be the one process that works on requests; the folder is for what it needs on the way."""
        signer = self.signer
        with self._workplace.alone():
            with self._durable.alone(PATIENCE):
                self._log.recover(signer)
            tidy(self._workplace.path, alone=True)
            yield self._workplace.path

    def at_work(self) -> bool:
        """Whether a process is working on requests now."""
        with self._workplace.if_free() as free:
            return not free

    def clear(self, name: str) -> None:
        """Delete something in the workplace."""
        remove(self._workplace.path / name)

    def progress(self) -> dict[str, Any]:
        """How far the work is, for those who watch; nothing where nobody is at work."""
        try:
            found = json.loads((self.folder / "work" / "progress.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and self.at_work() else {}

    def _moment(self, events: Sequence[Event]) -> datetime:
        """Now; with a note where the clock is behind the log."""
        moment = self.clock()
        if events and stamp(moment + timedelta(seconds=1)) < events[-1].time:
            self.notes.append(
                f"The clock is behind the last event ({events[-1].time}): the new one gets that time; set the clock."
            )
        return moment


def _mentioned(events: Sequence[Event]) -> set[str]:
    """Every text in the log that may be a digest of a name."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, Mapping):
            for key, own in value.items():
                found.add(key)
                walk(own)
        elif isinstance(value, list | tuple):
            for own in value:
                walk(own)

    for event in events:
        walk([event.by, event.content])
    return found
