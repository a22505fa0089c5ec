"""Models that experiments share: a cell is one model to be made, determined by its fields alone; store.py keeps it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from expunge.auditing.later import more_rounds
from expunge.bench.adversary import Tampering
from expunge.bench.scenario import Federation, Scenario, SwitchableEngine
from expunge.bench.settings import Contender, Forget
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.engines.engine import Cost, Engine, measured
from expunge.federation.engines.workbench import SIDE_BY_SIDE
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import CurvatureProduct, Draw, Gradient, Train
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.sharded import train_sharded
from expunge.unlearning.registry import Method, method
from expunge.unlearning.repair import SMALLER
from expunge.unlearning.retrain import RetrainOptions, retrain

ALL_SAMPLES = {"digits": 1437, "mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "hospitals": 689}
MODEL_WORK = {
    **{"resnet18": 60.0, "resnet18-bf16": 30.0, "vit-lite": 20.0, "vit-lite-bf16": 10.0},
    **{"cnn": 3.0, "digits-net": 0.3, "softmax": 0.1, "mlp": 0.1},
}

UPDATES_EVERY = 2
SHARDS, SLICES = 3, 2
AT_A_TIME = 5
"""More rounds that are made in one go: longer ways go over shorter ones, which are kept."""


@dataclass(frozen=True, eq=False)
class Kept:
    """A finished cell: the state that it made, and the record beside it."""

    state: ServerState
    cost: Cost
    record: dict[str, Any]


class Workplace(Protocol):
    """What a cell is made with; the store is one."""

    def engine(self, scenario: Scenario) -> tuple[Federation, SwitchableEngine]:
        """The federation and a new engine on it."""

    def kept(self, cell: Cell) -> Kept:
        """A finished cell."""


@dataclass(frozen=True)
class Cell(ABC):
    """One model to be made."""

    kind: ClassVar[str]
    scenario: Scenario

    @property
    def needs(self) -> tuple[Cell, ...]:
        """Cells that must be finished before."""
        return ()

    @property
    def keeps_more(self) -> bool:
        """Whether something is kept beside what others would keep under the same name."""
        return False

    @property
    def work(self) -> float:
        """About how much it costs, in samples of a small network: only to tell the time that is left."""
        plan, samples = self.scenario.plan, self.scenario.train_samples or ALL_SAMPLES[self.scenario.dataset]
        return plan.rounds * plan.epochs * plan.participation * samples * MODEL_WORK.get(self.scenario.model, 1.0)

    @abstractmethod
    def make(self, workplace: Workplace) -> tuple[ServerState, Cost, dict[str, Any]]:
        """Do the work: the state, what it cost, and what is to be written down."""


@dataclass(frozen=True)
class TrainedCell(Cell):
    """The federation trained on everybody; ``updates`` are kept beside the vectors where a method needs them."""

    kind = "trained"
    updates: bool = field(default=False, metadata={"content": True})

    @property
    def keeps_more(self) -> bool:
        """The stored updates."""
        return self.updates

    def make(self, workplace: Workplace) -> tuple[ServerState, Cost, dict[str, Any]]:
        """FedAvg."""
        federation, engine = workplace.engine(self.scenario)
        warm_up(engine, federation.initial(), self.scenario)
        keep = Keep(updates_every=UPDATES_EVERY if self.updates else None)
        with measured(engine) as cost:
            state = train(engine, federation.initial(), self.scenario.plan, keep=keep)
        return state, cost, {"keeping_seconds": dict(state.keeping_seconds), "updates": self.updates}


@dataclass(frozen=True)
class ShardedCell(Cell):
    """The federation trained by SISA."""

    kind = "sharded"

    def make(self, workplace: Workplace) -> tuple[ServerState, Cost, dict[str, Any]]:
        """Shards, slices, checkpoints."""
        federation, engine = workplace.engine(self.scenario)
        warm_up(engine, federation.initial(), self.scenario)
        starts = [federation.initial(derived_seed(self.scenario.seed, "shard", number)) for number in range(SHARDS)]
        with measured(engine) as cost:
            state = train_sharded(engine, starts, self.scenario.plan, shards=SHARDS, slices=SLICES)
        return state, cost, {}


@dataclass(frozen=True)
class RetrainedCell(Cell):
    """Trained again without what is to be forgotten; what whole clients that leave did to their data plays no part."""

    kind = "retrained"
    forget: Forget
    number: int
    fresh: bool = True
    same_batches: bool = True
    """Of one that is not fresh: whether those who stay get the batches that they had, too, or new ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scenario", self.scenario.without_deeds(self.forget.clients))

    def make(self, workplace: Workplace) -> tuple[ServerState, Cost, dict[str, Any]]:
        """From a fresh initialisation; or from the training's own, with or without the batches that there were."""
        federation, engine = workplace.engine(self.scenario)
        warm_up(engine, federation.initial(), self.scenario)
        start, plan, keep = federation.initial(), self.scenario.plan, Keep(vectors=False, checkpoints=0)
        same_draws = not self.fresh and self.same_batches
        if not same_draws:
            seed = derived_seed(self.scenario.seed, "retrain", self.number)
            start = federation.initial(seed) if self.fresh else start
            plan = dataclasses.replace(plan, seed=seed)
        options = RetrainOptions(start, plan, same_draws=same_draws, keep=keep)
        outcome = retrain(engine, ServerState(start), self.forget.request(federation), options)
        return outcome.state, outcome.cost, {}


