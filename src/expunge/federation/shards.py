"""SISA over clients (Bourtoule et al. 2021): sharded, isolated, sliced, aggregated training.

The clients are divided into shards, each a federation of its own that never hears of the others; their models answer
as an ensemble. Inside a shard the clients are divided into slices: stage r trains on the clients of slices 1 to r, from
the model that stage r - 1 left, and every stage leaves a checkpoint. A client has touched one shard only, and there
only what came after the checkpoint before its slice.

How many rounds a stage takes: with R equal slices, stage r works on r/R of the data, so t rounds a stage cost
``t (1 + 2 + ... + R)/R = t (R + 1)/2`` rounds on all the data. That is as much as the T rounds of plain training for
``t = 2 T/(R + 1)``, rounded, and at least 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.checkpoint import pack, unpack
from expunge.federation.engine import Engine
from expunge.federation.fedavg import Keep, Progress, ServerState, TrainingPlan, derived_seed, train
from expunge.federation.tasks import Indices
from expunge.models.ensemble import joined

Slices = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """One of the federations.

    Attributes:
        slices: names of its clients. A slice that all clients have left stays, as a stage without anybody new.
        checkpoints: the start, and the model after each stage; the last one is the shard's model.
        plans: how each stage is trained, its seed included.
        left_out: samples that its clients do not use, forgotten ones among them: they must not come back when the
            shard trains again. They are counted in the client's data as it was when training began.
    """

    slices: Slices
    checkpoints: tuple[Snapshot, ...]
    plans: tuple[TrainingPlan, ...]
    left_out: Mapping[str, Indices] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of its clients."""
        return tuple(name for part in self.slices for name in part)

    @property
    def model(self) -> Snapshot:
        """Its model as it is now."""
        return self.checkpoints[-1]

    def trained(self, engine: Engine, stage: int, progress: Progress | None = None) -> Shard:
        """The same shard with this stage and all that follow trained anew, from the checkpoint before it.

        Args:
            engine: reaches the clients; only those of the slices up to each stage are asked.
            stage: the first one to train, from 0.
            progress: called after each round.
        """
        checkpoints = list(self.checkpoints[: stage + 1])
        for number in range(stage, len(self.slices)):
            members = {name: self.left_out.get(name, ()) for part in self.slices[: number + 1] for name in part}
            model = checkpoints[-1]
            if members:
                keep = Keep(vectors=False)
                model = train(engine, model, self.plans[number], clients=members, keep=keep, progress=progress).model
            checkpoints.append(model)
        return replace(self, checkpoints=tuple(checkpoints))


@dataclass(frozen=True, eq=False)
class Shards:
    """What sharded training keeps: every shard's slices and checkpoints."""

    shards: tuple[Shard, ...]

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of all clients."""
        return tuple(name for shard in self.shards for name in shard.clients)

    @property
    def model(self) -> Snapshot:
        """The ensemble of the shards' models, as a snapshot of ``Ensemble(architecture, len(shards))``."""
        return joined([shard.model for shard in self.shards])

    @property
    def stored_bytes(self) -> int:
        """What keeping it costs: all checkpoints, a start that shards have in common once."""
        return sum(snapshot.stored_bytes for snapshot in self._distinct().values())

    def _distinct(self) -> dict[str, Snapshot]:
        return {snapshot.digest: snapshot for shard in self.shards for snapshot in shard.checkpoints}

    def save(self, path: Path) -> None:
        """Write it to one safetensors file."""
        tensors: dict[str, Tensor] = {}
        described = {}
        for digest, snapshot in self._distinct().items():
            own, described[digest] = pack(snapshot, f"{digest}/")
            tensors |= own
        shards = [
            {
                "slices": shard.slices,
                "checkpoints": [snapshot.digest for snapshot in shard.checkpoints],
                "plans": [asdict(plan) for plan in shard.plans],
                "left_out": dict(shard.left_out),
            }
            for shard in self.shards
        ]
        save_file(tensors, path, metadata={"shards": json.dumps({"snapshots": described, "shards": shards})})

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Shards:
        """Read it back, onto a device."""
        try:
            with safe_open(path, framework="pt") as file:
                described = json.loads((file.metadata() or {})["shards"])
                snapshots = {
                    digest: unpack(file.get_tensor, f"{digest}/", more).on(torch.device(device))
                    for digest, more in described["snapshots"].items()
                }
                shards = tuple(
                    Shard(
                        tuple(tuple(part) for part in shard["slices"]),
                        tuple(snapshots[digest] for digest in shard["checkpoints"]),
                        tuple(TrainingPlan(**plan) for plan in shard["plans"]),
                        {name: tuple(indices) for name, indices in shard["left_out"].items()},
                    )
                    for shard in described["shards"]
                )
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RequestError) as problem:
            raise DataError(f"The file of shards {path} cannot be read: {problem}.") from problem
        return cls(shards)


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
    kept = Shards(tuple(shard.trained(engine, 0, count) for shard in fresh))
    return ServerState(kept.model, plan.schedule(counts), shards=kept)


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
