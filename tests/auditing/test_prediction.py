import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from expunge.auditing.prediction import Prediction, as_if_further, holm
from expunge.errors import RequestError

VALUES = st.lists(st.floats(-100, 100), min_size=3, max_size=8)


class TestInterval:
    def test_against_scipy(self):
        """The t statistic of one new value beside five is that of a two-sample test with one value on one side."""
        values, new = [0.3, 0.5, 0.1, 0.45, 0.2], 0.9
        further = Prediction.of(values)
        assert further.p_value(new) == pytest.approx(_two_sample(values, new), rel=1e-12)
        low, high = further.limits(0.05)
        assert further.p_value(low) == pytest.approx(0.05)
        assert further.p_value(high) == pytest.approx(0.05)
        width = stats.t.ppf(0.975, df=4) * np.std(values, ddof=1) * math.sqrt(1 + 1 / 5)
        assert high == pytest.approx(np.mean(values) + width)

    def test_one_side(self):
        above, below = Prediction.of([1, 2, 3], side="above"), Prediction.of([1, 2, 3], side="below")
        assert above.p_value(-50) == below.p_value(50) == 1.0
        assert above.p_value(5) == pytest.approx(_two_sample([1, 2, 3], 5) / 2)
        assert above.limits(0.05)[0] == -math.inf
        assert below.limits(0.05)[1] == math.inf
        assert above.limits(0.05)[1] - 2 == pytest.approx(2 - below.limits(0.05)[0])

    def test_the_margin_widens_it(self):
        narrow, wide = Prediction.of([1, 2, 3]), Prediction.of([1, 2, 3], margin=0.5)
        assert wide.limits(0.05)[1] == pytest.approx(narrow.limits(0.05)[1] + 0.5)
        assert wide.p_value(4.5) == narrow.p_value(4.0)
        assert wide.p_value(2.5) == 1.0

    def test_equal_values_leave_the_margin_or_the_least_spread(self):
        exact = Prediction.of([0.0] * 5, margin=0.01)
        assert exact.p_value(0.01) == 1.0
        assert exact.p_value(0.011) == 0.0
        assert Prediction.of([0.0] * 5, least_spread=0.01).p_value(0.02) > 0.05

    def test_infinite_and_missing_values_are_told_or_not(self):
        assert Prediction.of([1, 2, 3], side="above").p_value(math.inf) == 0.0
        with pytest.raises(RequestError, match="at least 3"):
            Prediction.of([1.0, 2.0])

    @given(VALUES, st.floats(-1000, 1000), st.floats(0.001, 0.5), st.floats(0, 10))
    def test_told_if_and_only_if_outside(self, values, new, level, margin):
        further = Prediction.of(values, margin=margin, least_spread=0.1)
        low, high = further.limits(level)
        if abs(new - low) > 1e-6 and abs(new - high) > 1e-6:
            assert (further.p_value(new) <= level) == (not low <= new <= high)

    @given(VALUES, st.floats(-10, 10), st.floats(0.1, 10), st.floats(-50, 50))
    def test_units_do_not_matter(self, values, shift, factor, new):
        one = Prediction.of(values, margin=0.5, least_spread=0.1)
        other = Prediction.of([shift + factor * v for v in values], margin=0.5 * factor, least_spread=0.1 * factor)
        assert other.p_value(shift + factor * new) == pytest.approx(one.p_value(new), abs=1e-6)