@dataclass(frozen=True)
class ForgottenCell(Cell):
    """A method's answer to requests that come one after another; it makes the last step."""

    kind = "forgotten"
    contender: Contender
    forgets: tuple[Forget, ...]
    tamper: str = ""

    @property
    def needs(self) -> tuple[Cell, ...]:
        """What it starts from: training, or the step before; and the contender whose budget it gets."""
        needs: list[Cell] = [self.before]
        if self.contender.budget_of is not None:
            needs.append(dataclasses.replace(self, contender=self.contender.budget_of))
        return tuple(needs)

    @property
    def before(self) -> Cell:
        """The state before its step."""
        if len(self.forgets) > 1:
            return dataclasses.replace(self, forgets=self.forgets[:-1])
        kept = method(self.contender.method).needs
        if kept == "shards":
            return ShardedCell(self.scenario)
        return TrainedCell(self.scenario, updates=kept == "updates")

    @property
    def work(self) -> float:
        """A guess: what retrains in part takes half a training, what ascends or tunes a few epochs, others less."""
        dear = {"fed-eraser": 0.5, "sisa": 0.4, "fed-osd": 0.25, "not": 0.2, "projected-gradient-ascent": 0.2}
        return super().work * dear.get(self.contender.method, 0.05)

    def make(self, workplace: Workplace) -> tuple[ServerState, Cost, dict[str, Any]]:
        """Run the method; whoever left before cannot be reached, and for the trajectory source nor can the leaver."""
        federation, engine = workplace.engine(self.scenario)
        chosen = self.configured(workplace)
        before = self._start(workplace.kept(self.before).state, chosen.needs)
        forget, gone = self.forgets[-1], [name for earlier in self.forgets[:-1] for name in earlier.clients]
        kept = before.memory.clients if before.memory is not None else ()  # nobody's who was never drawn to take part
        replays = getattr(chosen.options, "source", "auto") == "replay"
        if chosen.needs == "vectors" and not replays and set(forget.owners) <= {*forget.clients} & {*kept}:
            gone += forget.clients
        reached = engine.without(tuple(gone))
        warm_up(reached, federation.initial(), self.scenario)
        acting: Engine = Tampering(reached, forget.owners, self.tamper, self.scenario.seed) if self.tamper else reached
        record: dict[str, Any] = {"stored_bytes": stored_bytes(chosen.needs, before)}
        try:
            with measured(reached) as cost:
                outcome = chosen(acting, before, forget.request(federation))
        except NumericalError as problem:  # it diverged or was lied to: the model stays as it was, which is a result
            return (
                self._left(before),
                cost,
                {**record, "succeeded": False, "details": {}, "warnings": [str(problem)]},
            )
        record |= {"succeeded": outcome.succeeded, "details": outcome.details, "warnings": list(outcome.warnings)}
        return outcome.state if outcome.succeeded else self._left(before), outcome.cost, record

    def configured(self, workplace: Workplace | None = None) -> Method:
        """The method with all its options; its seed follows from the scenario's and the step, if it is not chosen."""
        more: dict[str, Any] = {}
        if "seed" in vars(method(self.contender.method).options) and "seed" not in self.contender.options:
            more["seed"] = derived_seed(self.scenario.seed, "method", len(self.forgets))
        if self.contender.budget_of is not None and workplace is not None:
            spent = workplace.kept(dataclasses.replace(self, contender=self.contender.budget_of))
            more["budget"] = round(spent.cost.sample_gradients)
        return self.contender.configured(more)

    def _start(self, state: ServerState, needs: str | None) -> ServerState:
        """What the method gets: vectors only where it needs them, or it would have to keep them up."""
        return state if needs == "vectors" else dataclasses.replace(state, memory=None)

    def _left(self, state: ServerState) -> ServerState:
        """The state after a failure: the leaver is gone all the same, the model as it was."""
        memory = state.memory.without(self.forgets[-1].clients) if state.memory is not None else None
        return state.moved(state.model, memory)


