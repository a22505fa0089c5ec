"""The best attack there is on released models may not get beyond the claimed epsilon, unless the noise is too small.

The likelihood ratio of two Gaussians with the same noise is a projection onto the line between their means, so an
attacker who knows both models without noise thresholds that projection, and nothing does better.
"""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import beta

from auditing.certificate_cases import certified, conditioned, retrained, unlearned
from expunge.auditing.budget import Budget
from expunge.auditing.certificate import release
from expunge.auditing.gaussian import gaussian_sigma
from expunge.core.vectors import Snapshot

EPSILON, DELTA = 1.0, 1e-5
DRAWS = 40_000


def epsilon_shown(first: np.ndarray, second: np.ndarray, confidence: float = 0.999) -> float:
    """A lower bound on epsilon: P(A) <= e^epsilon Q(A) + delta for events A = {score above or below a threshold}.

    The event is chosen on one half of the draws, its two rates are bounded (Clopper-Pearson) on the other.
    """
    (choose_p, use_p), (choose_q, use_q) = np.array_split(first, 2), np.array_split(second, 2)
    best, shown = -np.inf, 0.0
    for sign in (1, -1):
        for p, q, test_p, test_q in ((choose_p, choose_q, use_p, use_q), (choose_q, choose_p, use_q, use_p)):
            for threshold in np.quantile(sign * q, [0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995]):
                guess = _log_ratio(sign * p > threshold, sign * q > threshold, confidence)
                if guess > best:
                    best, shown = guess, _log_ratio(sign * test_p > threshold, sign * test_q > threshold, confidence)
    return shown


def _log_ratio(in_p: np.ndarray, in_q: np.ndarray, confidence: float) -> float:
    """``log((least P(A) - delta) / largest Q(A))``, both at once at this confidence."""
    level, hits, misses = (1 - confidence) / 2, int(in_p.sum()), int(in_q.sum())
    least = beta.ppf(level, hits, len(in_p) - hits + 1) if hits else 0.0
    largest = beta.ppf(1 - level, misses + 1, len(in_q) - misses) if misses < len(in_q) else 1.0
    return float(np.log((least - DELTA) / largest)) if least > DELTA else -np.inf


def test_the_attack_itself_finds_the_epsilon_of_randomised_response():
    generator = np.random.default_rng(0)
    first, second = generator.random(DRAWS) < 0.75, generator.random(DRAWS) < 0.25
    assert 0.9 * np.log(3) < epsilon_shown(first.astype(float), second.astype(float)) <= np.log(3)


@pytest.mark.parametrize("kind", ["ridge", "softmax"])
def test_released_models_stay_within_the_claim_and_too_little_noise_is_found_out(kind):
    federation = conditioned(kind, seed=3, kappa=5.0)
    truth = retrained(federation)
    model = unlearned(federation, retrained(federation, {}), iterations=1)  # far enough to see something
    distance = certified(federation, model, sharp=True).distance_bound
    budget = Budget.planned(EPSILON, DELTA, distance)  # as little noise as the claim allows
    pair = [(Snapshot(p, {}), certified(federation, p, budget, sharp=True)) for p in (model, truth)]
    direction = (model - truth) / (model - truth).norm()

    def projections(noise: Budget) -> list[np.ndarray]:
        held = [(snapshot, dataclasses.replace(certificate, budget=noise)) for snapshot, certificate in pair]
        return [
            np.array([float(release(*one, seed).parameters @ direction) for seed in range(3 * DRAWS // 2)])
            for one in held  # the noise follows from the model's last bit, so there must be enough of it
        ]

    shown = epsilon_shown(*projections(budget))
    assert 0.2 < shown <= EPSILON
    too_little = Budget(budget.sigma / 4, epsilon=50.0, delta=DELTA)
    assert epsilon_shown(*projections(too_little)) > EPSILON


def test_seeing_many_releases_stays_within_the_claim_because_their_distances_add_up():
    distances = np.linspace(0.5, 1.5, 25)
    generator = np.random.default_rng(1)

    def scores(sigma: float) -> tuple[np.ndarray, np.ndarray]:
        """The likelihood ratio of all releases together: projections, each weighted by its distance."""
        noise = sigma * generator.standard_normal((2, 5 * DRAWS, len(distances)))
        return (noise[0] + distances) @ distances, noise[1] @ distances

    budget = Budget(gaussian_sigma(float(np.linalg.norm(distances)) * (1 + 1e-9), EPSILON, DELTA), EPSILON, DELTA)
    for distance in distances:
        budget = budget.charged(float(distance))
    assert 0.3 < epsilon_shown(*scores(budget.sigma)) <= EPSILON
    # Noise that hides each release alone does not hide them together, and the budget refuses it.
    alone = Budget(gaussian_sigma(1.5, EPSILON, DELTA), EPSILON, DELTA)
    assert epsilon_shown(*scores(alone.sigma)) > EPSILON
    assert not alone.charged(1.0).fits(1.5)


def test_noise_that_repeats_would_give_everything_away():
    """Why the noise follows from the model, too: the same seed for two models must not give the same noise."""
    federation = conditioned("ridge", seed=0, kappa=5.0)
    truth = retrained(federation)
    step = torch.full_like(truth, 1e-6)
    released = [
        release(Snapshot(p, {}), certified(federation, p, Budget(0.1, EPSILON, DELTA)), seed=0).parameters
        for p in (truth, truth + step)
    ]
    assert float((released[1] - released[0] - step).norm()) > 0.1
