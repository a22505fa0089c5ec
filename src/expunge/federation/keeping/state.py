"""What the server has after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from expunge.core.vectors import Snapshot
from expunge.federation.keeping.checkpoints import Checkpoints
from expunge.federation.keeping.history import History
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.shards import Shards
from expunge.federation.training.plan import Schedule
from expunge.federation.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server has after training: the model, and what it keeps to be able to forget.

    Attributes:
        model: parameters and buffers.
        schedule: learning rate, steps and rounds of the training.
        memory: one vector per client, where it was kept.
        history: stored updates of the clients, where they were kept.
        shards: the shards' slices and checkpoints, where training was sharded; the model is then their ensemble.
        checkpoints: a few models of the training's way, where they were kept.
        recipe: how clients and server trained, where there is no memory that knows it.
        keeping_seconds: what recording cost while training: "vectors" and "updates", as far as they were kept.
        lost: a sentence for each thing that was kept and could not be found again; every outcome warns of it.
    """

    model: Snapshot
    schedule: Schedule | None = None
    memory: Memory | None = None
    history: History | None = None
    shards: Shards | None = None
    checkpoints: Checkpoints | None = None
    recipe: Recipe | None = None
    keeping_seconds: Mapping[str, float] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def moved(self, model: Snapshot, memory: Memory | None) -> ServerState:
        """The state after a step of unlearning that no stored update knows of.

        History, shards and checkpoints lead to the model that was, leavers included, so they are dropped: FedEraser,
        SISA and a replay can follow only on themselves or on a training. A memory is bound to the new model.
        """
        if memory is not None and not memory.is_bound:
            momentum = self.memory.server_momentum if self.memory is not None else None
            memory = memory.bound_to(model, momentum)
        return replace(self, model=model, memory=memory, history=None, shards=None, checkpoints=None)

    @property
    def trained_by(self) -> Recipe:
        """How clients and server trained: as the memory says, or as it is stated; else plain SGD and averaging."""
        if self.memory is not None:
            return self.memory.recipe
        return self.recipe if self.recipe is not None else Recipe()
