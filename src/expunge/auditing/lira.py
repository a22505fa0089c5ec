"""The likelihood-ratio attack (Carlini et al. 2022), and its form for unlearning, U-LiRA (Hayes et al. 2024).

Both ask of each sample: is its signal under the target more like that of models that had it, or of models that had
not? Each side is a normal distribution whose mean comes from the shadows of that sample; its variance is estimated

- ``per-example``: from the same few shadows. Right with many; with few, a sample whose shadows happen to agree looks
  certain, and the ratio is mostly noise.
- ``global``: one for all samples, pooled from the squared distances to each sample's own mean.
- ``shrunk``: between the two, ``(d0 s0^2 + d s^2) / (d0 + d)`` with d the sample's own degrees of freedom. How much
  d0 the common s0^2 counts is learned from how differently the samples vary (Smyth 2004, "moderated" variances: s^2 is
  taken to be a scaled F variable, and d0 and s0^2 are fitted to the mean and variance of log s^2). Where the samples
  vary no more than chance makes them, d0 is infinite and this is ``global``.

The default is ``shrunk`` below 64 shadows, ``per-example`` from there.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, polygamma

from expunge.auditing.signals import Booleans, Floats, Values, as_floats, as_masks
from expunge.errors import DataError, RequestError

VARIANCES = ("per-example", "global", "shrunk")
MANY_SHADOWS = 64
LEAST = 2  # shadows on each side of each sample: a mean and something to vary around it


def lira(target: Values, shadows: Values, masks: Values, online: bool = True, variance: str | None = None) -> Floats:
    """Scores of the samples, large for members.

    Online: ``log N(t; mu_in, s_in^2) - log N(t; mu_out, s_out^2)``. Offline only shadows without the sample are used:
    ``(t - mu_out) / s_out``, which puts samples in the order of Carlini's ``Pr[N(mu_out, s_out^2) < t]`` without
    rounding the surest to 1.

    Args:
        target: the target's signal of each sample, best the scaled confidence; large means member.
        shadows: shadows x samples, the same signal.
        masks: shadows x samples, true where the shadow was trained on the sample.
        online: whether shadows that were trained on the sample are used.
        variance: one of ``VARIANCES``; by the number of shadows where none is named.

    Example:
        >>> shadows = np.array([[5.0, 1.0], [6.0, 2.0], [0.0, 5.0], [1.0, 6.0]])
        >>> masks = np.array([[True, False], [True, False], [False, True], [False, True]])
        >>> lira([5.5, 1.5], shadows, masks, variance="global")  # like a member, like a non-member
        array([ 25., -16.])
    """
    table = as_floats(shadows, "shadows' signals", dimensions=2)
    signals, inside = _target(target, table), as_masks(masks, table.shape)
    mode = _variance(variance, len(table))
    mean_out, variance_out = _moments(table, ~inside, mode, "without")
    if not online:
        return np.asarray((signals - mean_out) / np.sqrt(variance_out), dtype=np.float64)
    return _log_ratio(signals, _moments(table, inside, mode, "with"), (mean_out, variance_out))


def u_lira(
    target: Values,
    unlearned: Values,
    retrained: Values,
    forgotten: Values | None = None,
    absent: Values | None = None,
    variance: str | None = None,
) -> Floats:
    """Scores of the samples, large where the target looks unlearned rather than retrained.

    ``log N(t; mu_unlearned, s^2) - log N(t; mu_retrained, s^2)``: a weaker attack that does not know how unlearning
    leaves its traces would call a sample forgotten that is only disturbed. To judge a method, measure the scores of
    unlearned targets (members) against those of retrained targets (non-members) on the same samples. Samples share
    what their target has: for an honest interval take few of each of many targets.

    Args:
        target: the target's signal of each sample.
        unlearned: shadows x samples; models that were trained with the samples and then made to forget them.
        retrained: shadows x samples; models that were trained without them.
        forgotten: shadows x samples, true where an unlearned shadow did forget the sample; everywhere by default.
        absent: shadows x samples, true where a retrained shadow was trained without the sample; everywhere by default.
        variance: one of ``VARIANCES``; by the number of shadows where none is named.

    Example:
        >>> unlearned, retrained = np.array([[2.0], [4.0]]), np.array([[-2.0], [0.0]])
        >>> u_lira([3.0], unlearned, retrained)  # (4^2 - 0^2) / (2 s^2), s^2 = 2
        array([4.])
    """
    first = as_floats(unlearned, "unlearned shadows' signals", dimensions=2)
    second = as_floats(retrained, "retrained shadows' signals", dimensions=2)
    signals = _target(target, first)
    _target(target, second)
    gone = np.ones(first.shape, dtype=bool) if forgotten is None else as_masks(forgotten, first.shape)
    never = np.ones(second.shape, dtype=bool) if absent is None else as_masks(absent, second.shape)
    mode = _variance(variance, len(first) + len(second))
    return _log_ratio(signals, _moments(first, gone, mode, "that forgot"), _moments(second, never, mode, "without"))


def moderated_variances(variances: Floats, freedom: Floats) -> Floats:
    """Sample variances drawn towards a common one, as far as chance explains their differences (Smyth 2004).

    Args:
        variances: unbiased, one a sample.
        freedom: degrees of freedom of each.

    Example:
        >>> moderated_variances(np.array([1.0, 1.1, 0.9]), np.array([4.0, 4.0, 4.0]))  # no more apart than by chance
        array([1., 1., 1.])
    """
    pooled = float((freedom * variances).sum() / freedom.sum())
    floored = np.maximum(variances, 1e-5 * np.median(variances[variances > 0]))  # log 0 would rule the fit
    logs = np.log(floored) - digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, freedom / 2).mean()) if len(logs) > 1 else 0.0
    if excess <= 0:
        return np.full_like(variances, pooled)
    prior_freedom = 2 * _inverse_trigamma(excess)
    prior = math.exp(float(logs.mean() + digamma(prior_freedom / 2)) - math.log(prior_freedom / 2))
    return np.asarray((prior_freedom * prior + freedom * variances) / (prior_freedom + freedom), dtype=np.float64)


def _moments(table: Floats, used: Booleans, mode: str, which: str) -> tuple[Floats, Floats]:
    """Mean and variance of each sample over the shadows that count for it."""
    counts = used.sum(axis=0)
    if counts.min() < LEAST:
        raise DataError(
            f"Every sample needs at least {LEAST} shadows {which} it, and one has {counts.min()}: train more shadows."
        )
    mean = np.where(used, table, 0.0).sum(axis=0) / counts
    squares = np.where(used, np.square(table - mean), 0.0).sum(axis=0)
    freedom = (counts - 1).astype(np.float64)
    if squares.sum() == 0:
        raise DataError(f"The shadows {which} the samples all agree: they are copies, give them their own seeds.")
    if mode == "global":
        return mean, np.full_like(mean, squares.sum() / freedom.sum())
    variances = squares / freedom
    if mode == "shrunk":
        return mean, moderated_variances(variances, freedom)
    return mean, np.maximum(variances, 1e-12 * squares.sum() / freedom.sum())  # two equal shadows: no division by 0


def _log_ratio(signals: Floats, inside: tuple[Floats, Floats], outside: tuple[Floats, Floats]) -> Floats:
    likelihoods = [-(((signals - mean) ** 2) / variance + np.log(variance)) / 2 for mean, variance in (inside, outside)]
    return np.asarray(likelihoods[0] - likelihoods[1], dtype=np.float64)


def _target(target: Values, table: Floats) -> Floats:
    signals = as_floats(target, "target's signals")
    if len(signals) != table.shape[1]:
        raise DataError(f"The target has signals of {len(signals)} samples, the shadows of {table.shape[1]}.")
    return signals


def _variance(variance: str | None, shadows: int) -> str:
    if variance is None:
        return "shrunk" if shadows < MANY_SHADOWS else "per-example"
    if variance not in VARIANCES:
        raise RequestError(f"There is no variance '{variance}' for LiRA: choose one of {', '.join(VARIANCES)}.")
    return variance


def _inverse_trigamma(value: float) -> float:
    """The x with ``trigamma(x) = value``; it lies between 1/value and 1/value + 1/sqrt(value)."""
    return float(brentq(lambda x: polygamma(1, x) - value, 0.5 / value, 2 / value + 2 / math.sqrt(value)))
