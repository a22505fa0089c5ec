"""Recovery: one round of the retained clients that may not walk back to the model that remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engine import Engine, expect
from expunge.federation.fedavg import TrainingPlan
from expunge.federation.tasks import Indices, Trained


@dataclass(frozen=True)
class Recovery:
    """Options of the recovery round.

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


def recovery_round(
    engine: Engine, remembers: Snapshot, forgot: Snapshot, retained: Mapping[str, Indices], plan: TrainingPlan
) -> dict[str, Trained]:
    """One FedAvg round of the retained clients from ``forgot``, each update stripped of its way back."""
    tasks = {name: plan.task(forgot, 0, name, left_out) for name, left_out in retained.items()}
    replies = expect(engine.ask(tasks), Trained)
    towards = remembers.parameters - forgot.parameters
    return {name: replace(reply, update=strip_return(reply.update, towards)) for name, reply in replies.items()}
