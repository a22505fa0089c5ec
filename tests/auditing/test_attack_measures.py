"""The common result of all attacks, taken apart by sample and client, and beside the retrained models."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.auditing.comparison import Scores, beside_retrained
from expunge.auditing.membership import loss_threshold_attack, matched_weights, measure_attack, threshold
from expunge.errors import DataError

scores = st.lists(st.integers(-50, 50).map(lambda v: v / 8), min_size=1, max_size=40)


def normal(count, seed, mean=0.0):
    return np.random.default_rng(seed).normal(mean, 1.0, count)


class TestMeasure:
    @given(scores, scores)
    def test_no_monotone_change_of_the_scores_matters(self, members, others):
        plain = measure_attack(members, others)
        bent = measure_attack([math.exp(v) for v in members], [math.exp(v) for v in others])
        assert bent == plain

    @given(scores, scores)
    def test_swapped_sides_mirror_the_auc(self, members, others):
        there, back = measure_attack(members, others).auc, measure_attack(others, members).auc
        assert back == pytest.approx((1 - there.value, 1 - there.high, 1 - there.low), abs=1e-6)

    def test_large_scores_are_members(self):
        found = measure_attack(normal(200, 0, 30), normal(1000, 1))
        assert found.auc.value == found.tpr_at_1_percent.value == found.tpr_at_01_percent.value == 1.0
        assert found.auc.low < 1
        assert found.tpr_at_1_percent.low == pytest.approx(0.025 ** (1 / 200))
        assert measure_attack(normal(200, 0, -30), normal(1000, 1)).auc.value == 0.0

    def test_true_positives_by_counting(self):
        members, others = normal(500, 0, 1.0), normal(1000, 1)
        found, ranked = measure_attack(members, others), np.sort(others)[::-1]
        assert found.tpr_at_1_percent.value == np.mean(members > ranked[10])  # ten of 1000 lie above it
        assert found.tpr_at_01_percent.value == np.mean(members > ranked[1])

    @given(st.integers(0, 1000), st.sampled_from([0.01, 0.1, 0.5]))
    def test_the_threshold_is_the_smallest_that_keeps_the_false_alarms(self, seed, allowed):
        random = np.random.default_rng(seed)
        others, weights = random.integers(0, 20, 60).astype(float), random.dirichlet(np.ones(60))
        limit = threshold(others, weights, allowed)
        assert weights[others > limit].sum() <= allowed + 1e-9
        lower = others[others < limit]
        assert len(lower) == 0 or weights[others > lower.max()].sum() > allowed

    def test_too_few_non_members_give_no_rate(self):
        few, some, many = (measure_attack(normal(50, 0), normal(count, 1)) for count in (99, 100, 1000))
        assert few.tpr_at_1_percent is None
        assert some.tpr_at_1_percent is not None
        assert some.tpr_at_01_percent is None
        assert many.tpr_at_01_percent is not None

    def test_weights_give_the_matched_attack_and_count_as_fewer(self):
        random = np.random.default_rng(0)
        groups, other_groups = torch.tensor(random.integers(0, 3, 300)), torch.tensor(random.integers(0, 5, 400))
        members, others = normal(300, 1) + groups.numpy(), normal(400, 2) + other_groups.numpy()
        weights = matched_weights(groups, other_groups)
        found = measure_attack(members, others, weights)
        oracle = loss_threshold_attack(torch.tensor(-members), groups, torch.tensor(-others), other_groups)
        assert found.auc.value == pytest.approx(oracle.auc)
        assert 150 < found.others < 400
        assert found.auc.high - found.auc.low > np.ptp(measure_attack(members, others).auc[1:])

    @pytest.mark.parametrize(
        ("members", "others", "weights", "message"),
        [
            ([], [1.0], None, "no members"),
            ([1.0], [], None, "no non-members"),
            ([math.nan], [1.0], None, "NaN"),
            ([1.0], [1.0, 2.0], [1.0], "a weight each"),
            ([1.0], [1.0, 2.0], [0.0, 0.0], "a weight each"),
            ([1.0], [1.0, 2.0], [2.0, -1.0], "a weight each"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, members, others, weights, message):
        with pytest.raises(DataError, match=message):
            measure_attack(members, others, weights)


class TestBesideRetrained:
    """Members are hard samples: no model that never saw them gives 0.5."""

    HARD = normal(400, 0, -1.0)
    OTHERS = normal(400, 1)

    def model(self, seed, memory=0.0, noise=0.3):
        random = np.random.default_rng(seed)
        members = self.HARD + memory + random.normal(0, noise, 400)
        return Scores(members, self.OTHERS + random.normal(0, noise, 400))

    def test_the_retrained_value_is_the_target(self):
        found = beside_retrained(self.model(1, memory=1.0), self.model(2), [self.model(s) for s in (3, 4, 5)])
        assert found.unlearned.auc.value == pytest.approx(found.retrained[0].auc.value, abs=0.03)
        assert found.unlearned.auc.high < 0.5  # and it is no 0.5
        assert found.gap.auc.covers(0)
        assert found.gap.tpr_at_1_percent.covers(0)
        assert found.do_nothing.auc.low > 0.15
        assert found.do_nothing.auc.value == pytest.approx(
            found.trained.auc.value - np.mean([attack.auc.value for attack in found.retrained])
        )
        # A model at 0.5 has not forgotten: it is above the retrained ones.
        half = beside_retrained(self.model(1, 1.0), self.model(2, memory=1.0), [self.model(s) for s in (3, 4, 5)])
        assert half.unlearned.auc.covers(0.5)
        assert not half.gap.auc.covers(0)

    def test_forgetting_too_much_is_a_gap_below(self):
        found = beside_retrained(self.model(1, 1.0), self.model(2, memory=-1.0), [self.model(s) for s in (3, 4, 5)])
        assert found.gap.auc.high < 0

    def test_common_samples_make_the_gap_narrower_than_its_parts(self):
        found = beside_retrained(self.model(1, 1.0), self.model(2, noise=0.05), [self.model(3, noise=0.05)])
        width = np.ptp(found.gap.auc[1:])
        assert 0 < width < 0.5 * np.ptp(found.unlearned.auc[1:])

    @pytest.mark.parametrize(("member_noise", "other_noise"), [(0.1, 1.5), (1.5, 0.1)])
    def test_interval_against_resampling(self, member_noise, other_noise):
        """The samples' part, with one retrained model: 400 members, 60 non-members, one side follows its samples."""
        random, gaps = np.random.default_rng(0), []
        own, other = (
            Scores(
                self.HARD + memory + random.normal(0, member_noise, 400),
                self.OTHERS[:60] + random.normal(0, other_noise, 60),
            )
            for memory in (0.5, 0.0)
        )
        found = beside_retrained(own, own, [other]).gap.auc
        for _ in range(400):
            i, j = random.integers(400, size=400), random.integers(60, size=60)
            aucs = [measure_attack(model.members[i], model.others[j]).auc.value for model in (own, other)]
            gaps.append(aucs[0] - aucs[1])
        assert found.high - found.low == pytest.approx(2 * 1.96 * np.std(gaps), rel=0.15)

    def test_the_gap_in_true_positives(self):
        trained, retrained = self.model(1, memory=3.0), [self.model(s) for s in (3, 4, 5)]
        found = beside_retrained(trained, self.model(2), retrained)
        rates = [attack.tpr_at_1_percent.value for attack in (found.trained, *found.retrained)]
        assert found.do_nothing.tpr_at_1_percent.value == pytest.approx(rates[0] - np.mean(rates[1:]))
        assert found.do_nothing.tpr_at_1_percent.low > 0.1

    def test_retrained_models_that_differ_widen_it(self):
        alike, apart = ([self.model(s, memory=m) for s, m in ((3, -d), (4, 0.0), (5, d))] for d in (0.0, 0.3))
        narrow, wide = (beside_retrained(self.model(1), self.model(2), models).gap.auc for models in (alike, apart))
        aucs = [measure_attack(model.members, model.others).auc.value for model in apart]
        assert wide.high - wide.value > 4.303 * np.std(aucs, ddof=1) * math.sqrt(4 / 3)
        assert wide.high - wide.low > 2 * (narrow.high - narrow.low)

    def test_few_non_members_have_no_rate_gap(self):
        few = Scores(normal(50, 0), normal(50, 1))
        assert beside_retrained(few, few, [few]).gap.tpr_at_1_percent is None

    def test_what_does_not_fit_is_refused(self):
        one, other = self.model(1), Scores(normal(10, 0), normal(400, 1))
        with pytest.raises(DataError, match="at least one retrained"):
            beside_retrained(one, one, [])
        with pytest.raises(DataError, match="same samples"):
            beside_retrained(one, one, [other])
