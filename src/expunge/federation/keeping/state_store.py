"""The state of a federation that lives on: what the server keeps between trainings and requests to forget.

    STORE/store.json    schedule, sample counts, who has left, the request being worked on, what came of earlier ones
    STORE/state-7/      model.safetensors, memory.safetensors, vectors/ and more (state_files.py)
    STORE/journal/      finished rounds of the request being worked on (journal.py)
    STORE/.lock         locked by the one run that works on the folder

A crash at any moment leaves the old state or the new one (durable.py). Vectors that a state does not change it has in
common with the one before it (vector_files.py). Earlier states are deleted: after a request nothing is left of the old
model, and of the vectors that it changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.book import Book
from expunge.federation.keeping.durable import DurableFolder
from expunge.federation.keeping.files import remove, require_writable
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_files import kept_in, load_memory, load_state, save_state
from expunge.federation.training.plan import Schedule


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

    name = "store.json"
    """Of the book."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._durable = DurableFolder(self.folder, self.name)
        require_writable(self.folder)
        self.book = self._read()
        if self.exists and self._unfinished:
            with self._durable.if_free() as free:  # what another run is writing is not ours to judge
                if free:
                    self.book = self._read()
                    self._durable.tidy(self.book.state)
                    self._tidy()

    @property
    def exists(self) -> bool:
        """Whether a state is in it."""
        return self.book.state > 0

    @property
    def state(self) -> Path:
        """Where the files of the state that counts are."""
        return self._durable.state(self.book.state)

    @property
    def journal(self) -> Path:
        """Where the finished rounds of the pending request are."""
        return self.folder / "journal"

    def load(self, model: nn.Module) -> ServerState:
        """The state that counts, for this architecture."""
        if not self.exists:
            raise DataError(f"There is no trained federation in {self.folder}: train with a Recorder first.")
        schedule = Schedule(**self.book.schedule) if self.book.schedule is not None else None
        return load_state(model, self._durable.state(self.book.state), schedule, self.book.kept)

    def memory(self) -> Memory | None:
        """The memory of the state that counts, whose vectors are read when they are asked for, while it counts."""
        found = load_memory(self.state)
        if found is None and "vectors" in self.book.kept:
            raise RequestError(
                f"{self.state} is no more: another run has changed {self.folder} meanwhile, start again."
            )
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every other run off the folder inside the block; refused at once where one is at work there."""
        if not self.folder.exists():
            yield  # nothing to keep anybody off
            return
        with self._durable.alone():
            self.book = self._read()
            yield

    def write(self, book: Book, state: ServerState | None = None, model: nn.Module | None = None) -> None:
        """Replace the book, and with it the state where one is given; what no longer counts is deleted.

        Refused where another run is at work on the folder, or wrote meanwhile: one of the two states would be lost
        without a word.
        """
        with self._durable.alone():
            if self._read() != self.book:
                raise RequestError(
                    f"Another run has changed {self.folder} meanwhile: nothing was written, start again."
                )
            fill = None
            if state is not None and model is not None:
                own, architecture = state, model
                schedule = dataclasses.asdict(own.schedule) if own.schedule is not None else None
                kept = tuple(kept_in(own))
                book = dataclasses.replace(book, state=self.book.state + 1, schedule=schedule, kept=kept)

                def fill(folder: Path) -> None:
                    save_state(own, architecture, folder)

            self._durable.write(self._content(book), fill)
            self.book = self._read()
            self._tidy()

    @property
    def _unfinished(self) -> bool:
        """Whether something is there that does not count."""
        return self._durable.has_leftovers(self.book.state) or self._useless_journal

    @property
    def _useless_journal(self) -> bool:
        return self.book.pending is None and self.journal.exists()

    def _tidy(self) -> None:
        if self._useless_journal:
            remove(self.journal)

    def _read(self) -> Book:
        content = self._durable.read()
        if content is None:
            if not self._durable.is_new:
                raise RequestError(f"{self.folder} is not empty and has no {self.name}: choose another folder.")
            return Book()
        return self._understood(content)

    def _understood(self, content: Mapping[str, Any]) -> Book:
        return Book.read(content, self._durable.book)

    def _content(self, book: Book) -> dict[str, Any]:
        return book.as_dict()
