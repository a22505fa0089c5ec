"""Fine-tuning, negation and the controls against numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from expunge.core.vectors import Layout
from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost
from expunge.models.cnn import CNN
from expunge.models.resnet import ResNet18
from expunge.models.vit import ViTLite
from expunge.unlearning.fine_tuning import (
    FineTuningOptions,
    SameBudgetOptions,
    fine_tuning,
    same_budget,
    split,
)
from expunge.unlearning.negation import NegationOptions, first_layer, negation
from expunge.unlearning.registry import methods
from expunge.unlearning.request import Request
from unlearning.by_hand import assert_ends_at, averaged, engine_of, gradient, line, moved, trained

# bob's two samples are alike, so that it does not matter which of them a draw takes.
DATA = {"ada": [((9, 9), 9)], "bob": [((1, 2), 3), ((1, 2), 3)], "cyd": [((0, 1), 5)]}
ADA = Request.of("ada")


def a_round(theta):
    """At (1, 2): bob's gradient 2 (1, 2), cyd's -3 (0, 1), with weights 2/3 and 1/3."""
    return moved(theta, averaged([gradient(theta, DATA["bob"]), gradient(theta, DATA["cyd"])], [2, 1]), -0.1)


def run(function, options, request=ADA):
    return function(engine_of(line(1, 2), DATA), trained(line(1, 2), DATA), request, options)


class TestFineTuning:
    def test_a_round_of_those_who_stay(self):
        """(2, 4) 2/3 + (0, -3) 1/3 = (4/3, 5/3), downhill at 0.1."""
        outcome = run(fine_tuning, FineTuningOptions())
        assert_ends_at(outcome, [1 - 0.4 / 3, 2 - 0.5 / 3])
        assert outcome.cost.sample_gradients == 3
        assert outcome.cost.rounds == 1

    def test_several_rounds(self):
        outcome = run(fine_tuning, FineTuningOptions(rounds=3))
        assert_ends_at(outcome, a_round(a_round(a_round([1, 2]))))
        assert outcome.cost.sample_gradients == 9

    def test_the_round_is_remembered(self):
        """B_bob = 2/3 (Delta_bob - Delta) with Delta_bob = (-0.2, -0.4), Delta = -(0.4, 0.5)/3; A = B / (1 - 2/3)."""
        outcome = run(fine_tuning, FineTuningOptions())
        expected = [2 * (-0.2 + 0.4 / 3), 2 * (-0.4 + 0.5 / 3)]
        torch.testing.assert_close(outcome.memory.influence(["bob"]), torch.tensor(expected).double())
        assert outcome.memory.clients == ("bob", "cyd")

    def test_forgotten_samples_do_not_train(self):
        outcome = run(fine_tuning, FineTuningOptions(), Request.of("ada", samples={"bob": [0]}))
        theta = [1, 2]
        assert_ends_at(
            outcome,
            moved(theta, averaged([gradient(theta, [DATA["bob"][1]]), gradient(theta, DATA["cyd"])], [1, 1]), -0.1),
        )
        assert "bob" in outcome.warnings[0]


class TestSameBudget:
    def test_whole_epochs_then_a_part(self):
        """5 = 3 + 2: the last 2 are one sample each, and the weights stay 2/3 and 1/3."""
        outcome = run(same_budget, SameBudgetOptions(budget=5))
        assert_ends_at(outcome, a_round(a_round([1, 2])))
        assert outcome.cost.sample_gradients == 5
        assert outcome.cost.rounds == 2
        assert outcome.details == {"budget": 5, "whole_rounds": 1, "samples_in_the_last": 2}

    def test_who_gets_no_sample_takes_no_part(self):
        """1 of 3: bob's share is the larger one."""
        outcome = run(same_budget, SameBudgetOptions(budget=1))
        assert_ends_at(outcome, moved([1, 2], gradient([1, 2], DATA["bob"]), -0.1))

    def test_epochs_while_they_fit(self):
        """15 = 2 x 6 + 3: two rounds of two epochs, one of one."""
        outcome = run(same_budget, SameBudgetOptions(budget=15, epochs=2))
        assert (outcome.cost.sample_gradients, outcome.cost.rounds) == (15, 3)

    @pytest.mark.parametrize("epochs", [1, 3])
    @pytest.mark.parametrize("budget", [1, 2, 3, 4, 6, 7, 11, 50])
    def test_exactly_the_budget(self, budget, epochs):
        outcome = run(same_budget, SameBudgetOptions(budget=budget, epochs=epochs))
        assert outcome.cost.sample_gradients == budget

    @pytest.mark.parametrize("budget", [None, 0, -3, 2.5])
    def test_without_a_budget_it_says_what_to_give(self, budget):
        engine = engine_of(line(1, 2), DATA)
        with pytest.raises(RequestError, match="needs the option budget: the sample-gradients"):
            same_budget(engine, trained(line(1, 2), DATA), ADA, SameBudgetOptions(budget=budget))
        assert engine.cost.rounds == 0

    def test_largest_remainders(self):
        assert split(10, {"a": 3, "b": 3, "c": 1}) == {"a": 4, "b": 4, "c": 2}  # 4.29, 4.29, 1.43
        assert split(2, {"a": 2, "b": 1}) == {"a": 1, "b": 1}  # 1.33, 0.67
        for total in range(1, 40):
            assert sum(split(total, {"a": 11, "b": 13, "c": 17}).values()) == total


