"""Does a model behave like one more retrained model? One measure at a time, beside M retrained models.

A deviation counts where a further retrained model would hardly show it (``prediction``) and it is larger than the
measure's margin (``measures``). Over all measures Holm's procedure keeps the chance of any false alarm at a level.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from expunge.auditing.measures import MEASURES, Measure, Observed
from expunge.auditing.prediction import Prediction, as_if_further, holm
from expunge.errors import DataError

LEVEL = 0.02
"""The chance that an honest retrain is found to deviate in any measure, at most: of 100, 95 pass almost certainly."""


@dataclass(frozen=True)
class Noise:
    """How one measure varies over retrained models, on the scale where that is about normal."""

    measure: Measure
    further: Prediction

    @property
    def centre(self) -> float:
        """The retrained models' value."""
        return self.measure.natural(self.further.mean)

    def p_value(self, value: float) -> float:
        """The chance that a further retrained model deviates by as much beyond the margin."""
        return self.further.p_value(self._without_margin(value))

    def limits(self, level: float) -> tuple[float, float]:
        """The widened prediction interval."""
        low, high = self.further.limits(level)
        return (
            -math.inf if low == -math.inf else self.measure.natural(low) - self.measure.margin,
            math.inf if high == math.inf else self.measure.natural(high) + self.measure.margin,
        )

    def reach(self, level: float) -> float:
        """The smallest deviation from the centre that is told."""
        low, high = self.limits(level)
        return self.centre - low if self.measure.side == "below" else high - self.centre

    def caught(self, value: float, level: float) -> float:
        """How often a model of this value would be told."""
        return self.further.caught(self._without_margin(value) - self.further.mean, level)

    def honest_told(self, level: float) -> float:
        """How often a further retrained model is found to deviate by mistake: at most the level, less by the margin."""
        margin = self.measure.margin if self.measure.beside is None else 0.0  # on a log scale it is left out
        return dataclasses.replace(self.further, margin=margin).caught(0.0, level)

    def share_told(self, value: float, level: float) -> float:
        """The smallest share of a model's deviation that is still told; infinite where it has none that counts."""
        deviation = value - self.centre
        if self.measure.side == "below":
            deviation = -deviation
        elif self.measure.side == "both":
            deviation = abs(deviation)
        if deviation <= 0:
            return math.inf
        share = self.reach(level) / deviation
        return math.sqrt(share) if self.measure.is_divergence else share

    def needed(self, value: float, share: float, level: float) -> int | None:
        """How many retrained models would tell this share of the value's deviation."""
        kept = self.centre + (value - self.centre) * (share**2 if self.measure.is_divergence else share)
        return self.further.needed(self._without_margin(kept) - self.further.mean, level)

    def _without_margin(self, value: float) -> float:
        """The value, nearer to the centre by the margin, on the scale."""
        towards = math.copysign(min(self.measure.margin, abs(value - self.centre)), self.centre - value)
        return self.measure.scaled(value + towards)


def retrained_noise(retrained: Sequence[Observed]) -> list[Noise]:
    """The noise of every measure that these models have."""
    found = []
    for measure in MEASURES:
        values = spread_values(measure, retrained)
        if values is None:
            continue
        further = Prediction.of(values, side=measure.side, least_spread=_one_sample(measure, fmean(values), retrained))
        found.append(Noise(measure, further))
    return found


def _one_sample(measure: Measure, mean: float, retrained: Sequence[Observed]) -> float:
    """What one sample is worth, on the scale: a rate is not known to vary by less."""
    if measure.samples is None:
        return 0.0
    return mean - measure.scaled(measure.natural(mean) - 1 / measure.samples(retrained[0]))


def spread_values(measure: Measure, retrained: Sequence[Observed]) -> list[float] | None:
    """What each of the retrained models shows, on the measure's scale, as one more beside the others."""
    if measure.beside is not None:
        table = np.zeros((len(retrained), len(retrained)))
        for j, reference in enumerate(retrained):
            for i, model in enumerate(retrained):
                table[j, i] = measure.scaled(measure.beside(reference, model)) if i != j else 0.0
        return as_if_further(table)
    assert measure.alone is not None
    values = [measure.alone(model) for model in retrained]
    known = [measure.scaled(value) for value in values if value is not None]
    return known if len(known) == len(values) else None


def value_of(measure: Measure, model: Observed, retrained: Sequence[Observed]) -> float | None:
    """The model's value; beside each retrained model, the mean on the measure's scale."""
    if measure.beside is None:
        assert measure.alone is not None
        return measure.alone(model)
    return measure.natural(fmean(measure.scaled(measure.beside(other, model)) for other in retrained))


@dataclass(frozen=True)
class Finding:
    """One measure of one model beside the retrained ones.

    Attributes:
        measure: what was compared.
        value: the model's.
        retrained: the mean of the retrained models.
        low: below it a model is told for sure (the prediction interval at level / number of measures), maybe -inf.
        high: above it.
        p_value: the chance of such a deviation for a further retrained model.
        deviates: whether it was rejected by Holm's procedure.
        same_init: the standard deviation over models retrained from the training's own initialisation, if given.
    """

    measure: Measure
    value: float
    retrained: float
    low: float
    high: float
    p_value: float
    deviates: bool
    same_init: float | None = None


def findings(
    noise: Sequence[Noise],
    model: Observed,
    retrained: Sequence[Observed],
    level: float = LEVEL,
    same_init: Sequence[Observed] = (),
) -> list[Finding]:
    """Every measure of the model; those that deviate by Holm's procedure are marked."""
    values = {}
    for own in noise:
        value = value_of(own.measure, model, retrained)
        if value is None:
            raise DataError(f"The {own.measure.label} is missing for one model: measure it for all or for none.")
        values[own.measure.name] = value
    p_values = {own.measure.name: own.p_value(values[own.measure.name]) for own in noise}
    rejected = holm(p_values, level)
    found = []
    for own in noise:
        name, (low, high) = own.measure.name, own.limits(level / len(noise))
        spread = _same_init_spread(own.measure, same_init)
        found.append(
            Finding(own.measure, values[name], own.centre, low, high, p_values[name], name in rejected, spread)
        )
    return found


def _same_init_spread(measure: Measure, models: Sequence[Observed]) -> float | None:
    if len(models) < 2 or measure.alone is None:
        return None
    values = [value for model in models if (value := measure.alone(model)) is not None]
    return stdev(values) if len(values) == len(models) else None
