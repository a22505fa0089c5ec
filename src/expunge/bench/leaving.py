"""A client leaves a language model: train, forget by every method, retrain, measure, and keep what was measured.

What `text` and `tofu` have in common: they differ in who trains on what, and in what is measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from torch import Tensor, nn

from expunge.bench.measured import kept_part
from expunge.bench.measuring import SAME_INIT, Part
from expunge.bench.results import Results, Row, environment, utc_now
from expunge.bench.runner import all_done
from expunge.bench.settings import Contender
from expunge.bench.store import Store
from expunge.bench.workers import one_by_one
from expunge.core.losses import CrossEntropy
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, Progress, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain


class Reader(Protocol):
    """Measures models."""

    def measure(self, model: Snapshot) -> Mapping[str, float]:
        """Values of a row, by name."""


class Stage(Protocol):
    """The federation of one seed: who trains on what, and who leaves."""

    @property
    def seed(self) -> int:
        """Of the initial weights and the training."""

    @property
    def name(self) -> str:
        """Of the leaver."""

    @property
    def data(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """What each client trains on: tokens, and for each the one after it."""

    @property
    def plan(self) -> TrainingPlan:
        """How it trains, with the seed."""

    @property
    def retrains(self) -> int:
        """How many models are retrained from fresh weights."""

    def network(self, seed: int) -> nn.Module:
        """Fresh weights."""

    def described(self) -> dict[str, Any]:
        """For a reader, and to tell one from another."""

    def reader(self) -> Reader:
        """Measures models of this stage."""


@dataclass(frozen=True)
class Departure:
    """What is asked of every seed.

    Attributes:
        experiment: its name.
        title: what it asks, in words.
        who: leaves, many of them, for a line that shows how far it is.
        contenders: the methods.
        measures: of a row, whose ranges over retrained models are kept.
        version: of what is kept of a seed; after a change in a measure it is another one.
    """

    experiment: str
    title: str
    who: str
    contenders: tuple[Contender, ...]
    measures: tuple[str, ...]
    version: int

    def run(self, stages: Sequence[Stage], data: str, store: Store, progress: Progress | None = None) -> Results:
        """Everything for every stage, a seed each, and put together; ``data`` is the digest of what they read."""
        with one_by_one() as pool:
            parts = all_done([partial(self._kept, stage, data, store) for stage in stages], pool, progress, self.who)
        rows = [row for part in parts for row in part.rows]
        date = max((part.date for part in parts if part.date is not None), default=utc_now())
        where = parts[0].environment or environment()
        return Results(self.experiment, self._scenario(stages), where, rows, self._ranges(parts), date=date)

    def _scenario(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """What was done, in the words that reports know: numbers and names in the place of what made them."""
        first, described = stages[0], stages[0].described()
        sides = ", ".join(f"{name} {size}" for name, size in described["model"].items())
        return {
            **described,
            "title": self.title,
            "architecture": described["model"],
            "model": f"GPT of {sides}",
            "names": described["clients"],
            "clients": len(first.data),
            "seeds": [stage.seed for stage in stages],
            "forgotten": [stage.name for stage in stages],
            "steps": [{"clients": [first.name], "shares": {}, "triggered": []}],
            "retrains_per_seed": first.retrains,
        }

    def _kept(self, stage: Stage, data: str, store: Store) -> Part:
        content = [self.version, self.experiment, stage.described(), data]
        content += [[own.label, own.method, dict(own.options)] for own in self.contenders]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return kept_part(store.root / "measured" / f"{digest}.json", partial(self.left, stage), store)

    def left(self, stage: Stage) -> Part:
        """Train, let the client leave by every method, retrain, and measure all of it."""
        reader, request = stage.reader(), Request.of(stage.name)
        engine = LocalEngine(stage.network(stage.seed), CrossEntropy(), stage.data, compiled=True)
        start = Snapshot.of(stage.network(stage.seed))
        trained = train(engine, start, stage.plan, keep=Keep(checkpoints=0))
        rows = [_row("trained", stage, reader, trained.model)]
        again: list[tuple[ServerState, Cost]] = []
        for number in range(stage.retrains):
            seed = derived_seed(stage.seed, "retrain", number)
            own = Snapshot.of(stage.network(seed)), dataclasses.replace(stage.plan, seed=seed)
            again.append(_retrained(engine, request, *own))
        same = _retrained(engine, request, start, stage.plan, same=True)
        work = fmean(cost.sample_gradients for _, cost in again)
        rows += [_row("retrain", stage, reader, state.model, cost, work) for state, cost in again]
        rows.append(_row(SAME_INIT, stage, reader, same[0].model, same[1], work))
        away = engine.without((stage.name,))  # nobody asks the leaver
        for contender in self.contenders:
            method = contender.configured({"seed": derived_seed(stage.seed, "method")} if _seeded(contender) else None)
            state = trained if method.needs == "vectors" else dataclasses.replace(trained, memory=None)
            outcome = method(away if method.needs == "vectors" else engine, state, request)
            rows.append(_row(contender.label, stage, reader, outcome.state.model, outcome.cost, work))
        noise = {name: [getattr(row, name) for row in rows if row.method == "retrain"] for name in self.measures}
        return Part(rows, noise, {}, [])

    def _ranges(self, parts: Sequence[Part]) -> dict[str, dict[str, float]]:
        pooled = {name: [value for part in parts for value in part.noise[name]] for name in self.measures}
        return {name: {"low": min(own), "high": max(own), "mean": fmean(own)} for name, own in pooled.items()}


def leaver_of(seed: int, clients: int) -> int:
    """Who of so many leaves: the first only where something is chosen, below seed 10.

    Example:
        >>> [leaver_of(seed, 10) for seed in (0, 9, 20, 21)]
        [0, 0, 3, 4]
    """
    return 0 if seed < 10 else 1 + seed % (clients - 1)


def _retrained(
    engine: LocalEngine, request: Request, start: Snapshot, plan: TrainingPlan, *, same: bool = False
) -> tuple[ServerState, Cost]:
    options = RetrainOptions(start, plan, same_draws=same, keep=Keep(vectors=False, checkpoints=0))
    outcome = retrain(engine, ServerState(start), request, options)
    return outcome.state, outcome.cost


def _seeded(contender: Contender) -> bool:
    return "seed" in vars(contender.configured().options) and "seed" not in contender.options


def _row(label: str, stage: Stage, reader: Reader, model: Snapshot, cost: Cost | None = None, work: float = 0.0) -> Row:
    measures: dict[str, Any] = dict(reader.measure(model))
    row = Row(label, stage.seed, **measures)
    if cost is None:
        return row
    times = work / cost.sample_gradients if cost.sample_gradients else None
    return dataclasses.replace(
        row,
        seconds=cost.seconds,
        sample_gradients=cost.sample_gradients,
        speedup_in_gradients=times,
        rounds=float(cost.rounds),
    )
