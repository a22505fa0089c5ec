"""One piece of work: the requests that are worked on together, and what is needed to do so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from expunge.federation.engines.engine import Engine
from expunge.federation.keeping.state_store import StateStore
from expunge.ledger.candidate import Candidate
from expunge.ledger.cases import Case
from expunge.ledger.federation import Federation
from expunge.ledger.ledger import Ledger
from expunge.ledger.watching import Watch
from expunge.unlearning.request import Request

Reach = Callable[[StateStore, Sequence[str]], Engine]
"""Makes the engine for a store, given whom it has to wait for."""

TRAINED_ON = "The model was trained on since the work began: run it again."


@dataclass(frozen=True)
class Job:
    """Requests that are worked on together.

    Attributes:
        ledger: where they stand.
        federation: what they are about.
        reach: makes the engine.
        watch: told how far it is.
        place: the workplace.
        numbers: the requests.
    """

    ledger: Ledger
    federation: Federation
    reach: Reach
    watch: Watch
    place: Path
    numbers: tuple[str, ...]

    @property
    def case(self) -> Case:
        """How they stand: all alike, since every event of the work is about all of them."""
        return self.ledger.case(self.numbers[0])

    @property
    def candidate(self) -> Candidate:
        """The new model of the work that was begun last."""
        return Candidate(self.place, self.case.run)

    def request(self) -> Request:
        """What they ask for together, by name."""
        names, clients = self.ledger.names(), []
        samples: dict[str, list[int]] = {}
        for number in self.numbers:
            scope = self.ledger.case(number).facts["received"]["scope"]
            clients += [names.text(digest) for digest in scope["clients"]]
            for own in scope["samples"]:
                indices = json.loads(f"[{names.text(own['indices'])}]")
                samples.setdefault(names.text(own["client"]), []).extend(indices)
        return Request.of(clients, {name: own for name, own in samples.items() if name not in clients})

    def known(self) -> Mapping[str, str]:
        """Every name that must not stand in the log, with what may stand there."""
        book, names = self.federation.state_store().book, self.ledger.names()
        found = dict.fromkeys((*book.counts, *book.departed), "a client")
        for number in self.numbers:
            found |= {own.text: f"client {digest[:12]}" for digest, own in names.of(number).items()}
        return found

    def fail(self, sentence: str) -> None:
        """Write down that it did not work."""
        self.ledger.record("failed", self.numbers, {"sentence": sentence})
