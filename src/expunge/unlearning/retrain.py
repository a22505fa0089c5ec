"""Retraining without the forgotten data: the gold standard that every other method is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import KEEP_VECTORS, Keep, Progress, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.estimate import Estimate, Size, small_change
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Request

INCOMPLETE = "Retraining needs a start model and a training plan in its options."


@dataclass(frozen=True, eq=False)
class RetrainOptions:
    """How to retrain.

    Attributes:
        start: the initial model; a fresh initialisation, or the one that the training began with.
        plan: the training plan, usually the training's own with a fresh seed.
        same_draws: whether those who stay are drawn for the same rounds as with those who leave; with the training's
            own start and plan they then see the same batches in the same rounds.
        keep: what is recorded, so that the new model can forget in its turn.
        progress: called after each round.
    """

    start: Snapshot | None = None
    plan: TrainingPlan | None = None
    same_draws: bool = False
    keep: Keep = KEEP_VECTORS
    progress: Progress | None = None


def retrain(engine: Engine, state: ServerState, request: Request, options: RetrainOptions) -> Outcome:
    """FedAvg from the start on what is left; weights follow from the counts that remain."""
    if options.start is None or options.plan is None:
        raise RequestError(INCOMPLETE)
    remembered = state.memory.clients if state.memory is not None else ()
    parties = request.parties(engine.clients(), remembered)
    with measured(engine) as cost:
        trained = train(
            engine,
            options.start,
            options.plan,
            clients=parties.retained,
            absent=parties.leaving if options.same_draws else (),
            keep=options.keep,
            progress=options.progress,
        )
    return Outcome("retrain", trained, cost)


def _estimate(options: RetrainOptions, size: Size) -> Estimate:
    """What it costs at most: every round of everybody who stays."""
    if options.start is None or options.plan is None:
        raise RequestError(INCOMPLETE)
    rounds, epochs = options.plan.rounds, options.plan.epochs
    each = (rounds * options.start.stored_bytes + small_change(rounds)) * size.clients
    return Estimate(rounds, each, each, float(rounds * epochs * size.samples))


register(
    Method(
        "retrain",
        retrain,
        RetrainOptions(),
        "train again from the start without the forgotten data",
        estimate=_estimate,
    )
)
