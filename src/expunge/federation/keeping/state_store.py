"""The state of a federation that lives on: what the server keeps between trainings and requests to forget.

    STORE/store.json    schedule, sample counts, who has left, the request being worked on, what came of earlier ones
    STORE/state-7/      model.safetensors, memory.safetensors
    STORE/journal/      finished rounds of the request being worked on (journal.py)
    STORE/.lock         locked by the one run that works on the folder; empty

``store.json`` names the state that counts, and is replaced in one move, so a crash at any moment leaves the old state
or the new one. Earlier states are deleted: after a request nothing is left of the old model and vectors.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import load_state, read_json, require_writable, save_state, write_whole
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule

FORMAT = 1
"""Of the folder; another one is refused."""

_LOCK = ".lock"


@dataclass(frozen=True)
class Book:
    """What ``store.json`` says.

    Attributes:
        number: of the state that counts; 0 before the first.
        schedule: of the training so far.
        counts: sample counts of the clients that trained and have not left.
        departed: clients that were forgotten.
        pending: the request being worked on.
        forgotten: what came of earlier requests: who left, the method, its cost and details; no weights.
    """

    number: int = 0
    schedule: Mapping[str, Any] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    departed: tuple[str, ...] = ()
    pending: Mapping[str, Any] | None = None
    forgotten: tuple[Mapping[str, Any], ...] = ()


class StateStore:
    """A folder with one server's state.

    Args:
        folder: made with the first state; one that holds something else is refused.

    Example:
        >>> import tempfile
        >>> from expunge.core.vectors import Snapshot
        >>> model, place = nn.Linear(2, 1), tempfile.TemporaryDirectory()
        >>> store = StateStore(Path(place.name) / "federation")
        >>> store.write(Book(counts={"ada": 3}), ServerState(Snapshot.of(model)), model)
        >>> StateStore(store.folder).book.counts, store.load(model).model.digest == Snapshot.of(model).digest
        ({'ada': 3}, True)
        >>> place.cleanup()
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._locked = False
        require_writable(self.folder)
        self.book = self._read()
        self._tidy()

    @property
    def exists(self) -> bool:
        """Whether a state is in it."""
        return self.book.number > 0

    @property
    def journal(self) -> Path:
        """Where the finished rounds of the pending request are."""
        return self.folder / "journal"

    def load(self, model: nn.Module) -> ServerState:
        """The state that counts, for this architecture."""
        if not self.exists:
            raise DataError(f"There is no trained federation in {self.folder}: train with a Recorder first.")
        schedule = Schedule(**self.book.schedule) if self.book.schedule is not None else None
        return load_state(model, self._place(self.book.number), schedule)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every other run off the folder inside the block; refused at once where one is at work there."""
        if not self.folder.exists():
            yield  # nothing to keep anybody off
            return
        with self._lock():
            self.book = self._read()
            yield

    def write(self, book: Book, state: ServerState | None = None, model: nn.Module | None = None) -> None:
        """Replace the book, and with it the state where one is given; what no longer counts is deleted.

        Refused where another run is at work on the folder, or wrote meanwhile: one of the two states would be lost
        without a word.
        """
        with self._lock():
            self._write(book, state, model)

    def _write(self, book: Book, state: ServerState | None, model: nn.Module | None) -> None:
        if self._read() != self.book:
            raise RequestError(f"Another run has changed {self.folder} meanwhile: nothing was written, start again.")
        if state is not None:
            assert model is not None
            schedule = dataclasses.asdict(state.schedule) if state.schedule is not None else None
            book = dataclasses.replace(book, number=self.book.number + 1, schedule=schedule)
            self.folder.mkdir(parents=True, exist_ok=True)
            save_state(state, model, self._place(book.number))
        content = {"format": FORMAT, **dataclasses.asdict(book)}
        write_whole(self.folder / "store.json", json.dumps(content, indent=2) + "\n")
        self.book = self._read()
        self._tidy()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process at the latest; whoever holds it may ask again."""
        if self._locked:
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as problem:
            raise RequestError(f"{self.folder} cannot be written: {problem.strerror or problem}.") from problem
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as problem:
                raise RequestError(f"Another run is at work on {self.folder}: wait until it has ended.") from problem
            self._locked = True
            yield
        finally:
            self._locked = False
            os.close(handle)

    def _place(self, number: int) -> Path:
        return self.folder / f"state-{number}"

    def _read(self) -> Book:
        file = self.folder / "store.json"
        if not file.exists():
            found = {path.name for path in self.folder.glob("*")} - {_LOCK}
            if found and "state-1" not in found:
                raise RequestError(f"{self.folder} is not empty and has no store.json: choose another folder.")
            return Book()
        content = read_json(file)
        if content.pop("format", None) != FORMAT:
            raise DataError(f"{file} has another format than this version of expunge reads ({FORMAT}).")
        try:
            departed, forgotten = tuple(content.pop("departed")), tuple(content.pop("forgotten"))
            return Book(**content, departed=departed, forgotten=forgotten)
        except (TypeError, KeyError) as problem:
            raise DataError(f"{file} cannot be read: it is damaged or not ours.") from problem

    def _tidy(self) -> None:
        """Delete earlier states, and the journal of no request; a later state may be in the making elsewhere."""
        for place in self.folder.glob("state-*"):
            number = place.name.removeprefix("state-")
            if number.isdigit() and int(number) < self.book.number:
                shutil.rmtree(place)
        if self.book.pending is None and self.journal.exists():
            shutil.rmtree(self.journal)
