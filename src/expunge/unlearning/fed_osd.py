"""FedOSD (Pan et al., AAAI 2025, "Federated Unlearning with Gradient Descent and Conflict Mitigation").

Unlearning rounds: the owners descend the unlearning cross-entropy ``-log(1 - p_y/2)``, bounded where ascent is not,
while the clients that stay train as ever. With g_u the owners' update, A the retained clients' updates as rows,

    d = g_u - A' (A A')^+ A g_u,  scaled back to ||g_u||;   theta <- theta + d

is the orthogonal steepest descent: closest to g_u among the directions that no retained client feels to first order.
Recovery rounds: FedAvg of the clients that stay, each update without its component along g_a = theta - theta_0 (what
was walked from the trained model) and scaled back to its length, so that nobody walks back. As in the authors' code
the component is taken away whatever its sign; ``strip_return`` takes only the way back and does not scale.

Two things differ from the paper: several owners are averaged by how much they hold to forget and recovering clients
by their samples, where it weighs all alike; and fewer rounds are made by default, five of each where its training of
2000 rounds is followed by 100 of each. For a loss other than cross-entropy ``exp(-l)`` stands for p_y.

Where it fails: it asks every client in every round, so it costs as much as training for as long; orthogonality is
first order, and against many clients little of g_u is left, which scaling back then blows up; and where the data to
forget is fitted perfectly its gradient vanishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Ascend, Indices, Task, Trained
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.preparation import forgotten_memory, memory_warnings, prepared, require_reachable
from expunge.unlearning.recovery import LocalTraining, fedavg_rounds
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained

_DEPENDENT = 1e-5  # a smaller share of a vector outside a span is rounding, not a direction


@dataclass(frozen=True)
class FedOsdOptions(LocalTraining):
    """Options of FedOSD.

    Attributes:
        epochs: local epochs a round, of unlearning and of recovery.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling.
        unlearning_rounds: rounds along the orthogonal direction.
        recovery_rounds: FedAvg rounds of the clients that stay, afterwards; 0 is none.
    """

    unlearning_rounds: int = 5
    recovery_rounds: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unlearning_rounds < 1 or self.recovery_rounds < 0:
            raise RequestError("FedOSD needs at least 1 unlearning round, and recovery rounds cannot be below 0.")


def fed_osd(engine: Engine, state: ServerState, request: Request, options: FedOsdOptions) -> Outcome:
    """Unlearn where no retained client feels it, then recover without walking back.

    Args:
        engine: reaches all clients, the leaving ones, too.
        state: the trained model; it is left untouched.
        request: what is to be forgotten.
        options: rounds and local training.
    """
    parties = prepared(engine, state, request)
    require_reachable(parties)
    plan, stay = options.plan(state), Retained.of(engine, state, parties)
    model, memory, shares = state.model, forgotten_memory(state, parties), []
    with measured(engine) as cost:
        for number in range(options.unlearning_rounds):
            wanted, retained = _updates(engine, model, parties, plan, number)
            direction, share = orthogonal_direction(wanted, retained)
            shares.append(share)
            model = model.moved(model.parameters + direction)
        model = stay.statistics(model)
        if options.recovery_rounds:

            def staying_away(update: Tensor, now: Snapshot) -> Tensor:
                return orthogonal_direction(update, [now.parameters - state.model.parameters])[0]

            after_plan = replace(plan, rounds=options.recovery_rounds)
            model = fedavg_rounds(stay, model, memory, after_plan, staying_away)
    warnings = memory_warnings(parties, memory)
    if not all(shares):
        warnings += ("In some rounds no direction was left that the retained clients do not feel: no step was made.",)
    details = {"orthogonal_share": shares}
    return Outcome("fed-osd", state.moved(model, memory), cost, details=details, warnings=warnings)


def _updates(
    engine: Engine, model: Snapshot, parties: Parties, plan: TrainingPlan, number: int
) -> tuple[Tensor, list[Tensor]]:
    """The owners' mean update and each retained client's, in one message; a second to those who are both."""

    def ascent(name: str, indices: Indices | None) -> Ascend:
        seed = derived_seed(plan.seed, number, "ascent", name)
        return Ascend(model, plan.epochs, plan.batch_size, plan.learning_rate, seed, indices, bounded=True)

    tasks: dict[str, Task] = {name: plan.task(model, number, name, gone) for name, gone in parties.retained.items()}
    tasks.update({name: ascent(name, None) for name in parties.leaving})
    replies = ask_each(engine, tasks, Trained)
    owners = [replies[name] for name in parties.leaving]
    if parties.partly:
        both = {name: ascent(name, indices) for name, indices in parties.partly.items()}
        owners.extend(ask_each(engine, both, Trained).values())
    total = sum(reply.count for reply in owners)
    wanted = weighted_sum((reply.update for reply in owners), (reply.count / total for reply in owners))
    return wanted, [replies[name].update for name in parties.retained]


def orthogonal_direction(wanted: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, float]:
    """What of ``wanted`` is orthogonal to all the others, at the length of ``wanted``, and its share of that length.

    Zero where nothing is left. By Gram-Schmidt, each projection made twice for the sake of rounding.

    Example:
        >>> direction, share = orthogonal_direction(torch.tensor([3.0, 4.0]), [torch.tensor([0.0, 2.0])])
        >>> direction, round(share, 4)
        (tensor([5., 0.]), 0.6)
    """
    basis: list[Tensor] = []
    for other in others:
        rest = _without(other, basis)
        if rest.norm() > _DEPENDENT * other.norm():
            basis.append(rest / rest.norm())
    rest, length = _without(wanted, basis), wanted.norm()
    if rest.norm() <= _DEPENDENT * length:
        return torch.zeros_like(wanted), 0.0
    return rest * (length / rest.norm()), float(rest.norm() / length)


def _without(vector: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2):
        for axis in basis:
            vector = vector - torch.dot(vector, axis) * axis
    return vector


register(
    Method(
        "fed-osd",
        fed_osd,
        FedOsdOptions(),
        "steps that no retained client feels, then recovery that does not walk back",
        asks_owners=True,
    )
)
