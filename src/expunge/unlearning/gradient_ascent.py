"""Naive gradient ascent ("NaiveGA" among the HF-KCU paper's baselines): raise the loss of the data to forget.

    theta <- theta + eta grad L_u(theta),  ten epochs over D_u

Each owner does so on its data to forget, starting from the trained model; several owners' updates are averaged by how
much they hold to forget. Cross-entropy has no upper bound, so plain ascent overflows: every batch's gradient is
clipped to ``max_norm``.

Where it fails: nothing says when to stop, and what the retained clients know is climbed away from as well. With the
defaults the model usually ends at chance, which is the paper's finding, too (10% on CIFAR-10).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Ascend, Trained
from expunge.federation.training.fedavg import aggregate
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.preparation import forgotten_memory, memory_warnings, prepared, require_reachable
from expunge.unlearning.recovery import LocalTraining
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained


@dataclass(frozen=True)
class GradientAscentOptions(LocalTraining):
    """Options of gradient ascent.

    Attributes:
        epochs: passes over the data to forget.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the owners' shuffling.
        max_norm: a longer gradient is scaled down to this norm.
    """

    epochs: int = 10
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_norm")


def gradient_ascent(engine: Engine, state: ServerState, request: Request, options: GradientAscentOptions) -> Outcome:
    """Ascend on the data to forget.

    Args:
        engine: reaches the owners of the data to forget.
        state: the trained model; it is left untouched.
        request: what is to be forgotten.
        options: epochs and clipping.
    """
    parties = prepared(engine, state, request)
    require_reachable(parties)
    plan = options.plan(state)
    with measured(engine) as cost:
        model, replies = ascended(engine, state.model, parties, plan, Limits(options.max_norm))
        model = Retained.of(engine, state, parties).statistics(model)
    memory = forgotten_memory(state, parties)
    details = {
        "steps": {name: reply.steps for name, reply in replies.items()},
        "distance": float((model.parameters - state.model.parameters).norm()),
    }
    after = state.moved(model, memory)
    return Outcome("gradient-ascent", after, cost, details=details, warnings=memory_warnings(parties, memory))


@dataclass(frozen=True)
class Limits:
    """What holds an ascent back.

    Attributes:
        max_norm: a longer gradient is scaled down to this norm.
        radius: of the ball around where it began; None is no ball.
        stop_accuracy: it ends when a batch is classified worse than this; None never.
    """

    max_norm: float
    radius: float | None = None
    stop_accuracy: float | None = None


def ascended(
    engine: Engine, model: Snapshot, parties: Parties, plan: TrainingPlan, limits: Limits
) -> tuple[Snapshot, dict[str, Trained]]:
    """The owners ascend on their data to forget; their updates averaged by how much they hold to forget."""
    tasks = {
        name: Ascend(
            model,
            plan.epochs,
            plan.batch_size,
            plan.learning_rate,
            derived_seed(plan.seed, "ascent", name),
            indices,
            max_norm=limits.max_norm,
            radius=limits.radius,
            stop_accuracy=limits.stop_accuracy,
        )
        for name, indices in parties.owners.items()
    }
    replies = ask_each(engine, tasks, Trained)
    return model.moved(aggregate(model, replies).parameters), replies


def require_positive(options: object, *names: str) -> None:
    """Refuse an option that is given but not a number above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise RequestError(f"The option {name} must be a number above 0, not {value}.")


register(
    Method(
        "gradient-ascent",
        gradient_ascent,
        GradientAscentOptions(),
        "climb the loss of the data to forget for ten epochs, clipped",
        asks_owners=True,
    )
)
