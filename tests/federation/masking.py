"""Sums under pairwise masks (Bonawitz et al. 2017), in one process: the server sees uniform numbers and their sum.

Every two clients share a key. Each adds a mask to its reply, in whole numbers modulo 2^64, for every other client: the
two signs of a pair cancel in the sum of all, exactly. Clients that drop out need no protocol of their own, since no
engine ever leaves one out. In a deployment masks are made at the clients; that the server's code never needs more than
``seen`` is what this shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.client import Client
from expunge.federation.engines.engine import MASKED, Cost, Engine
from expunge.federation.messages.tasks import CurvatureFactors, CurvatureProduct, Gradient, Losses, Reply, Sum, Task

Words = np.ndarray  # of uint64
SUMMED = Gradient | CurvatureProduct | CurvatureFactors | Losses
FRACTION = 2.0**-40
"""A reply's smallest step, in units that everybody knows."""
MOST = 2.0**60
"""What one client's number may be at most, so that eight of them do not wrap around; more clients, less each."""


def encoded(values: Tensor, unit: float, clients: int) -> Words:
    """Whole numbers of ``unit`` modulo 2^64; what the sum could not hold is refused at the client itself."""
    scaled = torch.round(values.detach().double().reshape(-1) / unit)
    if not bool((scaled.abs() < 8 * MOST / max(clients, 8)).all()):
        raise NumericalError("A reply is too large, or no number, so it cannot be masked.")
    return scaled.to(torch.int64).numpy().view(np.uint64)


def mask(key: bytes, purpose: str, size: int) -> Words:
    """The stream of a pair's key for one message: nobody without the key can tell it from chance."""
    return np.frombuffer(hashlib.shake_256(key + purpose.encode()).digest(8 * size), dtype="<u8")


def masked(own: str, words: Words, keys: Mapping[str, bytes], purpose: str) -> Words:
    """What a client sends: its words and a mask for each other client, with one sign or the other."""
    for other, key in keys.items():
        stream = mask(key, purpose, len(words))
        words = words + stream if own < other else words - stream
    return words


def opened(replies: Iterable[Words], unit: float) -> Tensor:
    """The sum of all, in which the masks cancel."""
    total = np.sum(np.stack(list(replies)), axis=0, dtype=np.uint64)
    return torch.from_numpy(total.view(np.int64).astype(np.float64) * unit)


def shared_keys(names: Iterable[str], seed: str) -> dict[str, dict[str, bytes]]:
    """One key for every two clients; a deployment would agree on them by Diffie-Hellman."""
    names = list(names)
    return {
        own: {
            other: hashlib.sha256(f"{seed} {sorted((own, other))}".encode()).digest() for other in names if other != own
        }
        for own in names
    }


class MaskedEngine:
    """An engine of which the server sees only masked replies and sums; leavers alone reply in clear.

    Attributes:
        seen: all that the server saw of the others, by message round and client.
    """

    sums_only = True

    def __init__(self, engine: Engine, leaving: Iterable[str] = (), seed: str = "a seed") -> None:
        self._engine, self._leaving, self._seed = engine, frozenset(leaving), seed
        self.seen: list[dict[str, Words]] = []

    @property
    def cost(self) -> Cost:
        return self._engine.cost

    @property
    def validation(self) -> Client | None:
        return self._engine.validation

    def clients(self) -> Mapping[str, int]:
        return self._engine.clients()

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        if self._leaving.issuperset(tasks):
            return self._engine.ask(tasks)
        if not all(isinstance(task, SUMMED) for task in tasks.values()):
            raise RequestError("Clients that stay reply only to what can be summed under masks.")
        if len(set(tasks) - self._leaving) < 2:
            raise RequestError("The sum over one client is its own reply: two that stay must be asked together.")
        return {MASKED: self._summed(tasks, self._engine.ask(tasks))}

    def _summed(self, tasks: Mapping[str, Task], replies: Mapping[str, Reply]) -> Sum:
        first = next(iter(replies.values()))
        unit, keys = self._unit(next(iter(tasks.values()))), shared_keys(tasks, self._seed)
        sent = {}
        for name, reply in replies.items():
            assert isinstance(reply, Sum)
            total = reply.total
            if isinstance(tasks[name], Losses):  # far along a step they may be infinite in honesty: unsafe is enough
                total = total.double().nan_to_num(1e5, 1e5, 0.0).clamp(-1e5, 1e5)
            words = encoded(total, unit, len(tasks))
            sent[name] = masked(name, words, keys[name], f"message {len(self.seen)}")
        self.seen.append(sent)
        total = opened(sent.values(), unit).view(first.total.shape).to(first.total.dtype)
        return Sum(total, sum(reply.count for reply in replies.values()), 0.0, first.blocks)

    @staticmethod
    def _unit(task: Task) -> float:
        """Products are in units of the vector that everybody was sent: CG's become small."""
        return FRACTION * float(task.vectors.abs().max()) if isinstance(task, CurvatureProduct) else FRACTION
