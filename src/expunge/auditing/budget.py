"""What may be released, one model after another: noise and (epsilon, delta) fixed in advance, distances added up.

Let theta_t be the unlearned model after the t-th deletion, theta*_t the one retrained on what is left then, and
``||theta_t - theta*_t|| <= Delta_t``. Released are ``theta_t + sigma z_t``, each with noise of its own. Whoever sees
them all has seen one Gaussian vector, whose mean is at most

    Delta = sqrt(sum_t Delta_t^2)

away from that of ``theta*_t + sigma z_t``: all releases together are (epsilon, delta)-indistinguishable from noisy
retrained models if ``Delta / sigma`` is small enough (gaussian.py). Each Delta_t is measured afresh against the
objective retained at its moment, so errors of the models do not pile up; what piles up is what the observer has seen.

sigma may not follow what was measured, since then the noise itself would tell; and a release that does not fit is not
made. Under this stopping rule the sum also holds when requests depend on what was released before (Koskela, Tobaben &
Honkela 2023). A retrained model has a tiny Delta_t of its own: to retrain stops the spending, it gives nothing back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from expunge.auditing.gaussian import gaussian_epsilon, gaussian_sigma, largest_ratio, require_delta, require_epsilon
from expunge.errors import RequestError


@dataclass(frozen=True)
class Budget:
    """The noise, the claim, and the distance bounds of the releases made so far.

    Attributes:
        sigma: standard deviation of the noise on every weight, fixed before any deletion.
        epsilon: claimed for all releases together.
        delta: claimed for all releases together.
        distances: Delta_t of each release.

    Example:
        >>> budget = Budget(sigma=1.0, epsilon=1.0, delta=1e-5)
        >>> round(budget.allowed, 4)
        0.2681
        >>> budget = budget.charged(0.2)
        >>> round(budget.allowed, 4), round(budget.spent_epsilon, 4), budget.fits(0.2)
        (0.1785, 0.7255, False)
    """

    sigma: float
    epsilon: float
    delta: float
    distances: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise RequestError(f"The noise sigma must be a number above 0, not {self.sigma}.")
        require_epsilon(self.epsilon)
        require_delta(self.delta)
        for distance in self.distances:
            _require_distance(distance)
        if self.used > self.capacity:
            raise RequestError("The releases on record exceed what this noise can hide at this epsilon and delta.")

    @classmethod
    def planned(cls, epsilon: float, delta: float, distance: float, releases: int = 1) -> Budget:
        """The budget with the least noise that holds so many releases of at most this distance.

        Example:
            >>> round(Budget.planned(epsilon=1.0, delta=1e-5, distance=0.01, releases=100).sigma, 4)
            0.3731
        """
        if releases < 1:
            raise RequestError(f"A budget is planned for at least 1 release, not {releases}.")
        _require_distance(distance)
        # One part in 10^9 more, so that rounding in the sum of squares does not shut out the last release.
        return cls(gaussian_sigma(math.sqrt(releases) * distance * (1 + 1e-9), epsilon, delta), epsilon, delta)

    @cached_property
    def capacity(self) -> float:
        """The largest Pythagorean sum of distances that the noise can hide."""
        return self.sigma * largest_ratio(self.epsilon, self.delta)

    @cached_property
    def used(self) -> float:
        """The Pythagorean sum of the distances so far."""
        return math.hypot(*self.distances)

    @property
    def allowed(self) -> float:
        """The largest distance that one more release may have; above it, retrain."""
        return math.sqrt(max(0.0, (self.capacity - self.used) * (self.capacity + self.used)))

    @property
    def spent_epsilon(self) -> float:
        """The smallest epsilon that is true of all releases so far, at the budget's delta."""
        return gaussian_epsilon(self.used / self.sigma, self.delta)

    def fits(self, distance: float) -> bool:
        """Whether a release at this distance can still be made."""
        _require_distance(distance)
        return math.hypot(*self.distances, distance) <= self.capacity

    def releases_left(self, distance: float) -> int | None:
        """How many more releases at this distance fit; None is no limit.

        Example:
            >>> Budget(sigma=1.0, epsilon=1.0, delta=1e-5).releases_left(0.1)
            7
        """
        _require_distance(distance)
        share = (self.allowed / distance) ** 2 if distance > 0 else math.inf
        return math.floor(share) if math.isfinite(share) else None

    def charged(self, distance: float) -> Budget:
        """The budget after a release; refused where it does not fit."""
        if not self.fits(distance):
            raise RequestError(
                f"A model at distance up to {distance:.3g} cannot be released, only up to {self.allowed:.3g}: retrain."
            )
        return replace(self, distances=(*self.distances, distance))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sigma": self.sigma,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "releases": len(self.distances),
            "used_distance": self.used,
            "allowed_distance": self.allowed,
            "spent_epsilon": self.spent_epsilon,
        }


def _require_distance(distance: float) -> None:
    if not (distance >= 0 and math.isfinite(distance)):
        raise RequestError(f"A distance must be a number of at least 0, not {distance}.")
