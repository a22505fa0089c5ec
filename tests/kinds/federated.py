"""Federated training as a user writes it, with torch's optimisers, and the test that a client was forgotten.

``Kind`` says what is trained: a model, the clients' data, the loss of a batch as the user computes it. Everything that
expunge is told stands in ``told``.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import expunge


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of model and data.

    Attributes:
        network: fresh weights from a seed.
        clients: makes everybody's data, the leaver's given name having something of its own.
        loss: of a batch, as the user's training loop computes it.
        told: what ``expunge.forget`` is told beside model, data and memory.
        collate: of the user's DataLoader.
        adam: trained by AdamW; else by SGD.
    """

    network: Callable[[int], nn.Module]
    clients: Callable[[str], dict[str, Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    told: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    adam: bool = False
    rate: float = 0.1
    rounds: int = 6
    epochs: int = 2
    batch_size: int = 16
    size: Callable[[Any], int] = len


def trained(kind: Kind, clients: Mapping[str, Any], seed: int, memory: bool = False) -> tuple[nn.Module, Any]:
    """The model after all rounds, and what was recorded."""
    model = kind.network(seed)
    model.train()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    recipe = expunge.Recipe(expunge.AdamW(weight_decay=0.01)) if kind.adam else None
    kept = expunge.Memory(model, recipe) if memory else None
    chance = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    weights = {name: kind.size(data) for name, data in clients.items()}
    for _ in range(kind.rounds):
        before, updates, steps, moments = copy.deepcopy(model.state_dict()), {}, {}, {}
        for name, data in clients.items():
            model.load_state_dict(before)
            own = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimiser = (
                torch.optim.AdamW(own, lr=kind.rate, weight_decay=0.01)
                if kind.adam
                else torch.optim.SGD(own, lr=kind.rate)
            )
            loader = DataLoader(data, kind.batch_size, shuffle=True, collate_fn=kind.collate, generator=chance)
            steps[name] = 0
            for _ in range(kind.epochs):
                for batch in loader:
                    optimiser.zero_grad()
                    kind.loss(model, batch).backward()
                    optimiser.step()
                    steps[name] += 1
            after = model.state_dict()
            updates[name] = {key: after[key].clone() - before[key] for key in names}
            if kind.adam:
                moments[name] = expunge.second_moments(optimiser)
        if kept is not None:
            kept.record(updates, weights, learning_rate=kind.rate, steps=steps, moments=moments or None)
        total = sum(weights.values())
        for key in names:
            before[key] += sum(weights[name] * updates[name][key] for name in clients) / total
        model.load_state_dict(before)
    return model.eval(), kept


def loss_on(kind: Kind, model: nn.Module, data: Any) -> float:
    """The mean loss on somebody's data, as the user computes it."""
    with torch.no_grad():
        found = [float(kind.loss(model.eval(), batch)) for batch in DataLoader(data, 64, collate_fn=kind.collate)]
    return statistics.fmean(found)


@dataclass(frozen=True)
class Found:
    """Losses on the leaver's data, in standard deviations of retrained models from their mean."""

    nothing: float
    result: float
    retrained: tuple[float, ...]
    losses: tuple[float, float]
    others: tuple[float, float, float]
    outcome: Any

    def __str__(self) -> str:
        mean, spread = statistics.fmean(self.retrained), statistics.stdev(self.retrained)
        return (
            f"nothing {self.nothing:+.1f} result {self.result:+.1f} | {self.losses[0]:.3f} -> {self.losses[1]:.3f}, "
            f"retrained {mean:.3f} +- {spread:.3f} | others {self.others[0]:.3f} -> {self.others[1]:.3f}, "
            f"retrained {self.others[2]:.3f} | {self.outcome.method} {self.outcome.warnings}"
        )


def forgotten(kind: Kind, leaver: str, seed: int, retrains: int = 5, **options: Any) -> Found:
    """Train with everybody, forget the leaver, and compare with models retrained from other weights without it."""
    clients = kind.clients(leaver)
    own = clients[leaver]
    staying = {name: data for name, data in clients.items() if name != leaver}
    model, memory = trained(kind, clients, seed, memory=True)
    outcome = expunge.forget(model, staying, leaver, memory=memory, progress=False, **{**kind.told, **options})
    result = copy.deepcopy(model)
    outcome.write_to(result)
    again = [trained(kind, staying, seed + 1 + number)[0] for number in range(retrains)]
    retrained = [loss_on(kind, each, own) for each in again]
    mean, spread = statistics.fmean(retrained), statistics.stdev(retrained)
    losses = loss_on(kind, model, own), loss_on(kind, result, own)
    kept = [
        statistics.fmean(loss_on(kind, each, data) for data in staying.values()) for each in (model, result, *again)
    ]
    return Found(
        (losses[0] - mean) / spread,
        (losses[1] - mean) / spread,
        tuple(retrained),
        losses,
        (kept[0], kept[1], statistics.fmean(kept[2:])),
        outcome,
    )
