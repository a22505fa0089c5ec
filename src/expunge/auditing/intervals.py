"""Intervals for what an attack reaches: rates, areas under the curve, and gaps between two of them.

- A rate: Clopper & Pearson (1934), exact, so never narrower than it says.
- An AUC: the values A that the measured one does not contradict, ``|A - measured| <= z sqrt(V(A))``, V as Hanley &
  McNeil have it in Newcombe's form (2006, method 5), scaled so that at the measured value it is the variance of DeLong
  et al. (1988), which assumes no distribution. DeLong's own interval has no width where the classes are apart; this one
  always has. With fewer than ``FEW`` samples on a side V is not scaled.
- A gap of two values on the same samples: Zou & Donner's combination of their intervals (2008), with the correlation
  of the two; for AUCs it is DeLong's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtri

from expunge.auditing.signals import Floats
from expunge.errors import RequestError

LEVEL = 0.95
FEW = 10


class Interval(NamedTuple):
    """A value and the limits it is known within."""

    value: float
    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether the value is one of those that were not contradicted."""
        return self.low <= value <= self.high


def clopper_pearson(successes: float, trials: float, level: float = LEVEL) -> Interval:
    """The exact interval of a rate.

    Neither count needs to be whole: a mean of several models' hits, or weighted samples, go through the same beta
    quantiles (then they are no longer exact).

    Example:
        >>> tuple(round(limit, 4) for limit in clopper_pearson(0, 10))
        (0.0, 0.0, 0.3085)
    """
    if not 0 <= successes <= trials or trials <= 0:
        raise RequestError(f"{successes} successes in {trials} trials are no rate.")
    tail = _tail(level)
    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1 - tail)) if successes < trials else 1.0
    return Interval(successes / trials, low, high)


def auc_interval(
    auc: float, members: float, others: float, level: float = LEVEL, variance: float | None = None
) -> Interval:
    """The interval of an AUC from so many members and (effective) non-members.

    Args:
        auc: as measured.
        members: how many.
        others: how many.
        level: of the interval.
        variance: DeLong's; where there is none, or it is 0, Hanley & McNeil's is used as it is.

    Example:
        >>> tuple(round(limit, 3) for limit in auc_interval(1.0, members=20, others=20))
        (1.0, 0.899, 1.0)
    """
    if not 0 <= auc <= 1 or members <= 0 or others <= 0:
        raise RequestError(f"An AUC of {auc} from {members} members and {others} non-members has no interval.")
    z, known = -float(ndtri(_tail(level))), _hanley_mcneil(auc, members, others)
    usable = variance is not None and known > 0 and variance > 1e-9 * known and min(members, others) >= FEW
    factor = variance / known if usable and variance is not None else 1.0

    def contradiction(candidate: float) -> float:
        return abs(auc - candidate) - z * math.sqrt(factor * _hanley_mcneil(candidate, members, others))

    # The variance is 0 at 0 and 1: a measured 1.0 solves its own equation there; the limit is the other root.
    tiny = 1e-12
    low = float(brentq(contradiction, 0.0, auc - tiny)) if auc > tiny else 0.0
    high = float(brentq(contradiction, auc + tiny, 1.0)) if auc < 1 - tiny else 1.0
    return Interval(auc, low, high)


def _hanley_mcneil(auc: float, members: float, others: float) -> float:
    """Variance of the AUC, both sides treated alike (Newcombe 2006)."""
    half = (members + others) / 2 - 1
    spread = 1 + half * (1 - auc) / (2 - auc) + half * auc / (1 + auc)
    return auc * (1 - auc) * spread / (members * others)


def gap_interval(own: Interval, other: Interval, correlation: float = 0.0, noise: float = 0.0) -> Interval:
    """``own - other`` with limits; ``noise`` is a further half width, added in squares.

    Example:
        >>> gap = gap_interval(Interval(0.75, 0.5, 1.0), Interval(0.5, 0.25, 0.75))
        >>> gap.value, round(gap.low, 4), round(gap.high, 4)
        (0.25, -0.1036, 0.6036)
    """
    value = own.value - other.value
    below, above = own.value - own.low, own.high - own.value
    other_below, other_above = other.value - other.low, other.high - other.value
    return Interval(
        value,
        value - math.sqrt(_squares(below, other_above, correlation) + noise**2),
        value + math.sqrt(_squares(above, other_below, correlation) + noise**2),
    )


def placements(members: Floats, others: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """DeLong's components; the (weighted) mean of either is the AUC.

    Of each member the weighted share of non-members below it, of each non-member the share of members above it; equal
    scores count half.

    Example:
        >>> placements(np.array([2.0, 1.0]), np.array([1.0, 0.0]), np.array([0.5, 0.5]))
        (array([1.  , 0.75]), array([0.75, 1.  ]))
    """
    order = np.argsort(others, kind="stable")
    ranked, mass = others[order], np.concatenate([[0.0], np.cumsum(weights[order])])
    below, upto = mass[np.searchsorted(ranked, members, "left")], mass[np.searchsorted(ranked, members, "right")]
    of_members = (below + upto) / (2 * mass[-1])
    ascending = np.sort(members)
    left, right = np.searchsorted(ascending, others, "left"), np.searchsorted(ascending, others, "right")
    return of_members, 1 - (left + right) / (2 * len(members))


def delong_covariance(first: tuple[Floats, Floats], second: tuple[Floats, Floats], weights: Floats) -> float:
    """Covariance of two AUCs on the same samples, from their ``placements``; the variance, where both are one.

    Example:
        >>> parts = placements(np.array([2.0, 1.0]), np.array([1.0, 0.0]), np.array([0.5, 0.5]))
        >>> delong_covariance(parts, parts, np.array([0.5, 0.5]))
        0.03125
    """
    members = [part[0] - part[0].mean() for part in (first, second)]
    others = [part[1] - weights @ part[1] for part in (first, second)]
    count, squares = len(members[0]), float(np.square(weights).sum())
    of_members = float(members[0] @ members[1]) / max(count * (count - 1), 1)
    of_others = float(np.square(weights) @ (others[0] * others[1])) / max(1 - squares, squares)
    return of_members + of_others


def _squares(own: float, other: float, correlation: float) -> float:
    return max(own**2 + other**2 - 2 * correlation * own * other, 0.0)


def _tail(level: float) -> float:
    if not 0 < level < 1:
        raise RequestError(f"The level of an interval must be between 0 and 1, not {level}.")
    return (1 - level) / 2
