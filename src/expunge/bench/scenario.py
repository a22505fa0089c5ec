"""A federation to experiment on: a dataset split over clients, some of whom may be malicious."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Layout, Snapshot
from expunge.data import NATURAL, Backdoor, ImageDataset, Mislabelling, dirichlet, load, mislabel, poison
from expunge.errors import DataError, ModelError, RequestError
from expunge.federation.engines.engine import Engine
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.plan import TrainingPlan
from expunge.models import build
from expunge.models.ensemble import Ensemble

EARLY, CANCELLING, CREDIT = SCHEMES = ("pulls early", "pulls that cancel", "takes the credit")
"""What an attacker who knows the method may do while it trains (scheming.py)."""


class SwitchableEngine(Engine, Protocol):
    """An engine whose clients can be switched off."""

    def without(self, names: tuple[str, ...]) -> SwitchableEngine:
        """An engine on the same clients but these, with its own cost account."""


@dataclass(frozen=True)
class Scenario:
    """Everything that determines a federation and its training, down to the seeds.

    Attributes:
        dataset: its name.
        model: the architecture's name.
        clients: how many; they are called client-0, client-1, ..., or as in life where the data has its own.
        alpha: of the Dirichlet split over labels; small is very unequal. Data with its own clients is not split.
        backdoors: the attacks, by the client that hides them in its data.
        plan: rounds, epochs, batch size, learning rate, participation.
        seed: of the split, the poisoning, the initial weights and the training.
        train_samples: how many training images are used, drawn by the seed; None is all.
        test_samples: how many test images.
        shrink: images are averaged over squares of this side, to work on fewer pixels.
        mislabelled: whose labels are partly wrong, so that a model can only know them by heart.
        l2: factor of half the squared weights in everybody's loss.
        schemes: who sends what misleads unlearning, and by which of `SCHEMES`.

    Example:
        >>> scenario = Scenario(backdoors={"client-1": Backdoor(size=3)})
        >>> Scenario.from_dict(scenario.as_dict()) == scenario
        True
    """

    dataset: str = "digits"
    model: str = "digits-net"
    clients: int = 5
    alpha: float = 1.0
    backdoors: Mapping[str, Backdoor] = field(default_factory=dict)
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    seed: int = 0
    train_samples: int | None = None
    test_samples: int | None = None
    shrink: int = 1
    mislabelled: Mapping[str, Mislabelling] = field(default_factory=dict)
    l2: float = 0.0
    schemes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise RequestError(f"A seed is a whole number of at least 0, not {self.seed}.")
        if not isinstance(self.clients, int) or self.clients < 2:
            raise RequestError(f"A federation to forget from needs at least 2 clients, not {self.clients}.")
        if self.shrink < 1:
            raise RequestError(f"Images are averaged over squares of 1 pixel or more, not {self.shrink}.")
        if self.dataset in NATURAL:
            self._require_natural()
        for name in self.backdoors:
            if name not in self.names:
                raise RequestError(f"There is no client {name!r} to attack; there are {', '.join(self.names)}.")
        for name in self.mislabelled:
            if name not in self.names or name in self.backdoors:
                raise RequestError(f"Wrong labels are for a client of the federation without a backdoor, not {name!r}.")
        for name, scheme in self.schemes.items():
            if name not in self.names or scheme not in SCHEMES:
                raise RequestError(f"A client of the federation may scheme by {', '.join(SCHEMES)}: not {name!r} so.")

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return list(NATURAL.get(self.dataset, [f"client-{number}" for number in range(self.clients)]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; wrong labels, an L2 term and schemes where there are some, so that older scenarios keep digests."""
        values = {**dataclasses.asdict(self), "plan": self.plan.as_dict()}
        return {name: own for name, own in values.items() if own or name not in ("mislabelled", "l2", "schemes")}

    def _require_natural(self) -> None:
        """Data with its own clients is taken as it is."""
        own = NATURAL[self.dataset]
        if self.clients != len(own):
            raise RequestError(
                f"{self.dataset} has its own {len(own)} clients: ask for {len(own)}, not {self.clients}."
            )
        if self.backdoors or self.shrink > 1 or self.train_samples is not None:
            raise RequestError(f"{self.dataset} is a table, taken whole: no backdoors, shrink or train_samples there.")

    def without_deeds(self, clients: tuple[str, ...]) -> Scenario:
        """The same where these clients did nothing to their data.

        Example:
            >>> Scenario(backdoors={"client-1": Backdoor(size=3)}).without_deeds(("client-1",)) == Scenario()
            True
        """
        backdoors = {name: own for name, own in self.backdoors.items() if name not in clients}
        mislabelled = {name: own for name, own in self.mislabelled.items() if name not in clients}
        schemes = {name: own for name, own in self.schemes.items() if name not in clients}
        return dataclasses.replace(self, backdoors=backdoors, mislabelled=mislabelled, schemes=schemes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scenario:
        """Back from JSON."""
        try:
            backdoors = {name: Backdoor(**attack) for name, attack in values["backdoors"].items()}
            mislabelled = {name: Mislabelling(**own) for name, own in values.get("mislabelled", {}).items()}
            plan = TrainingPlan.from_dict(values["plan"])
            return cls(**{**values, "backdoors": backdoors, "plan": plan, "mislabelled": mislabelled})
        except (KeyError, TypeError, AttributeError) as problem:
            raise DataError(f"The scenario cannot be read: {problem}.") from problem

    def with_seed(self, seed: int) -> Scenario:
        """The same with another seed, for the training as well."""
        return dataclasses.replace(self, seed=seed, plan=dataclasses.replace(self.plan, seed=seed))

    def build(self, data_dir: Path | None = None, *, download: bool = False, device: str = "cpu") -> Federation:
        """Load the data, split it, poison the attackers, spoil labels."""
        dataset = self._subset(load(self.dataset, data_dir, download))
        for backdoor in self.backdoors.values():
            if backdoor.target >= dataset.classes:
                raise RequestError(f"The backdoor's target must be below {dataset.classes}, not {backdoor.target}.")
        dataset = dataclasses.replace(
            dataset,
            **{
                name: getattr(dataset, name).to(device)
                for name in ("train_inputs", "train_labels", "test_inputs", "test_labels", "white")
            },
        )
        datasets: dict[str, tuple[Tensor, Tensor]] = {}
        triggered: dict[str, Tensor] = {}
        for name, part in self._parts(dataset).items():
            inputs, labels = dataset.train_inputs[part.to(device)], dataset.train_labels[part.to(device)]
            mask = torch.zeros(len(labels), dtype=torch.bool, device=device)
            if name in self.backdoors:
                inputs, labels, mask = poison(inputs, labels, self.backdoors[name], dataset.white, self.seed)
            if name in self.mislabelled:
                labels, _ = mislabel(labels, self.mislabelled[name].share, dataset.classes, self.seed)
            datasets[name], triggered[name] = (inputs, labels), mask
        return Federation(self, dataset, datasets, triggered, self.fresh_model(dataset, self.seed).to(device))

    def _parts(self, dataset: ImageDataset) -> Mapping[str, Tensor]:
        """Whose training samples are which."""
        if dataset.owners:
            return dataset.owners
        parts = dirichlet(dataset.train_labels.cpu(), self.clients, self.alpha, self.seed)
        return dict(zip(self.names, parts, strict=True))

    def _subset(self, dataset: ImageDataset) -> ImageDataset:
        chosen: dict[str, Any] = {}
        for part, size in (("train", self.train_samples), ("test", self.test_samples)):
            labels = getattr(dataset, f"{part}_labels")
            if size is None:
                continue
            if not 0 < size <= len(labels):
                raise RequestError(
                    f"{self.dataset} has {len(labels)} {part} images: ask for 1 to that many, not {size}."
                )
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))[:size]
            chosen |= {f"{part}_inputs": getattr(dataset, f"{part}_inputs")[order], f"{part}_labels": labels[order]}
        if self.shrink > 1:
            for name in ("train_inputs", "test_inputs"):
                chosen[name] = F.avg_pool2d(chosen.get(name, getattr(dataset, name)), self.shrink)
        return dataclasses.replace(dataset, **chosen)

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
        return LocalEngine(self.model, self.loss, self.datasets, self.boosts(), compiled=True)

    @property
    def loss(self) -> CrossEntropy:
        """What everybody minimises."""
        return CrossEntropy(l2=self.scenario.l2)

    def boosts(self) -> dict[str, float]:
        """What the attackers, and those with wrong labels, multiply their updates with."""
        total = sum(len(labels) for _, labels in self.datasets.values())
        return {name: own.boost for name, own in self.scenario.mislabelled.items()} | {
            name: backdoor.boost_for(len(self.datasets[name][1]) / total)
            for name, backdoor in self.scenario.backdoors.items()
        }

    def architecture(self, model: Snapshot) -> nn.Module:
        """The module that these parameters belong to: the federation's own, or an ensemble of several."""
        members, rest = divmod(model.parameters.numel(), Layout.of(self.model).size)
        if rest or not members:
            raise ModelError("The model is of another architecture than this federation's.")
        return self.model if members == 1 else Ensemble(self.model, members)

    def initial(self, seed: int | None = None) -> Snapshot:
        """The initial model; of another seed, a fresh initialisation."""
        if seed is None:
            return Snapshot.of(self.model)
        device = next(self.model.parameters()).device
        return Snapshot.of(self.scenario.fresh_model(self.dataset, seed).to(device))
