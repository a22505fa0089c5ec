"""Clients that lie: an engine whose leaver sends a crafted gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from expunge.core.seeds import derived_seed
from expunge.errors import RequestError
from expunge.federation.engines.client import Client
from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.messages.tasks import Gradient, Reply, Sum, Task


def _random(honest: Tensor, chance: torch.Generator) -> Tensor:
    noise = torch.randn(honest.shape, generator=chance, dtype=honest.dtype).to(honest)
    length = float(torch.linalg.vector_norm(honest)) / float(torch.linalg.vector_norm(noise))
    return length * noise


LIES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "flipped": lambda honest, _: -honest,
    "hundredfold": lambda honest, _: 100 * honest,
    "random": _random,
    "not a number": lambda honest, _: torch.full_like(honest, float("nan")),
}
"""What a leaver may send in place of the gradient of its data."""


class Between:
    """Stands between the server and an engine's clients, and hands on all but what they are asked."""

    def __init__(self, engine: Engine) -> None:
        self._behind = engine

    @property
    def cost(self) -> Cost:
        """What was spent so far, by the engine behind it."""
        return self._behind.cost

    @cost.setter
    def cost(self, cost: Cost) -> None:
        self._behind.cost = cost

    @property
    def validation(self) -> Client | None:
        """The server's own samples."""
        return self._behind.validation

    @property
    def sums_only(self) -> bool:
        """As the engine behind it."""
        return self._behind.sums_only

    def clients(self) -> Mapping[str, int]:
        """As the engine behind it."""
        return self._behind.clients()


class Tampering(Between):
    """An engine that reaches the same clients, some of whom lie about their gradient.

    Args:
        engine: the honest one.
        liars: who lies.
        lie: one of `LIES`.
        seed: of a random lie.
    """

    def __init__(self, engine: Engine, liars: tuple[str, ...], lie: str, seed: int) -> None:
        if lie not in LIES:
            raise RequestError(f"There is no lie {lie!r}; there are {', '.join(LIES)}.")
        super().__init__(engine)
        self._liars, self._lie = liars, LIES[lie]
        self._chance = torch.Generator().manual_seed(derived_seed(seed, "lie"))

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """As the honest engine, but for the liars' gradients."""
        replies = self._behind.ask(tasks)
        for name in self._liars:
            reply = replies.get(name)
            if isinstance(tasks.get(name), Gradient) and isinstance(reply, Sum):
                replies[name] = replace(reply, total=self._lie(reply.total, self._chance))
        return replies
