"""The margin of one measure: by hand, its level, and what it must not do."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from expunge.auditing.margins import findings, robust_spread
from expunge.auditing.measures import MEASURES, Compared
from expunge.auditing.verdict import Verdict, judge

LOSS, ASR, NEARBY = MEASURES["forget_loss"], MEASURES["asr"], MEASURES["nearby_pull"]
PULL, ACCURACY = MEASURES["trigger_pull"], MEASURES["test_accuracy"]
VALUES = (3.0, 3.05, 2.95, 3.02, 2.98)


def finding(measure, value, trained, values=VALUES, step=0.0, level=0.05):
    return findings([Compared(measure, value, trained, tuple(values), step)], level)[0]


class TestByHand:
    def test_margin_is_a_tenth_of_the_deviation_or_three_spreads(self):
        quiet, loud = finding(LOSS, 3.0, 0.0), finding(LOSS, 3.0, 2.5)
        assert quiet.margin == pytest.approx(0.1 * 3.0)
        assert loud.margin == pytest.approx(3 * robust_spread(VALUES))
        assert (quiet.deviation, loud.deviation) == (pytest.approx(3.0), pytest.approx(0.5))

    def test_usable_up_to_three_tenths_of_the_deviation(self):
        at = 3 * robust_spread(VALUES) / 0.3
        assert finding(LOSS, 3.0, 3.0 - 1.001 * at).usable
        assert not finding(LOSS, 3.0, 3.0 - 0.999 * at).usable
        assert not finding(LOSS, 3.0, 3.0).usable, "nothing was known, so nothing can be told"

    def test_within_open_outside(self):
        margin, error = 0.3, stdev(VALUES) / math.sqrt(5)
        reach, doubt = (student.isf(tail, 4) * error for tail in (0.05, 0.01))
        for side in (-1, 1):
            near, edge, far = (3.0 + side * off for off in (margin - reach - 1e-6, margin, margin + doubt + 1e-6))
            assert [finding(LOSS, x, 0.0).outcome for x in (near, edge, far)] == ["within", "open", "outside"]

    def test_sides_that_count(self):
        values = (0.90, 0.91, 0.89, 0.905, 0.895)
        assert finding(ACCURACY, 0.99, 0.9, values).outcome == "within", "better is no fault"
        assert finding(ACCURACY, 0.80, 0.9, values).outcome == "outside"
        assert (finding(ACCURACY, 0.9, 0.9, values).low, finding(ACCURACY, 0.9, 0.9, values).high) == (
            pytest.approx(0.86),
            math.inf,
        )

    def test_what_is_measured_elsewhere_has_the_unit_of_the_trigger(self):
        """A moved trigger does nothing in the trained model; still it must not pull as the trigger did."""
        pulls = Compared(PULL, 0.0, 12.0, (0.0, 0.1, -0.1, 0.05, -0.05))
        moved = Compared(NEARBY, 8.0, 0.3, (0.3, 0.4, 0.2, 0.35, 0.25))
        found = findings([pulls, moved])[1]
        assert (found.outcome, found.margin) == ("outside", pytest.approx(1.2))
        assert findings([moved])[0].usable is False, "alone it has no unit but its own deviation, which is none"

    def test_a_rate_varies_by_one_sample_at_least(self):
        none = finding(ASR, 0.02, 0.9, (0.0,) * 5, step=0.01)
        assert (none.spread, none.margin) == (0.01, pytest.approx(0.09))
        assert none.reach == pytest.approx(student.isf(0.05, 4) * 0.01 / math.sqrt(5))

    def test_share_that_is_left(self):
        assert finding(LOSS, 1.5, 0.0).share == pytest.approx(0.5)
        assert finding(LOSS, 4.5, 0.0).share == pytest.approx(-0.5)
        assert finding(LOSS, 4.5, fmean(VALUES)).share is None


class TestSpread:
    @pytest.mark.parametrize("count", [3, 4, 5, 8, 10, 12, 15, 20, 30])
    def test_a_standard_deviation_of_normal_values(self, count):
        chance = np.random.default_rng(count)
        found = [robust_spread(row) for row in chance.normal(size=(6000, count))]
        assert fmean(found) == pytest.approx(1.0, abs=0.035)

    @pytest.mark.parametrize("count", [5, 8, 10])
    def test_one_spoiled_value_does_not_blow_it_up(self, count):
        chance = np.random.default_rng(7)
        clean = chance.normal(size=(500, count))
        spoiled = clean.copy()
        spoiled[:, 0] = 1e6
        assert fmean(robust_spread(row) for row in spoiled) < 2 * fmean(robust_spread(row) for row in clean)

    @given(st.lists(st.floats(-100, 100), min_size=3, max_size=12), st.floats(-10, 10), st.floats(0.1, 10))
    def test_it_moves_with_the_scale_and_not_with_the_place(self, values, shift, scale):
        moved = robust_spread([scale * value + shift for value in values])
        assert moved == pytest.approx(scale * robust_spread(values), rel=1e-6, abs=1e-6)


class TestLevel:
    @pytest.mark.parametrize("count", [5, 8, 10])
    @pytest.mark.parametrize("known", [3.0, 30.0, 300.0])
    def test_a_model_at_the_edge_of_the_stated_margin_is_rarely_within(self, count, known):
        """1000 draws on the edge: 5% are within but for chance, however the margin came about; at most 6.5%."""
        chance = np.random.default_rng(count)
        within = 0
        for _ in range(1000):
            values = tuple(chance.normal(size=count))
            margin = finding(LOSS, 0.0, known, values).margin
            within += finding(LOSS, margin, known, values).outcome == "within"
        assert within <= 65

    def test_each_level_is_its_own(self):
        """A level of 1.25% lets through about a quarter of what 5% does."""
        chance = np.random.default_rng(3)
        counts = {0.05: 0, 0.0125: 0}
        for _ in range(2000):
            values = tuple(chance.normal(size=10))
            for level in counts:
                margin = finding(LOSS, 0.0, 30.0, values, level=level).margin
                counts[level] += finding(LOSS, margin, 30.0, values, level=level).outcome == "within"
        assert counts[0.0125] < 0.5 * counts[0.05] < 75

    def test_an_honest_value_is_hardly_ever_outside(self):
        chance = np.random.default_rng(5)
        outside = {5: 0, 10: 0}
        for count in outside:
            for _ in range(2000):
                *values, own = chance.normal(size=count + 1)
                outside[count] += finding(LOSS, own, 30.0, values).outcome == "outside"
        assert max(outside.values()) <= 0.02 * 2000


def test_where_all_models_have_one_value_nothing_can_be_told():
    """No margin: neither a claim nor an alarm, and no division by it."""
    same = Compared(MEASURES["trigger_rank"], 9.0, 9.0, (9.0,) * 5)
    (found,) = findings([same])
    assert (found.usable, found.outcome) == (False, "within")
    (off,) = findings([Compared(MEASURES["trigger_rank"], 8.0, 9.0, (9.0,) * 5)])
    assert (off.usable, off.outcome) == (False, "open")
    assert judge([Compared(MEASURES["trigger_rank"], 8.0, 9.0, (9.0,) * 5)]).verdict is Verdict.UNDECIDED
