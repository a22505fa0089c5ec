"""How long a step may be: pure decisions on what those who stay say of several lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from expunge.core.vectors import Snapshot
from expunge.federation.messages.tasks import Sum

LENGTHS = tuple(2.0 ** (-j / 2) for j in range(12))
"""Step lengths that the trust region tries where nothing else is said."""


@dataclass(frozen=True)
class RetainedLoss:
    """What a step does to those who stay, at several lengths of which the first is 0.

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


@dataclass(frozen=True, eq=False)
class Trial:
    """One length of a step: the model after it, and the loss of those who stay before and after."""

    length: float
    model: Snapshot
    losses: dict[str, float]


def in_messages(lengths: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """The lengths of one message together: the whole step, which mostly is safe, then a few, then all others.

    Example:
        >>> in_messages((1.0, 0.5, 0.25, 0.125, 0.0625))
        ((1.0,), (0.5, 0.25, 0.125), (0.0625,))
    """
    groups = tuple(lengths[:1]), tuple(lengths[1:4]), tuple(lengths[4:])
    return tuple(group for group in groups if group)


def longest_safe(trials: Iterable[Trial], allowed: float) -> tuple[Trial | None, dict[str, float]]:
    """The first trial (longest first) after which the loss has risen by no more than ``allowed``, and its losses.

    Trials are asked for one after another. Where none is safe the losses are those of the model as it is.
    """
    before = math.nan
    for trial in trials:
        before = trial.losses["retained_loss_before"]
        if math.isfinite(before) and trial.losses["retained_rise"] <= allowed:
            return trial, trial.losses
    return None, {"retained_loss_before": before, "retained_loss_after": before, "retained_rise": 0.0}


def lowest(loss: RetainedLoss, lengths: Sequence[float]) -> tuple[float, dict[str, float]]:
    """The length with the lowest loss among those, 0 included, at which it does not rise; and the losses there.

    Example:
        >>> lowest(RetainedLoss((1.0, 0.9, 1.2), (0.0, -0.1, 0.2)), (0.0, 0.5, 1.0))[0]
        0.5
    """
    safe = [(mean, t, rise) for mean, t, rise in zip(loss.means, lengths, loss.rises, strict=True) if rise <= 0]
    mean, length, rise = min(safe, default=(loss.means[0], 0.0, 0.0))
    return length, {"retained_loss_before": loss.means[0], "retained_loss_after": mean, "retained_rise": rise}


def shortest(loss: RetainedLoss, lengths: Sequence[float], allowed: float) -> float:
    """The shortest length that leaves no more than ``allowed`` to be won by another; 0 where nothing can be won.

    Example:
        >>> loss = RetainedLoss((1.0, 0.9, 0.8, 0.85), (0.0, -0.1, -0.2, -0.15))
        >>> shortest(loss, (0.0, 0.25, 0.5, 1.0), allowed=0.12), shortest(loss, (0.0, 0.25, 0.5, 1.0), allowed=0.2)
        (0.25, 0.0)
    """
    least = min(loss.rises)
    if not least < 0:  # also where the loss is not a number
        return 0.0
    return next(length for length, rise in zip(lengths, loss.rises, strict=True) if rise <= least + max(allowed, 0.0))


def combined(replies: Iterable[Sum], columns: Sequence[int] | None = None) -> RetainedLoss:
    """The mean over all samples, and its rise with nobody's own below the second lowest (of three or more clients).

    Of all lengths that were asked about, or of these columns, the first of which the others are compared with.

    Example:
        >>> told = [Sum(torch.tensor([1.0, 1.0 + rise]), 1, 0.0) for rise in (0.1, 0.2, -9.0)]
        >>> round(combined(told).rises[1], 4)
        0.1333
    """
    replies = list(replies)
    totals = torch.stack([reply.total for reply in replies]).double().cpu()
    totals = totals if columns is None else totals[:, list(columns)]
    counts = torch.tensor([float(reply.count) for reply in replies], dtype=torch.float64)
    # What is NaN or infinite is not safe, not even where it is minus infinity.
    risen = ((totals - totals[:, :1]) / counts[:, None]).nan_to_num(math.inf, math.inf, math.inf)
    if len(replies) >= 3:
        risen = risen.clamp(min=risen.kthvalue(2, dim=0).values)
    rises = counts @ risen / counts.sum()
    return RetainedLoss(tuple((totals.sum(dim=0) / counts.sum()).tolist()), tuple(rises.tolist()))
