"""Fine-tuning: FedAvg rounds of the clients that stay, from the trained model, and hope for forgetting.

``fine-tuning`` makes so many rounds. ``fine-tuning-same-budget`` is a control: it spends exactly what another method
spent, in sample-gradients, so that the other's gain is not just that of having computed something.

Where it fails: whatever the clients that stay do not contradict is not forgotten. A backdoor survives it for long,
since no honest sample wears the trigger. Batch-norm statistics follow the rounds' own batches; after a few steps only,
they still hold a little of the leaver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from expunge.core.seeds import derived_seed
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Draw
from expunge.unlearning.preparation import forgotten_memory, memory_warnings, prepared
from expunge.unlearning.recovery import LocalTraining, fedavg_rounds, taken
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained


@dataclass(frozen=True)
class FineTuningOptions(LocalTraining):
    """Options of fine-tuning.

    Attributes:
        epochs: local epochs a round.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling.
        rounds: FedAvg rounds of the clients that stay.
    """

    rounds: int = 1


@dataclass(frozen=True)
class SameBudgetOptions(LocalTraining):
    """Options of the control.

    Attributes:
        epochs: local epochs a round, as long as the budget holds them.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling and of the last round's draw.
        budget: sample-gradients to spend, a whole number; what the compared method spent.
    """

    budget: int | None = None


def fine_tuning(engine: Engine, state: ServerState, request: Request, options: FineTuningOptions) -> Outcome:
    """Let the clients that stay train on.

    Args:
        engine: reaches the clients that stay.
        state: the trained model; it is left untouched.
        request: what is to be forgotten.
        options: rounds and local training.
    """
    parties = prepared(engine, state, request)
    plan = options.plan(state, options.rounds)
    memory = forgotten_memory(state, parties)
    with measured(engine) as cost:
        model = fedavg_rounds(Retained.of(engine, state, parties), state.model, memory, plan)
    return Outcome("fine-tuning", state.moved(model, memory), cost, warnings=memory_warnings(parties, memory))


def same_budget(engine: Engine, state: ServerState, request: Request, options: SameBudgetOptions) -> Outcome:
    """Spend exactly the budget: whole epochs while they fit, then a last round on a draw of the clients' samples."""
    parties = prepared(engine, state, request)
    plan = options.plan(state)
    if not isinstance(options.budget, int) or options.budget < 1:
        raise RequestError(
            "Fine-tuning on the same budget needs the option budget: the sample-gradients, a whole number, that the "
            "compared method spent."
        )
    stay = Retained.of(engine, state, parties)
    left = stay.left
    each, rest = sum(left.values()), options.budget
    model, memory, number = state.model, forgotten_memory(state, parties), 0
    with measured(engine) as cost:
        while epochs := min(plan.epochs, rest // each):
            now = replace(plan, epochs=epochs)
            model = taken(model, memory, stay.train(model, now, number), now.learning_rate)
            rest, number = rest - epochs * each, number + 1
        if rest:
            shares = {name: size for name, size in split(rest, left).items() if size}
            draws = {name: Draw(size, derived_seed(plan.seed, "draw", name)) for name, size in shares.items()}
            last = stay.train(model, replace(plan, epochs=1), number, draws=draws)
            model = taken(model, memory, last, plan.learning_rate)
    details = {"budget": options.budget, "whole_rounds": number, "samples_in_the_last": rest}
    after = state.moved(model, memory)
    return Outcome("fine-tuning-same-budget", after, cost, details=details, warnings=memory_warnings(parties, memory))


def split(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """``total`` shared out in proportion to the sizes, in whole numbers that add up to it: largest remainders first.

    Example:
        >>> split(5, {"ada": 2, "bob": 3, "cyd": 3})
        {'ada': 1, 'bob': 2, 'cyd': 2}
    """
    everything = sum(sizes.values())
    shares = {name: total * size // everything for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: total * sizes[name] % everything, reverse=True)
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


register(
    Method("fine-tuning", fine_tuning, FineTuningOptions(), "rounds of the clients that stay, from the trained model")
)
register(
    Method(
        "fine-tuning-same-budget",
        same_budget,
        SameBudgetOptions(),
        "a control: fine-tuning that spends exactly so many sample-gradients",
    )
)
