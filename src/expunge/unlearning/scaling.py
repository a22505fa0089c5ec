"""Adaptive scaling: how long a step may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.messages.tasks import Losses, Sum
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.influence import spread
from expunge.unlearning.request import Parties

LENGTHS = tuple(2.0 ** (-j / 2) for j in range(12))
TRIES = (LENGTHS[:1], LENGTHS[1:4], LENGTHS[4:])
"""Step lengths that the trust region tries, a message for each group where there is no batch norm: the whole step,
which mostly is safe, a few, all others."""


def adaptive_scale(raw: Tensor, parameters: Tensor, beta: float) -> float:
    """Line 17 of Algorithm 1: ``min(1, beta ||theta|| / ||raw||)``.

    Example:
        >>> adaptive_scale(torch.tensor([4.0]), torch.tensor([10.0]), beta=0.1)
        0.25
    """
    norm = float(torch.linalg.vector_norm(raw))
    return min(1.0, beta * float(torch.linalg.vector_norm(parameters)) / norm) if norm else 1.0


@dataclass(frozen=True)
class RetainedLoss:
    """What the step does to those who stay, at several lengths of which the first is 0.

    Attributes:
        means: the mean loss.
        rises: how much higher than the first it is, where no client speaks better of the step than the second best:
            one that lies about its losses can then hide little of what the others lose.
    """

    means: tuple[float, ...]
    rises: tuple[float, ...]

    def at(self, number: int) -> dict[str, float]:
        """For the record: the loss before, and at one of the lengths."""
        return {
            "retained_loss_before": self.means[0],
            "retained_loss_after": self.means[number],
            "retained_rise": self.rises[number],
        }


def trust_region(
    engine: Engine,
    model: Snapshot,
    step: Tensor,
    parties: Parties,
    options: HfKcuOptions,
    allowed: float,
    tries: tuple[tuple[float, ...], ...] = TRIES,
    refreshed: Callable[[Snapshot], Snapshot] | None = None,
) -> tuple[float | None, Snapshot, dict[str, float]]:
    """The largest t with ``L_r(theta - t step) <= L_r(theta) + allowed``; None where no length is safe.

    The loss is taken on retained samples other than those that made the curvature, as far as there are others.

    Args:
        engine: reaches the clients.
        model: theta.
        step: what is subtracted at t = 1.
        parties: who stays.
        options: samples and seed.
        allowed: how much the loss may rise.
        tries: the lengths, those of a group in one message.
        refreshed: gives a moved model its new batch-norm statistics, with which it is judged, one length at a time;
            None where there are none.

    Returns:
        The length, the very model that was judged, or that which was given, and the loss before and after.
    """
    before = math.nan
    for length, moved, losses in _trials(engine, model, step, parties, options, tries, refreshed):
        before = losses["retained_loss_before"]
        if math.isfinite(before) and losses["retained_rise"] <= allowed:
            return length, moved, losses
    return None, model, {"retained_loss_before": before, "retained_loss_after": before, "retained_rise": 0.0}


def _trials(
    engine: Engine,
    model: Snapshot,
    step: Tensor,
    parties: Parties,
    options: HfKcuOptions,
    tries: tuple[tuple[float, ...], ...],
    refreshed: Callable[[Snapshot], Snapshot] | None,
) -> Iterator[tuple[float, Snapshot, dict[str, float]]]:
    """Each length in turn with the model after it and the loss before and after; asked for when its turn comes."""

    def moved(length: float) -> Snapshot:
        return model.moved(model.parameters - length * step)

    if refreshed is None:
        for lengths in tries:
            loss = retained_loss(engine, model, step, (0.0, *lengths), parties, options)
            for number, length in enumerate(lengths, 1):
                yield length, moved(length), loss.at(number)
        return
    nowhere = torch.zeros_like(step)
    given = _checked(_told(engine, model, nowhere, (0.0,), parties, options))
    for length in chain.from_iterable(tries):
        judged = refreshed(moved(length))
        after = _told(engine, judged, nowhere, (0.0,), parties, options)
        both = [replace(told, total=torch.cat([told.total, after[name].total])) for name, told in given.items()]
        yield length, judged, combined(both).at(1)


def lowest_loss(
    engine: Engine,
    model: Snapshot,
    way: Tensor,
    lengths: tuple[float, ...],
    parties: Parties,
    options: HfKcuOptions,
) -> tuple[float, dict[str, float]]:
    """The t with the lowest ``L_r(theta - t way)`` among those, 0 included, at which it does not rise."""
    loss = retained_loss(engine, model, way, lengths, parties, options)
    safe = [
        (mean, length, rise) for mean, length, rise in zip(loss.means, lengths, loss.rises, strict=True) if rise <= 0
    ]
    mean, length, rise = min(safe, default=(loss.means[0], 0.0, 0.0))
    return length, {"retained_loss_before": loss.means[0], "retained_loss_after": mean, "retained_rise": rise}


def retained_loss(
    engine: Engine, model: Snapshot, step: Tensor, lengths: tuple[float, ...], parties: Parties, options: HfKcuOptions
) -> RetainedLoss:
    """The loss of those who stay at ``theta - t step`` for several t, the first 0.

    It comes from the server's own data where there is some, else from the clients in one message.
    """
    return combined(_checked(_told(engine, model, step, lengths, parties, options)).values())


def _told(
    engine: Engine, model: Snapshot, step: Tensor, lengths: tuple[float, ...], parties: Parties, options: HfKcuOptions
) -> dict[str, Sum]:
    """Each one's sum of losses at each length."""
    if engine.validation is not None:
        reply = engine.validation.perform(Losses(model, step, lengths))
        assert isinstance(reply, Sum)
        engine.cost.sample_gradients += reply.sample_gradients
        return {"the server": reply}
    draws = spread(options, parties.retained, parties.counts, from_back=True)
    tasks = {name: Losses(model, step, lengths, draws[name], left_out) for name, left_out in parties.retained.items()}
    return ask_each(engine, tasks, Sum)


def _checked(replies: dict[str, Sum]) -> dict[str, Sum]:
    """The same: what is not a number before any step is refused where others have numbers."""
    broken = [name for name, reply in replies.items() if not math.isfinite(reply.total[0])]
    if 0 < len(broken) < len(replies):
        raise NumericalError(
            f"Client {broken[0]!r} replied a loss that is NaN or infinite: the model is left as it was."
        )
    return replies


def combined(replies: Iterable[Sum]) -> RetainedLoss:
    """The mean over all samples, and its rise with nobody's own below the second lowest (of three or more clients).

    Example:
        >>> told = [Sum(torch.tensor([1.0, 1.0 + rise]), 1, 0.0) for rise in (0.1, 0.2, -9.0)]
        >>> round(combined(told).rises[1], 4)
        0.1333
    """
    replies = list(replies)
    totals = torch.stack([reply.total for reply in replies]).double().cpu()
    counts = torch.tensor([float(reply.count) for reply in replies], dtype=torch.float64)
    # What is NaN or infinite is not safe, not even where it is minus infinity.
    risen = ((totals - totals[:, :1]) / counts[:, None]).nan_to_num(math.inf, math.inf, math.inf)
    if len(replies) >= 3:
        risen = risen.clamp(min=risen.kthvalue(2, dim=0).values)
    rises = counts @ risen / counts.sum()
    return RetainedLoss(tuple((totals.sum(dim=0) / counts.sum()).tolist()), tuple(rises.tolist()))
