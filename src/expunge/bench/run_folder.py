"""A run on disk: the trained federation, and beside it what was tried to forget whom.

    RUN/run.json                          scenario, schedule, which state counts, who has left for good (run_book.py)
    RUN/state-1/                          model, memory, vectors (state_files.py); after somebody left for good, state-2
    RUN/without-client-3/METHOD/          outcome.json, and the same of the state that it made
    RUN/federation.py                     for `expunge request`, which takes the run for its store (run_store.py)
    RUN/without-client-3/results.json     with plots and report.html, written by `expunge show` and `expunge audit`

A crash at any moment leaves the run as it was or as it was to be (keeping/durable.py). What was made of results goes
when one of them changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.auditing.evidence import solver_evidence
from expunge.bench.run_book import RunBook, outcome_record
from expunge.bench.scenario import Federation, Scenario
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.book import list_of
from expunge.federation.keeping.checkpoint import load_snapshot
from expunge.federation.keeping.durable import DurableFolder, require_new
from expunge.federation.keeping.files import STAGING, appear, private_folder, read_json, remove, tidy
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_files import kept_in, load_state, save_state
from expunge.federation.training.plan import Schedule
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request

DERIVED = ("results.json", "rows.csv", "table.md", "report.html", "audit.json", "audit.html", "*.png", "*.svg")
"""What is made of the tries of a request; it goes when one of them changes."""

PATIENCE = 10.0
"""Seconds that a finished try waits for another run to write its own."""

OWN_START = "same_start"
"""In the details of a retrained model: it begins with the weights that the training began with."""

LONGEST_NAME = 100
"""File systems end at 255 bytes; a longer list of clients, or one with odd characters, is told apart by a digest."""


@dataclass(frozen=True, eq=False)
class Tried:
    """What a method made of the trained model, what it cost, and what it wrote down."""

    method: str
    model: Snapshot
    cost: Cost
    details: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def has_own_start(self) -> bool:
        """Whether it was retrained from the training's own start."""
        return self.method == "retrain" and self.details.get(OWN_START) is True


@dataclass(frozen=True)
class RunFolder:
    """One run; open it with ``RunFolder.open`` or make it with ``RunFolder.create``."""

    path: Path
    book: RunBook
    _folder: DurableFolder = field(compare=False, repr=False)

    @classmethod
    def create(cls, path: Path, federation: Federation, state: ServerState) -> RunFolder:
        """Write a freshly trained federation to a new folder."""
        require_new(path)
        counts = {name: len(labels) for name, (_, labels) in federation.datasets.items()}
        book = RunBook(federation.scenario, state.schedule, kept=tuple(kept_in(state)), counts=counts)
        run = cls(path, book, _durable(path))
        with run._folder.alone():
            require_new(path)  # another training may have been quicker
            run._folder.write(book.as_dict(), lambda folder: save_state(state, federation.model, folder))
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run; what a run that was cut off has left is deleted first."""
        folder = _durable(path)
        run = cls(path, _read(folder), folder)
        if run._left():
            with folder.if_free() as free:
                if free:
                    return run._tidied()
            if run.book.erasing:
                raise RequestError(f"Another run is at work on {path}: wait until it has ended.")
        return run

    @property
    def scenario(self) -> Scenario:
        """Data, model and training."""
        return self.book.scenario

    @property
    def schedule(self) -> Schedule | None:
        """What unlearning has to know of the training."""
        return self.book.schedule

    @property
    def departed(self) -> tuple[str, ...]:
        """Who has left for good."""
        return self.book.departed

    @property
    def state(self) -> Path:
        """Where the model and the vectors are."""
        return self._folder.state(self.book.state)

    @contextmanager
    def alone(self, patience: float = 1.0) -> Iterator[None]:
        """Keep other runs off the folder; refused where one is at work there, or has changed it since it was opened."""
        with self._folder.alone(patience):
            if _read(self._folder) != self.book:
                raise RequestError(f"Another run has changed {self.path} meanwhile: nothing was written, start again.")
            yield

    def trained(self, federation: Federation) -> ServerState:
        """The state to forget from."""
        return load_state(federation.model, self.state, self.schedule, self.book.kept)

    def engine(self, federation: Federation) -> LocalEngine:
        """An engine on the clients that have not left for good."""
        return federation.engine().without(self.departed)

    def save(self, request: Request, outcome: Outcome, federation: Federation) -> Path:
        """Keep an outcome under its request and method; a retrained model gets a number."""
        with self.alone(PATIENCE):
            parent = self.path / folder_name(request)
            target = parent / outcome.method
            if outcome.method == "retrain":
                target = parent / f"retrain-{self.retrained(request) + 1}"
            record = json.dumps(self._record(request, outcome, federation), indent=2) + "\n"

            def fill(folder: Path) -> None:
                save_state(outcome.state, federation.model, folder)
                (folder / "outcome.json").write_text(record)

            private_folder(parent)
            for derived in (file for pattern in DERIVED for file in parent.glob(pattern)):
                derived.unlink()
            appear(target, fill)
        return target

    def retrained(self, request: Request) -> int:
        """The highest number that a retrained model of this request has; 0 where there is none."""
        found = (self.path / folder_name(request)).glob("retrain-*")
        return max((int(folder.name.removeprefix("retrain-")) for folder in found), default=0)

    def erase(self, request: Request, outcome: Outcome, federation: Federation) -> RunFolder:
        """Let the run go on with an outcome: the trained model, the leavers' vectors and all tries are deleted.

        What was made of them (numbers and plots, no weights) stays, as evidence.
        """
        with self.alone():
            if self.book.pending is not None:
                raise RequestError(f"A request is being worked on in {self.path}: `expunge request resume` it first.")
            book = dataclasses.replace(
                self.book,
                counts={name: count for name, count in self.book.counts.items() if name not in request.clients},
                schedule=outcome.state.schedule,
                state=self.book.state + 1,
                kept=tuple(kept_in(outcome.state)),
                departed=(*self.departed, *request.clients),
                forgotten=(*self.book.forgotten, self._record(request, outcome, federation)),
                erasing=True,
            )
            self._folder.write(book.as_dict(), lambda folder: save_state(outcome.state, federation.model, folder))
            return dataclasses.replace(self, book=_read(self._folder))._tidied()

    def requests(self) -> dict[str, Request]:
        """The requests that something was tried for, by folder name."""
        found: dict[str, Request] = {}
        for tries in sorted(self.path.glob("without-*")):
            for file in _outcomes(tries):
                with _understood(file):
                    asked = read_json(file)["request"]
                    found[tries.name] = Request.of(asked["clients"], asked["samples"])
        return found

    def tried(self, name: str, federation: Federation) -> list[Tried]:
        """Everything that was tried for one request."""
        found = []
        for file in _outcomes(self.path / name):
            with _understood(file):
                model = load_snapshot(federation.model, file.parent / "model.safetensors")
                found.append(_tried(read_json(file), model))
        return found

    def own_starts(self, request: Request) -> list[bool]:
        """Of every retrained model of a request, whether it has the training's own start."""
        found = []
        for file in _outcomes(self.path / folder_name(request)):
            with _understood(file):
                if file.parent.name.startswith("retrain-"):
                    found.append(read_json(file)["details"].get(OWN_START) is True)
        return found

    def _record(self, request: Request, outcome: Outcome, federation: Federation) -> dict[str, Any]:
        before = load_snapshot(federation.model, self.state / "model.safetensors").digest
        return outcome_record(request, outcome, before)

    def _left(self) -> bool:
        """Whether a run that was cut off has left something to delete."""
        half_made = any(any(tries.glob(f"{STAGING}*")) for tries in self.path.glob("without-*"))
        return half_made or self.book.erasing or self._folder.has_leftovers(self.book.state)

    def _tidied(self) -> RunFolder:
        """Delete what does not count; where somebody left for good, that is everything that was tried."""
        with self._folder.alone():
            run = dataclasses.replace(self, book=_read(self._folder))
            self._folder.tidy(run.book.state)
            for tries in self.path.glob("without-*"):
                tidy(tries)  # `show` may be writing a report there, without the lock
            if not run.book.erasing:
                return run
            remove_tries(self.path)
            done = dataclasses.replace(run.book, erasing=False)
            self._folder.write(done.as_dict())
            return dataclasses.replace(run, book=_read(self._folder))


