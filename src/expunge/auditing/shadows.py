"""Shadow models: who is trained on what, and the attack that learns from their outputs (Shokri et al. 2017).

Nothing is trained here but the attack's own small classifiers: callers train the shadows and bring their outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from expunge.auditing.signals import Booleans, Floats, Values, as_masks, modified_entropy, scaled_confidence
from expunge.errors import DataError, RequestError

ENOUGH = 50  # members, and as many non-members, of a class that gets its own attack classifier

NEWTON_STEPS, PRECISION = 100, 1e-12
"""At most so many Newton steps, and none that promises to lower the value by a smaller part of itself."""

LEAST_CURVATURE = 1e-9
"""Of the intercept, which has no ridge, where a classifier is sure of every row."""


def half_splits(shadows: int, samples: int, seed: int) -> Booleans:
    """Which shadow is trained on which sample: each sample by a random half of the shadows (rounded down).

    The samples may be clients: a shadow federation is then trained by about half of them. Draw a target's half apart
    from these: one of the shadows, taken out as a target, leaves its members a shadow less on that side, and even
    samples that nobody saw no longer give an AUC of 0.5.

    Returns:
        masks, shadows x samples.

    Example:
        >>> half_splits(shadows=4, samples=3, seed=0).sum(axis=0)
        array([2, 2, 2])
    """
    if shadows < 2 or samples < 2:
        raise RequestError(f"Half splits need at least 2 shadows and 2 samples, not {shadows} and {samples}.")
    places = np.random.default_rng(seed).random((shadows, samples)).argsort(axis=0)
    masks = places < shadows // 2
    if not (masks.any(axis=1) & ~masks.all(axis=1)).all():
        raise RequestError(f"With {samples} samples and seed {seed} a shadow gets none or all: give more samples.")
    return np.asarray(masks, dtype=np.bool_)


def shadow_model_attack(
    shadow_logits: Tensor, masks: Values, labels: Tensor, target_logits: Tensor, target_labels: Tensor
) -> Floats:
    """Log-odds of membership of the target's samples, from classifiers trained on the shadows' outputs.

    A classifier for each class with at least ``ENOUGH`` members and non-members among the shadows' outputs, one for
    all other classes together. Each is a logistic regression (Shokri et al. take a small network, which needs more
    outputs than most federations give) on the scaled confidence of the label, the modified entropy and the
    log-probabilities in falling order.

    Args:
        shadow_logits: shadows x samples x classes.
        masks: shadows x samples, true where the shadow was trained on the sample.
        labels: of the shadows' samples.
        target_logits: samples x classes; these samples may be others than the shadows'.
        target_labels: their labels.

    Example:
        >>> member, other = torch.tensor([[4.0, 0.0]]), torch.tensor([[1.0, 0.0]])
        >>> logits, masks = torch.stack([member, other]), np.array([[True], [False]])
        >>> label = torch.tensor([0])
        >>> bool(shadow_model_attack(logits, masks, label, member, label) > 0)
        True
    """
    if shadow_logits.ndim != 3 or shadow_logits.shape[2] != target_logits.shape[-1]:
        raise DataError(
            f"Shadows' outputs must be shadows x samples x the target's {target_logits.shape[-1]} classes, "
            f"not {tuple(shadow_logits.shape)}."
        )
    shadows, samples, classes = shadow_logits.shape
    if labels.shape != (samples,):
        raise DataError(f"The shadows' {samples} samples need one label each, not {tuple(labels.shape)}.")
    truth = as_masks(masks, (shadows, samples)).reshape(-1)
    if truth.all() or not truth.any():
        raise DataError("The shadows' outputs need both members and non-members to learn from.")
    known, wanted = labels.cpu().repeat(shadows), target_labels.cpu()
    if not bool(torch.isin(wanted, known).all()):
        raise DataError("The target has labels that no shadow sample has: give shadows of the same label set.")
    features = _features(shadow_logits.reshape(-1, classes).cpu(), known)
    queries = _features(target_logits.cpu(), wanted)
    return _log_odds(features, truth, known.numpy(), queries, wanted.numpy())


def _log_odds(features: Floats, truth: Booleans, known: np.ndarray, queries: Floats, wanted: np.ndarray) -> Floats:
    scores = np.empty(len(queries))
    rest = np.ones(len(queries), dtype=bool)
    for label in np.unique(wanted):
        own = known == label
        if min(truth[own].sum(), (~truth[own]).sum()) >= ENOUGH:
            asked = wanted == label
            scores[asked] = _classifier(features[own], truth[own])(queries[asked])
            rest &= ~asked
    if rest.any():
        scores[rest] = _classifier(features, truth)(queries[rest])
    return scores


def _classifier(features: Floats, truth: Booleans) -> Callable[[Floats], Floats]:
    """Log-odds by logistic regression on standardised features, with a ridge of 1 on all but the intercept."""
    mean, spread = features.mean(axis=0), features.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    rows = np.column_stack([(features - mean) / spread, np.ones(len(features))])
    signs = np.where(truth, 1.0, -1.0)
    # Members and non-members count alike, whatever their numbers: classes' scores must share one zero.
    weights = len(truth) / 2 / np.where(truth, truth.sum(), (~truth).sum())

    def penalised(beta: Floats) -> tuple[float, Floats]:
        margins = signs * (rows @ beta)
        ridge = np.append(beta[:-1], 0.0)
        value = weights @ np.logaddexp(0.0, -margins) + 0.5 * ridge @ ridge
        return float(value), rows.T @ (-weights * signs * expit(-margins)) + ridge

    def curvature(beta: Floats) -> Floats:
        chances = expit(rows @ beta)
        flat = np.full(len(beta), 1.0)
        flat[-1] = LEAST_CURVATURE
        return np.asarray((rows * (weights * chances * (1 - chances))[:, None]).T @ rows + np.diag(flat))

    beta = newton_minimum(penalised, curvature, np.zeros(rows.shape[1]))
    return lambda queries: np.asarray((queries - mean) / spread @ beta[:-1] + beta[-1], dtype=np.float64)


def newton_minimum(
    objective: Callable[[Floats], tuple[float, Floats]], curvature: Callable[[Floats], Floats], start: Floats
) -> Floats:
    """Where a smooth, strictly convex function is lowest, by Newton steps, each shortened until it lowers the value.

    Example:
        >>> lowest = newton_minimum(lambda x: (float(x @ x), 2 * x), lambda x: 2 * np.eye(2), np.array([3.0, -1.0]))
        >>> lowest.tolist()
        [0.0, 0.0]
    """
    beta, (value, gradient) = start, objective(start)
    for _ in range(NEWTON_STEPS):
        step = np.linalg.solve(curvature(beta), gradient)
        promised, length = float(gradient @ step), 1.0
        if promised <= PRECISION * (1 + abs(value)):
            break
        while length > PRECISION:
            tried = objective(beta - length * step)
            if tried[0] <= value - 1e-4 * length * promised:
                break
            length /= 2
        else:
            break  # rounding: nothing lower can be found
        beta, (value, gradient) = beta - length * step, tried
    return beta


def _features(logits: Tensor, labels: Tensor) -> Floats:
    sorted_logs = logits.detach().double().log_softmax(dim=1).sort(dim=1, descending=True).values.numpy()
    own = [scaled_confidence(logits, labels), modified_entropy(logits, labels)]
    return np.column_stack([*own, sorted_logs])
