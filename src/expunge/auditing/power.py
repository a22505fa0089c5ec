"""What so many retrained models can tell: the power of a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expunge.auditing.equivalence import Finding, Noise

KEPT_SHARE = 0.5
"""EQUIVALENT needs that a model which kept this share of the trained model's deviation would have been told."""


@dataclass(frozen=True)
class Power:
    """What so many retrained models can tell.

    Attributes:
        retrains: how many there are.
        honest_passes: chance that a further retrained model is found to deviate nowhere; a lower bound.
        nothing_caught: chance that a model that forgot nothing is told by the sharpest measure.
        sharpest: the name of the measure of forgetting that tells the smallest share of the trained model's deviation.
        share_told: that share; infinite where the trained model does not deviate.
        smallest_told: for each measure, the smallest deviation that is told.
        needed: retrained models that it takes to tell a model which kept half; None where no number does.
    """

    retrains: int
    honest_passes: float
    nothing_caught: float
    sharpest: str
    share_told: float
    smallest_told: dict[str, float]
    needed: int | None

    @property
    def sentence(self) -> str:
        """For a reader."""
        text = (
            f"With {self.retrains} retrained models an honest retrain passes with a chance of at least "
            f"{self.honest_passes:.1%}, and doing nothing is caught with one of {self.nothing_caught:.1%}"
        )
        if self.share_told >= 1:
            return f"{text}: what the trained model knows of the data is too little to be told."
        return (
            f"{text}; what kept more than {self.share_told:.0%} of the trained model's deviation is told "
            f"({self.sharpest})."
        )


def power_of(noise: Sequence[Noise], nothing: Sequence[Finding], level: float) -> Power:
    """What can be told, from the noise and from the trained model's findings."""
    each = level / len(noise)
    values = {finding.measure.name: finding.value for finding in nothing}
    telling = [own for own in noise if own.measure.about_forgetting]
    sharpest = min(telling, key=lambda own: own.share_told(values[own.measure.name], each))
    value = values[sharpest.measure.name]
    needs = [own.needed(values[own.measure.name], KEPT_SHARE, each) for own in telling]
    return Power(
        retrains=noise[0].further.count,
        honest_passes=max(0.0, 1 - sum(own.honest_told(each) for own in noise)),
        nothing_caught=sharpest.caught(value, each),
        sharpest=sharpest.measure.label,
        share_told=sharpest.share_told(value, each),
        smallest_told={own.measure.name: own.reach(each) for own in noise},
        needed=min((count for count in needs if count is not None), default=None),
    )
