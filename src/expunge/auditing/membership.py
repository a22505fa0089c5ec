"""Membership inference: can the forgotten samples be told from samples nobody trained on?

Every attack ends in a score for each sample, large for a member (``signals``, ``lira``, ``rmia``, ``shadows``);
``measure_attack`` says how far the scores get.

Non-members must look like the members in everything but membership. A client of a non-IID federation has its own mix
of labels, and a poisoned one its own triggers: so non-members are weighted until each group (label, triggered or not)
counts as much as among the members. The value to compare with is the retrained model's, never 0.5 by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from expunge.auditing.intervals import LEVEL, Interval, auc_interval, clopper_pearson, delong_covariance, placements
from expunge.auditing.signals import Floats, Values, as_floats
from expunge.errors import DataError

FALSE_ALARMS = (0.01, 0.001)


@dataclass(frozen=True)
class Attack:
    """How well scores tell members from non-members.

    Attributes:
        auc: chance that a member scores higher than a non-member (DeLong's variance, see ``auc_interval``).
        tpr_at_1_percent: share of the members found while at most 1% of the non-members are taken for members
            (Clopper-Pearson; the threshold is taken as given). None where there are fewer than 100 non-members: not
            one false alarm could be allowed.
        tpr_at_01_percent: the same for 0.1%, from 1000 non-members on.
        members: how many.
        others: how many non-members; where they are weighted, how many equal ones are worth as much.
    """

    auc: Interval
    tpr_at_1_percent: Interval | None
    tpr_at_01_percent: Interval | None
    members: int
    others: float


def measure_attack(members: Values, others: Values, weights: Values | None = None, level: float = LEVEL) -> Attack:
    """AUC and the true positive rate at few false positives, with intervals.

    Args:
        members: scores of the samples that may have been trained on; large means member.
        others: scores of samples that nobody trained on.
        weights: of the non-members, such as ``matched_weights``; all alike where none are given.
        level: of the intervals.

    Example:
        >>> found = measure_attack(members=[3.0, 2.0, 1.0], others=[1.5, 0.0])
        >>> round(found.auc.value, 4), found.tpr_at_1_percent
        (0.8333, None)
    """
    inside, outside = as_floats(members, "members' scores"), as_floats(others, "non-members' scores")
    mass = checked_weights(weights, len(outside))
    worth = float(1 / np.square(mass).sum())  # Kish: as many equal weights would be as certain
    parts = placements(inside, outside, mass)
    auc = auc_interval(
        float(parts[0].mean()), len(inside), worth, level, variance=delong_covariance(parts, parts, mass)
    )
    first, second = (_true_positives(inside, outside, mass, worth, rate, level) for rate in FALSE_ALARMS)
    return Attack(auc, first, second, len(inside), worth)


def threshold(others: Floats, weights: Floats, false_alarms: float) -> float:
    """The smallest score above which at most this share of the non-members lies.

    Example:
        >>> threshold(np.array([1.0, 2.0, 3.0, 4.0]), np.full(4, 0.25), false_alarms=0.25)
        3.0
    """
    scores, which = np.unique(others, return_inverse=True)
    mass = np.bincount(which, weights=weights)
    above = mass.sum() - np.cumsum(mass)
    return float(scores[np.argmax(above <= false_alarms + 1e-9)])  # nothing is above the last: one always fits


def checked_weights(weights: Values | None, count: int) -> Floats:
    """Weights that add up to 1; equal ones where none are given.

    Example:
        >>> checked_weights([1.0, 3.0], count=2)
        array([0.25, 0.75])
    """
    mass = np.ones(count) if weights is None else as_floats(weights, "weights")
    if len(mass) != count or mass.min() < 0 or mass.sum() <= 0:
        raise DataError(f"The {count} non-members need a weight each, not negative and not all zero.")
    return np.asarray(mass / mass.sum(), dtype=np.float64)


@dataclass(frozen=True)
class Membership:
    """What a loss-threshold attack reaches (Yeom et al. 2018).

    Attributes:
        auc: chance that a member has a smaller loss than a matched non-member.
        success_rate: balanced accuracy of a threshold chosen on one half of the samples and used on the other.
    """

    auc: float
    success_rate: float


def loss_threshold_attack(
    member_losses: Tensor, member_groups: Tensor, other_losses: Tensor, other_groups: Tensor, seed: int = 0
) -> Membership:
    """Attack with the loss as the score.

    Args:
        member_losses: losses of the samples that may have been trained on.
        member_groups: an integer for each: its label, or label and trigger.
        other_losses: losses of samples that nobody trained on.
        other_groups: their groups.
        seed: of the halves.

    Example:
        >>> groups = torch.zeros(4, dtype=torch.int64)
        >>> members, others = torch.tensor([0.1, 0.1, 0.2, 0.2]), torch.tensor([1.0, 1.0, 2.0, 2.0])
        >>> loss_threshold_attack(members, groups, others, groups)
        Membership(auc=1.0, success_rate=1.0)
    """
    if len(member_losses) != len(member_groups) or len(other_losses) != len(other_groups):
        raise DataError("Each loss needs a group: give as many groups as losses.")
    known = torch.isin(member_groups, other_groups)
    if not bool(known.any()):
        raise DataError("No non-member has a label that a member has: give non-members with the forgotten labels.")
    members, groups = member_losses[known].double(), member_groups[known]
    weights = matched_weights(groups, other_groups)
    used = weights > 0
    others, weights = other_losses[used].double(), weights[used]
    inside, outside = (-members).numpy(), (-others).numpy()
    auc = float(placements(inside, outside, weights.numpy())[0].mean())
    scores, truth = np.concatenate([inside, outside]), np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    weight = torch.cat([torch.full((len(members),), 1.0 / len(members), dtype=torch.float64), weights]).numpy()
    return Membership(auc, _success_rate(scores, truth, weight, seed))


def matched_weights(member_groups: Tensor, other_groups: Tensor) -> Tensor:
    """Weights of non-members, adding up to 1, under which their groups are distributed as the members' are.

    Example:
        >>> matched_weights(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 1, 2]))
        tensor([0.7500, 0.1250, 0.1250, 0.0000], dtype=torch.float64)
    """
    weights = torch.zeros(len(other_groups), dtype=torch.float64)
    for group in torch.unique(member_groups):
        own = other_groups == group
        if own.any():
            weights[own] = (member_groups == group).double().mean() / own.sum()
    return weights / weights.sum()


def _success_rate(scores: np.ndarray, truth: np.ndarray, weight: np.ndarray, seed: int) -> float:
    order = np.random.default_rng(seed).permutation(len(scores))
    halves = (order[::2], order[1::2])
    rates = []
    for chosen, used in (halves, halves[::-1]):
        best = _best_threshold(scores[chosen], truth[chosen], weight[chosen])
        rates.append(_balanced(scores[used] >= best, truth[used], weight[used]))
    return float(np.mean(rates))


def _best_threshold(scores: np.ndarray, truth: np.ndarray, weight: np.ndarray) -> float:
    """The threshold, between two scores or beside all of them, with the largest balanced accuracy; the lowest such."""
    seen, which = np.unique(scores, return_inverse=True)
    candidates = np.concatenate([[seen[0]], (seen[1:] + seen[:-1]) / 2, [np.inf]])
    below = []
    for own in (truth == 1, truth == 0):
        mass = np.bincount(which[own], weights=weight[own], minlength=len(seen))
        below.append(
            np.concatenate([[0.0], np.cumsum(mass) / mass.sum()]) if own.any() else np.full(len(candidates), 0.5)
        )
    members, others = below
    return float(candidates[np.argmax(np.round(others - members, 12))])


def _balanced(guess: np.ndarray, truth: np.ndarray, weight: np.ndarray) -> float:
    """Mean of the weighted hit rates on members and on non-members."""
    inside, outside = truth == 1, truth == 0
    hit = np.average(guess[inside], weights=weight[inside]) if inside.any() else 0.5
    correct_rejection = np.average(~guess[outside], weights=weight[outside]) if outside.any() else 0.5
    return float((hit + correct_rejection) / 2)


def _true_positives(
    members: Floats, others: Floats, weights: Floats, worth: float, false_alarms: float, level: float
) -> Interval | None:
    if worth * false_alarms < 1 - 1e-9:
        return None
    found = int((members > threshold(others, weights, false_alarms)).sum())
    return clopper_pearson(found, len(members), level)
