"""SISA over clients (Bourtoule et al. 2021): sharded, isolated, sliced, aggregated training.

The clients are divided into shards, each a federation of its own that never hears of the others; their models answer
as an ensemble. Inside a shard the clients are divided into slices: stage r trains on the clients of slices 1 to r, from
the model that stage r - 1 left, and every stage leaves a checkpoint. A client has touched one shard only, and there
only what came after the checkpoint before its slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.federation.keeping.tensor_file import read_tensors, reading, write_tensors
from expunge.federation.messages.snapshots import pack_snapshot, unpack_snapshot
from expunge.federation.messages.tasks import Indices
from expunge.federation.training.plan import TrainingPlan
from expunge.models.ensemble import joined

KIND, VERSION = "shards", 2

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
            own, described[digest] = pack_snapshot(snapshot)
            tensors |= own
        shards = [
            {
                "slices": shard.slices,
                "checkpoints": [snapshot.digest for snapshot in shard.checkpoints],
                "plans": [plan.as_dict() for plan in shard.plans],
                "left_out": dict(shard.left_out),
            }
            for shard in self.shards
        ]
        write_tensors(path, KIND, VERSION, tensors, {"snapshots": described, "shards": shards})

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Shards:
        """Read it back, onto a device; a file of an older version is refused."""
        found = read_tensors(path, KIND, VERSION)
        with reading(path, KIND):
            if found.content is None:
                raise ValueError("it is not ours or of an older version, so train again with this one")
            snapshots = {
                digest: unpack_snapshot(described, found.tensors).on(torch.device(device))
                for digest, described in found.content["snapshots"].items()
            }
            return cls(tuple(_shard(shard, snapshots) for shard in found.content["shards"]))


def _shard(described: Mapping[str, Any], snapshots: Mapping[str, Snapshot]) -> Shard:
    return Shard(
        tuple(tuple(part) for part in described["slices"]),
        tuple(snapshots[digest] for digest in described["checkpoints"]),
        tuple(TrainingPlan.from_dict(plan) for plan in described["plans"]),
        {name: tuple(indices) for name, indices in described["left_out"].items()},
    )
