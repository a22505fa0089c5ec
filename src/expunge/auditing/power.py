"""What so many retrained models can tell: the power of a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from expunge.auditing.margins import LEVEL, Finding
from expunge.auditing.student import chance_beyond, value_beyond


@dataclass(frozen=True)
class Power:
    """What so many retrained models can tell.

    Attributes:
        retrains: how many there are.
        honest_passes: chance that a further retrained model is found within all margins; a lower bound.
        sharpest: the label of the usable measure of forgetting with the smallest margin beside the deviation.
        share: that margin as a share of what there was to forget; None where no measure is usable.
        left_out: labels of measures of forgetting that are too noisy here to carry a claim.
        level: the chance that a model at the edge of its margin passes; less at every further attempt.
    """

    retrains: int
    honest_passes: float
    sharpest: str
    share: float | None
    left_out: tuple[str, ...]
    level: float = LEVEL

    @property
    def sentence(self) -> str:
        """For a reader."""
        without = f" Too noisy here and left out: {', '.join(self.left_out)}." if self.left_out else ""
        if self.share is None:
            return f"With {self.retrains} retrained models no measure of forgetting is sharp enough.{without}"
        return (
            f"With {self.retrains} retrained models, one that kept more than {self.share:.0%} of what the trained model"
            f" shows is not called EQUIVALENT, but for a chance of {100 * self.level:g}% ({self.sharpest}); an honestly"
            f" retrained model is, with a chance of about {self.honest_passes:.0%} or more.{without}"
        )


def power_of(found: Sequence[Finding], retrains: int, level: float = LEVEL) -> Power:
    """What can be told at a level, from the noise and from the trained model's deviations."""
    forgetting = [one for one in found if one.measure.about_forgetting]
    usable = [one for one in forgetting if one.usable]
    left_out = tuple(one.measure.label for one in forgetting if not one.usable)
    claimed = [one for one in found if one.usable]
    passes = max(0.0, 1 - sum(1 - honest_passes(one) for one in claimed))
    if not usable:
        return Power(retrains, 0.0, "", None, left_out, level)
    sharpest = min(usable, key=lambda one: one.margin / one.deviation)
    return Power(retrains, passes, sharpest.measure.label, sharpest.margin / sharpest.deviation, left_out, level)


def honest_passes(one: Finding) -> float:
    """The chance that a further retrained model is found within the margin of one measure."""
    room, spread = one.margin - one.reach, one.spread * math.sqrt(1 + 1 / one.models)
    if spread == 0:
        return 1.0 if room >= 0 else 0.0
    beyond = chance_beyond(room / spread, one.models - 1)
    return 1 - (2 * beyond if one.measure.side == "both" else beyond) if room >= 0 else 0.0


def models_needed(one: Finding, level: float = LEVEL, most: int = 50) -> int | None:
    """How many more retrained models would bring this value within its margin.

    The spread is taken as it is known; None where no number would.
    """
    if not one.usable:
        return None
    off = one.excess
    if off >= one.margin:
        return None
    for count in range(one.models + 1, most + 1):
        shrunk = one.reach * math.sqrt(one.models / count) * _quantile(count, level) / _quantile(one.models, level)
        if off + shrunk <= one.margin:
            return count - one.models
    return None


def _quantile(count: int, level: float) -> float:
    return value_beyond(level, count - 1)
