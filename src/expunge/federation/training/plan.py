"""How a federation trains, and what unlearning has to know of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.client import local_steps
from expunge.federation.messages.tasks import Indices, Train


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