class TestErrorRates:
    def test_false_alarms_are_as_many_as_promised(self):
        chance = np.random.default_rng(0)
        draws = chance.normal(size=(4000, 6))
        for side in ("both", "above", "below"):
            told = np.mean([Prediction.of(list(d[:5]), side=side).p_value(d[5]) <= 0.05 for d in draws])
            assert told == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 4000))

    def test_power_is_what_simulation_shows(self):
        chance = np.random.default_rng(1)
        for deviation, margin in ((0.0, 0.0), (4.0, 0.0), (8.0, 1.0)):
            draws = chance.normal(size=(3000, 6))
            told = np.mean([Prediction.of(list(d[:5]), margin=margin).p_value(d[5] + deviation) <= 0.01 for d in draws])
            foretold = Prediction(0.0, 1.0, 5, "both", margin).caught(deviation, 0.01)
            assert foretold == pytest.approx(told, abs=0.03)
        assert Prediction(0.0, 1.0, 5).caught(0.0, 0.01) == pytest.approx(0.01, abs=0.001)
        assert (
            Prediction(0.0, 1.0, 5, "below").caught(-30.0, 0.01)
            > 0.99
            > Prediction(0.0, 1.0, 5, "below").caught(30.0, 0.01)
        )

    def test_needed_is_the_smallest_number_that_tells(self):
        further = Prediction(0.0, 1.0, 5, "both", 0.1)
        count = further.needed(3.5, 0.01)
        assert count is not None
        assert Prediction(0.0, 1.0, count, "both", 0.1).reach(0.01) <= 3.5
        assert Prediction(0.0, 1.0, count - 1, "both", 0.1).reach(0.01) > 3.5
        assert further.needed(0.1, 0.01) is None


class TestHolm:
    def test_by_hand(self):
        """Four at 5%: 0.0125, then 0.01667, then 0.025, then 0.05."""
        p = {"a": 0.012, "b": 0.016, "c": 0.026, "d": 0.04}
        assert holm(p, 0.05) == {"a", "b"}
        assert holm({**p, "c": 0.025}, 0.05) == {"a", "b", "c", "d"}
        assert holm({**p, "a": 0.013}, 0.05) == frozenset()
        assert holm({}, 0.05) == frozenset()

    @given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=10), st.floats(0.001, 0.5))
    def test_between_bonferroni_and_none(self, p, level):
        rejected = holm(p, level)
        assert {name for name, value in p.items() if value <= level / len(p)} <= rejected
        assert rejected <= {name for name, value in p.items() if value <= level}
        assert all(p[a] <= p[b] for a in rejected for b in set(p) - rejected)

    def test_any_false_alarm_at_most_at_the_level(self):
        chance = np.random.default_rng(0)
        alarms = [bool(holm({str(k): v for k, v in enumerate(row)}, 0.05)) for row in chance.uniform(size=(4000, 9))]
        assert np.mean(alarms) == pytest.approx(1 - (1 - 0.05 / 9) ** 9, abs=0.014)


class TestPairs:
    @given(
        st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=7),
        st.floats(-5, 5),
        st.floats(-5, 5),
    )
    def test_exact_on_sums(self, effects, level, own):
        """What a further model shows is its own effect over the mean of the references': that of each is found."""
        u, v = np.array([e[0] for e in effects]), np.array([e[1] for e in effects])
        table = level + u[:, None] + v[None, :]
        found = as_if_further(table)
        assert found == pytest.approx(list(level + u.mean() + v), abs=1e-9)
        assert np.mean(level + u + own) == pytest.approx(level + u.mean() + own)

    def test_false_alarms_of_distances(self):
        """Squared distances of points, on a log scale: the naive means of columns alarm too often."""
        chance, alarms = np.random.default_rng(0), {"mended": 0, "naive": 0}
        for _ in range(1500):
            points = chance.normal(size=(6, 40)) * chance.gamma(20, 1 / 20, size=(6, 1))
            table = np.log(((points[:, None] - points[None]) ** 2).sum(axis=2) + np.eye(6))
            apart = ~np.eye(5, dtype=bool)
            naive = [table[:5, k][apart[k]].mean() for k in range(5)]
            for name, values in (("mended", as_if_further(table[:5, :5])), ("naive", naive)):
                alarms[name] += Prediction.of(values, side="above").p_value(table[:5, 5].mean()) <= 0.05
        assert alarms["mended"] / 1500 == pytest.approx(0.05, abs=0.025)
        assert alarms["naive"] > 1.3 * alarms["mended"]

    def test_refused(self):
        with pytest.raises(RequestError, match="at least 3"):
            as_if_further(np.zeros((2, 2)))


def _two_sample(values, new):
    """Student's two-sided two-sample p-value, with the pooled variance of the larger side."""
    t = (new - np.mean(values)) / (np.std(values, ddof=1) * math.sqrt(1 + 1 / len(values)))
    return 2 * stats.t.sf(abs(t), len(values) - 1)
