"""Attacks taken apart: which samples, which clients are recognised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expunge.auditing.intervals import LEVEL, per_column_auc
from expunge.auditing.membership import Attack, measure_attack
from expunge.auditing.signals import Floats, Values, as_floats, as_masks
from expunge.errors import DataError


def per_sample(scores: Values, masks: Values) -> Floats:
    """AUC of each sample over models: the chance that one trained on it gives it the higher score.

    Args:
        scores: models x samples.
        masks: models x samples, true where the model was trained on the sample.

    Example:
        >>> per_sample(np.array([[2.0, 0.0], [1.0, 1.0]]), np.array([[True, True], [False, False]]))
        array([1., 0.])
    """
    table = as_floats(scores, "scores", dimensions=2)
    inside = as_masks(masks, table.shape)
    if not (inside.any(axis=0) & ~inside.all(axis=0)).all():
        raise DataError("Each sample needs scores of a model that was trained on it and of one that was not.")
    return per_column_auc(table, inside)


def per_client(
    members: Values, clients: Sequence[str], others: Values, weights: Values | None = None, level: float = LEVEL
) -> dict[str, Attack]:
    """The attack on each client's samples, against the same non-members.

    Args:
        members: scores of all clients' samples.
        clients: whose sample each is.
        others: scores of non-members.
        weights: of the non-members.
        level: of the intervals.

    Example:
        >>> found = per_client([2.0, 0.5], ["ada", "bob"], others=[1.0, 1.0])
        >>> {name: attack.auc.value for name, attack in found.items()}
        {'ada': 1.0, 'bob': 0.0}
    """
    inside = as_floats(members, "members' scores")
    owners = _owners(clients, len(inside))
    return {str(name): measure_attack(inside[owners == name], others, weights, level) for name in np.unique(owners)}


def client_scores(scores: Values, clients: Sequence[str]) -> dict[str, float]:
    """One score a client, the mean over its samples: whether the *client* took part, not whether a sample did.

    For log-likelihood ratios (LiRA) the mean is the joint test of all its samples, divided by their number so that
    large clients do not score high for their size.

    Example:
        >>> client_scores([1.0, 3.0, 5.0], ["ada", "ada", "bob"])
        {'ada': 2.0, 'bob': 5.0}
    """
    values = as_floats(scores, "scores")
    owners = _owners(clients, len(values))
    return {str(name): float(values[owners == name].mean()) for name in np.unique(owners)}


def _owners(clients: Sequence[str], count: int) -> np.ndarray:
    if len(clients) != count:
        raise DataError(f"There are {len(clients)} clients' names for {count} scores: name the owner of each.")
    return np.asarray(clients, dtype=str)
