"""What an experiment compares: settings, who is forgotten there, and by which methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from expunge.bench.scenario import Federation, Scenario
from expunge.core.seeds import derived_seed
from expunge.errors import RequestError
from expunge.unlearning.registry import Method, method
from expunge.unlearning.request import Request


@dataclass(frozen=True)
class Forget:
    """Whom or what to forget, said before the data is at hand.

    Attributes:
        clients: whole clients.
        shares: parts of clients: a share of each one's samples, drawn by the scenario's seed.
        triggered: clients of which only the samples with the trigger are to go.

    Example:
        >>> Forget(clients=("client-1", "client-2")).owners
        ('client-1', 'client-2')
    """

    clients: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    triggered: tuple[str, ...] = ()

    @property
    def owners(self) -> tuple[str, ...]:
        """Everybody who holds data to forget."""
        return (*self.clients, *self.shares, *self.triggered)

    def request(self, federation: Federation) -> Request:
        """The request that it comes to in a federation."""
        samples: dict[str, list[int]] = {}
        for name, share in self.shares.items():
            count = len(federation.datasets[name][1])
            chance = torch.Generator().manual_seed(derived_seed(federation.scenario.seed, "forget", name))
            size = min(max(1, round(share * count)), count - 1)
            samples[name] = torch.randperm(count, generator=chance)[:size].tolist()
        for name in self.triggered:
            samples[name] = federation.triggered[name].nonzero().flatten().tolist()
        return Request.of(self.clients, samples)


def together(forgets: tuple[Forget, ...]) -> Forget:
    """All of them at once.

    Example:
        >>> together((Forget(("client-1",)), Forget(("client-2",)))).clients
        ('client-1', 'client-2')
    """
    shares: dict[str, float] = {}
    for forget in forgets:
        shares |= forget.shares
    clients = tuple(name for forget in forgets for name in forget.clients)
    return Forget(clients, shares, tuple(name for forget in forgets for name in forget.triggered))


@dataclass(frozen=True)
class Contender:
    """A method with some of its options changed, under its name in results.

    Attributes:
        method: its registered name.
        options: what is changed; plain values, so that they can be written down.
        label: the name in results; the method's own by default.
        budget_of: the contender whose sample-gradients are this one's budget.

    Example:
        >>> Contender("hf-kcu", {"damping": 0.1}).configured().options.damping
        0.1
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    budget_of: Contender | None = None

    def __post_init__(self) -> None:
        method(self.method)  # an unknown one is refused at once
        object.__setattr__(self, "label", self.label or self.method)

    def configured(self, more: Mapping[str, Any] | None = None) -> Method:
        """The method, ready to run, with more options than its own where some are given."""
        return method(self.method).configured({**self.options, **(more or {})})


@dataclass(frozen=True)
class Setting:
    """One variant of an experiment.

    Attributes:
        label: the variant's name in results.
        scenario: the federation; its seed is replaced by each of the experiment's.
        forgets: who leaves, one after another; mostly it is one step.
        contenders: the methods.
        retrains: retrained models of fresh initialisations for each seed.
        same_init: retrained models from the training's own start and batches, 1 or none.
        tamper: a lie of the leaver's (see adversary.py), or "".
        seeds: how many of the seeds that are asked for it takes, the first ones; None is all.
        more_rounds: for how many rounds those who stay go on from every model before it is measured.
    """

    label: str
    scenario: Scenario
    forgets: tuple[Forget, ...]
    contenders: tuple[Contender, ...]
    retrains: int = 3
    same_init: int = 1
    tamper: str = ""
    seeds: int | None = None
    more_rounds: int = 0

    def __post_init__(self) -> None:
        labels = [contender.label for contender in self.contenders]
        if len(set(labels)) < len(labels):
            raise RequestError(f"Two methods of {self.label!r} have the same name in results: {', '.join(labels)}.")

    def with_seed(self, seed: int) -> Setting:
        """The same for one seed."""
        return dataclasses.replace(self, scenario=self.scenario.with_seed(seed))
