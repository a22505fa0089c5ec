"""KLoM: the divergence between the distributions of margins (Georgiev et al. 2024, "Attribute-to-Delete").

KLoM judges a method: N models that forgot (each from its own training) beside M retrained ones. For every sample the
margin ``log p_y - log(1 - p_y)`` has a distribution over the models of either kind; KLoM is the divergence between the
two, in nats, one value a sample. They are estimated by histograms over 20 bins at most.

Where it fails: with few models the estimate is far above zero for equal distributions, too. So the retrained are parted
at random: ``value`` compares some of those that forgot with one part of the retrained, ``noise_floor`` as many of the
other part with the same one. Only what is above the floor counts. One model alone can be measured as well: it is one
draw of its distribution, its floor is what a retrained model shows beside the others, and how far away it is no longer
shows once it lies outside all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expunge.auditing.signals import Floats, Values, as_floats
from expunge.errors import DataError

FEWEST_RETRAINED = 3
"""One is left out for the floor, and two more have a spread."""

LARGEST = 100.0
"""Margins beyond this are cut off, as in the paper."""


@dataclass(frozen=True)
class Klom:
    """The divergences of margins over the samples, and what equal distributions would show.

    Attributes:
        value: mean over the samples.
        noise_floor: the same for retrained models in place of those that forgot.
        worst: the 95th percentile over the samples.
        worst_floor: the same for retrained models.
        models: how many that forgot there are.
        retrained: how many retrained ones.
    """

    value: float
    noise_floor: float
    worst: float
    worst_floor: float
    models: int
    retrained: int


def klom(forgot: Values, retrained: Values, *, splits: int = 20, seed: int = 0) -> Klom:
    """Compare a method's models, or one model, with retrained ones.

    Args:
        forgot: margins (``signals.scaled_confidence``) of models that forgot: models x samples.
        retrained: the same of retrained models, at least ``FEWEST_RETRAINED``.
        splits: random parts to average over.
        seed: of the parts.

    Example:
        >>> chance = np.random.default_rng(0)
        >>> found = klom(chance.normal(3, 1, (16, 200)), chance.normal(0, 1, (16, 200)))
        >>> found.value > 3 * found.noise_floor
        True
    """
    one, other = as_floats(forgot, "margins", dimensions=2), as_floats(retrained, "margins", dimensions=2)
    if one.shape[1] != other.shape[1]:
        raise DataError(f"KLoM needs the same samples on both sides, not {one.shape[1]} and {other.shape[1]}.")
    if len(other) < FEWEST_RETRAINED:
        raise DataError(f"KLoM needs at least {FEWEST_RETRAINED} retrained models, not {len(other)}.")
    chance, taken = np.random.default_rng(seed), max(1, min(len(one), len(other)) // 2)
    found, floor = [], []
    for _ in range(splits):
        mine, theirs = chance.permutation(len(one)), chance.permutation(len(other))
        reference = other[theirs[taken:]]
        found.append(histogram_divergence(one[mine[:taken]], reference))
        floor.append(histogram_divergence(other[theirs[:taken]], reference))
    value, noise = np.mean(found, axis=0), np.mean(floor, axis=0)
    worst, worst_noise = (float(np.mean([np.quantile(part, 0.95) for part in parts])) for parts in (found, floor))
    return Klom(float(value.mean()), float(noise.mean()), worst, worst_noise, len(one), len(other))


def histogram_divergence(first: Floats, second: Floats) -> Floats:
    """``KL(first || second)`` of each column from histograms of equal width over both, half a count added to each bin.

    There are as many bins as the square root of the second's values, 4 at least and 20 at most.

    Example:
        >>> values = np.array([[0.0], [1.0], [2.0], [3.0]])
        >>> histogram_divergence(values, values)
        array([0.])
    """
    one, other = (np.clip(values, -LARGEST, LARGEST) for values in (first, second))
    bins = int(np.clip(round(np.sqrt(len(other))), 4, 20))
    both = np.concatenate([one, other])
    low, width = both.min(axis=0), np.ptp(both, axis=0)
    shares = []
    for values in (one, other):
        places = np.clip(((values - low) / np.where(width > 0, width, 1.0) * bins).astype(int), 0, bins - 1)
        counts = (places[:, None, :] == np.arange(bins)[None, :, None]).sum(axis=0) + 0.5
        shares.append(counts / counts.sum(axis=0))
    return np.asarray((shares[0] * np.log(shares[0] / shares[1])).sum(axis=0), dtype=np.float64)
