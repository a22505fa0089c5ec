"""A folder that lives on: one run at a time works on it, and it changes in one move.

    FOLDER/BOOK.json      says what counts; "state" is the number of the state, "digest" tells a damaged book
    FOLDER/state-7/       that state
    FOLDER/.lock          locked by the one run that works on the folder; says who that is, for those who wait
    FOLDER/.staging-*     what is being written

The new state is on the disk before the book names it, the book is replaced in one move, and only then the old state is
deleted. So a crash at any moment, of the process or of the machine, leaves the old state or the new one, whole; what
does not count is deleted by the next run that opens the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import (
    STAGING,
    appear,
    read_json,
    remove,
    require_writable,
    tidy,
    to_disk,
    write_whole,
)

_LOCK, _STATE = ".lock", "state-"


class DurableFolder:
    """The folder and its lock.

    Args:
        path: made when something is written.
        book: the name of the JSON file that says what counts.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     folder = DurableFolder(Path(place) / "mine", "book.json")
        ...     folder.write({"state": 1}, lambda state: (state / "note").write_text("kept") and None)
        ...     folder.write({"state": 1, "more": True})
        ...     folder.read(), (folder.state(1) / "note").read_text()
        ({'state': 1, 'more': True}, 'kept')
    """

    def __init__(self, path: Path, book: str) -> None:
        self.path, self.book = path, path / book
        self._locked = False

    def __reduce__(self) -> tuple[type[DurableFolder], tuple[Path, str]]:
        """For another process, which does not hold the lock."""
        return DurableFolder, (self.path, self.book.name)

    def state(self, number: int) -> Path:
        """Where the state of that number is."""
        return self.path / f"{_STATE}{number}"

    def read(self) -> dict[str, Any] | None:
        """What the book says; None where there is none, refused where it is not what was written."""
        if not self.book.exists():
            return None
        content = read_json(self.book)
        written = content.pop("digest", None)  # earlier versions wrote none
        if written is not None and written != _digest(content):
            raise DataError(f"{self.book} cannot be read: it is damaged, so take it from a backup.")
        return content

    @property
    def is_new(self) -> bool:
        """Whether nothing is in it but what a first writing may have left that was cut off."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and all(_is_ours(place.name) for place in self.path.iterdir())

    @contextmanager
    def alone(self, patience: float = 1.0) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process at the latest; whoever holds it may ask again.

        Args:
            patience: seconds to wait where another run holds it, as one that only tidies does; then it is refused.
        """
        if self._locked:
            yield
            return
        handle = self._handle()
        try:
            self._wait(handle, patience)
            self._locked = True
            _sign(handle)
            yield
        finally:
            if self._locked:
                with suppress(OSError):
                    os.ftruncate(handle, 0)
            self._locked = False
            os.close(handle)

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock inside the block where nobody else does and the folder can be written; says whether."""
        with ExitStack() as held:
            try:
                held.enter_context(self.alone(patience=0.0))
                free = True
            except RequestError:
                free = False
            yield free

    def write(self, content: Mapping[str, Any], fill: Callable[[Path], None] | None = None) -> None:
        """Replace the book, and with it the state where a new one is filled; what no longer counts is deleted.

        Args:
            content: of the book; "state" is the number of the state that counts from now on.
            fill: writes the files of a new state into a folder.
        """
        text = json.dumps({**content, "digest": _digest(content)}, indent=2) + "\n"
        with self.alone():
            if fill is not None:
                remove(self.state(content["state"]))  # of a run that was cut off before the book named it
                appear(self.state(content["state"]), fill)
            write_whole(self.book, text, private=True)
            self.tidy(content["state"])

    def has_leftovers(self, number: int) -> bool:
        """Whether something is there that does not count beside the state of that number."""
        return any(self.path.glob(f"{STAGING}*")) or bool(self._other_states(number))

    def tidy(self, number: int) -> None:
        """Delete what does not count; only who is alone with the folder may.

        A book may be damaged: nothing is deleted for the sake of a state that does not exist.
        """
        with self.alone():
            if not self.state(number).is_dir():
                raise DataError(f"{self.state(number)} is missing, though {self.book} names it: take it from a backup.")
            tidy(self.path, alone=True)
            for place in self._other_states(number):
                remove(place)

    def _other_states(self, number: int) -> list[Path]:
        found = (place for place in self.path.glob(f"{_STATE}*") if place.name.removeprefix(_STATE).isdigit())
        return [place for place in found if place != self.state(number)]

    def _handle(self) -> int:
        try:
            if not self.path.exists():
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                to_disk(self.path.parent)
            return os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as problem:
            raise RequestError(f"{self.path} cannot be written: {problem.strerror or problem}.") from problem

    def _wait(self, handle: int, patience: float) -> None:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as problem:
                if time.monotonic() >= end:
                    raise RequestError(
                        f"Another run is at work on {self.path}: wait until it has ended; locked by {_holder(handle)}."
                    ) from problem
                time.sleep(0.05)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sign(handle: int) -> None:
    """Write into the lock who holds it: only for the eyes of those who wait, so a full disk does not matter."""
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} since {since}".encode(), 0)


def _holder(handle: int) -> str:
    return os.pread(handle, 100, 0).decode(errors="replace") or "a process that does not say which"


def require_new(path: Path) -> None:
    """Refuse to write over something, called before the work starts; what a first writing left is nothing."""
    if not DurableFolder(path, "").is_new:
        raise RequestError(f"{path} exists already and is not empty: choose another folder or remove it.")
    require_writable(path)


def _is_ours(name: str) -> bool:
    return name == _LOCK or name.startswith((STAGING, _STATE))
