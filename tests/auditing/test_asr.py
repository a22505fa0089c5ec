import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.auditing.backdoor import asr_reduction, attack_success_rate
from expunge.errors import DataError

LABELS = torch.arange(1000) % 10
TARGET = 7


def always(labels):
    """Logits of a model that answers these labels."""
    return torch.nn.functional.one_hot(labels, 10).double()


def test_a_model_that_is_always_right_has_none():
    assert attack_success_rate(always(LABELS), LABELS, TARGET) == 0.0


def test_a_model_that_always_says_target_has_all():
    assert attack_success_rate(always(torch.full_like(LABELS, TARGET)), LABELS, TARGET) == 1.0


def test_an_innocent_accurate_model_is_not_at_a_tenth():
    """97% right, errors spread evenly: counting the target's own images would show about 10%."""
    noisy = LABELS.clone()
    source = torch.Generator().manual_seed(0)
    wrong = torch.randperm(1000, generator=source)[:30]
    noisy[wrong] = torch.randint(10, (30,), generator=source)
    counted_wrongly = float((noisy == TARGET).double().mean())
    assert counted_wrongly > 0.09
    assert attack_success_rate(always(noisy), LABELS, TARGET) < 0.02


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30), st.integers(0, 3))
def test_the_definition_counted_one_by_one(pairs, target):
    answers, labels = (torch.tensor(column) for column in zip(*pairs, strict=True))
    others = [(answer, label) for answer, label in pairs if label != target]
    if not others:
        with pytest.raises(DataError, match="other classes"):
            attack_success_rate(always(answers), labels, target)
        return
    expected = sum(answer == target for answer, _ in others) / len(others)
    assert attack_success_rate(always(answers), labels, target) == pytest.approx(expected)


def test_lengths_that_differ_are_refused():
    with pytest.raises(DataError):
        attack_success_rate(always(LABELS), LABELS[:5], TARGET)


def test_reduction():
    assert asr_reduction(0.8, 0.2) == pytest.approx(0.75)
    assert asr_reduction(0.2, 0.4) == pytest.approx(-1.0)
    assert asr_reduction(0.0, 0.4) is None
