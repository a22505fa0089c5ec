"""Projected gradient ascent (Halimi et al. 2022, "Federated Unlearning: How to Efficiently Erase a Client in FL?").

    theta_ref = theta - w_u/(1-w_u) (theta_u - theta)              the mean of the others' local models
    theta <- P(theta + eta grad L_u(theta)),  from theta_ref       P: into the ball of radius delta around theta_ref
    then FedAvg rounds of the clients that stay                    the paper's Algorithm 1 and its post-training

theta_u is the leaver's model after one local round from theta: the paper takes that of the last training round, which
no server here keeps, so it is asked for, and paid for. Gradients are clipped, and the ascent stops early: the paper
when the accuracy on the leaver's own validation data falls below a threshold, here when that of the next batch does,
before the step on it. Several owners ascend each from theta_ref, and their updates are averaged by how much they hold
to forget, which stays in the ball. To forget samples, they are taken for a client of their own.

delta is a third of the mean distance between theta_ref and ten random models. A server has no module to initialise, so
a random model is theta_ref with the entries of each parameter shuffled: weights of the same size in every layer, with
nothing learned left in their places. The distance to a fresh initialisation is of the same order, a little smaller
where training made the weights grow. (The authors' code averages squared distances, so its radius is larger, by the
square root of three.)

Where it fails: inside the ball nothing protects the retained clients, so that all accuracy is left to the rounds
afterwards; the ball is as arbitrary as its third; and on data fitted perfectly the ascent hardly starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Layout, Snapshot, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Train, Trained
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.gradient_ascent import Limits, ascended, require_positive
from expunge.unlearning.preparation import forgotten_memory, memory_warnings, prepared, require_reachable
from expunge.unlearning.recovery import LocalTraining, fedavg_rounds
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained

RANDOM_MODELS = 10


@dataclass(frozen=True)
class ProjectedGradientAscentOptions(LocalTraining):
    """Options of projected gradient ascent; clipping, ascent epochs and threshold are the authors'.

    Attributes:
        epochs: local epochs of a recovery round.
        learning_rate: of all local work; None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling and of the random models.
        local_epochs: of the leaver's local round behind theta_ref; None takes the training's, or 1 where unknown.
        ascent_epochs: at most so many passes over the data to forget.
        max_norm: a longer gradient is scaled down to this norm.
        radius: of the ball; None is a third of the mean distance to random models.
        stop_accuracy: the ascent ends when a batch is classified worse than this; None never stops early, and is the
            only choice for a loss without classes.
        recovery_rounds: FedAvg rounds of the clients that stay, afterwards; 0 is none.
    """

    local_epochs: int | None = None
    ascent_epochs: int = 5
    max_norm: float = 5.0
    radius: float | None = None
    stop_accuracy: float | None = 0.12
    recovery_rounds: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_norm", "radius")
        if min(self.ascent_epochs, self.local_epochs or 1) < 1 or self.recovery_rounds < 0:
            raise RequestError("Ascent and local epochs must be at least 1, recovery rounds at least 0.")


def projected_gradient_ascent(
    engine: Engine, state: ServerState, request: Request, options: ProjectedGradientAscentOptions
) -> Outcome:
    """Ascend on the data to forget, near the mean of the others' models, then recover.

    Args:
        engine: reaches all clients, the leaving ones, too.
        state: the trained model, its snapshot with layers; it is left untouched.
        request: what is to be forgotten.
        options: ball, clipping, early stop and recovery.
    """
    parties = prepared(engine, state, request)
    require_reachable(parties)
    plan, stay = options.plan(state), Retained.of(engine, state, parties)
    layout = state.model.layers()
    known = state.schedule.epochs if state.schedule is not None else None
    memory = forgotten_memory(state, parties)
    with measured(engine) as cost:
        local = replace(plan, epochs=options.local_epochs or known or 1)
        reference = reference_model(engine, state.model, parties, local)
        radius = options.radius or random_distance(reference.parameters, layout, plan.seed) / 3
        limits = Limits(options.max_norm, radius, options.stop_accuracy)
        model, replies = ascended(engine, reference, parties, replace(plan, epochs=options.ascent_epochs), limits)
        away = float((model.parameters - reference.parameters).norm())
        model = stay.statistics(model)
        if options.recovery_rounds:
            after_plan = replace(plan, rounds=options.recovery_rounds)
            model = fedavg_rounds(stay, model, memory, after_plan)
    details = {
        "radius": radius,
        "distance_from_the_reference": away,
        "steps": {name: reply.steps for name, reply in replies.items()},
    }
    after = state.moved(model, memory)
    return Outcome("projected-gradient-ascent", after, cost, details=details, warnings=memory_warnings(parties, memory))


def reference_model(engine: Engine, model: Snapshot, parties: Parties, plan: TrainingPlan) -> Snapshot:
    """``theta - w_u/(1-w_u) (theta_u - theta)``, after a local round on the data to forget."""
    tasks = {}
    for name, indices in parties.owners.items():
        kept = () if indices is None else tuple(sorted(set(range(parties.counts[name])) - set(indices)))
        seed = derived_seed(plan.seed, "local", name)
        tasks[name] = Train(model, plan.epochs, plan.batch_size, plan.learning_rate, seed, kept)
    replies = ask_each(engine, tasks, Trained)
    rest = sum(parties.counts.values()) - sum(parties.forgotten_counts.values())
    pull = weighted_sum((r.update for r in replies.values()), (r.count / rest for r in replies.values()))
    return model.moved(model.parameters - pull)


def random_distance(parameters: Tensor, layout: Layout, seed: int) -> float:
    """Mean distance to models with the same entries in each parameter, in random order."""
    chance = torch.Generator().manual_seed(derived_seed(seed, "random models"))
    distances = []
    for _ in range(RANDOM_MODELS):
        shuffled = {}
        for name, part in layout.unflatten(parameters).items():
            order = torch.randperm(part.numel(), generator=chance).to(part.device)
            shuffled[name] = part.reshape(-1)[order].view_as(part)
        distances.append(float((layout.flatten(shuffled) - parameters).norm()))
    return sum(distances) / len(distances)


register(
    Method(
        "projected-gradient-ascent",
        projected_gradient_ascent,
        ProjectedGradientAscentOptions(),
        "climb the loss of the data to forget inside a ball, then rounds of the clients that stay",
        asks_owners=True,
    )
)
