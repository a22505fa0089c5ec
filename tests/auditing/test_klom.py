import numpy as np
import pytest
import torch

from expunge.auditing.klom import histogram_divergence, klom
from expunge.auditing.signals import scaled_confidence
from expunge.errors import DataError


def normal(mean, spread, shape, seed):
    return np.random.default_rng(seed).normal(mean, spread, shape)


class TestKlom:
    def test_gaussians(self):
        """KL(N(m, 1) || N(0, 1)) is m^2 / 2."""
        for mean, expected in ((0.5, 0.125), (1.0, 0.5)):
            found = histogram_divergence(normal(mean, 1, (20000, 4), 0), normal(0, 1, (20000, 4), 1))
            assert found == pytest.approx(np.full(4, expected), rel=0.12)

    def test_direction(self):
        """KL(N(0, 1) || N(0, 4)) is log 2 - 3/8 = 0.318, the other way round 1.5 - log 2 = 0.807."""
        narrow, wide = normal(0, 1, (20000, 1), 0), normal(0, 2, (20000, 1), 1)
        assert histogram_divergence(narrow, wide)[0] == pytest.approx(0.318, rel=0.12)
        assert histogram_divergence(wide, narrow)[0] == pytest.approx(0.807, rel=0.25)

    def test_equal_distributions_are_at_the_floor(self):
        found = klom(normal(0, 1, (16, 500), 0), normal(0, 1, (16, 500), 1))
        assert found.value == pytest.approx(found.noise_floor, rel=0.1)
        assert found.worst == pytest.approx(found.worst_floor, rel=0.15)
        assert found.noise_floor > 0.05, "few models are far above zero: that is what the floor is for"
        assert (found.models, found.retrained) == (16, 16)

    def test_other_distributions_are_above_it(self):
        found = klom(normal(2, 1, (16, 500), 0), normal(0, 1, (16, 500), 1))
        assert found.value > 3 * found.noise_floor
        assert found.worst > found.worst_floor

    def test_a_few_samples_that_remember_show_in_the_worst(self):
        forgot = normal(0, 1, (32, 500), 0)
        forgot[:, :50] += 5
        found = klom(forgot, normal(0, 1, (32, 500), 1))
        assert found.worst > 2 * found.worst_floor

    def test_from_logits(self):
        logits = torch.randn(20, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        labels = torch.zeros(30, dtype=torch.int64)
        margins = np.stack([scaled_confidence(own, labels) for own in logits])
        assert klom(margins, margins[::-1]).value >= 0

    def test_constant_margins(self):
        assert klom(np.ones((16, 3)), np.ones((16, 3))).value == 0.0

    def test_refused(self):
        with pytest.raises(DataError, match="at least 3 retrained models, not 2"):
            klom(np.zeros((1, 3)), np.zeros((2, 3)))
        with pytest.raises(DataError, match="the same samples on both sides, not 3 and 4"):
            klom(np.zeros((16, 3)), np.zeros((16, 4)))


class TestOneModel:
    """One model is one draw: its floor is what a retrained model shows beside the others."""

    RETRAINED = normal(0, 1, (5, 2000), 1)

    def test_one_more_retrained_model_is_at_the_floor(self):
        found = klom(normal(0, 1, (1, 2000), 0), self.RETRAINED)
        assert found.value == pytest.approx(found.noise_floor, rel=0.05)
        assert (found.models, found.retrained) == (1, 5)

    def test_one_that_remembers_is_above_it_and_further_away_no_further(self):
        near, far, further = (klom(normal(shift, 1, (1, 2000), 0), self.RETRAINED) for shift in (1.5, 5.0, 50.0))
        assert 1.2 * near.noise_floor < near.value < far.value
        assert further.value == pytest.approx(far.value, rel=0.2), "outside of all of them is as far as it goes"

    def test_the_floor_is_of_models_that_the_reference_does_not_hold(self):
        """Each retrained model beside the four others, by hand."""
        others = [np.delete(self.RETRAINED, left, axis=0) for left in range(5)]
        by_hand = [histogram_divergence(self.RETRAINED[[left]], others[left]).mean() for left in range(5)]
        assert klom(self.RETRAINED[:1], self.RETRAINED, splits=400).noise_floor == pytest.approx(
            np.mean(by_hand), rel=0.03
        )