class TestNegation:
    def test_both_parameters_of_a_single_layer(self):
        """w x + b at (1, 2) becomes -x - 2. bob, x = 1, y = 3, twice: residual -6; cyd, x = 0, y = 5: residual -7.

        Gradients (-6, -6) and (0, -7), mean (-4, -19/3); a step of 0.1 down from (-1, -2).
        """
        model = nn.Linear(1, 1).double()
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(2)
        data = {"ada": [((9,), 9)], "bob": [((1,), 3), ((1,), 3)], "cyd": [((0,), 5)]}
        outcome = negation(engine_of(model, data), trained(model, data), ADA, NegationOptions(rounds=1))
        assert_ends_at(outcome, [-1 + 0.4, -2 + 1.9 / 3])
        assert outcome.details == {"negated": ["weight", "bias"]}
        assert outcome.cost.sample_gradients == 3

    def test_the_first_of_two_layers_only(self):
        """v u x at u = 1, v = 2 becomes u = -1. bob, x = 1, y = 3, twice: residual -5, gradient (r v x, r u x) =
        (-10, 5); cyd, x = 2, y = 5: residual -9, gradient (-36, 18). Mean (-56/3, 28/3).
        """
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        with torch.no_grad():
            model[0].weight.fill_(1)
            model[1].weight.fill_(2)
        data = {"ada": [((9,), 9)], "bob": [((1,), 3), ((1,), 3)], "cyd": [((2,), 5)]}
        outcome = negation(engine_of(model, data), trained(model, data), ADA, NegationOptions(rounds=1))
        assert_ends_at(outcome, [-1 + 5.6 / 3, 2 - 2.8 / 3])

    def test_which_layer_is_the_first(self):
        assert first_layer(Layout.of(CNN())) == ("features.0.weight", "features.0.bias")
        assert first_layer(Layout.of(ViTLite())) == ("embedding.weight", "embedding.bias")
        names = first_layer(Layout.of(ResNet18()))
        assert len(names) == 1
        assert names[0] == Layout.of(ResNet18()).shapes[0][0]

    def test_four_rounds_unless_said(self):
        outcome = run(negation, methods()["not"].options)
        assert_ends_at(outcome, a_round(a_round(a_round(a_round([-1, -2])))))


class TestControls:
    def test_doing_nothing(self):
        found = run(methods()["do-nothing"].function, methods()["do-nothing"].options)
        assert_ends_at(found, [1, 2])
        assert found.cost == Cost()
        assert found.memory.clients == ("bob", "cyd")

    def test_unfiltered_is_the_trajectory_without_its_filter(self):
        """ada sent (1, 0) of 4 samples, the others nothing: A = 1/4 (1 - 1/4) / (3/4) = 1/4, and theta - A is left."""
        state = trained(line(1, 2), DATA)
        sent = {"ada": torch.tensor([1.0, 0.0]).double()} | dict.fromkeys(("bob", "cyd"), torch.zeros(2).double())
        state.memory.record(sent, {"ada": 1, "bob": 2, "cyd": 1})
        known = methods()["unfiltered+recovery"]
        assert known.needs == "vectors"
        assert (known.options.tau, known.options.filter) == (0.5, "none")
        bare = known.configured({"recovery": None, "tau": None})
        outcome = bare(engine_of(line(1, 2), DATA), state, ADA)
        assert_ends_at(outcome, [0.75, 2])
        assert math.isclose(outcome.cost.sample_gradients, 0)
