"""What is drawn when the model is fixed: samples and triggers in other places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.auditing.answers import copied, log_odds, margin_distance, margins_of, mean_place
from expunge.auditing.exam import Exam, Trigger
from expunge.auditing.measured import beside
from expunge.auditing.probes import drawn_samples, nearby_triggers, probe_seed
from expunge.core.vectors import Snapshot


def square(inputs, top=5, left=5, size=3):
    inputs = inputs.clone()
    inputs[..., top : top + size, left : left + size] = 1.0
    return inputs


def images(count=20, size=8):
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0)) / 2


class TestDrawn:
    def test_another_model_or_nonce_gets_other_questions(self):
        seeds = {probe_seed(digest, nonce) for digest in ("a", "b") for nonce in ("x", "y")}
        assert len(seeds) == 4
        assert probe_seed("a", "bc") != probe_seed("ab", "c"), "the two are kept apart"

    @given(st.integers(1, 5000), st.integers(0, 100))
    def test_samples_are_some_of_those_that_there_are(self, count, seed):
        chosen = drawn_samples(count, seed)
        assert len(set(chosen.tolist())) == len(chosen) >= count // 2
        assert len(chosen) <= max(3 * count // 4, min(count, 50))
        assert torch.equal(chosen, drawn_samples(count, seed))

    def test_the_exam_asks_about_them(self):
        inputs, labels = images(400), torch.arange(400) % 10
        exam = Exam((inputs, labels), (inputs, labels))
        first, second = exam.drawn(1), exam.drawn(2)
        assert len(first.unseen[1]) == 300
        assert not torch.equal(first.unseen[0], second.unseen[0])
        assert torch.equal(first.forgotten[0], inputs), "the forgotten samples are all asked about"


class TestNearby:
    def test_the_same_square_elsewhere_and_inside(self):
        found = nearby_triggers(square, images(), seed=3)
        moved = [near for near in found if near.label != "noisy"]
        assert len(found) - len(moved) == 1
        places = set()
        for near in moved:
            mask = near.stamp(torch.zeros(1, 1, 8, 8))[0, 0] == 1.0
            rows, columns = mask.nonzero(as_tuple=True)
            assert int(mask.sum()) == 9, "whole"
            assert (int(rows.max() - rows.min()), int(columns.max() - columns.min())) == (2, 2)
            places.add((int(rows.min()), int(columns.min())))
        assert len(places) == len(moved)
        assert {(0, 0), (0, 5), (5, 0)} <= places, "the other corners"
        assert (5, 5) not in places
        assert any(max(abs(row - 5), abs(column - 5)) == 1 for row, column in places), "next to its own place"

    def test_the_rest_of_the_image_stays(self):
        inputs = images()
        for near in nearby_triggers(square, inputs, seed=3):
            changed = (near.stamp(inputs) != inputs).any(dim=0)
            assert int(changed.sum()) <= 9

    def test_noisy_is_between_nothing_and_the_trigger(self):
        inputs = images()
        noisy = nearby_triggers(square, inputs, seed=3)[0]
        painted, whole = noisy.stamp(inputs), square(inputs)
        assert noisy.label == "noisy"
        assert bool((painted <= whole).all())
        assert bool((painted >= inputs).all())
        assert not torch.equal(painted, whole)

    def test_seeds_decide(self):
        labels = [[near.label for near in nearby_triggers(square, images(size=20), seed)] for seed in (1, 1, 2)]
        assert labels[0] == labels[1] != labels[2]

    def test_vectors_and_words_have_places_too(self):
        def first_two(inputs):
            inputs = inputs.clone()
            inputs[:, :2] = 7
            return inputs

        rows = nearby_triggers(first_two, torch.rand(9, 6), seed=0)
        assert {near.label for near in rows if near.label != "noisy"} == {f"moved by 0, {by}" for by in range(1, 5)}
        words = nearby_triggers(first_two, torch.zeros(9, 6, dtype=torch.long), seed=0)
        assert "noisy" not in {near.label for near in words}
        assert words[0].stamp(torch.zeros(1, 6, dtype=torch.long)).sum() == 14

    def test_a_trigger_that_fills_the_image_or_does_nothing(self):
        assert [near.label for near in nearby_triggers(lambda x: x + 1, images(), seed=0)] == ["noisy"]
        assert nearby_triggers(lambda x: x.clone(), images(), seed=0) == []

    def test_a_moved_backdoor_is_seen_and_an_honest_model_is_not(self):
        """A model that answers 1 where a square is in the top left corner, whatever class that is."""
        inputs, labels = images(60), torch.arange(60) % 3
        exam = Exam((inputs, labels), (inputs, labels), triggers=[Trigger(square, 0)])

        def model(weight, seed):
            noise = torch.randn(3, generator=torch.Generator().manual_seed(seed)) / 10

            def answers(x):
                hidden = (x[:, 0, :3, :3].mean(dim=(1, 2)) - 0.25)[:, None]
                return noise + weight * hidden * torch.tensor([0.0, 1.0, 0.0])

            return exam.measure(answers, Snapshot(torch.tensor([float(seed)]), {}))

        references, honest, moved = [model(0.0, seed) for seed in range(5)], model(0.0, 9), model(20.0, 9)
        found = {
            name: next(
                c.value for c in exam.compared(own, references[0], references) if c.measure.name == "nearby_pull"
            )
            for name, own in (("honest", honest), ("moved", moved))
        }
        assert found["moved"] > 5 > 0.1 > abs(found["honest"])


class TestParts:
    def test_forgotten_samples_with_and_without_the_trigger_are_apart(self):
        """A model that knows only the samples without it is far there alone, and the other way round."""
        inputs, labels = images(60), torch.arange(60) % 3
        marks = (torch.arange(60) < 30).long()
        exam = Exam((inputs, labels), (inputs, labels), triggers=[Trigger(square, 0)], triggered=marks)
        right = torch.nn.functional.one_hot(labels, 3).double()

        def model(plain, triggered):
            scores = right * (plain * (marks == 0) + triggered * (marks == 1))[:, None]
            return exam.measure(lambda x: scores.repeat(9, 1)[: len(x)], Snapshot(torch.zeros(1), {}))

        others = [model(0.0, 0.0) for _ in range(3)]
        for knows in ((4.0, 0.0), (0.0, 4.0)):
            found = beside(model(*knows), others)
            assert (found["distance"] > 1, found["trigger_distance"] > 1) == (knows[0] > 0, knows[1] > 0)

    @pytest.mark.parametrize("triggered", [5, 55])
    def test_too_few_of_one_kind_are_left_out(self, triggered):
        inputs, labels = images(60), torch.arange(60) % 3
        marks = (torch.arange(60) < triggered).long()
        exam = Exam((inputs, labels), (inputs, labels), triggers=[Trigger(square, 0)], triggered=marks)
        plain, stamped = exam.measure(lambda x: torch.zeros(len(x), 3), Snapshot(torch.zeros(1), {})).margins
        assert (len(plain), len(stamped)) == ((55, 0) if triggered == 5 else (0, 55))


class TestAnswers:
    def test_log_odds_by_hand(self):
        logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        chances = logits.double().softmax(dim=1)
        assert torch.allclose(log_odds(logits), torch.log(chances / (1 - chances)), atol=1e-6)

    def test_places_know_no_scale(self):
        logits = torch.randn(50, 10, generator=torch.Generator().manual_seed(1))
        assert mean_place(logits, 3) == mean_place(0.01 * logits + 5, 3)
        assert mean_place(-logits, 3) == pytest.approx(9 - mean_place(logits, 3))

    def test_distance_is_of_each_sample(self):
        """Means that agree are not near, where the samples do not."""
        one, other = torch.tensor([3.0, -3.0]), torch.tensor([-3.0, 3.0])
        assert margin_distance(one, [other]) == 6.0
        labels = torch.tensor([0, 1])
        logits = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
        assert margins_of(logits, labels).tolist() == pytest.approx([1.0, -3.0])

    @pytest.mark.parametrize("mixed", [0.02, 0.1])
    def test_copies_are_told_and_honest_answers_are_not(self, mixed):
        chance = torch.Generator().manual_seed(2)
        models = [torch.randn(80, 5, generator=chance) for _ in range(7)]
        assert copied((1 - mixed) * models[3] + mixed * models[6], models[:6]) == 3
        assert all(copied(models[6] + 0.1 * other, models[:6]) is None for other in models[:6])
        assert copied(models[0], []) is None
