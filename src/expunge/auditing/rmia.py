"""The robust membership inference attack (Zarifzadeh et al. 2024): each sample against a population."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from expunge.auditing.signals import Booleans, Floats, Values, as_floats, as_masks
from expunge.errors import DataError, RequestError


def rmia(
    target: Values,
    shadows: Values,
    masks: Values,
    population: Values,
    population_shadows: Values,
    population_masks: Values | None = None,
    gamma: float = 1.0,
    online: bool = True,
    offline_a: float = 0.3,
) -> Floats:
    """Scores of the samples in [0, 1], large for members.

    The score of x is the share of population samples z with ``(p(x|target) / p(x)) / (p(z|target) / p(z)) > gamma``,
    where ``p(x)`` is the mean over a world with and a world without x: ``(p_in + p_out) / 2`` from the shadows.
    Offline, and for a population that no shadow was trained on, ``p_in`` is guessed as ``a p_out + 1 - a``.

    With one population for all samples the score rises with ``p(x|target) / p(x)`` alone: gamma and the population give
    the threshold its meaning, they do not change the order. A gamma far from 1 makes ties (all 0 or all 1) where a
    model generalises well, so the default is 1.

    Args:
        target: ``log p_y`` of each sample under the target (minus the loss).
        shadows: shadows x samples, the same.
        masks: shadows x samples, true where the shadow was trained on the sample.
        population: ``log p_y`` of samples that the target was not trained on, the more the finer the score.
        population_shadows: shadows x population, the same.
        population_masks: true where a shadow was trained on the population sample; nowhere by default.
        gamma: how much more a sample must be favoured than z.
        online: whether shadows that were trained on the sample are used.
        offline_a: how much of ``p_in`` is as ``p_out``; 0 is a model that fits everything, 1 one that fits nothing.

    Example:
        >>> shadows = np.log([[0.9, 0.4], [0.3, 0.8]])
        >>> masks = np.array([[True, False], [False, True]])
        >>> rmia(np.log([0.9, 0.4]), shadows, masks, np.log([0.5, 0.6]), np.log([[0.5, 0.5], [0.6, 0.6]]))
        array([1., 0.])
    """
    if not gamma > 0 or not 0 <= offline_a <= 1:
        raise RequestError(f"RMIA needs gamma above 0 and offline_a in [0, 1], not {gamma} and {offline_a}.")
    table, signals = _paired(shadows, target, "")
    inside = as_masks(masks, table.shape)
    other_table, other_signals = _paired(population_shadows, population, "population's ")
    if len(other_table) != len(table):
        raise DataError(f"The population has signals of {len(other_table)} shadows, the samples of {len(table)}.")
    nowhere = np.zeros(other_table.shape, dtype=bool)
    other_inside = nowhere if population_masks is None else as_masks(population_masks, other_table.shape)
    ratios = signals - _log_marginal(table, inside, online, offline_a)
    other_online = online and population_masks is not None
    other_ratios = np.sort(other_signals - _log_marginal(other_table, other_inside, other_online, offline_a))
    below = np.searchsorted(other_ratios, ratios - np.log(gamma), side="left")
    return np.asarray(below / len(other_ratios), dtype=np.float64)


def _log_marginal(table: Floats, inside: Booleans, online: bool, offline_a: float) -> Floats:
    """``log p(x)`` of each sample."""
    outside = _log_mean(table, ~inside, "without")
    if online:
        both = np.stack([_log_mean(table, inside, "with"), outside])
        return np.asarray(logsumexp(both, axis=0) - np.log(2), dtype=np.float64)
    return np.log((1 + offline_a) / 2 * np.exp(outside) + (1 - offline_a) / 2)


def _log_mean(table: Floats, used: Booleans, which: str) -> Floats:
    counts = used.sum(axis=0)
    if counts.min() < 1:
        raise DataError(f"Every sample needs at least 1 shadow {which} it: train more shadows, or attack offline.")
    return np.asarray(logsumexp(table, axis=0, b=used) - np.log(counts), dtype=np.float64)


def _paired(shadows: Values, target: Values, whose: str) -> tuple[Floats, Floats]:
    table = as_floats(shadows, f"{whose}shadow signals", dimensions=2)
    signals = as_floats(target, f"{whose}target signals")
    if len(signals) != table.shape[1]:
        raise DataError(f"The target has signals of {len(signals)} samples, the shadows of {table.shape[1]}.")
    if max(signals.max(), table.max()) > 0:
        raise DataError("RMIA takes log-probabilities, which are never above 0: give minus the loss.")
    return table, signals
