"""The Gaussian mechanism, calibrated exactly (Balle & Wang 2018).

Two points at distance Delta, each released with noise N(0, sigma^2 I): along the line through them they are two normal
distributions at ``ratio = Delta / sigma``, and across it the same. No test tells them apart better than

    delta(epsilon) = Phi(ratio/2 - epsilon/ratio) - e^epsilon Phi(-ratio/2 - epsilon/ratio),

which is the smallest delta with ``P(A) <= e^epsilon Q(A) + delta`` for every event A, in both directions. The usual
``sigma = Delta sqrt(2 log(1.25/delta)) / epsilon`` is only sufficient, and only below epsilon = 1.

Several releases with noise of their own are one release of the stacked vectors: their ratios add in squares.

Solutions are the safe one of two neighbouring numbers: an epsilon is not too small, a permitted ratio not too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import erfcx

from expunge.errors import RequestError

_CLOSE = 1e-5
"""Arguments of erfcx closer than this are told apart by its derivative: their difference would lose its digits."""


def gaussian_delta(epsilon: float, ratio: float) -> float:
    """The smallest delta that noise gives at this epsilon.

    With ``x, y = (epsilon/ratio -+ ratio/2) / sqrt(2)`` it is ``exp(-x^2) (erfcx(x) - erfcx(y)) / 2``, where
    ``erfcx(x) = exp(x^2) erfc(x)``: nothing overflows, and no tail is lost.

    Args:
        epsilon: at least 0.
        ratio: distance over standard deviation, at least 0.

    Example:
        >>> round(gaussian_delta(epsilon=1.0, ratio=1.0), 6)
        0.126937
    """
    require_epsilon(epsilon)
    if not (ratio >= 0 and math.isfinite(ratio)):
        raise RequestError(f"The ratio of distance to noise must be a number of at least 0, not {ratio}.")
    if ratio == 0:
        return 0.0
    centre = epsilon / ratio
    if centre == math.inf:
        return 0.0
    x, y = (centre - ratio / 2) / math.sqrt(2), (centre + ratio / 2) / math.sqrt(2)
    if x < -5:  # erfcx grows like exp(x^2) there, and erfc has nothing to lose
        return 0.5 * (math.erfc(x) - math.exp(-x * x) * float(erfcx(y)))
    return 0.5 * math.exp(-x * x) * _erfcx_fall(x, y, ratio / math.sqrt(2))


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """The smallest epsilon that noise gives at this delta; 0 where the two releases are within delta anyway.

    Example:
        >>> round(gaussian_epsilon(ratio=1.0, delta=1e-5), 4)
        4.3772
    """
    require_delta(delta)
    if gaussian_delta(0.0, ratio) <= delta:
        return 0.0
    # Phi(ratio/2 - epsilon/ratio) <= delta from here on, so that delta(epsilon) is, too.
    enough = ratio * ratio / 2 + ratio * math.sqrt(2 * math.log(1 / delta))
    return _bisected(lambda epsilon: gaussian_delta(epsilon, ratio) > delta, 0.0, enough)[1]


def largest_ratio(epsilon: float, delta: float) -> float:
    """How many standard deviations apart two points may be at this (epsilon, delta).

    Example:
        >>> round(1 / largest_ratio(epsilon=1.0, delta=1e-5), 4)
        3.7306
    """
    require_epsilon(epsilon)
    require_delta(delta)
    beyond = 1.0
    while gaussian_delta(epsilon, beyond) <= delta:
        beyond *= 2
    return _bisected(lambda ratio: gaussian_delta(epsilon, ratio) <= delta, 0.0, beyond)[0]


def gaussian_sigma(distance: float, epsilon: float, delta: float) -> float:
    """The smallest standard deviation that hides this distance at (epsilon, delta).

    Example:
        >>> round(gaussian_sigma(distance=2.0, epsilon=1.0, delta=1e-5), 4)
        7.4613
    """
    if not (distance > 0 and math.isfinite(distance)):
        raise RequestError(f"The distance to hide must be a number above 0, not {distance}.")
    ratio = largest_ratio(epsilon, delta)
    if ratio == 0:
        raise RequestError("No noise is enough for so small an epsilon and delta: make one of them larger.")
    sigma = distance / ratio
    return sigma if distance / sigma <= ratio else math.nextafter(sigma, math.inf)


def require_epsilon(epsilon: float) -> None:
    """Refuse what is no epsilon."""
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise RequestError(f"Epsilon must be a number of at least 0, not {epsilon}.")


def require_delta(delta: float) -> None:
    """Refuse what is no delta."""
    if not 0 < delta < 1:
        raise RequestError(f"Delta must lie between 0 and 1, not {delta}.")


def _erfcx_fall(x: float, y: float, apart: float) -> float:
    """``erfcx(x) - erfcx(y)`` for ``y = x + apart``."""
    if apart > _CLOSE:
        return float(erfcx(x) - erfcx(y))
    middle = x + apart / 2
    return apart * max(0.0, 2 / math.sqrt(math.pi) - 2 * middle * float(erfcx(middle)))


def _bisected(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Neighbouring numbers, the last where a condition holds and the first where it does not."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
