"""Student's t, beside scipy.stats."""

import math

import pytest
from scipy import stats

from expunge.auditing.student import chance_beyond, value_beyond


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 200])
@pytest.mark.parametrize("chance", [0.5, 0.2, 0.05, 0.0125, 7e-4, 1e-6, 0.8])
def test_values_and_chances_are_those_of_scipy_stats(freedom, chance):
    value = value_beyond(chance, freedom)
    assert value == pytest.approx(float(stats.t.isf(chance, freedom)), rel=1e-8, abs=1e-12)
    assert chance_beyond(value, freedom) == pytest.approx(chance, rel=1e-8)


def test_the_ends():
    assert chance_beyond(math.inf, 4) == 0.0
    assert chance_beyond(-math.inf, 4) == 1.0
    assert chance_beyond(0.0, 4) == 0.5
