"""Local training after a step: its options, FedAvg rounds of the clients that stay, and what may not come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Trained
from expunge.federation.training.fedavg import aggregate
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, Recipe
from expunge.federation.training.works import ROUNDING
from expunge.unlearning.checks import require_number, require_rising, require_whole
from expunge.unlearning.retained import Retained

Change = Callable[[Tensor, Snapshot], Tensor]
"""What becomes of a client's update before it is averaged, given the model that it was asked to train."""

RECOVERY_LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How far a round may be taken where nothing else is said; the length with the least retained loss is."""


@dataclass(frozen=True)
class LocalTraining:
    """How clients train: options that those of several methods extend.

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
        require_whole(self, "epochs")
        require_whole(self, "seed", least=0)
        if self.batch_size is not None:
            require_whole(self, "batch_size")
        require_number(self, "learning_rate", may_be_none=True)
        if self.learning_rate == 0:
            raise RequestError("The option learning_rate must be above 0, or None for the training's.")

    def plan(self, state: ServerState, rounds: int = 1) -> TrainingPlan:
        """So many rounds, with the training's learning rate and batch size where none is given."""
        learning_rate = self.learning_rate or (state.schedule.learning_rate if state.schedule else None)
        batch_size = self.batch_size or (state.schedule.batch_size if state.schedule else None)
        if learning_rate is None or batch_size is None:
            raise RequestError("Local training needs a learning rate and a batch size: give those of the training.")
        rule = state.trained_by.client
        recipe = Recipe(rule) if isinstance(rule, SGD | Adam) and self.learning_rate is None else Recipe()
        return TrainingPlan(rounds, self.epochs, batch_size, learning_rate, seed=self.seed, recipe=recipe)


@dataclass(frozen=True)
class Recovery(LocalTraining):
    """The options of a recovery round.

    Attributes:
        epochs: local epochs, at most one by default.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling.
        lengths: how far the round may be taken, from 0 on; the length with the least retained loss is.
    """

    lengths: tuple[float, ...] = RECOVERY_LENGTHS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rising(self, "lengths")


def strip_return(update: Tensor, towards: Tensor) -> Tensor:
    """``d <- d - max(0, d.g) / ||g||^2 g``: the update without its component back towards the model that remembers.

    Example:
        >>> strip_return(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
        tensor([0., 1.])
        >>> strip_return(torch.tensor([-1.0, 1.0]), torch.tensor([2.0, 0.0]))
        tensor([-1.,  1.])
    """
    length = torch.dot(towards, towards)
    back = torch.dot(update, towards).clamp(min=0.0)
    return update - torch.where(length > 0, back / length, 0.0) * towards  # not by an if, for which a GPU is waited for


def without_return(replies: Mapping[str, Trained], remembers: Snapshot, model: Snapshot) -> dict[str, Trained]:
    """The clients' updates from ``model``, each stripped of its way back to the model that remembers."""
    towards = remembers.parameters - model.parameters
    return {name: replace(reply, update=strip_return(reply.update, towards)) for name, reply in replies.items()}


def taken(model: Snapshot, memory: Memory | None, replies: Mapping[str, Trained], rate: float) -> Snapshot:
    """The model after the round; the memory, where there is one, gets the round added."""
    if memory is not None:
        memory.record(
            {name: reply.update for name, reply in replies.items()},
            {name: reply.count for name, reply in replies.items()},
            learning_rate=rate,
            steps={name: max(reply.steps, ROUNDING) for name, reply in replies.items()},
            moments={name: reply.moments for name, reply in replies.items() if reply.moments},
            plain=True,
        )
    return aggregate(model, replies)


def fedavg_rounds(
    stay: Retained, model: Snapshot, memory: Memory | None, plan: TrainingPlan, change: Change | None = None
) -> Snapshot:
    """All rounds of the plan, by FedAvg of the retained clients; the memory, where there is one, gets them added."""
    for number in range(plan.rounds):
        replies = stay.train(model, plan, number)
        if change is not None:
            replies = {n: replace(reply, update=change(reply.update, model)) for n, reply in replies.items()}
        model = taken(model, memory, replies, plan.rate(number))
    return model
