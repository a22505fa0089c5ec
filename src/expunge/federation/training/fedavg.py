"""FedAvg (McMahan et al. 2017) on any Engine: weights by sample count, client sampling, buffers averaged.

With a momentum on the server it is FedAvgM (Hsu et al. 2019); clients train by the recipe's optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.engine import Engine, ask_each, timed
from expunge.federation.keeping.checkpoints import Checkpoints, wanted_rounds
from expunge.federation.keeping.history import History
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Indices, Trained
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import AdaptiveServer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Keep:
    """What training keeps so that the model can forget later; methods say what they need.

    Attributes:
        vectors: one vector per client (memory.py).
        updates_every: the clients' updates of the first round and of every so many after it (history.py), or None.
        checkpoints: so many global models of the way (checkpoints.py): what samples did can be replayed from them.

    Example:
        >>> Keep(updates_every=2)
        Keep(vectors=True, updates_every=2, checkpoints=3)
    """

    vectors: bool = True
    updates_every: int | None = None
    checkpoints: int = 3

    def __post_init__(self) -> None:
        if self.checkpoints < 0:
            raise RequestError(f"At least 0 checkpoints can be kept, not {self.checkpoints}.")
        if self.updates_every is not None and self.updates_every < 1:
            raise RequestError(f"Updates can be kept of every round or every few, not of every {self.updates_every}.")


KEEP_VECTORS = Keep()
"""What is kept where nothing else is said."""


def train(
    engine: Engine,
    start: Snapshot,
    plan: TrainingPlan,
    *,
    clients: Mapping[str, Indices] | None = None,
    absent: Sequence[str] = (),
    keep: Keep = KEEP_VECTORS,
    progress: Progress | None = None,
) -> ServerState:
    """Train by FedAvg.

    Args:
        engine: reaches the clients.
        start: the initial model.
        plan: rounds, epochs and so on.
        clients: who takes part, each with the samples it leaves out; None is everyone with everything.
        absent: who is drawn for rounds as well and then is not there: the others are drawn as they were with them.
        keep: what is recorded to be able to forget later.
        progress: called after each round with ("training", done, total).
    """
    members = dict(clients) if clients is not None else dict.fromkeys(engine.clients(), ())
    if not members:
        raise RequestError("Nobody is left to train: a federation needs at least one client.")
    pool = tuple(dict.fromkeys(name for name in (*engine.clients(), *absent) if name in members or name in absent))
    start.require_finite()
    server = plan.recipe.server
    if isinstance(server, AdaptiveServer):
        raise RequestError(f"Servers here train by FedAvg or FedAvgM, not by {server.name}.")
    memory = Memory(start, plan.recipe) if keep.vectors else None
    history = History(start) if keep.updates_every is not None else None
    kept = {"vectors": memory, "updates": history}
    seconds = {what: 0.0 for what, place in kept.items() if place is not None}
    way, wanted = dict[int, Snapshot](), wanted_rounds(keep.checkpoints, plan.rounds) if keep.checkpoints else ()
    model, momentum = start, torch.zeros_like(start.parameters)
    for number in range(plan.rounds):
        if number in wanted:
            way[number] = model
        chosen = [name for name in _sample_clients(pool, plan, number) if name in members]
        if not chosen:  # only the absent were drawn
            continue
        tasks = {name: plan.task(model, number, name, members[name]) for name in chosen}
        replies = ask_each(engine, tasks, Trained)
        parameters, momentum = server.apply(model.parameters, momentum, mean_update(replies))
        model = replace(model, parameters=parameters, buffers=mean_buffers(replies))
        updates = {name: reply.update for name, reply in replies.items()}
        counts = {name: reply.count for name, reply in replies.items()}
        steps = {name: reply.steps for name, reply in replies.items()}
        if memory is not None:
            with timed(seconds, "vectors", model.parameters):
                moments = {name: reply.moments for name, reply in replies.items() if reply.moments}
                memory.record(updates, counts, learning_rate=plan.rate(number), steps=steps, moments=moments)
        if history is not None and keep.updates_every is not None and number % keep.updates_every == 0:
            with timed(seconds, "updates", model.parameters):
                history.record(number, updates, counts)
        if progress is not None:
            progress("training", number + 1, plan.rounds)
    left = {name: engine.clients()[name] - len(left_out) for name, left_out in members.items()}
    schedule, checkpoints = plan.schedule(left), Checkpoints(way) if way else None
    return ServerState(
        model, schedule, memory, history, checkpoints=checkpoints, recipe=plan.recipe, keeping_seconds=seconds
    )


def aggregate(model: Snapshot, replies: Mapping[str, Trained]) -> Snapshot:
    """Add the mean update, weighted by sample counts; float buffers are averaged, counters take the largest."""
    return replace(model, parameters=model.parameters + mean_update(replies), buffers=mean_buffers(replies))


def mean_update(replies: Mapping[str, Trained]) -> Tensor:
    """The mean of the clients' updates, weighted by sample counts; refused where it is not finite."""
    total = sum(reply.count for reply in replies.values())
    mean = weighted_sum((r.update for r in replies.values()), (r.count / total for r in replies.values()))
    if not bool(torch.isfinite(mean).all()):
        bad = next((name for name, reply in replies.items() if not bool(torch.isfinite(reply.update).all())), "?")
        raise NumericalError(f"Training diverged at client {bad!r}: lower the learning rate or the boost.")
    return mean


def mean_buffers(replies: Mapping[str, Trained]) -> dict[str, Tensor]:
    """The clients' buffers, averaged."""
    return average_buffers({name: (reply.buffers, reply.count) for name, reply in replies.items()})


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


def _sample_clients(names: tuple[str, ...], plan: TrainingPlan, number: int) -> tuple[str, ...]:
    if plan.participation == 1:
        return names
    size = max(1, math.ceil(plan.participation * len(names) - 1e-9))  # 0.07 * 100 is 7.000000000000001
    generator = np.random.default_rng(derived_seed(plan.seed, number, "sampling"))
    chosen = set(generator.choice(len(names), size=size, replace=False).tolist())
    return tuple(name for index, name in enumerate(names) if index in chosen)
