"""How a federation trains, and what unlearning has to know of it afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.client import local_steps
from expunge.federation.messages.tasks import Indices, Train
from expunge.federation.training.recipe import SGD, Adam, Recipe


@dataclass(frozen=True)
class TrainingPlan:
    """How a federation trains; the defaults are the paper's.

    Attributes:
        rounds: FedAvg rounds.
        epochs: local epochs per round.
        batch_size: local batch size.
        learning_rate: of the clients' optimiser, in the first round where it falls.
        participation: share of the clients drawn in each round; at least one always takes part.
        seed: of client sampling and of the clients' shuffling.
        recipe: the clients' optimiser and the server's rule.
        cosine: whether the learning rate falls over the rounds as half a cosine does, nearly to 0.
        min_epochs: where devices are slow, each client trains a number of epochs drawn from here to ``epochs``.

    Example:
        >>> plan = TrainingPlan(rounds=3, learning_rate=1.0, cosine=True)
        >>> [round(plan.rate(number), 2) for number in range(3)], TrainingPlan.from_dict(plan.as_dict()) == plan
        ([1.0, 0.75, 0.25], True)
    """

    rounds: int = 20
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 0.01
    participation: float = 1.0
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    cosine: bool = False
    min_epochs: int | None = None

    def __post_init__(self) -> None:
        if min(self.rounds, self.epochs, self.batch_size) < 1 or not self.learning_rate > 0:
            raise RequestError("Rounds, epochs and batch size must be at least 1, the learning rate above 0.")
        if not 0 < self.participation <= 1:
            raise RequestError(f"The participation must lie above 0 and be at most 1, not {self.participation}.")
        if self.min_epochs is not None and not 1 <= self.min_epochs <= self.epochs:
            raise RequestError(f"The fewest epochs lie from 1 to {self.epochs}, not at {self.min_epochs}.")

    def rate(self, number: int) -> float:
        """The learning rate of round ``number``, from 0."""
        fallen = (1 + math.cos(math.pi * number / self.rounds)) / 2 if self.cosine else 1.0
        return self.learning_rate * fallen

    def task(self, model: Snapshot, number: int, name: str, exclude: Indices = ()) -> Train:
        """What one client is asked to do in round ``number``."""
        seed = derived_seed(self.seed, number, name)
        epochs, rule = self.epochs, self.recipe.client
        if self.min_epochs is not None:
            epochs = self.min_epochs + derived_seed(seed, "epochs") % (self.epochs - self.min_epochs + 1)
        if not isinstance(rule, SGD | Adam):
            raise RequestError(f"Clients here train by SGD, Adam or AdamW, not by {rule.name}.")
        return Train(model, epochs, self.batch_size, self.rate(number), seed, exclude, optimiser=rule)

    def schedule(self, counts: Mapping[str, int]) -> Schedule:
        """The plan as seen by the filter: learning rate and mean local steps of these clients."""
        steps = sum(n * local_steps(n, self.epochs, self.batch_size) for n in counts.values()) / sum(counts.values())
        return Schedule(self.learning_rate, steps, self.rounds, self.batch_size, self.epochs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is as it always was is left out, so that older plans keep their digests."""
        values = {**asdict(self), "recipe": self.recipe.as_dict()}
        usual = {"recipe": Recipe().as_dict(), "cosine": False, "min_epochs": None}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingPlan:
        """Back from JSON."""
        recipe = Recipe.from_dict(values["recipe"]) if "recipe" in values else Recipe()
        return cls(**{**values, "recipe": recipe})


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
