"""The Gaussian mechanism beside its definition (an integral), beside 60 digits, and beside published values."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from expunge.auditing.budget import Budget
from expunge.auditing.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma, largest_ratio
from expunge.errors import RequestError

RATIOS = st.floats(1e-6, 50.0)
EPSILONS = st.floats(0.0, 50.0)
DELTAS = st.floats(1e-12, 0.5)


def exact_delta(epsilon: float, ratio: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        e, r = mpmath.mpf(epsilon), mpmath.mpf(ratio)
        return mpmath.ncdf(r / 2 - e / r) - mpmath.exp(e) * mpmath.ncdf(-r / 2 - e / r)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0, 3.0])
def test_delta_is_the_integral_of_what_one_density_exceeds_the_other_by(epsilon, ratio):
    def excess(x: float) -> float:
        return max(0.0, norm.pdf(x - ratio) - math.exp(epsilon) * norm.pdf(x))

    crossing = epsilon / ratio + ratio / 2
    integral = quad(excess, crossing, crossing + 40, epsabs=1e-14, epsrel=1e-10, limit=500)[0]
    assert gaussian_delta(epsilon, ratio) == pytest.approx(integral, rel=1e-7, abs=1e-13)


@given(st.floats(1e-9, 300.0), st.floats(0.0, 5.0), st.booleans())
def test_delta_has_its_digits_wherever_it_can_be_written_down(ratio, scale, by_ratio):
    epsilon = scale * ratio if by_ratio else scale
    exact = exact_delta(epsilon, ratio)
    if exact > 1e-280:
        assert gaussian_delta(epsilon, ratio) == pytest.approx(float(exact), rel=1e-9)
    else:
        assert gaussian_delta(epsilon, ratio) <= 1e-279


def test_published_values():
    # Balle & Wang's calibration at sensitivity 1, epsilon 1, delta 1e-5; the usual formula asks for 4.8448.
    assert gaussian_sigma(1.0, epsilon=1.0, delta=1e-5) == pytest.approx(3.7306316, abs=1e-6)
    assert gaussian_sigma(1.0, 1.0, 1e-5) < math.sqrt(2 * math.log(1.25e5))
    # Without epsilon it is the total variation between two normals.
    assert gaussian_delta(0.0, 1.0) == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-12)


@given(RATIOS, DELTAS)
def test_epsilon_is_safe_and_the_least(ratio, delta):
    epsilon = gaussian_epsilon(ratio, delta)
    assert gaussian_delta(epsilon, ratio) <= delta
    if epsilon > 1e-9:
        assert gaussian_delta(epsilon * (1 - 1e-6), ratio) > delta


@given(EPSILONS, DELTAS, st.floats(1e-9, 1e9))
def test_sigma_is_safe_and_the_least_and_gives_back_epsilon(epsilon, delta, distance):
    sigma = gaussian_sigma(distance, epsilon, delta)
    assert gaussian_delta(epsilon, distance / sigma) <= delta
    assert gaussian_delta(epsilon, distance / (sigma * (1 - 1e-6))) > delta
    assert gaussian_epsilon(distance / sigma, delta) <= epsilon + 1e-9
    if epsilon > 1e-3:
        assert gaussian_epsilon(distance / sigma, delta) == pytest.approx(epsilon, rel=1e-6)


@given(EPSILONS, DELTAS, RATIOS, st.floats(1.01, 3.0))
def test_more_noise_is_more_private_and_a_weaker_claim_needs_less(epsilon, delta, ratio, more):
    assert gaussian_delta(epsilon, ratio) <= gaussian_delta(epsilon, ratio * more) * (1 + 1e-9)
    assert gaussian_delta(epsilon * more, ratio) <= gaussian_delta(epsilon, ratio) * (1 + 1e-9)
    assert gaussian_epsilon(ratio, delta) <= gaussian_epsilon(ratio * more, delta)
    assert gaussian_epsilon(ratio, min(0.9, delta * more)) <= gaussian_epsilon(ratio, delta)
    assert largest_ratio(epsilon, delta) <= largest_ratio(epsilon * more, delta)


def test_far_corners_neither_overflow_nor_lose_safety():
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(1e-300, 1e-5) == 0.0
    assert gaussian_delta(1e300, 1.0) == gaussian_delta(5.0, 1e-320) == 0.0
    assert gaussian_delta(0.0, 1e6) == 1.0
    assert 499_000 < gaussian_epsilon(1e3, 1e-5) < 510_000
    assert largest_ratio(700.0, 1e-300) > 1


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30))
def test_a_budget_holds_what_it_charged_and_not_more(distances):
    budget = Budget(sigma=1.0, epsilon=1.0, delta=1e-5)
    for distance in distances:
        if budget.fits(distance):
            before, budget = budget, budget.charged(distance)
            assert budget.allowed <= before.allowed
            assert budget.spent_epsilon >= before.spent_epsilon
        else:
            assert distance > budget.allowed * (1 - 1e-9)
            with pytest.raises(RequestError, match="retrain"):
                budget.charged(distance)
    together = np.sqrt(np.sum(np.square(budget.distances)))
    assert gaussian_delta(budget.epsilon, together) <= budget.delta * (1 + 1e-9)
    assert budget.spent_epsilon <= budget.epsilon + 1e-9


def test_a_planned_budget_holds_its_releases_and_says_how_many_are_left():
    budget = Budget.planned(epsilon=1.0, delta=1e-5, distance=0.01, releases=100)
    for left in range(100, 0, -1):
        assert budget.releases_left(0.01) == left
        budget = budget.charged(0.01)
    assert budget.releases_left(0.01) == 0
    assert budget.releases_left(0.0) is None
    assert budget.spent_epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    for refused in (lambda: gaussian_epsilon(1.0, delta), lambda: Budget(sigma=1.0, epsilon=1.0, delta=delta)):
        with pytest.raises(RequestError, match=r"^Delta must lie between 0 and 1"):
            refused()


@pytest.mark.parametrize("epsilon", [-1.0, math.inf, math.nan])
def test_an_epsilon_out_of_range_is_refused(epsilon):
    for refused in (lambda: gaussian_sigma(1.0, epsilon, 1e-5), lambda: Budget(1.0, epsilon, 1e-5)):
        with pytest.raises(RequestError, match=r"^Epsilon must be a number of at least 0"):
            refused()


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda: Budget(sigma=0.0, epsilon=1.0, delta=1e-5), "The noise sigma must be"),
        (lambda: Budget(1.0, 1.0, 1e-5, distances=(5.0,)), "exceed what this noise can hide"),
        (lambda: Budget(1.0, 1.0, 1e-5).charged(-1.0), "A distance must be"),
        (lambda: Budget.planned(1.0, 1e-5, distance=1.0, releases=0), "at least 1 release"),
        (lambda: gaussian_sigma(0.0, 1.0, 1e-5), "The distance to hide"),
        (lambda: gaussian_delta(1.0, math.nan), "The ratio of distance to noise"),
    ],
)
def test_other_bad_numbers_are_refused_with_one_sentence(refused, sentence):
    with pytest.raises(RequestError, match=sentence):
        refused()
