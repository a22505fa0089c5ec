"""The Engine protocol: how work reaches clients, wherever they are, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from expunge.core.vectors import weighted_sum
from expunge.errors import NumericalError
from expunge.federation.tasks import Reply, Sum, Task

R = TypeVar("R", bound=Reply)


@dataclass
class Cost:
    """What some work cost: one scale for every method."""

    seconds: float = 0.0
    sample_gradients: float = 0.0
    rounds: int = 0
    bytes_down: int = 0
    bytes_up: int = 0

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


class Engine(Protocol):
    """Reaches the clients of a federation.

    ``ask`` is one message round: it returns every client's reply or raises. An engine on a network asks again for a
    lost reply; leaving a client out silently would solve another problem, so no engine does it.
    """

    cost: Cost

    def clients(self) -> Mapping[str, int]:
        """Names of the clients that can be reached, with their sample counts."""

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """Give each named client its task; return all replies."""


@contextmanager
def measured(engine: Engine) -> Iterator[Cost]:
    """What the engine spends inside the block, seconds included; filled in when the block ends."""
    before, started, spent = Cost(**asdict(engine.cost)), time.perf_counter(), Cost()
    try:
        yield spent
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.seconds = time.perf_counter() - started
        spent.sample_gradients = engine.cost.sample_gradients - before.sample_gradients
        spent.rounds = engine.cost.rounds - before.rounds
        spent.bytes_down = engine.cost.bytes_down - before.bytes_down
        spent.bytes_up = engine.cost.bytes_up - before.bytes_up


@contextmanager
def timed(seconds: dict[str, float], what: str, like: Tensor) -> Iterator[None]:
    """Add the time that the block takes; where ``like`` is on a GPU, its work has ended on both sides of the clock."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    started = time.perf_counter()
    yield
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - started


def expect(replies: Mapping[str, Reply], kind: type[R]) -> dict[str, R]:
    """The replies, if they are all of one kind."""
    checked: dict[str, R] = {}
    for name, reply in replies.items():
        if not isinstance(reply, kind):
            raise NumericalError(f"Client {name!r} replied {type(reply).__name__} where {kind.__name__} was asked for.")
        checked[name] = reply
    return checked


def ask_mean(engine: Engine, tasks: Mapping[str, Task]) -> Tensor:
    """Ask for sums, and divide their sum by the sum of counts: the mean over all the clients' samples."""
    replies = expect(engine.ask(tasks), Sum).values()
    total = weighted_sum((reply.total for reply in replies), (1.0 for _ in replies))
    return total / sum(reply.count for reply in replies)
