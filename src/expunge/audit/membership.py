"""Membership inference: can the loss tell the forgotten samples from samples nobody trained on?

Non-members must look like the members in everything but membership. A client of a non-IID federation has its own mix
of labels, and a poisoned one its own triggers: so non-members are weighted until each group (label, triggered or not)
counts as much as among the members. The value to compare with is the retrained model's, never 0.5 by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from expunge.errors import DataError


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
    scores = torch.cat([-members, -others]).numpy()
    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    weight = torch.cat([torch.full((len(members),), 1.0 / len(members), dtype=torch.float64), weights]).numpy()
    auc = float(roc_auc_score(truth, scores, sample_weight=weight))
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
        seen = np.unique(scores[chosen])
        candidates = np.concatenate([[seen[0]], (seen[1:] + seen[:-1]) / 2, [np.inf]])
        best = max(candidates, key=lambda limit: _balanced(scores[chosen] >= limit, truth[chosen], weight[chosen]))
        rates.append(_balanced(scores[used] >= best, truth[used], weight[used]))
    return float(np.mean(rates))


def _balanced(guess: np.ndarray, truth: np.ndarray, weight: np.ndarray) -> float:
    """Mean of the weighted hit rates on members and on non-members."""
    inside, outside = truth == 1, truth == 0
    hit = np.average(guess[inside], weights=weight[inside]) if inside.any() else 0.5
    correct_rejection = np.average(~guess[outside], weights=weight[outside]) if outside.any() else 0.5
    return float((hit + correct_rejection) / 2)
