"""The margin of a measure, and whether a model's value is shown to lie within it.

With M retrained values of mean ``m``, spread ``s`` (robust) and standard deviation ``sd``, and the trained value ``t``:

    deviation   d = |t - m|                       what there was to forget
    margin      w = max(10% of d, 3 s)            for a measure of use: fixed
    usable      w <= 30% of d                     else the measure cannot carry a claim
    interval    x - m  +-  q sd / sqrt(M)         q of Student's t with M - 1 degrees of freedom

The model's value ``x`` is known; what is not known is the mean that retraining has in the long run, hence the interval.
A value is *within* where the interval at the level (one-sided, 5%) lies inside the margin: a model exactly at its edge
gets there with a chance of 5%. It is *outside* where the interval at a far stricter level, all measures together, lies
beyond it. Anything else is *open*.

The spread must not grow with one spoiled retrained model, or it would hide others. Of all differences between two
retrained models it takes the mean of the smaller ones, as many as there are without one of the models, and scales it to
a standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Literal

from expunge.auditing.measures import Compared, Measure
from expunge.auditing.student import value_beyond

SHARE = 0.10
"""Of the trained model's deviation: no smaller margin is asked for."""

SPREADS = 3.0
"""So many robust standard deviations of the retrained models are no deviation."""

USABLE = 0.30
"""A margin above this share of the deviation would let through a model that forgot too little."""

LEVEL = 0.05
"""The chance that a model at the edge of the margin is found within, one measure, first attempt."""

DOUBT = 0.02
"""The chance that an honest retrain is found outside any margin, at most, as far as values are normal."""

_SCALES = (2.207, 1.745, 1.549, 1.429, 1.352, 1.292, 1.249, 1.215, 1.187, 1.162, 1.143, 1.127, 1.113)
"""What makes the spread a standard deviation of normal values, for 3 values, 4, and so on; simulated."""

Outcome = Literal["within", "open", "outside"]


@dataclass(frozen=True)
class Finding:
    """One measure of one model beside the retrained ones.

    Attributes:
        measure: what was compared.
        value: the model's.
        trained: the trained model's.
        retrained: the mean of the retrained models.
        spread: their robust standard deviation.
        margin: how far from the mean is near enough.
        reach: half the width of the interval around the model's deviation, at the level.
        deviation: what there was to forget: the trained model's distance from the mean, or the unit's.
        usable: whether the margin is small enough, beside the deviation, to carry a claim.
        outcome: within the margin, outside it, or open.
        models: how many retrained models have a value.
    """

    measure: Measure
    value: float
    trained: float
    retrained: float
    spread: float
    margin: float
    reach: float
    deviation: float
    usable: bool
    outcome: Outcome
    models: int

    @property
    def low(self) -> float:
        """The lower edge of the margin."""
        return -math.inf if self.measure.side == "above" else self.retrained - self.margin

    @property
    def high(self) -> float:
        """The upper edge of the margin."""
        return math.inf if self.measure.side == "below" else self.retrained + self.margin

    @property
    def share(self) -> float | None:
        """How much of the trained model's deviation is left; negative where it went too far."""
        apart = self.trained - self.retrained
        return (self.value - self.retrained) / apart if apart else None

    @property
    def excess(self) -> float:
        """How far from the mean on a side that counts."""
        return excess(self.measure, self.value - self.retrained)


def robust_spread(values: Sequence[float]) -> float:
    """A standard deviation that one value far off moves little: from the smaller differences of two of three or more.

    Example:
        >>> round(robust_spread([1.0, 2.0, 3.0, 4.0, 5.0]), 3), round(robust_spread([1.0, 2.0, 3.0, 4.0, 500.0]), 3)
        (2.065, 2.582)
    """
    apart = sorted(abs(first - second) for first, second in combinations(values, 2))
    count = len(values)
    scale = _SCALES[count - 3] if count - 3 < len(_SCALES) else 0.886 * (1 + 4 / count)
    return scale * fmean(apart[: (count - 1) * (count - 2) // 2])


def excess(measure: Measure, deviation: float) -> float:
    """The part of a deviation that counts.

    Example:
        >>> from expunge.auditing.measures import MEASURES
        >>> excess(MEASURES["test_accuracy"], 0.02), excess(MEASURES["asr"], -0.02)
        (-0.02, 0.02)
    """
    if measure.side == "both":
        return abs(deviation)
    return deviation if measure.side == "above" else -deviation


def mean_error(one: Compared) -> float:
    """The standard error of the retrained models' mean."""
    return max(stdev(one.retrained), one.step) / math.sqrt(len(one.retrained))


def findings(measures: Sequence[Compared], level: float = LEVEL) -> list[Finding]:
    """Every measure of a model, beside at least three retrained ones.

    Example:
        >>> from expunge.auditing.measures import MEASURES
        >>> retrained = (0.010, 0.012, 0.011, 0.013, 0.009)
        >>> found = findings([Compared(MEASURES["asr"], 0.02, 0.9, retrained)])[0]
        >>> found.outcome, round(found.margin, 3), found.usable
        ('within', 0.089, True)
    """
    deviations = {one.measure.name: abs(one.trained - fmean(one.retrained)) for one in measures}
    return [_finding(one, deviations, level, DOUBT / max(len(measures), 1)) for one in measures]


def _finding(one: Compared, deviations: dict[str, float], level: float, doubt: float) -> Finding:
    measure, count, mean = one.measure, len(one.retrained), fmean(one.retrained)
    spread = max(robust_spread(one.retrained), one.step)
    deviation = deviations.get(measure.unit, deviations[measure.name])
    if measure.margin is not None:
        margin, usable = measure.margin, True
    else:
        margin = max(SHARE * deviation, SPREADS * spread)
        usable = 0 < margin <= USABLE * deviation  # where all models have one value there is nothing to tell
    off, error = excess(measure, one.value - mean), mean_error(one)
    reach = value_beyond(level, count - 1) * error
    beyond_doubt = value_beyond(doubt / 2, count - 1) * error
    outcome: Outcome = "within" if off + reach <= margin else "outside" if off - beyond_doubt > margin > 0 else "open"
    return Finding(measure, one.value, one.trained, mean, spread, margin, reach, deviation, usable, outcome, count)
