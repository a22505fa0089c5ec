"""What a model shows beside others: the share of the trained model's answers that is left, and what chance explains."""

import math

import pytest
import torch

from expunge.auditing.exam import Exam, Trigger
from expunge.auditing.margins import findings
from expunge.auditing.measured import chance_share, kept_share
from expunge.core.vectors import Snapshot

CLASSES, COUNT = 4, 80


def stamp(inputs):
    return torch.cat([inputs[:, :-1], torch.ones(len(inputs), 1, dtype=inputs.dtype)], dim=1)


@pytest.fixture
def exam():
    """Samples with a feature each for four classes and one more, which the trigger sets."""
    labels = torch.arange(COUNT) % CLASSES
    inputs = torch.nn.functional.one_hot(labels, CLASSES + 1).double()
    marks = (torch.arange(COUNT) < COUNT // 2).long()
    forgotten = torch.where(marks[:, None] > 0, stamp(inputs), inputs), labels.masked_fill(marks > 0, 0)
    return Exam(forgotten, (inputs, labels), triggers=[Trigger(stamp, 0)], triggered=marks)


def weights(seed, backdoor=0.0, attention=1.0, scale=1.0):
    """A linear model: right of each class, noisy, and drawn to class 0 by the trigger."""
    noise = torch.randn(CLASSES + 1, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise[-1] *= attention
    found = 0.3 * noise + 3 * torch.eye(CLASSES + 1, CLASSES, dtype=torch.float64)
    found[-1, 0] += backdoor
    return scale * found


def asked(exam, matrix):
    return exam.measure(lambda inputs: inputs @ matrix, Snapshot(matrix.flatten(), {}))


@pytest.fixture
def trained(exam):
    return asked(exam, weights(50, backdoor=8.0))


@pytest.fixture
def retrained(exam):
    return [asked(exam, weights(seed)) for seed in range(6)]


class TestKeptShare:
    def test_it_is_one_for_the_trained_model_and_nothing_for_an_honest_one(self, exam, trained, retrained):
        assert kept_share(trained, trained, retrained) == pytest.approx(1.0)
        assert abs(kept_share(asked(exam, weights(9)), trained, retrained)) < 0.1

    def test_it_is_the_coefficient_of_a_regression(self, exam, trained, retrained):
        own = asked(exam, weights(9, backdoor=2.0))
        mean = torch.stack([other.directions for other in retrained]).mean(dim=0).flatten()
        x, y = trained.directions.flatten() - mean, own.directions.flatten() - mean
        by_hand = torch.linalg.lstsq(x[:, None], y[:, None]).solution.item()
        assert kept_share(own, trained, retrained) == pytest.approx(by_hand)

    def test_no_scaling_of_outputs_hides_it(self, exam, trained, retrained):
        shares = [
            kept_share(asked(exam, weights(9, backdoor=4.0, scale=scale)), trained, retrained) for scale in (0.1, 1, 9)
        ]
        assert shares == pytest.approx([shares[0]] * 3)
        assert shares[0] > 0.2

    def test_both_the_samples_and_the_trigger_count(self, exam, trained):
        assert trained.directions.shape == (COUNT + COUNT * 3 // 4, CLASSES)  # stamped ones are not of the target
        plain = Exam(exam.forgotten, exam.unseen)
        assert asked(plain, weights(1)).directions.shape == (COUNT, CLASSES)

    def test_nothing_to_compare_says_nothing(self, exam, trained, retrained):
        assert kept_share(trained, trained, []) is None
        broken = asked(exam, torch.full((CLASSES + 1, CLASSES), math.nan, dtype=torch.float64))
        assert kept_share(broken, trained, retrained) is None
        same = asked(exam, weights(0))
        assert kept_share(same, same, [retrained[0]]) == 0.0


class TestChance:
    def test_a_model_that_learnt_nothing_of_the_data_deviates_by_chance(self, exam, trained, retrained):
        assert chance_share(trained, retrained) < 0.15
        clean = asked(exam, weights(51))
        assert chance_share(clean, retrained) > 0.3
        assert chance_share(trained, retrained[:1]) == 1.0

    def test_then_the_share_carries_no_claim(self, exam, trained, retrained):
        def usable(before):
            honest = asked(exam, weights(9))
            found = findings(exam.compared(honest, before, retrained))
            return next(one for one in found if one.measure.name == "kept_share").usable

        assert usable(trained)
        assert not usable(asked(exam, weights(51)))


class TestWhatTheTriggerMoves:
    def test_by_hand(self, exam):
        matrix = weights(3)
        inputs = exam.unseen[0][exam.unseen[1] != 0]
        plain, stamped = ((each @ matrix).softmax(dim=1) for each in (inputs, stamp(inputs)))
        moved = float((plain - stamped).abs().sum(dim=1).mean()) / 2
        assert asked(exam, matrix).alone["trigger_moves"] == pytest.approx(math.log(moved))

    def test_a_model_that_looks_past_the_trigger_is_below_all_others(self, exam, trained, retrained):
        blind = asked(exam, weights(9, attention=0.01))
        found = findings(exam.compared(blind, trained, retrained))
        moves = next(one for one in found if one.measure.name == "trigger_moves")
        assert moves.excess > moves.margin
        above = asked(exam, weights(9, backdoor=3.0))
        moves = next(o for o in findings(exam.compared(above, trained, retrained)) if o.measure.name == "trigger_moves")
        assert moves.excess < 0
