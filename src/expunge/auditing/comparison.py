"""One attack on the trained, the unlearned and the retrained models: the target is the retrained value, never 0.5.

On a model that never saw a client's samples an attack still reaches its own value, because the samples differ from the
non-members in more than membership; and a value below it is a trace of forgetting, not better forgetting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from expunge.auditing.intervals import (
    LEVEL,
    Interval,
    auc_interval,
    clopper_pearson,
    delong_covariance,
    gap_interval,
    placements,
)
from expunge.auditing.membership import FALSE_ALARMS, Attack, checked_weights, measure_attack, threshold
from expunge.auditing.signals import Floats, Values, as_floats
from expunge.auditing.student import value_beyond
from expunge.errors import DataError


@dataclass(frozen=True, eq=False)
class Scores:
    """One model's scores of the members and of the non-members; large means member."""

    members: Values
    others: Values


@dataclass(frozen=True)
class Gap:
    """How far a model is from the retrained ones: own value minus theirs, with its interval."""

    auc: Interval
    tpr_at_1_percent: Interval | None


@dataclass(frozen=True)
class Comparison:
    """One attack on all models.

    Attributes:
        trained: the attack on the model before unlearning.
        unlearned: on the one after.
        retrained: on each retrained model.
        do_nothing: the trained model's gap to the retrained ones; where its interval covers 0, there was nothing to
            see, and the next one proves nothing.
        gap: the unlearned model's gap.
    """

    trained: Attack
    unlearned: Attack
    retrained: tuple[Attack, ...]
    do_nothing: Gap
    gap: Gap


def beside_retrained(
    trained: Scores,
    unlearned: Scores,
    retrained: Sequence[Scores],
    weights: Values | None = None,
    level: float = LEVEL,
) -> Comparison:
    """The attack on all models side by side, and the gaps to the retrained value.

    All must score the same samples: what these have in common then cancels in the gap. From two retrained models on,
    the interval also holds the noise of retraining: ``t s sqrt(1 + 1/M)``, since an unlearned model as good as a
    retrained one would still be one more draw. With a single one it holds the samples' noise only, and is too narrow.

    Args:
        trained: scores under the model before unlearning.
        unlearned: under the one after.
        retrained: under each model that was retrained without the members.
        weights: of the non-members, such as ``matched_weights``.
        level: of the intervals.

    Example:
        >>> seen = Scores(members=[3.0, 4.0, 5.0, 6.0], others=[0.0, 1.0, 2.0, 3.5])
        >>> never = Scores(members=[1.0, 2.0, 1.0, 2.0], others=[2.0, 1.0, 2.0, 1.0])
        >>> found = beside_retrained(trained=seen, unlearned=never, retrained=[never])
        >>> found.do_nothing.auc.value, found.gap.auc.value
        (0.4375, 0.0)
    """
    if not retrained:
        raise DataError("The value to reach is the retrained model's: give at least one retrained model.")
    models = [_Scored.of(scores, weights) for scores in (trained, unlearned, *retrained)]
    if len({(len(model.members), len(model.others)) for model in models}) > 1:
        raise DataError("The models' scores are of different numbers of samples: score the same samples with each.")
    before, after, others = models[0], models[1], models[2:]
    attacks = [measure_attack(model.members, model.others, model.weights, level) for model in models]
    return Comparison(
        attacks[0], attacks[1], tuple(attacks[2:]), _gap(before, others, level), _gap(after, others, level)
    )


@dataclass(frozen=True, eq=False)
class _Scored:
    """A model's scores, and of each sample its part in the AUC and in the true positive rate."""

    members: Floats
    others: Floats
    weights: Floats
    above: Floats
    below: Floats
    hits: Floats

    @classmethod
    def of(cls, scores: Scores, weights: Values | None) -> _Scored:
        members, others = as_floats(scores.members, "members' scores"), as_floats(scores.others, "non-members' scores")
        mass = checked_weights(weights, len(others))
        hits = (members > threshold(others, mass, FALSE_ALARMS[0])).astype(np.float64)
        return cls(members, others, mass, *placements(members, others, mass), hits)


def _gap(own: _Scored, retrained: Sequence[_Scored], level: float) -> Gap:
    worth = float(1 / np.square(own.weights).sum())
    count = len(own.members)
    mine = own.above, own.below
    theirs = np.mean([m.above for m in retrained], axis=0), np.mean([m.below for m in retrained], axis=0)
    first, second = (delong_covariance(part, part, own.weights) for part in (mine, theirs))
    aucs = [float(model.above.mean()) for model in retrained]
    auc = gap_interval(
        auc_interval(float(own.above.mean()), count, worth, level, variance=first),
        auc_interval(min(fmean(aucs), 1.0), count, worth, level, variance=second),
        _ratio(delong_covariance(mine, theirs, own.weights), first, second),
        _retrain_noise(aucs, level),
    )
    if worth * FALSE_ALARMS[0] < 1 - 1e-9:
        return Gap(auc, None)
    hits = np.mean([model.hits for model in retrained], axis=0)
    tpr = gap_interval(
        clopper_pearson(float(own.hits.sum()), count, level),
        clopper_pearson(min(float(hits.sum()), count), count, level),
        _ratio(_covariance(own.hits, hits), _covariance(own.hits, own.hits), _covariance(hits, hits)),
        _retrain_noise([float(model.hits.mean()) for model in retrained], level),
    )
    return Gap(auc, tpr)


def _covariance(first: Floats, second: Floats) -> float:
    return float(np.mean((first - first.mean()) * (second - second.mean())))


def _ratio(both: float, first: float, second: float) -> float:
    """A correlation; 0, which is the wider, where one of the two does not vary."""
    if first <= 0 or second <= 0:
        return 0.0
    return float(np.clip(both / math.sqrt(first * second), -1.0, 1.0))


def _retrain_noise(values: Sequence[float], level: float) -> float:
    count = len(values)
    if count < 2:
        return 0.0
    return value_beyond((1 - level) / 2, count - 1) * stdev(values) * math.sqrt(1 + 1 / count)
