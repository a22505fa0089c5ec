"""A federation to experiment on: a dataset split over clients, one of whom may be malicious."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data import Backdoor, ImageDataset, dirichlet, load, poison
from expunge.errors import DataError, RequestError
from expunge.federation.fedavg import TrainingPlan
from expunge.federation.local import LocalEngine
from expunge.models import build


@dataclass(frozen=True)
class Scenario:
    """Everything that determines a federation and its training, down to the seeds.

    Attributes:
        dataset: its name.
        model: the architecture's name.
        clients: how many; they are called client-0, client-1, ...
        alpha: of the Dirichlet split over labels; small is very unequal.
        attacker: the client with the backdoor.
        backdoor: the attack, or None.
        plan: rounds, epochs, batch size, learning rate, participation.
        seed: of the split, the poisoning, the initial weights and the training.

    Example:
        >>> scenario = Scenario(backdoor=Backdoor(size=3))
        >>> Scenario.from_dict(scenario.as_dict()) == scenario
        True
    """

    dataset: str = "digits"
    model: str = "digits-net"
    clients: int = 5
    alpha: float = 1.0
    attacker: str = "client-0"
    backdoor: Backdoor | None = None
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise RequestError(f"A seed is a whole number of at least 0, not {self.seed}.")
        if not isinstance(self.clients, int) or self.clients < 2:
            raise RequestError(f"A federation to forget from needs at least 2 clients, not {self.clients}.")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scenario:
        """Back from JSON."""
        try:
            backdoor = Backdoor(**values["backdoor"]) if values["backdoor"] else None
            return cls(**{**values, "backdoor": backdoor, "plan": TrainingPlan(**values["plan"])})
        except (KeyError, TypeError) as problem:
            raise DataError(f"The scenario cannot be read: {problem}.") from problem

    def with_seed(self, seed: int) -> Scenario:
        """The same with another seed, for the training as well."""
        return dataclasses.replace(self, seed=seed, plan=dataclasses.replace(self.plan, seed=seed))

    def build(self, data_dir: Path | None = None, *, download: bool = False, device: str = "cpu") -> Federation:
        """Load the data, split it, poison the attacker."""
        dataset = load(self.dataset, data_dir, download)
        if self.backdoor is not None and self.backdoor.target >= dataset.classes:
            raise RequestError(f"The backdoor's target must be below {dataset.classes}, not {self.backdoor.target}.")
        dataset = dataclasses.replace(
            dataset,
            **{
                name: getattr(dataset, name).to(device)
                for name in ("train_inputs", "train_labels", "test_inputs", "test_labels", "white")
            },
        )
        names = [f"client-{number}" for number in range(self.clients)]
        if self.backdoor is not None and self.attacker not in names:
            raise RequestError(f"There is no client {self.attacker!r} to attack; there are {', '.join(names)}.")
        datasets: dict[str, tuple[Tensor, Tensor]] = {}
        triggered: dict[str, Tensor] = {}
        parts = dirichlet(dataset.train_labels.cpu(), self.clients, self.alpha, self.seed)
        for name, part in zip(names, parts, strict=True):
            inputs, labels = dataset.train_inputs[part.to(device)], dataset.train_labels[part.to(device)]
            mask = torch.zeros(len(labels), dtype=torch.bool, device=device)
            if self.backdoor is not None and name == self.attacker:
                inputs, labels, mask = poison(inputs, labels, self.backdoor, dataset.white, self.seed)
            datasets[name], triggered[name] = (inputs, labels), mask
        return Federation(self, dataset, datasets, triggered, self.fresh_model(dataset, self.seed).to(device))

    def fresh_model(self, dataset: ImageDataset, seed: int) -> nn.Module:
        """The architecture with the initial weights of a seed."""
        _, channels, size, _ = dataset.train_inputs.shape
        return build(self.model, channels, size, dataset.classes, seed)


@dataclass(frozen=True, eq=False)
class Federation:
    """A scenario made real.

    Attributes:
        scenario: what it was made from.
        dataset: train and test data.
        datasets: the clients' own samples.
        triggered: for each client, which of its samples carry the trigger.
        model: the architecture with its initial weights.
    """

    scenario: Scenario
    dataset: ImageDataset
    datasets: dict[str, tuple[Tensor, Tensor]]
    triggered: dict[str, Tensor]
    model: nn.Module

    def engine(self) -> LocalEngine:
        """An engine on all clients, with its own cost account."""
        backdoor = self.scenario.backdoor
        boosts = {self.scenario.attacker: backdoor.boost} if backdoor is not None else {}
        return LocalEngine(self.model, CrossEntropy(), self.datasets, boosts)

    def initial(self, seed: int | None = None) -> Snapshot:
        """The initial model; of another seed, a fresh initialisation."""
        if seed is None:
            return Snapshot.of(self.model)
        device = next(self.model.parameters()).device
        return Snapshot.of(self.scenario.fresh_model(self.dataset, seed).to(device))
