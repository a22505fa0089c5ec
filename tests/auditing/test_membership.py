import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from expunge.auditing.membership import _balanced, _best_threshold, loss_threshold_attack, matched_weights
from expunge.errors import DataError


def normal(count, seed, mean=0.0):
    return mean + torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_group(count):
    return torch.zeros(count, dtype=torch.int64)


def counted(member_losses, other_losses):
    """The chance that a member's loss is smaller, pair by pair."""
    smaller = (member_losses[:, None] < other_losses[None]).double()
    equal = (member_losses[:, None] == other_losses[None]).double()
    return float((smaller + 0.5 * equal).mean())


class TestAuc:
    def test_half_without_a_difference(self):
        found = loss_threshold_attack(normal(4000, 0), one_group(4000), normal(4000, 1), one_group(4000))
        assert found.auc == pytest.approx(0.5, abs=4 / np.sqrt(12 * 2000))
        assert found.success_rate == pytest.approx(0.5, abs=0.05)

    def test_one_where_members_have_smaller_losses(self):
        found = loss_threshold_attack(normal(50, 0, -20), one_group(50), normal(70, 1), one_group(70))
        assert found.auc == 1.0
        assert found.success_rate == 1.0

    def test_zero_where_members_have_larger_losses(self):
        assert loss_threshold_attack(normal(50, 0, 20), one_group(50), normal(70, 1), one_group(70)).auc == 0.0

    @settings(deadline=None)
    @given(
        st.lists(st.integers(0, 6), min_size=1, max_size=20),
        st.lists(st.integers(0, 6), min_size=1, max_size=20),
    )
    def test_pair_by_pair_with_ties(self, members, others):
        member_losses, other_losses = (torch.tensor(values, dtype=torch.float64) for values in (members, others))
        found = loss_threshold_attack(member_losses, one_group(len(members)), other_losses, one_group(len(others)))
        assert found.auc == pytest.approx(counted(member_losses, other_losses))
        assert 0 <= found.success_rate <= 1


class TestMatching:
    """A one-sided client: its losses differ because of its labels, not because it was trained on."""

    MEMBER_LABELS = torch.tensor([0] * 1800 + [1] * 200)
    OTHER_LABELS = torch.tensor([0] * 500 + [1] * 1500)

    def losses(self, labels, seed):
        return normal(len(labels), seed) + 4.0 * labels  # class 1 is hard for everybody

    def test_labels_alone_look_like_membership_only_where_they_are_not_matched(self):
        members, others = self.losses(self.MEMBER_LABELS, 0), self.losses(self.OTHER_LABELS, 1)
        unmatched = loss_threshold_attack(members, one_group(2000), others, one_group(2000))
        matched = loss_threshold_attack(members, self.MEMBER_LABELS, others, self.OTHER_LABELS)
        assert unmatched.auc > 0.75
        assert unmatched.success_rate > 0.7
        assert matched.auc == pytest.approx(0.5, abs=0.04)
        assert matched.success_rate == pytest.approx(0.5, abs=0.05)

    def test_real_membership_is_still_seen(self):
        members, others = self.losses(self.MEMBER_LABELS, 0) - 2.0, self.losses(self.OTHER_LABELS, 1)
        assert loss_threshold_attack(members, self.MEMBER_LABELS, others, self.OTHER_LABELS).auc > 0.85

    def test_equals_sklearn_on_an_explicit_resample(self):
        """Whole copies instead of weights: 3 members of group 0 and 1 of group 1, others 2 and 3 of them."""
        member_groups, other_groups = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 1, 2])
        members, others = normal(4, 3), normal(6, 4)
        copies = [9, 9, 2, 2, 2, 0]  # group 0 has 18 copies to group 1's 6: three to one, as among members
        resampled = torch.cat([others[i].repeat(n) for i, n in enumerate(copies)])
        truth = np.concatenate([np.ones(4), np.zeros(len(resampled))])
        oracle = roc_auc_score(truth, -torch.cat([members, resampled]).numpy())
        assert loss_threshold_attack(members, member_groups, others, other_groups).auc == pytest.approx(oracle)
        assert oracle == pytest.approx(counted(members, resampled))

    def test_members_of_a_group_that_no_other_has_are_left_out(self):
        members, groups = torch.tensor([0.0, 0.0, 9.0]), torch.tensor([0, 0, 5])
        found = loss_threshold_attack(members, groups, torch.tensor([1.0, 1.0]), torch.tensor([0, 0]))
        assert found.auc == 1.0

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=30))
    def test_weights_add_up_and_give_the_members_distribution(self, members, others):
        shared = set(members) & set(others)
        assume(shared)
        weights = matched_weights(torch.tensor(members), torch.tensor(others))
        assert float(weights.sum()) == pytest.approx(1.0)
        known = [group for group in members if group in shared]
        for group in set(others):
            mass = float(weights[torch.tensor(others) == group].sum())
            assert mass == pytest.approx(known.count(group) / len(known))
            assert len({round(float(w), 12) for w in weights[torch.tensor(others) == group]}) == 1


class TestSuccessRate:
    def test_the_threshold_is_not_chosen_on_the_samples_it_is_judged_by(self):
        """Pure noise: choosing and judging on the same samples would show well above one half."""
        rates = [
            loss_threshold_attack(
                normal(20, 2 * seed), one_group(20), normal(20, 2 * seed + 1), one_group(20), seed=seed
            ).success_rate
            for seed in range(100)
        ]
        assert np.mean(rates) == pytest.approx(0.5, abs=0.03)

    def test_seeded(self):
        arguments = normal(40, 0), one_group(40), normal(40, 1, 0.5), one_group(40)
        assert loss_threshold_attack(*arguments, seed=3) == loss_threshold_attack(*arguments, seed=3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="as many groups"):
        loss_threshold_attack(normal(3, 0), one_group(2), normal(3, 0), one_group(3))
    with pytest.raises(DataError, match="No non-member"):
        loss_threshold_attack(normal(3, 0), one_group(3), normal(3, 0), one_group(3) + 1)


@given(st.integers(0, 10_000))
def test_the_best_threshold_is_that_of_trying_them_all(seed):
    chance = np.random.default_rng(seed)
    size = int(chance.integers(2, 60))
    scores, truth = np.round(chance.normal(size=size), 1), chance.integers(0, 2, size).astype(float)
    weight = chance.random(size) + 0.01
    seen = np.unique(scores)
    every = [seen[0], *((seen[1:] + seen[:-1]) / 2), np.inf]
    best = max(_balanced(scores >= limit, truth, weight) for limit in every)
    found = _best_threshold(scores, truth, weight)
    assert found in every
    assert _balanced(scores >= found, truth, weight) == pytest.approx(best, abs=1e-9)


def test_ten_thousand_samples_are_attacked_at_once():
    """Trying every threshold would take minutes."""
    generator = torch.Generator().manual_seed(0)
    members, others = (torch.rand(10_000, generator=generator) for _ in range(2))
    groups = torch.zeros(10_000, dtype=torch.int64)
    started = time.perf_counter()
    assert 0.47 < loss_threshold_attack(members, groups, others, groups).success_rate < 0.53
    assert time.perf_counter() - started < 5
