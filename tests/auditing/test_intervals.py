import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from expunge.auditing.intervals import (
    Interval,
    auc_interval,
    clopper_pearson,
    delong_covariance,
    gap_interval,
    placements,
)
from expunge.auditing.membership import measure_attack
from expunge.errors import RequestError


class TestClopperPearson:
    @given(st.integers(1, 300), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
    def test_against_scipy(self, trials, data, level):
        successes = data.draw(st.integers(0, trials))
        oracle = scipy.stats.binomtest(successes, trials).proportion_ci(level, method="exact")
        found = clopper_pearson(successes, trials, level)
        assert found == pytest.approx((successes / trials, oracle.low, oracle.high), abs=1e-9)

    def test_known_values(self):
        assert clopper_pearson(0, 100).high == pytest.approx(1 - 0.025**0.01)  # the rule of three, exactly
        assert clopper_pearson(1, 10) == pytest.approx((0.1, 0.0025, 0.4450), abs=5e-5)

    def test_covers_at_least_as_often_as_it_says(self):
        rate, trials = 0.07, 40
        counts = np.arange(trials + 1)
        covering = [clopper_pearson(k, trials).covers(rate) for k in counts]
        assert scipy.stats.binom.pmf(counts, trials, rate)[covering].sum() >= 0.95

    def test_what_is_no_rate_is_refused(self):
        for counts in ((-1, 5), (6, 5), (0, 0)):
            with pytest.raises(RequestError):
                clopper_pearson(*counts)
        with pytest.raises(RequestError, match="level"):
            clopper_pearson(1, 5, level=95)


class TestAuc:
    @given(st.floats(0, 1), st.integers(2, 500), st.integers(2, 500))
    def test_limits(self, auc, members, others):
        found = auc_interval(auc, members, others)
        assert 0 <= found.low <= auc <= found.high <= 1
        assert found.high - found.low > 0
        mirrored = auc_interval(1 - auc, others, members)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high), abs=1e-6)

    @pytest.mark.parametrize(("members", "others", "spread"), [(60, 90, 1.0), (300, 30, 1.0), (30, 300, 3.0)])
    def test_coverage(self, members, others, spread):
        """Two normals 1.2 apart, 300 times: it covers in about 95% of them and is no wider than needed."""
        random, true = np.random.default_rng(0), scipy.stats.norm.cdf(1.2 / math.hypot(1, spread))
        found = [
            measure_attack(random.normal(1.2, spread, members), random.normal(0, 1, others)).auc for _ in range(300)
        ]
        assert 0.92 <= np.mean([one.covers(true) for one in found]) <= 0.985
        needed = 2 * 1.96 * np.std([one.value for one in found])
        assert np.mean([one.high - one.low for one in found]) == pytest.approx(needed, rel=0.12)

    def test_delong_against_its_definition(self):
        """Sen's components and their covariances, pair by pair."""
        random, weights = np.random.default_rng(1), np.full(7, 1 / 7)
        models = [(random.normal(1, 1, 5), random.normal(0, 1, 7)) for _ in range(2)]
        kernels = [np.sign(a[:, None] - b[None]) / 2 + 0.5 for a, b in models]
        over_others, over_members = ([k.mean(axis=axis) for k in kernels] for axis in (1, 0))
        oracle = np.cov(over_others)[0, 1] / 5 + np.cov(over_members)[0, 1] / 7
        parts = [placements(a, b, weights) for a, b in models]
        assert delong_covariance(*parts, weights) == pytest.approx(oracle)

    def test_apart_or_few_fall_back_on_hanley_and_mcneil(self):
        assert auc_interval(1.0, 20, 20, variance=0.0) == auc_interval(1.0, 20, 20)
        assert auc_interval(0.8, 9, 20, variance=1e-6) == auc_interval(0.8, 9, 20)
        assert auc_interval(0.8, 10, 20, variance=1e-6).low > 0.79

    def test_what_is_no_auc_is_refused(self):
        for arguments in ((1.1, 5, 5), (0.5, 0, 5), (math.nan, 5, 5)):
            with pytest.raises(RequestError):
                auc_interval(*arguments)


class TestPlacements:
    @given(st.integers(0, 10_000))
    def test_both_average_to_the_weighted_auc(self, seed):
        random = np.random.default_rng(seed)
        members, others = random.integers(0, 8, 7).astype(float), random.integers(0, 8, 5).astype(float)
        weights = random.dirichlet(np.ones(5))
        above, below = placements(members, others, weights)
        truth = np.repeat([1, 0], [7, 5])
        oracle = roc_auc_score(
            truth, np.concatenate([members, others]), sample_weight=np.concatenate([np.full(7, 1 / 7), weights])
        )
        assert above.mean() == pytest.approx(oracle)
        assert weights @ below == pytest.approx(oracle)


class TestGap:
    def test_equal_values_that_move_together_have_no_gap(self):
        one = Interval(0.6, 0.5, 0.7)
        assert gap_interval(one, one, correlation=1.0) == pytest.approx((0, 0, 0))
        assert gap_interval(one, one, correlation=0.0).high == pytest.approx(0.1 * math.sqrt(2))
        assert gap_interval(one, one, correlation=1.0, noise=0.3) == pytest.approx((0, -0.3, 0.3))

    def test_each_limit_takes_the_facing_sides(self):
        own, other = Interval(0.9, 0.6, 1.0), Interval(0.3, 0.1, 0.7)
        found = gap_interval(own, other)
        assert found.low == pytest.approx(0.6 - math.hypot(0.3, 0.4))
        assert found.high == pytest.approx(0.6 + math.hypot(0.1, 0.2))


@pytest.mark.parametrize(("members", "others"), [(80, 400), (50, 50), (102, 648), (11, 1000)])
def test_scores_that_are_all_alike_have_an_interval_around_one_half(members, others):
    attack = measure_attack(np.zeros(members), np.zeros(others))
    assert attack.auc.value == pytest.approx(0.5)
    assert attack.auc.low < 0.5 < attack.auc.high
