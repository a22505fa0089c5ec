"""The Engine protocol: how work reaches clients, wherever they are, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from expunge.core.kronecker import Factors
from expunge.core.vectors import weighted_sum
from expunge.errors import NumericalError
from expunge.federation.engines.client import Client
from expunge.federation.messages.replies import require_comparable, require_sound, samples_behind
from expunge.federation.messages.tasks import CurvatureFactors, Losses, Reply, Sum, Task

R = TypeVar("R", bound=Reply)

MASKED = "the masked sum"
"""Under this name comes the sum of several clients' replies where only sums are to be seen."""


@dataclass
class Cost:
    """What some work cost: one scale for every method."""

    seconds: float = 0.0
    sample_gradients: float = 0.0
    rounds: int = 0
    bytes_down: int = 0
    bytes_up: int = 0

    def __add__(self, other: Cost) -> Cost:
        """What both cost together."""
        return Cost(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


class Engine(Protocol):
    """Reaches the clients of a federation.

    ``ask`` is one message round: it returns every client's reply or raises. An engine on a network asks again for a
    lost reply; leaving a client out silently would solve another problem, so no engine does it.
    """

    cost: Cost

    @property
    def validation(self) -> Client | None:
        """The server's own samples, where it has some: retained losses then come from them, whatever clients say."""

    @property
    def sums_only(self) -> bool:
        """Whether replies of several clients come as one, their sum under the name ``MASKED``: nobody can be named."""

    def clients(self) -> Mapping[str, int]:
        """Names of the clients that can be reached, with their sample counts."""

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """Give each named client its task; return all replies."""


@runtime_checkable
class Adding(Protocol):
    """An engine that may know the sum of replies without each of them."""

    def ask_sum(self, tasks: Mapping[str, Task]) -> Sum | None:
        """One message round, of which the sum is enough; None, and nothing asked, where each has to be asked."""


@contextmanager
def measured(engine: Engine) -> Iterator[Cost]:
    """What the engine spends inside the block, seconds included; filled in when the block ends."""
    before, started, spent = Cost(**asdict(engine.cost)), time.perf_counter(), Cost()
    try:
        yield spent
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.seconds = time.perf_counter() - started + engine.cost.seconds - before.seconds
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


def ask_each(engine: Engine, tasks: Mapping[str, Task], kind: type[R]) -> dict[str, R]:
    """One message round: replies of one kind, by client; one that cannot be right is refused by its sender's name."""
    replies, counts = engine.ask(tasks), engine.clients()
    samples = {name: samples_behind(task, counts[name]) for name, task in tasks.items()}
    if engine.sums_only and MASKED in replies:
        tasks, samples = {MASKED: next(iter(tasks.values()))}, {MASKED: sum(samples.values())}
    checked: dict[str, R] = {}
    for name, task in tasks.items():
        who, reply = f"Client {name!r}" if name != MASKED else "One of the clients", replies[name]
        if not isinstance(reply, kind):
            raise NumericalError(f"{who} replied {type(reply).__name__} where {kind.__name__} was asked for.")
        require_sound(who, task, reply, samples[name])
        checked[name] = reply
    return checked


def ask_mean(engine: Engine, tasks: Mapping[str, Task]) -> Tensor:
    """Ask for sums, and divide their sum by the sum of counts: the mean over all the clients' samples."""
    return _mean(_comparable(engine, tasks))


def ask_factors(engine: Engine, tasks: Mapping[str, CurvatureFactors]) -> Factors:
    """Ask for Kronecker factors: their mean over all the clients' samples."""
    replies = _comparable(engine, tasks)
    return Factors(_mean(replies), next(iter(replies.values())).blocks)


def _comparable(engine: Engine, tasks: Mapping[str, Task]) -> dict[str, Sum]:
    together = engine.ask_sum(tasks) if isinstance(engine, Adding) else None
    if together is not None:  # of clients in this process: what they reply is what was asked for
        return {MASKED: together}
    replies = ask_each(engine, tasks, Sum)
    if not any(isinstance(task, Losses) for task in tasks.values()):  # these differ without bounds, in honesty
        require_comparable(replies)
    return replies


def _mean(replies: Mapping[str, Sum]) -> Tensor:
    total = weighted_sum((reply.total for reply in replies.values()), (1.0 for _ in replies))
    return total / sum(reply.count for reply in replies.values())
