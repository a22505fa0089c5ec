"""What the server has after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from expunge.core.vectors import Snapshot
from expunge.federation.keeping.history import History
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.shards import Shards
from expunge.federation.training.plan import Schedule


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
        lost: a sentence for each thing that was kept and could not be found again; every outcome warns of it.
    """

    model: Snapshot
    schedule: Schedule | None = None
    memory: Memory | None = None
    history: History | None = None
    shards: Shards | None = None
    keeping_seconds: Mapping[str, float] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def moved(self, model: Snapshot, memory: Memory | None) -> ServerState:
        """The state after a step of unlearning that no stored update knows of.

        History and shards lead to the model that was, leavers included, so they are dropped: FedEraser and SISA can
        follow only on themselves or on a training.
        """
        return replace(self, model=model, memory=memory, history=None, shards=None)
