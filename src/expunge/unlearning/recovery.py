"""Rounds of the clients that stay: plain FedAvg, or recovery that may not walk back to the model that remembers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Buffers, Draw, Indices, NormStatistics, Trained
from expunge.federation.training.fedavg import aggregate, average_buffers
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.unlearning.request import Parties

PART, SMALLER = 3, 4
"""Of a short round: one in so many of the samples, in batches so many times smaller than the training's."""

Change = Callable[[Tensor, Snapshot], Tensor]
"""What becomes of a client's update before it is averaged, given the model that it was asked to train."""


@dataclass(frozen=True)
class Recovery:
    """How clients train after the step: the options of a recovery round, which other methods' options extend.

    Attributes:
        epochs: local epochs, at most one by default.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling.
    """

    epochs: int = 1
    learning_rate: float | None = None
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise RequestError(f"Recovery needs at least 1 epoch, not {self.epochs}.")

    def plan(self, state: ServerState, rounds: int = 1) -> TrainingPlan:
        """So many rounds, with the training's learning rate and batch size where none is given."""
        learning_rate = self.learning_rate or (state.schedule.learning_rate if state.schedule else None)
        batch_size = self.batch_size or (state.schedule.batch_size if state.schedule else None)
        if learning_rate is None or batch_size is None:
            raise RequestError("Local training needs a learning rate and a batch size: give those of the training.")
        return TrainingPlan(rounds, self.epochs, batch_size, learning_rate, seed=self.seed)


def strip_return(update: Tensor, towards: Tensor) -> Tensor:
    """``d <- d - max(0, d.g) / ||g||^2 g``: the update without its component back towards the model that remembers.

    Example:
        >>> strip_return(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
        tensor([0., 1.])
        >>> strip_return(torch.tensor([-1.0, 1.0]), torch.tensor([2.0, 0.0]))
        tensor([-1.,  1.])
    """
    length = torch.dot(towards, towards)
    if length == 0:
        return update
    return update - torch.dot(update, towards).clamp(min=0.0) / length * towards


def retained_round(
    engine: Engine,
    model: Snapshot,
    retained: Mapping[str, Indices],
    plan: TrainingPlan,
    number: int = 0,
    *,
    draws: Mapping[str, Draw] | None = None,
    averaged: bool = False,
    change: Change | None = None,
) -> dict[str, Trained]:
    """Ask the retained clients for one round of training from ``model``.

    Args:
        engine: reaches the clients.
        model: where they start.
        retained: who is asked, each with the samples that it no longer uses.
        plan: epochs, batch size, learning rate and seed; its rounds and participation are not looked at.
        number: of the round, for its seeds.
        draws: the clients that train, each on so many of its samples only; None is everyone on everything.
        averaged: each sends where its later steps were on average, not the last one.
        change: what becomes of each update.
    """
    tasks = {
        name: replace(plan.task(model, number, name, left_out), averaged=averaged)
        for name, left_out in retained.items()
    }
    if draws is not None:
        tasks = {name: replace(tasks[name], draw=draw) for name, draw in draws.items()}
    replies = ask_each(engine, tasks, Trained)
    if change is None:
        return replies
    return {name: replace(reply, update=change(reply.update, model)) for name, reply in replies.items()}


def recovery_round(
    engine: Engine, remembers: Snapshot, forgot: Snapshot, retained: Mapping[str, Indices], plan: TrainingPlan
) -> dict[str, Trained]:
    """One FedAvg round of the retained clients from ``forgot``, each update stripped of its way back."""
    return retained_round(engine, forgot, retained, plan, change=_no_return(remembers))


def short_draws(parties: Parties, seed: int) -> dict[str, Draw]:
    """What a short round trains on: the front of each client's order, whose back is looked at for its length."""
    left = {name: parties.counts[name] - len(left_out) for name, left_out in parties.retained.items()}
    return {name: Draw(math.ceil(count / PART), seed) for name, count in left.items()}


def short_round(
    engine: Engine,
    remembers: Snapshot,
    forgot: Snapshot,
    retained: Mapping[str, Indices],
    schedule: Schedule,
    draws: Mapping[str, Draw],
    seed: int,
) -> dict[str, Trained]:
    """A recovery round on part of the samples, in small batches, each client's later steps averaged.

    How far a round leads depends on its steps, not on how many samples make one; small batches are noisy, and the mean
    over steps and clients takes most of the noise out again.
    """
    plan = TrainingPlan(1, 1, max(1, schedule.batch_size // SMALLER), schedule.learning_rate, seed=seed)
    return retained_round(engine, forgot, retained, plan, draws=draws, averaged=True, change=_no_return(remembers))


def _no_return(remembers: Snapshot) -> Change:
    return lambda update, model: strip_return(update, remembers.parameters - model.parameters)


def taken(model: Snapshot, memory: Memory | None, replies: Mapping[str, Trained]) -> Snapshot:
    """The model after the round; the memory, where there is one, gets the round added."""
    if memory is not None:
        memory.record(
            {name: reply.update for name, reply in replies.items()},
            {name: reply.count for name, reply in replies.items()},
        )
    return aggregate(model, replies)


def fedavg_rounds(
    engine: Engine,
    model: Snapshot,
    memory: Memory | None,
    retained: Mapping[str, Indices],
    plan: TrainingPlan,
    change: Change | None = None,
) -> Snapshot:
    """All rounds of the plan, by FedAvg of the retained clients; the memory, where there is one, gets them added."""
    for number in range(plan.rounds):
        model = taken(model, memory, retained_round(engine, model, retained, plan, number, change=change))
    return model


def has_statistics(model: Snapshot) -> bool:
    """Whether the model has batch-norm statistics."""
    return any("running_" in name for name in model.buffers)


def refreshed_buffers(
    engine: Engine,
    model: Snapshot,
    state: ServerState,
    parties: Parties,
    draws: Mapping[str, Draw | None] | None = None,
) -> Snapshot:
    """Batch-norm statistics remember, too: they are estimated again from the clients that stay, or draws of theirs."""
    if not has_statistics(model):
        return model
    batch_size = state.schedule.batch_size if state.schedule is not None else 64
    tasks = {}
    for name, left_out in parties.retained.items():
        draw = draws[name] if draws is not None else None
        if draw is not None:  # batches count alike, so a few samples that are left over would count too much
            draw = replace(draw, size=batch_size * math.ceil(draw.size / batch_size))
        tasks[name] = NormStatistics(model, batch_size, left_out, draw)
    replies = ask_each(engine, tasks, Buffers)
    buffers = average_buffers({name: (reply.buffers, reply.count) for name, reply in replies.items()})
    return replace(model, buffers=buffers)
