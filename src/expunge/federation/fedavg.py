"""FedAvg (McMahan et al. 2017) on any Engine: weights by sample count, client sampling, buffers averaged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import NumericalError, RequestError
from expunge.federation.client import local_steps
from expunge.federation.engine import Engine, ask_each, timed
from expunge.federation.history import History
from expunge.federation.memory import Memory
from expunge.federation.tasks import Indices, Train, Trained

if TYPE_CHECKING:  # shards.py trains with this module
    from expunge.federation.shards import Shards

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TrainingPlan:
    """How a federation trains; the defaults are the paper's.

    Attributes:
        rounds: FedAvg rounds.
        epochs: local epochs per round.
        batch_size: local batch size.
        learning_rate: of plain SGD on the clients.
        participation: share of the clients drawn in each round; at least one always takes part.
        seed: of client sampling and of the clients' shuffling.
    """

    rounds: int = 20
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 0.01
    participation: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rounds, self.epochs, self.batch_size) < 1 or not self.learning_rate > 0:
            raise RequestError("Rounds, epochs and batch size must be at least 1, the learning rate above 0.")
        if not 0 < self.participation <= 1:
            raise RequestError(f"The participation must lie above 0 and be at most 1, not {self.participation}.")

    def task(self, model: Snapshot, number: int, name: str, exclude: Indices = ()) -> Train:
        """What one client is asked to do in round ``number``."""
        seed = derived_seed(self.seed, number, name)
        return Train(model, self.epochs, self.batch_size, self.learning_rate, seed, exclude)

    def schedule(self, counts: Mapping[str, int]) -> Schedule:
        """The plan as seen by the filter: learning rate and mean local steps of these clients."""
        steps = sum(n * local_steps(n, self.epochs, self.batch_size) for n in counts.values()) / sum(counts.values())
        return Schedule(self.learning_rate, steps, self.rounds, self.batch_size, self.epochs)


@dataclass(frozen=True)
class Schedule:
    """What unlearning has to know of the training that was: its learning rate, steps and rounds.

    ``epochs``, the local epochs of a round, may be unknown; only FedEraser asks for it.

    Example:
        >>> Schedule(learning_rate=0.01, local_steps=390, rounds=20).damping
        0.01282051282051282
    """

    learning_rate: float
    local_steps: float
    rounds: int
    batch_size: int = 64
    epochs: int | None = None

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and self.local_steps > 0 and self.rounds > 0 and self.batch_size > 0):
            raise RequestError("The learning rate, local steps, rounds and batch size must all be above 0.")
        if self.epochs is not None and self.epochs < 1:
            raise RequestError(f"A training has at least 1 local epoch a round, not {self.epochs}.")

    @property
    def damping(self) -> float:
        """The filter's cut-off: 1 / (learning rate x local steps in all)."""
        return 1.0 / (self.learning_rate * self.local_steps * self.rounds)

    def survival(self, curvature: Tensor) -> Tensor:
        """How much of a pull is left at the end along directions of this curvature, averaged over the rounds.

        ``f(e) = (1 - c^T) / (T (1 - c))`` with ``c = (1 - eta e)^steps``, the contraction of one round.
        """
        contraction = (1 - self.learning_rate * curvature).clamp(0.0, 1.0) ** self.local_steps
        total, power = torch.zeros_like(contraction), torch.ones_like(contraction)
        for _ in range(self.rounds):
            total += power
            power *= contraction
        return total / self.rounds


@dataclass(frozen=True)
class Keep:
    """What training keeps so that the model can forget later; methods say what they need.

    Attributes:
        vectors: one vector per client (memory.py).
        updates_every: the clients' updates of the first round and of every so many after it (history.py), or None.

    Example:
        >>> Keep(updates_every=2)
        Keep(vectors=True, updates_every=2)
    """

    vectors: bool = True
    updates_every: int | None = None

    def __post_init__(self) -> None:
        if self.updates_every is not None and self.updates_every < 1:
            raise RequestError(f"Updates can be kept of every round or every few, not of every {self.updates_every}.")