def remove_tries(path: Path) -> None:
    """Delete every try in a run folder; what was made of them stays, as evidence: numbers and plots."""
    for tries in path.glob("without-*"):
        for own in [place for place in tries.iterdir() if place.is_dir()]:
            remove(own)
        with suppress(OSError):
            tries.rmdir()


def _durable(path: Path) -> DurableFolder:
    return DurableFolder(path, "run.json")


def _read(folder: DurableFolder) -> RunBook:
    content = folder.read()
    if content is None:
        raise DataError(f"{folder.path} is not a run folder: make one with `expunge train --out {folder.path}`.")
    return RunBook.read(content, folder.book)


def _outcomes(tries: Path) -> list[Path]:
    """The records of what was tried for one request."""
    return sorted(file for file in tries.glob("*/outcome.json") if not file.parent.name.startswith(STAGING))


def _tried(record: dict[str, Any], model: Snapshot) -> Tried:
    """What a record says of a try; a TypeError or the like where it is none of ours."""
    cost, details, warnings = Cost(**record["cost"]), record["details"], tuple(list_of(str, record["warnings"]))
    numbers = all(isinstance(value, int | float) for value in vars(cost).values())
    if not numbers or not isinstance(record["method"], str) or not isinstance(details, dict):
        raise TypeError("these are no entries of a record")
    solver_evidence(details)  # an audit reads them
    return Tried(record["method"], model, cost, details, warnings)


@contextmanager
def _understood(file: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RequestError) as problem:
        raise DataError(f"{file} cannot be read: it is damaged or not ours.") from problem


def folder_name(request: Request) -> str:
    """A readable folder name for a request.

    Example:
        >>> folder_name(Request.of(["ada", "bob"]))
        'without-ada+bob'
    """
    clients = sorted(request.clients)
    asked = "without-" + "+".join([*clients, *sorted(request.samples)])
    name = re.sub(r"[^A-Za-z0-9.+_-]", "_", asked)
    if not request.samples and name == asked and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(json.dumps([clients, sorted(request.samples.items())]).encode()).hexdigest()[:8]
    return name[:LONGEST_NAME] + ("-samples-" if request.samples else "-") + digest
