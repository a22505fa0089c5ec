"""A run folder as a federation that deletion requests are about: `expunge request` and `expunge forget` share it.

    federation = run_federation(__file__)       all of RUN/federation.py

One folder, one book, one lock: what leaves by a request has left the run, and the other way round.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from expunge.bench.run_book import RunBook
from expunge.bench.run_folder import remove_tries
from expunge.bench.scenario import Federation as Built
from expunge.bench.scenario import Scenario
from expunge.core.vectors import Snapshot
from expunge.errors import DataError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.book import Book
from expunge.federation.keeping.files import read_json
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.plan import Schedule
from expunge.ledger.federation import Federation

FILE = '''"""The federation that `expunge train` has made here, for `expunge request` after `expunge init`."""

from expunge.bench.run_store import run_federation

federation = run_federation(__file__)
'''


class RunStore(StateStore):
    """The run's own states and book; with a new state all that was tried on the old one goes.

    Args:
        folder: the run.
    """

    name = "run.json"
    _run: RunBook

    @property
    def _unfinished(self) -> bool:
        return super()._unfinished or self._run.erasing

    def _tidy(self) -> None:
        super()._tidy()
        if self._run.erasing:
            remove_tries(self.folder)
            self._run = dataclasses.replace(self._run, erasing=False)
            self._durable.write(self._run.as_dict())

    def _understood(self, content: Mapping[str, Any]) -> Book:
        run = self._run = RunBook.read(content, self._durable.book)
        if not run.counts:
            raise DataError(f"{self.folder} is a run of an earlier expunge, which knows no requests: train again.")
        schedule = dataclasses.asdict(run.schedule) if run.schedule is not None else None
        return Book(run.state, schedule, run.counts, run.departed, run.pending, run.forgotten, run.kept)

    def _content(self, book: Book) -> dict[str, Any]:
        told = {name: getattr(book, name) for name in ("state", "counts", "departed", "pending", "forgotten", "kept")}
        schedule = Schedule(**book.schedule) if book.schedule is not None else None
        erasing = self._run.erasing or book.state != self._run.state
        run: RunBook = dataclasses.replace(self._run, **told, schedule=schedule, erasing=erasing)
        return run.as_dict()


@dataclass(frozen=True)
class RunFederation(Federation):
    """A federation on a built-in dataset, as its scenario has it.

    Attributes:
        built: makes it real, once.
    """

    built: Callable[[], Built] = Scenario().build

    def state_store(self) -> StateStore:
        """The run itself."""
        return RunStore(self.folder)

    def engine(self, departed: Sequence[str] = ()) -> LocalEngine:
        """Reaches the clients that have not left; attackers boost their updates as they did."""
        return self.built().engine().without(tuple(departed))

    def initial(self, seed: int) -> Snapshot:
        """The weights of a seed."""
        return self.built().initial(seed)


def run_federation(file: str) -> RunFederation:
    """The federation of the run that a federation file lies in; data that is no part of the package: EXPUNGE_DATA."""
    book, data = Path(file).resolve().with_name(RunStore.name), os.environ.get("EXPUNGE_DATA")
    scenario = RunBook.read(read_json(book), book).scenario

    @cache
    def built() -> Built:
        return scenario.build(Path(data) if data else None)

    return RunFederation(
        model=lambda: scenario.fresh_model(built().dataset, scenario.seed),
        clients=lambda: built().datasets,
        plan=scenario.plan,
        unseen=lambda: (built().dataset.test_inputs, built().dataset.test_labels),
        built=built,
    )
