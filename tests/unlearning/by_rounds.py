"""A federation written down as its users do: local optimisers of torch, the server's rule, a memory that records."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import expunge
from expunge.core.vectors import Snapshot
from expunge.federation.training.recipe import Adam, Recipe, second_moments

Clients = Mapping[str, tuple[Tensor, Tensor]]


def linear_data(
    features: int = 20, clients: int = 5, count: int = 40, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Linear regression; the first client, ada, has another slope along one feature, and an offset."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    slope, data = normal(features, 1), {}
    for name in ("ada", "bob", "cyd", "dan", "eve", "fay")[:clients]:
        inputs = normal(count, features) * (1 + 0.3 * normal(features)).abs()
        targets = inputs @ slope + 0.1 * normal(count, 1)
        data[name] = (inputs, targets + (3 * inputs[:, :1] + 1 if name == "ada" else 0))
    return data


def parameters(model: nn.Module) -> Tensor:
    return Snapshot.of(model).parameters


@dataclass(frozen=True)
class Federation:
    """How it trains; every client makes whole-batch steps."""

    clients: Clients
    recipe: Recipe
    rate: float
    steps: int
    l2: float = 0.0
    told: bool = True
    """Whether the memory is told rates and steps."""
    drawn: tuple[str, ...] = ()
    """Who takes part: in the first round whoever has a letter in the first text, and so on; empty is everybody."""

    def without(self, *names: str) -> Federation:
        return replace(self, clients={name: data for name, data in self.clients.items() if name not in names})

    def start(self) -> nn.Linear:
        """A line of zeros."""
        model = nn.Linear(next(iter(self.clients.values()))[0].shape[1], 1).double()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    def trained(self, rounds: int) -> tuple[nn.Module, expunge.Memory]:
        """From the start, with a memory that records every round."""
        model = self.start()
        memory = expunge.Memory(model, self.recipe)
        return self.goes_on(model, memory, rounds), memory

    def goes_on(
        self, model: nn.Module, memory: expunge.Memory, rounds: int, momentum: Tensor | None = None
    ) -> nn.Module:
        """So many rounds more, with the server's momentum where there is one already."""
        model, held = copy.deepcopy(model), torch.zeros_like(parameters(model)) if momentum is None else momentum
        weights = {name: len(targets) for name, (_, targets) in self.clients.items()}
        for number in range(rounds):
            before, updates, moments = parameters(model), {}, {}
            taking = [name for name in self.clients if not self.drawn or name[0] in self.drawn[number]]
            if not taking:
                continue
            for name in taking:
                updates[name], own = self.local(model, name)
                moments |= {name: own} if own else {}
            told = {"learning_rate": self.rate, "steps": self.steps} if self.told else {}
            counts = {name: weights[name] for name in taking}
            memory.record(updates, counts, **told, moments=moments)
            mean = sum(weights[name] * update for name, update in updates.items()) / sum(counts.values())
            now, held = self.recipe.server.apply(before, held, mean)
            Snapshot(now, {}).write_to(model)
        return model

    def local(self, model: nn.Module, name: str) -> tuple[Tensor, list[float]]:
        """One client's update in a round, and its second moments under Adam."""
        rule, (inputs, targets) = self.recipe.client, self.clients[name]
        own, start = copy.deepcopy(model), [parameter.detach().clone() for parameter in model.parameters()]
        if isinstance(rule, Adam):
            made = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
            optimiser = made(own.parameters(), lr=self.rate, betas=rule.betas, weight_decay=rule.weight_decay)
        else:
            optimiser = torch.optim.SGD(
                own.parameters(),
                lr=self.rate,
                momentum=rule.momentum,
                nesterov=rule.nesterov,
                weight_decay=rule.weight_decay,
            )
        for _ in range(self.steps):
            with torch.no_grad():
                error = (own(inputs) - targets) / len(targets)
                gradients = (error.T @ inputs, error.sum(dim=0))
                for parameter, began, gradient in zip(own.parameters(), start, gradients, strict=True):
                    pulled = self.l2 * parameter + rule.proximal_mu * (parameter - began)
                    parameter.grad = gradient + pulled
            optimiser.step()
        return parameters(own) - parameters(model), second_moments(optimiser) if rule.adaptive else []