KEEP_VECTORS = Keep()
"""What is kept where nothing else is said."""


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server has after training: the model, and what it keeps to be able to forget.

    Attributes:
        model: parameters and buffers.
        schedule: learning rate, steps and rounds of the training.
        memory: one vector per client, where it was kept.
        history: stored updates of the clients, where they were kept.
        shards: the shards' slices and checkpoints, where training was sharded; the model is then their ensemble.
        keeping_seconds: what recording cost while training: "vectors" and "updates", as far as they were kept.
    """

    model: Snapshot
    schedule: Schedule | None = None
    memory: Memory | None = None
    history: History | None = None
    shards: Shards | None = None
    keeping_seconds: Mapping[str, float] = field(default_factory=dict)

    def moved(self, model: Snapshot, memory: Memory | None) -> ServerState:
        """The state after a step of unlearning that no stored update knows of.

        History and shards lead to the model that was, leavers included, so they are dropped: FedEraser and SISA can
        follow only on themselves or on a training.
        """
        return replace(self, model=model, memory=memory, history=None, shards=None)


def train(
    engine: Engine,
    start: Snapshot,
    plan: TrainingPlan,
    *,
    clients: Mapping[str, Indices] | None = None,
    keep: Keep = KEEP_VECTORS,
    progress: Progress | None = None,
) -> ServerState:
    """Train by FedAvg.

    Args:
        engine: reaches the clients.
        start: the initial model.
        plan: rounds, epochs and so on.
        clients: who takes part, each with the samples it leaves out; None is everyone with everything.
        keep: what is recorded to be able to forget later.
        progress: called after each round with ("training", done, total).
    """
    members = dict(clients) if clients is not None else dict.fromkeys(engine.clients(), ())
    if not members:
        raise RequestError("Nobody is left to train: a federation needs at least one client.")
    start.require_finite()
    memory = Memory() if keep.vectors else None
    history = History(start) if keep.updates_every is not None else None
    kept = {"vectors": memory, "updates": history}
    seconds = {what: 0.0 for what, place in kept.items() if place is not None}
    model = start
    for number in range(plan.rounds):
        chosen = _sample_clients(tuple(members), plan, number)
        tasks = {name: plan.task(model, number, name, members[name]) for name in chosen}
        replies = ask_each(engine, tasks, Trained)
        model = aggregate(model, replies)
        updates = {name: reply.update for name, reply in replies.items()}
        counts = {name: reply.count for name, reply in replies.items()}
        if memory is not None:
            with timed(seconds, "vectors", model.parameters):
                memory.record(updates, counts)
        if history is not None and keep.updates_every is not None and number % keep.updates_every == 0:
            with timed(seconds, "updates", model.parameters):
                history.record(number, updates, counts)
        if progress is not None:
            progress("training", number + 1, plan.rounds)
    left = {name: engine.clients()[name] - len(left_out) for name, left_out in members.items()}
    return ServerState(model, plan.schedule(left), memory, history, keeping_seconds=seconds)


def aggregate(model: Snapshot, replies: Mapping[str, Trained]) -> Snapshot:
    """Add the mean update, weighted by sample counts; float buffers are averaged, counters take the largest."""
    total = sum(reply.count for reply in replies.values())
    mean = weighted_sum((r.update for r in replies.values()), (r.count / total for r in replies.values()))
    if not bool(torch.isfinite(mean).all()):
        bad = next((name for name, reply in replies.items() if not bool(torch.isfinite(reply.update).all())), "?")
        raise NumericalError(f"Training diverged at client {bad!r}: lower the learning rate or the boost.")
    buffers = average_buffers({name: (reply.buffers, reply.count) for name, reply in replies.items()})
    return replace(model, parameters=model.parameters + mean, buffers=buffers)


def average_buffers(buffers: Mapping[str, tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    """Means of float buffers by sample count; the largest value of integer ones (batch norm's counter)."""
    total = sum(count for _, count in buffers.values())
    names = next(iter(buffers.values()))[0].keys()
    averaged: dict[str, Tensor] = {}
    for name in names:
        stacked = torch.stack([own[name] for own, _ in buffers.values()])
        if stacked.is_floating_point():
            shares = torch.tensor([count / total for _, count in buffers.values()]).to(stacked)
            averaged[name] = torch.tensordot(shares, stacked, dims=1)
        else:
            averaged[name] = stacked.amax(dim=0)
    return averaged


def derived_seed(*parts: object) -> int:
    """A seed of its own for every purpose, from the run's seed and names: nothing random without a seed.

    Example:
        >>> derived_seed(0, 1, "ada") == derived_seed(0, 1, "ada") != derived_seed(0, 2, "ada")
        True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def _sample_clients(names: tuple[str, ...], plan: TrainingPlan, number: int) -> tuple[str, ...]:
    if plan.participation == 1:
        return names
    size = max(1, math.ceil(plan.participation * len(names) - 1e-9))  # 0.07 * 100 is 7.000000000000001
    generator = np.random.default_rng(derived_seed(plan.seed, number, "sampling"))
    chosen = set(generator.choice(len(names), size=size, replace=False).tolist())
    return tuple(name for index, name in enumerate(names) if index in chosen)
