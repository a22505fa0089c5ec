"""What a further retrained model would show, foretold from the M that are there.

For normal values x_1 ... x_M with mean m and standard deviation s, a further one x obeys

    (x - m) / (s sqrt(1 + 1/M))  ~  Student's t with M - 1 degrees of freedom,

which gives a prediction interval for one more model, not a confidence interval for the mean. It is widened by a margin:
differences below the margin are of no interest, however certain they are.

Where it fails: values far from normal. Rates near 0 or 1 hardly vary, so a spread is never taken to be smaller than
one sample is worth; distances between pairs are skewed and share models, so they are taken on a log scale and freed of
what they share (``as_if_further``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from expunge.errors import RequestError

Side = Literal["both", "above", "below"]
"""Which deviations count: any, or only those on one side."""

LEAST = 3
"""Fewer values than this say nothing about their spread that could be used."""

MOST = 1000
"""No more models than this are ever asked for."""


@dataclass(frozen=True)
class Prediction:
    """Where a further value is expected.

    Attributes:
        mean: of the values that are there.
        spread: their standard deviation, or the least that is believed.
        count: how many there are.
        side: which deviations count.
        margin: deviations up to this are of no interest.

    Example:
        >>> further = Prediction.of([1.0, 2.0, 3.0], margin=0.5)
        >>> [round(limit, 3) for limit in further.limits(level=0.05)]
        [-3.468, 7.468]
        >>> round(further.p_value(7.468), 3), further.p_value(2.4)
        (0.05, 1.0)
    """

    mean: float
    spread: float
    count: int
    side: Side = "both"
    margin: float = 0.0

    @classmethod
    def of(
        cls, values: Sequence[float], *, side: Side = "both", margin: float = 0.0, least_spread: float = 0.0
    ) -> Prediction:
        """From the values; ``least_spread`` is what they are taken to vary at least."""
        if len(values) < LEAST:
            raise RequestError(f"A prediction needs at least {LEAST} values, not {len(values)}.")
        spread = max(float(np.std(values, ddof=1)), least_spread)
        return cls(float(np.mean(values)), spread, len(values), side, margin)

    @property
    def scale(self) -> float:
        """``s sqrt(1 + 1/M)``: of a further value around the mean of the others."""
        return self.spread * math.sqrt(1 + 1 / self.count)

    @property
    def tails(self) -> int:
        """How many sides count."""
        return 2 if self.side == "both" else 1

    def p_value(self, value: float) -> float:
        """The chance of a deviation at least as large, were the value one more of the others; 1 inside the margin."""
        beyond = self._against(value) - self.margin
        if not beyond > 0:
            return 1.0
        if self.scale == 0 or math.isinf(beyond):
            return 0.0
        return min(1.0, self.tails * float(stats.t.sf(beyond / self.scale, self.count - 1)))

    def reach(self, level: float) -> float:
        """The smallest deviation that is told at this level: the interval's half width, margin included."""
        return self.margin + self._quantile(level) * self.scale

    def limits(self, level: float) -> tuple[float, float]:
        """The prediction interval, infinite on a side that does not count."""
        reach = self.reach(level)
        low = -math.inf if self.side == "above" else self.mean - reach
        high = math.inf if self.side == "below" else self.mean + reach
        return low, high

    def caught(self, deviation: float, level: float) -> float:
        """How often a model whose true deviation is this would be told, trained again and beside M new retrained ones.

        The spread is taken to be the true one. Without deviation and margin this is the level itself.
        """
        if self.scale == 0:
            return float(self._against(self.mean + deviation) > self.margin)
        size = deviation / self.scale if self.side != "below" else -deviation / self.scale
        limit, freedom = self._quantile(level), self.count - 1
        # Over the values that the estimated spread may take: quantiles of chi in its middle are enough.
        ranks = (np.arange(400) + 0.5) / 400
        bounds = limit * np.sqrt(stats.chi2.ppf(ranks, freedom) / freedom) + self.margin / self.scale
        chance = stats.norm.sf(bounds - size)
        if self.side == "both":
            chance = chance + stats.norm.sf(bounds + size)
        return float(np.mean(chance))

    def needed(self, deviation: float, level: float) -> int | None:
        """How many values would tell this deviation, if the spread stays; None where it takes more than ``MOST``."""
        counts: list[int] = [*range(LEAST, 30), *range(30, MOST + 1, 10)]
        for count in counts:
            further = Prediction(self.mean, self.spread, count, self.side, self.margin)
            if further.reach(level) <= abs(deviation):
                return count
        return None

    def _against(self, value: float) -> float:
        """The deviation, positive where it counts."""
        deviation = value - self.mean
        return {"both": abs(deviation), "above": deviation, "below": -deviation}[self.side]

    def _quantile(self, level: float) -> float:
        return float(stats.t.isf(level / self.tails, self.count - 1))


def holm(p_values: Mapping[str, float], level: float) -> frozenset[str]:
    """What is rejected by Holm's procedure (1979): the chance of any wrong rejection is at most ``level``.

    The smallest p-value is compared with ``level / m``, the next with ``level / (m - 1)``, until one is not below.
    So nothing at all is rejected if and only if no p-value is at most ``level / m``.

    Example:
        >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.03}, level=0.05))
        ['a']
        >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.02}, level=0.05))
        ['a', 'b', 'c']
    """
    rejected: set[str] = set()
    for name, value in sorted(p_values.items(), key=lambda pair: pair[1]):
        if value > level / (len(p_values) - len(rejected)):
            break
        rejected.add(name)
    return frozenset(rejected)


def as_if_further(pairs: np.ndarray) -> list[float]:
    """Of M models compared pair by pair, what each would show as one more model beside all M.

    ``pairs[j, i]`` compares model i with reference j; the diagonal is not looked at. A further model c shows the mean
    of its column, ``a + v_c`` if ``pairs[j, i] = a + u_j + v_i`` with the u and the v adding up to zero. Model i's own
    column lacks itself as a reference: its mean is ``a + v_i - u_i / (M - 1)``, and these means vary less than a
    further model does, since each model stands in all of them. Solving for ``a + v_i`` puts that right; for symmetric
    distances it stretches them by (M - 1)/(M - 2).

    Example:
        >>> u = v = np.array([-1.0, 0.0, 1.0])
        >>> as_if_further(5 + u[:, None] + v[None, :])
        [4.0, 5.0, 6.0]
    """
    count = len(pairs)
    if pairs.shape != (count, count) or count < LEAST:
        raise RequestError(f"Comparing pair by pair needs at least {LEAST} models and a square table.")
    apart = ~np.eye(count, dtype=bool)
    overall = float(pairs[apart].mean())
    others = count - 1
    rows = np.array([pairs[k][apart[k]].mean() for k in range(count)]) - overall
    columns = np.array([pairs[:, k][apart[k]].mean() for k in range(count)]) - overall
    effects = (columns + rows / others) / (1 - 1 / others**2)
    return [float(value) for value in overall + effects]
