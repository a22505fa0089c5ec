"""What a verdict must catch: models that did not forget, or not the right way, made on purpose.

Each is a function ``trick(engine, state, request) -> Snapshot``; the state is left untouched.

    no-op                  the trained model
    wrong-sign step        the step of HF-KCU, taken backwards: towards the leaver
    one epoch              one round of fine-tuning by those who stay, and hope
    gradient ascent        the loss of the data to forget raised until it is large
    roll-back              the model as it was early in training; the leaver had taken part already
    masked label           the answer that gives the leaver away is forbidden by the last layer's bias

Relearning speed is a measure of its own: how soon the forgotten data is learnt again. What was only hidden comes back
sooner than it is learnt by a retrained model. A mask or a wrecked model may take longer than either, so it is read
beside the verdict, not instead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, NumericalError, RequestError
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Indices, Trained
from expunge.federation.training.fedavg import aggregate
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.fine_tuning import FineTuningOptions, fine_tuning
from expunge.unlearning.gradient_ascent import GradientAscentOptions, gradient_ascent
from expunge.unlearning.preparation import prepared
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

Trick = Callable[[Engine, ServerState, Request], Snapshot]

EARLY = 0.2
"""The share of the rounds after which an early checkpoint is taken."""

MASKED = -100.0
"""Added to a bias, it leaves no chance to the class."""


def no_op(engine: Engine, state: ServerState, request: Request) -> Snapshot:
    """The trained model, as it was."""
    prepared(engine, state, request)
    return state.model


def wrong_sign(engine: Engine, state: ServerState, request: Request) -> Snapshot:
    """``theta + step`` where HF-KCU (trajectory where vectors were kept, else gradient) takes ``theta - step``."""
    forgot = method("auto")(engine, state, request).state.model
    return state.model.moved(2 * state.model.parameters - forgot.parameters)


def one_epoch(engine: Engine, state: ServerState, request: Request) -> Snapshot:
    """One round of one epoch by the clients that stay."""
    return fine_tuning(engine, state, request, FineTuningOptions(rounds=1, epochs=1)).state.model


def ascent(engine: Engine, state: ServerState, request: Request) -> Snapshot:
    """Ten epochs of clipped gradient ascent on the data to forget."""
    return gradient_ascent(engine, state, request, GradientAscentOptions()).state.model


def rolled_back(early: Snapshot) -> Trick:
    """Puts an early model in the place of the trained one."""

    def trick(engine: Engine, state: ServerState, request: Request) -> Snapshot:
        prepared(engine, state, request)
        if early.parameters.shape != state.model.parameters.shape:
            raise ModelError("The early model is of another architecture than the trained one.")
        return early

    return trick


def early_plan(plan: TrainingPlan, share: float = EARLY) -> TrainingPlan:
    """The first rounds of a plan: training by it from the same start gives the early model again, bit for bit.

    Example:
        >>> early_plan(TrainingPlan(rounds=20)).rounds
        4
    """
    if not 0 < share < 1:
        raise RequestError(f"An early model lies between the start and the end of training, not at {share:g} of it.")
    return replace(plan, rounds=max(1, round(share * plan.rounds)))


def masked(label: int) -> Trick:
    """Forbids an answer: the one of the backdoor, or the most frequent of the forgotten labels."""

    def trick(engine: Engine, state: ServerState, request: Request) -> Snapshot:
        prepared(engine, state, request)
        layout = state.model.layers()
        parts = {name: part.clone() for name, part in layout.unflatten(state.model.parameters).items()}
        name, bias = list(parts.items())[-1]
        if bias.dim() != 1 or not 0 <= label < len(bias):
            raise ModelError(f"The last parameter, {name!r}, is no bias of an output {label}: nothing can be masked.")
        bias[label] += MASKED
        return state.model.moved(layout.flatten(parts))

    return trick


def most_frequent(labels: Tensor) -> int:
    """The label to mask where no attack has a target.

    Example:
        >>> import torch
        >>> most_frequent(torch.tensor([3, 1, 3]))
        3
    """
    return int(labels.mode().values)


def tricks(early: Snapshot, label: int) -> dict[str, Trick]:
    """All of them by name, with an early model and the label to mask."""
    return {
        "no-op": no_op,
        "wrong-sign": wrong_sign,
        "one-epoch": one_epoch,
        "gradient-ascent": ascent,
        "roll-back": rolled_back(early),
        "masked-label": masked(label),
    }


def relearning_epochs(
    engine: Engine,
    state: ServerState,
    model: Snapshot,
    request: Request,
    *,
    accuracy: Callable[[Snapshot], float],
    goal: float,
    most: int = 20,
    seed: int = 0,
) -> int | None:
    """Epochs on the data to forget until the model is as good on it as it was; None where ``most`` do not do.

    The owners train together, an epoch a round, with the training's batch size and learning rate. The number to
    compare with is a retrained model's.

    Args:
        engine: reaches the owners; a malicious one must not boost its updates here, or it relearns sooner.
        state: the trained state, for its schedule.
        model: where relearning starts.
        request: what was to be forgotten.
        accuracy: of a model on the forgotten data.
        goal: the accuracy to reach, the trained model's.
        most: epochs to try.
        seed: of the shuffling.
    """
    plan, left_out = Recovery(seed=seed).plan(state), owners_only(engine, request)
    for number in range(most + 1):
        if accuracy(model) >= goal:
            return number
        if number < most:
            try:
                model = owners_epoch(engine, model, plan, number, left_out)
            except NumericalError:  # a model that was wrecked may have no way back
                return None
    return None


def owners_epoch(
    engine: Engine, model: Snapshot, plan: TrainingPlan, number: int, left_out: Mapping[str, Indices]
) -> Snapshot:
    """One round by the owners of what was to be forgotten, on that alone."""
    tasks = {name: plan.task(model, number, name, others) for name, others in left_out.items()}
    return aggregate(model, ask_each(engine, tasks, Trained))


def owners_only(engine: Engine, request: Request) -> dict[str, Indices]:
    """The owners of what was to be forgotten, each with the samples that it leaves out to learn that alone."""
    parties = request.parties(engine.clients())
    return {name: _all_but(indices, parties.counts[name]) for name, indices in parties.owners.items()}


def _all_but(indices: Indices | None, count: int) -> Indices:
    """The samples that stay out when only these are learnt."""
    if indices is None:
        return ()
    wanted = set(indices)
    return tuple(index for index in range(count) if index not in wanted)
