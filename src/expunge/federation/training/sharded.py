"""Training in shards and slices, as SISA does (keeping/shards.py says what is kept of it).

How many rounds a stage takes: with R equal slices, stage r works on r/R of the data, so t rounds a stage cost
``t (1 + 2 + ... + R)/R = t (R + 1)/2`` rounds on all the data. That is as much as the T rounds of plain training for
``t = 2 T/(R + 1)``, rounded, and at least 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine
from expunge.federation.keeping.shards import Shard, Shards, Slices
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Indices
from expunge.federation.training.fedavg import Keep, Progress, train
from expunge.federation.training.plan import TrainingPlan


def train_sharded(
    engine: Engine,
    start: Snapshot | Sequence[Snapshot],
    plan: TrainingPlan,
    *,
    shards: int,
    slices: int,
    clients: Mapping[str, Indices] | None = None,
    progress: Progress | None = None,
) -> ServerState:
    """Train by SISA; ``state.model`` is the ensemble.

    Args:
        engine: reaches the clients.
        start: the initial model, or one for each shard.
        plan: as for plain training: each shard costs as much as its clients would in it.
        shards: how many federations; no more than clients.
        slices: stages of each; a shard with fewer clients has one for each client.
        clients: who takes part, each with the samples it leaves out; None is everyone with everything.
        progress: called after each round with ("training", done, total).
    """
    members = dict(clients) if clients is not None else dict.fromkeys(engine.clients(), ())
    starts = [start] * shards if isinstance(start, Snapshot) else list(start)
    if not 1 <= shards <= len(members) or slices < 1:
        raise RequestError(f"There can be 1 to {len(members)} shards, with at least 1 slice each.")
    if len(starts) != shards:
        raise RequestError(f"Give one initial model, or one for each of the {shards} shards, not {len(starts)}.")
    counts = {name: engine.clients()[name] - len(left_out) for name, left_out in members.items()}
    fresh = []
    for number, names in enumerate(divide(counts, shards, derived_seed(plan.seed, "shards"))):
        own = {name: counts[name] for name in names}
        parts = divide(own, min(slices, len(own)), derived_seed(plan.seed, "slices", number))
        left_out = {name: members[name] for name in names if members[name]}
        fresh.append(Shard(parts, (starts[number],), _stage_plans(plan, number, len(parts)), left_out))
    total = sum(stage.rounds for shard in fresh for stage in shard.plans)
    count = in_all(progress, total)
    kept = Shards(tuple(trained_from(shard, engine, 0, count) for shard in fresh))
    return ServerState(kept.model, plan.schedule(counts), shards=kept)


def trained_from(shard: Shard, engine: Engine, stage: int, progress: Progress | None = None) -> Shard:
    """The same shard with this stage and all that follow trained anew, from the checkpoint before it.

    Args:
        shard: one of the federations.
        engine: reaches the clients; only those of the slices up to each stage are asked.
        stage: the first one to train, from 0.
        progress: called after each round.
    """
    checkpoints = list(shard.checkpoints[: stage + 1])
    for number in range(stage, len(shard.slices)):
        members = {name: shard.left_out.get(name, ()) for part in shard.slices[: number + 1] for name in part}
        model = checkpoints[-1]
        if members:
            keep = Keep(vectors=False, checkpoints=0)
            model = train(engine, model, shard.plans[number], clients=members, keep=keep, progress=progress).model
        checkpoints.append(model)
    return replace(shard, checkpoints=tuple(checkpoints))


def divide(counts: Mapping[str, int], parts: int, seed: int) -> Slices:
    """The clients in so many groups of about equally many samples: the largest first, each to the lightest group.

    Example:
        >>> sorted(sorted(part) for part in divide({"a": 5, "b": 3, "c": 2}, parts=2, seed=0))
        [['a'], ['b', 'c']]
    """
    generator = np.random.default_rng(seed)
    shuffled = [tuple(counts)[index] for index in generator.permutation(len(counts))]
    groups: list[list[str]] = [[] for _ in range(parts)]
    weights = [0] * parts
    for name in sorted(shuffled, key=lambda name: -counts[name]):
        lightest = weights.index(min(weights))
        groups[lightest].append(name)
        weights[lightest] += counts[name]
    return tuple(tuple(groups[index]) for index in generator.permutation(parts))


def in_all(progress: Progress | None, total: int) -> Progress | None:
    """Progress over several trainings: each round counts on, up to ``total``."""
    if progress is None:
        return None
    tell, done = progress, iter(range(1, total + 1))
    return lambda what, _done, _total: tell(what, next(done), total)


def _stage_plans(plan: TrainingPlan, shard: int, stages: int) -> tuple[TrainingPlan, ...]:
    rounds = max(1, round(2 * plan.rounds / (stages + 1)))
    seeds = (derived_seed(plan.seed, "shard", shard, "stage", stage) for stage in range(stages))
    return tuple(replace(plan, rounds=rounds, seed=seed) for seed in seeds)
