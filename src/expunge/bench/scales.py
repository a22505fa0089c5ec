"""The federations of the experiments at three scales: to see that it runs, for two cores, and the paper's own.

Settings of the methods were chosen on client 0 with seeds below 10; everything here is about other clients and seeds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from expunge.bench.scenario import Scenario
from expunge.data import Backdoor, is_there
from expunge.errors import RequestError
from expunge.federation.training.plan import TrainingPlan

Name = Literal["smoke", "small", "paper"]
SCALES: tuple[Name, ...] = get_args(Name)

LEAVER = "client-3"
LEAVERS = ("client-1", "client-3", "client-5", "client-7", "client-9")
"""Who leaves at the paper's scale: another client for every seed, in turn."""

_SMOKE = Scenario(
    dataset="digits",
    model="digits-net",
    clients=4,
    plan=TrainingPlan(rounds=3, epochs=1, batch_size=32, learning_rate=0.05),
    train_samples=200,
    test_samples=100,
)
_DIGITS = Scenario(
    dataset="digits",
    model="digits-net",
    clients=10,
    plan=TrainingPlan(rounds=20, epochs=5, batch_size=32, learning_rate=0.05),
)
_SMALL = Scenario(
    dataset="fashion-mnist",
    model="cnn-narrow",
    clients=10,
    alpha=0.5,
    plan=TrainingPlan(rounds=20, epochs=4, batch_size=32, learning_rate=0.1),
    train_samples=4000,
    test_samples=1000,
    shrink=2,
)
_PAPER = Scenario(dataset="cifar10", model="cnn", clients=10, alpha=0.5, plan=TrainingPlan())


@dataclass(frozen=True)
class Scale:
    """How large the experiments are.

    Attributes:
        name: smoke, small or paper.
        base: the federation that most experiments are about, nobody malicious.
        seeds: the default ones.
        retrains: retrained models of fresh initialisations for each seed, in the tables that carry the most weight.
        other_retrains: the same in all other experiments, where none of those tables' models can be used.
        same_init: retrained models from the training's own start and batches: 1 or none, since they are all the same.
        leavers: who leaves, one for every seed, in turn.

    Example:
        >>> scale_of("smoke").base.dataset
        'digits'
    """

    name: Name
    base: Scenario
    seeds: tuple[int, ...]
    retrains: int
    other_retrains: int
    same_init: int
    leavers: tuple[str, ...] = (LEAVER,)

    @property
    def leaver(self) -> str:
        """The client that leaves where nobody else is named."""
        return self.leavers[0]

    def for_seed(self, seed: int) -> Scale:
        """The same with that seed's leaver."""
        return dataclasses.replace(self, leavers=(self.leavers[seed % len(self.leavers)],))

    @property
    def is_smoke(self) -> bool:
        """Whether only the running counts."""
        return self.name == "smoke"

    def attacked(self, *attackers: str, strong: bool = False) -> Scenario:
        """The base with backdoors, one trigger for all; strong ones are larger and boosted."""
        backdoor = self.backdoor(strong=strong)
        return dataclasses.replace(self.base, backdoors=dict.fromkeys(attackers, backdoor))

    def backdoor(self, *, strong: bool = False) -> Backdoor:
        """The printed protocol: a 4x4 square on half of the samples; strong: 6x6 and updates boosted fourfold.

        A strong attacker with few samples boosts more, until its updates are half of the mean: only then nine in ten
        triggered images are answered as it wants, whoever attacks. Images of 16 pixels or fewer get 3x3 either way,
        MNIST 4x4, a twofold boost and a quarter of the mean.
        """
        small_images = self.base.dataset == "digits" or self.base.shrink > 1
        size = 3 if small_images else (6 if strong and self.base.dataset != "mnist" else 4)
        boost, share = (2.0, 0.25) if self.base.dataset == "mnist" else (4.0, 0.5)
        return Backdoor(7, size, fraction=0.5, boost=boost, share=share) if strong else Backdoor(7, size, fraction=0.5)

    def on(self, dataset: str, model: str | None = None) -> Scale:
        """The same on other data, and with another model."""
        return dataclasses.replace(
            self, base=dataclasses.replace(self.base, dataset=dataset, model=model or self.base.model)
        )

    def with_clients(self, clients: int) -> Scale:
        """The same with more clients or fewer."""
        return dataclasses.replace(self, base=dataclasses.replace(self.base, clients=clients))


def scale_of(name: str, data_dir: Path | None = None) -> Scale:
    """The scale of that name; `small` is on Fashion-MNIST where it lies in the data folder, else on digits."""
    if name == "smoke":
        return Scale("smoke", _SMOKE, (10,), retrains=3, other_retrains=3, same_init=1)
    if name == "small":
        base = _SMALL if is_there("fashion-mnist", data_dir) else _DIGITS
        return Scale("small", base, (10, 11, 12), retrains=5, other_retrains=5, same_init=1)
    if name == "paper":
        return Scale("paper", _PAPER, (10, 11, 12), retrains=5, other_retrains=3, same_init=0, leavers=LEAVERS)
    raise RequestError(f"There is no scale {name!r}; there are {', '.join(SCALES)}.")
