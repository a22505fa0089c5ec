import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.auditing.signals import (
    as_floats,
    as_masks,
    loss,
    membership_scores,
    modified_entropy,
    scaled_confidence,
)
from expunge.errors import DataError, RequestError

rows = st.lists(st.floats(-300, 300), min_size=2, max_size=5)


def exact(row, label):
    """Loss, modified entropy and scaled confidence with 400 digits."""
    with mpmath.workdps(400):
        powers = [mpmath.exp(mpmath.mpf(value)) for value in row]
        p = [power / mpmath.fsum(powers) for power in powers]
        others = [i for i in range(len(row)) if i != label]
        rest = [mpmath.fsum(p[:i] + p[i + 1 :]) for i in range(len(row))]
        entropy = -rest[label] * mpmath.log(p[label]) - mpmath.fsum(p[i] * mpmath.log(rest[i]) for i in others)
        confidence = mpmath.log(p[label]) - mpmath.log(rest[label])
        return float(-mpmath.log(p[label])), float(entropy), float(confidence)


@given(rows, st.data())
def test_against_many_digits(row, data):
    label = data.draw(st.integers(0, len(row) - 1))
    logits, labels = torch.tensor([row], dtype=torch.float64), torch.tensor([label])
    found = [signal(logits, labels)[0] for signal in (loss, modified_entropy, scaled_confidence)]
    for value, oracle in zip(found, exact(row, label), strict=True):
        assert value == pytest.approx(oracle, rel=1e-11, abs=1e-13)


def test_float32_logits_are_not_rounded_further():
    """1 - p_y is 1e-13 and 1e-26: in float32 both are 0."""
    logits, labels = torch.tensor([[30.0, 0.0], [60.0, 0.0]]), torch.tensor([0, 0])
    np.testing.assert_array_equal(scaled_confidence(logits, labels), [30.0, 60.0])
    assert scaled_confidence(logits, labels).dtype == np.float64
    assert loss(logits, labels) == pytest.approx([math.exp(-30), math.exp(-60)], rel=1e-2, abs=1e-16)


def test_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    by_hand = {
        0: 0.5 * math.log(2) + 2 * 0.25 * math.log(Fraction(4, 3)),
        1: 0.75 * math.log(4) + 0.5 * math.log(2) + 0.25 * math.log(Fraction(4, 3)),
    }
    for label, value in by_hand.items():
        assert modified_entropy(logits, torch.tensor([label]))[0] == pytest.approx(value)
    assert scaled_confidence(logits, torch.tensor([1]))[0] == pytest.approx(math.log(1 / 3))


@pytest.mark.parametrize("signal", ["confidence", "loss", "modified_entropy"])
def test_scores_rise_with_the_fit(signal):
    logits = torch.tensor([[value, 0.0, 1.0] for value in (-5.0, 0.0, 2.0, 9.0)])
    assert (np.diff(membership_scores(logits, torch.zeros(4, dtype=torch.int64), signal)) > 0).all()


def test_what_does_not_fit_is_refused():
    good, labels = torch.zeros(2, 3), torch.tensor([0, 1])
    for logits in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(0, 3), torch.zeros(3, 3)):
        with pytest.raises(DataError, match="samples x classes"):
            loss(logits, labels[: len(logits)] if len(logits) == 0 else labels)
    for value in (float("nan"), float("inf")):
        with pytest.raises(DataError, match="NaN or infinite"):
            scaled_confidence(torch.full((2, 3), value), labels)
    for wrong in (torch.tensor([0, 3]), torch.tensor([-1, 0])):
        with pytest.raises(DataError, match="Labels must be 0 to 2"):
            modified_entropy(good, wrong)
    with pytest.raises(RequestError, match="no membership signal"):
        membership_scores(good, labels, "entropy")
    with pytest.raises(DataError, match="no scores"):
        as_floats([], "scores")
    with pytest.raises(DataError, match="dimensions"):
        as_floats(np.zeros((2, 2)), "scores")
    with pytest.raises(DataError, match="NaN"):
        as_floats([1.0, math.nan], "scores")
    for masks in (np.zeros((2, 2)), np.zeros((2, 3), dtype=bool)):
        with pytest.raises(DataError, match="booleans"):
            as_masks(masks, (2, 2))