@dataclass(frozen=True)
class ContinuedCell(Cell):
    """Another cell's model after those who stay went on for some rounds; the same way for every model.

    ``earlier`` says how many rounds they had gone on before, so that they shuffle otherwise now.
    """

    kind = "continued"
    of: Cell
    forget: Forget
    rounds: int
    earlier: int = 0

    @property
    def needs(self) -> tuple[Cell, ...]:
        """The model that it starts from."""
        return (self.of,)

    @property
    def work(self) -> float:
        """As a training of so many rounds."""
        return super().work * self.rounds / self.scenario.plan.rounds

    def make(self, workplace: Workplace) -> tuple[ServerState, Cost, dict[str, Any]]:
        """More rounds by the training's plan, without those who left."""
        federation, engine = workplace.engine(self.scenario)
        plan = self.scenario.plan
        if self.earlier:
            plan = dataclasses.replace(plan, seed=derived_seed(plan.seed, "more", self.earlier))
        go_on = more_rounds(engine, plan, self.forget.request(federation), self.rounds)
        with measured(engine) as cost:
            model = go_on(workplace.kept(self.of).state.model)
        return ServerState(model), cost, {}


def after(cell: Cell, forget: Forget, rounds: int) -> Cell:
    """The cell itself, or where its model leads in so many more rounds of those who stay, a few at a time.

    Example:
        >>> cell, gone = TrainedCell(Scenario()), Forget(("client-1",))
        >>> after(cell, gone, 0) == cell, after(cell, gone, 15).needs == (after(cell, gone, 10),)
        (True, True)
    """
    if not rounds:
        return cell
    earlier = max(0, rounds - AT_A_TIME)
    return ContinuedCell(cell.scenario, after(cell, forget, earlier), forget, rounds - earlier, earlier)


def stored_bytes(needs: str | None, state: ServerState) -> int:
    """What training had to keep for a method."""
    place = {"vectors": state.memory, "updates": state.history, "shards": state.shards}.get(needs or "")
    return place.stored_bytes if place is not None else 0


def warm_up(engine: SwitchableEngine, model: Snapshot, scenario: Scenario) -> None:
    """One of everything on a few samples: the first ones load libraries and record steps, which is nobody's cost."""
    plan, other = scenario.plan, engine.without(())  # with its own account
    seed = derived_seed(scenario.seed, "warm-up")
    name = next(iter(other.clients()))
    other.ask({name: CurvatureProduct(model, model.parameters[None], "ggn", Draw(8, seed=0))})
    other.ask({name: Gradient(model, only=(0,))})
    few, some = Draw(2 * plan.batch_size, seed), list(other.clients())[:SIDE_BY_SIDE]
    small = max(1, plan.batch_size // SMALLER)  # of a short round
    for names, size in (([name], small), (some, plan.batch_size)):
        other.ask({n: Train(model, 1, size, plan.learning_rate, seed, draw=few) for n in names})
