import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.auditing.placebo import Hold, as_hold, kept_share, mean_raised, ranks
from expunge.errors import DataError

numbers = st.floats(-50, 50, allow_nan=False)
placebos = st.lists(numbers, min_size=3, max_size=9).map(tuple)


def spread(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


class TestShare:
    @given(placebos, st.floats(0.1, 100))
    def test_a_model_kept_all_of_itself(self, others, above):
        hold = Hold(max(others) + 40 * (1 + spread(others)) + above, others)
        kept = kept_share(hold, hold)
        assert kept.visible
        assert kept.value == 1.0
        assert kept.low <= 1.0 <= kept.high

    @given(placebos, numbers, numbers, st.floats(0.1, 10), numbers)
    def test_units_and_what_is_common_play_no_part(self, others, own, after, unit, shift):
        """Everything in other units, and every rank raised alike: the same share."""

        def changed(value):
            return unit * value + shift

        first = kept_share(Hold(own, others), Hold(after, others))
        turned = [Hold(changed(value), tuple(map(changed, others))) for value in (own, after)]
        second = kept_share(*turned)
        edge = abs(Hold(own, others).excess - Hold(own, others).reach(0.05)) < 1e-6
        if first.visible and not edge:
            assert second.value == pytest.approx(first.value, abs=1e-6, rel=1e-6)
            assert second.high == pytest.approx(first.high, abs=1e-6, rel=1e-6)

    @given(placebos, st.floats(0, 1), st.floats(0, 1))
    def test_who_keeps_more_is_said_to_keep_more(self, others, one, other):
        mean = sum(others) / len(others)
        before = Hold(mean + 50 * (1 + spread(others)), others)
        shares = [kept_share(before, Hold(mean + part * before.excess, others)) for part in sorted((one, other))]
        assert shares[0].value <= shares[1].value
        assert shares[0].high <= shares[1].high
        assert shares[1].value == pytest.approx(max(one, other), abs=1e-6)

    def test_bounds_are_those_of_one_more_placebo(self):
        """Worked by hand: spread 2 of three placebos, Student's t with two degrees of freedom."""
        kept = kept_share(Hold(20.0, (-2.0, 0.0, 2.0)), Hold(5.0, (-2.0, 0.0, 2.0)))
        reach = 2.919986 * 2 * math.sqrt(4 / 3)
        assert (kept.value, kept.low, kept.high) == pytest.approx((0.25, (5 - reach) / 20, (5 + reach) / 20), abs=1e-6)

    def test_wider_placebos_say_less(self):
        before = Hold(20.0, (-1.0, 0.0, 1.0))
        near, wide = (kept_share(before, Hold(0.0, (-by, 0.0, by))) for by in (1.0, 4.0))
        assert wide.high > near.high
        assert wide.low < near.low

    @pytest.mark.parametrize("own", [-9.0, 0.0, 1.0])
    def test_nothing_is_kept_of_what_was_not_to_be_seen(self, own):
        kept = kept_share(Hold(own, (-2.0, 0.0, 2.0)), Hold(0.0, (0.0, 0.0, 0.0)))
        assert not kept.visible
        assert math.isnan(kept.value)
        assert (kept.low, kept.high) == (-math.inf, math.inf)

    def test_a_share_is_hardly_ever_bounded_too_low(self):
        """10,000 draws of a model that kept 30%, placebos of one spread: the bound lies below in about 5%."""
        chance = torch.Generator().manual_seed(0)
        noise = torch.randn(10_000, 10, generator=chance, dtype=torch.float64)
        before = Hold(10.0, (-1.0, -0.5, 0.5, 1.0))
        highs = [kept_share(before, Hold(3.0 + float(row[0]), tuple(row[1:].tolist()))).high for row in noise]
        wrong = sum(high < 0.3 for high in highs) / len(highs)
        assert 0.043 < wrong < 0.057


class TestHold:
    def test_two_placebos_are_too_few(self):
        with pytest.raises(DataError, match="at least 3"):
            Hold(0.0, (1.0, 2.0))

    def test_what_is_not_finite_is_refused(self):
        with pytest.raises(DataError, match="not finite"):
            Hold(math.nan, (1.0, 2.0, 3.0))

    def test_placebos_are_the_labels_moved_on(self):
        raised = torch.arange(10.0, dtype=torch.float64).reshape(2, 5)
        hold = as_hold(mean_raised(raised, torch.tensor([0, 2]), shown=torch.tensor([4, 4])))
        assert hold.own == (0 + 7) / 2
        assert hold.placebos == ((1 + 8) / 2, 2.0, (3 + 5) / 2, 6.0)  # a moved label that is shown is left out

    def test_a_placebo_that_every_sample_shows_is_dropped(self):
        raised = torch.arange(5.0, dtype=torch.float64)[None]
        assert as_hold(mean_raised(raised, torch.tensor([0]), shown=torch.tensor([3]))).placebos == (1.0, 2.0, 4.0)

    def test_weights_are_counts(self):
        raised = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        labels, shown, counts = torch.tensor([0, 2, 4]), torch.tensor([1, 1, 0]), torch.tensor([3, 1, 2])
        repeated = (own.repeat_interleave(counts, dim=0) for own in (raised, labels, shown))
        weighed = mean_raised(raised, labels, shown, counts.double())
        assert torch.allclose(weighed, mean_raised(*repeated), equal_nan=True)


class TestRanks:
    @given(st.lists(numbers, min_size=2, max_size=8), st.floats(0.01, 100))
    def test_a_scale_plays_no_part_and_the_sum_is_fixed(self, scores, factor):
        logits = torch.tensor([scores], dtype=torch.float64)
        found = ranks(logits)
        count = len(scores)
        assert float(found.sum()) == count * (count - 1) / 2
        assert torch.equal(ranks(2.0 ** round(factor) * logits), found)

    def test_against_counting(self):
        logits = torch.tensor([[3.0, 1.0, 2.0, 1.0]])
        assert ranks(logits).tolist() == [[3.0, 0.5, 2.0, 0.5]]
