"""FedEraser (Liu, Ma, Yang, Wang, Liu 2021): rebuild the model from stored updates, calibrated by a little training.

The server stored every n-th round's updates U_k (history.py). From the initial model on, in each stored round the
clients that stay train for a few epochs from the model as rebuilt so far, which gives fresh updates V_k. Layer by layer

    calibrated update = ||U_k|| V_k / ||V_k||

the length is the stored one, the direction the fresh one: how far to go is remembered from the training, where to go
is asked again, since the stored directions were taken from models that knew the leaver. The calibrated updates are
averaged by sample counts as in FedAvg, and added. (Some public code has length and direction the other way round, or
averages the clients before it takes the length; the paper calibrates each client.)

The first round of the training began at the initial model, which had seen nobody: its stored updates are used as they
are, as in the paper. Only a client that loses samples trains there as well, for its stored update knows them.

Where it fails: lengths come from a training with the leaver in it; between stored rounds n - 1 rounds are skipped, so
with large n the rebuilt model is trained less; and it costs d floats for each client in each stored round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expunge.core.vectors import Layout, Snapshot, weighted_sum
from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.engine import Engine, ask_each, measured
from expunge.federation.keeping.history import History, StoredRound
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Trained
from expunge.federation.training.fedavg import average_buffers
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained


@dataclass(frozen=True)
class FedEraserOptions:
    """Options of FedEraser.

    Attributes:
        epochs: local epochs of calibration; None takes half of the training's, rounded up.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise RequestError(f"Calibration needs at least 1 epoch, not {self.epochs}.")


def calibrated(stored: Tensor, fresh: Tensor, layers: Layout) -> Tensor:
    """For every layer, the length of the stored update in the direction of the fresh one; zero where that is zero.

    Example:
        >>> layers = Layout((("a", torch.Size([2])), ("b", torch.Size([1]))))
        >>> calibrated(torch.tensor([3.0, 4.0, -7.0]), torch.tensor([0.0, -0.1, 0.2]), layers)
        tensor([ 0., -5.,  7.])
    """
    lengths, directions = layers.unflatten(stored), layers.unflatten(fresh)
    smallest = torch.finfo(fresh.dtype).tiny
    parts = []
    for name, direction in directions.items():
        norm = torch.linalg.vector_norm(direction).clamp(min=smallest)
        parts.append((torch.linalg.vector_norm(lengths[name]) * (direction / norm)).reshape(-1))
    return torch.cat(parts)


def fed_eraser(engine: Engine, state: ServerState, request: Request, options: FedEraserOptions) -> Outcome:
    """Forget clients, or samples inside clients.

    Args:
        engine: reaches the clients that stay; whole clients that leave need not be there.
        state: the trained model with its history; it is left untouched.
        request: what is to be forgotten.
        options: how to calibrate.
    """
    history, parties, plan = _prepared(engine, state, request, options)
    model, memory = history.initial.on(state.model.parameters.device), Memory(recipe=state.trained_by)
    after, lengths = History(history.initial), []
    with measured(engine) as cost:
        for stored in history.rounds:
            replies = _trained_again(engine, model, stored, parties, plan)
            updates, counts = _round(model, stored, replies, parties)
            total = sum(counts.values())
            mean = weighted_sum(updates.values(), (counts[name] / total for name in updates))
            if not bool(torch.isfinite(mean).all()):
                raise NumericalError("Calibration diverged: lower its learning rate.")
            lengths.append(float(torch.linalg.vector_norm(mean)))
            model = model.moved(model.parameters + mean)
            if replies:
                fresh = {name: (reply.buffers, reply.count) for name, reply in replies.items()}
                model = replace(model, buffers=average_buffers(fresh))
            after.record(stored.number, updates, counts)
            memory.record(updates, counts, plain=True)
        if history.rounds[-1].number == 0:  # not everybody trained, so nobody's buffers are there to be averaged
            model = Retained.of(engine, state, parties).statistics(model)
    details: dict[str, Any] = {
        "stored_rounds": [stored.number for stored in history.rounds],
        "calibration_epochs": plan.epochs,
        "update_norms": lengths,
    }
    warnings = []
    if parties.partly:
        names = ", ".join(parties.partly)
        warnings.append(f"The lengths of the updates of {names} come from training with the forgotten samples.")
    kept = memory.bound_to(model) if state.memory is not None else None
    left = replace(state, model=model, memory=kept, history=after, shards=None, checkpoints=None)
    return Outcome("fed-eraser", left, cost, details=details, warnings=tuple(warnings))


def _prepared(
    engine: Engine, state: ServerState, request: Request, options: FedEraserOptions
) -> tuple[History, Parties, TrainingPlan]:
    """The history of those who stay, who is touched, how to calibrate; all refusals before any work."""
    state.model.require_finite()
    if state.history is None:
        raise RequestError("No updates were kept while training: train with Keep(updates_every=2), or use hf-kcu.")
    remembered = state.memory.clients if state.memory is not None else ()
    parties = request.parties(engine.clients(), (*state.history.clients, *remembered))
    history = state.history.without(parties.leaving)
    if history.initial.layers().size != state.model.parameters.numel():
        raise RequestError("The history was recorded with another model: its updates have another length.")
    if not history.rounds:
        raise RequestError("No stored round has a client that stays: retrain instead.")
    if away := [name for name in history.clients if name not in parties.counts]:
        raise RequestError(f"Client {away[0]!r} stays but cannot be reached, and it has to train: wait for it.")
    return history, parties, _plan(state, options, len(history.rounds))


def _plan(state: ServerState, options: FedEraserOptions, rounds: int) -> TrainingPlan:
    schedule, epochs = state.schedule, options.epochs
    if epochs is None and schedule is not None and schedule.epochs is not None:
        epochs = (schedule.epochs + 1) // 2
    learning_rate = options.learning_rate or (schedule.learning_rate if schedule else None)
    batch_size = options.batch_size or (schedule.batch_size if schedule else None)
    if epochs is None or learning_rate is None or batch_size is None:
        raise RequestError("Calibration needs epochs, a learning rate and a batch size: give those of the training.")
    return TrainingPlan(rounds, epochs, batch_size, learning_rate, seed=options.seed)


def _is_calibrated(name: str, stored: StoredRound, parties: Parties) -> bool:
    """All updates but those of the first round; there only of clients that lose samples."""
    return stored.number > 0 or name in parties.partly


def _trained_again(
    engine: Engine, model: Snapshot, stored: StoredRound, parties: Parties, plan: TrainingPlan
) -> dict[str, Trained]:
    """Fresh updates of the clients whose stored ones are calibrated."""
    names = [name for name in stored.updates if _is_calibrated(name, stored, parties)]
    if not names:
        return {}
    tasks = {name: plan.task(model, stored.number, name, parties.retained[name]) for name in names}
    return ask_each(engine, tasks, Trained)


def _round(
    model: Snapshot, stored: StoredRound, replies: dict[str, Trained], parties: Parties
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Each client's update as it is added, and its sample count."""
    updates, counts = {}, {}
    for name, update in stored.updates.items():
        updates[name], counts[name] = update.to(model.parameters), stored.counts[name]
        if _is_calibrated(name, stored, parties):
            reply = replies[name]
            updates[name], counts[name] = calibrated(updates[name], reply.update, model.layers()), reply.count
    return updates, counts


register(
    Method(
        "fed-eraser",
        fed_eraser,
        FedEraserOptions(),
        "the model rebuilt from stored updates: their lengths, directions from a little training",
        needs="updates",
    )
)
