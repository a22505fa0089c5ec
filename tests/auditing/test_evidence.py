import math

import pytest
import torch
from torch import nn

from expunge.auditing.evidence import (
    Outputs,
    engine_evidence,
    gradient_evidence,
    held_out_evidence,
    retained_loss_evidence,
    solver_evidence,
)
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import Outcome, method
from expunge.unlearning.request import Request
from federation.small import Watching, clients, mlp

DATA = clients(ada=30, bob=20, cyd=25)
REQUEST = Request.of("bob", samples={"cyd": [0, 3]})
LABELS = torch.arange(60) % 3


def engine():
    return Watching(mlp(), CrossEntropy(), DATA)


@pytest.fixture(scope="module")
def state():
    return train(engine(), Snapshot.of(mlp()), TrainingPlan(rounds=5, epochs=2, batch_size=8, learning_rate=0.1))


def outputs(advantage, seed=0):
    """Logits of 60 forgotten and 60 held-out samples; the right answer of the forgotten ones is raised."""
    chance = torch.Generator().manual_seed(seed)
    forgotten, held_out = (torch.randn(60, 3, generator=chance, dtype=torch.float64) for _ in range(2))
    return Outputs(forgotten + advantage * nn.functional.one_hot(LABELS, 3), held_out)


class TestHeldOut:
    def test_told_apart_before_and_not_after(self):
        found = held_out_evidence(outputs(3.0), outputs(0.0), LABELS, LABELS)
        assert found.leaning == "for"
        assert found.values["auc_before"] > 0.8 > found.values["auc_after"]
        assert "no proof" in found.sentence

    @pytest.mark.parametrize(("advantage", "side", "leaning"), [(3.0, "better", "against"), (-3.0, "worse", "neither")])
    def test_still_told_apart_on_either_side(self, advantage, side, leaning):
        """Fitted worse says nothing: a model that never saw poisoned data fits it worse, too."""
        found = held_out_evidence(outputs(3.0), outputs(advantage), LABELS, LABELS)
        assert found.leaning == leaning
        assert f"fitted {side} than" in found.sentence

    def test_nothing_to_see_before(self):
        assert held_out_evidence(outputs(0.0), outputs(0.0), LABELS, LABELS).leaning == "neither"

    def test_labels_are_matched(self):
        """The leaver has one label only, and that is the easy one: not a sign of membership."""
        easy = torch.where(LABELS[:, None] == 0, 5.0, 0.0) * nn.functional.one_hot(LABELS, 3)
        noise = outputs(0.0)
        own = Outputs(noise.forgotten[LABELS == 0] + easy[LABELS == 0], noise.held_out + easy)
        found = held_out_evidence(own, own, LABELS[LABELS == 0], LABELS)
        assert found.leaning == "neither"

    def test_a_mix_of_labels_is_matched(self):
        """Nine in ten of the leaver's samples are of the easy class, half of the held-out ones: no membership."""
        chance = torch.Generator().manual_seed(3)

        def answers(labels):
            noise = torch.randn(len(labels), 2, generator=chance, dtype=torch.float64)
            return noise + torch.where(labels == 0, 3.0, 0.0)[:, None] * nn.functional.one_hot(labels, 2)

        forgotten, held_out = (torch.arange(400) >= 360).long(), (torch.arange(400) >= 200).long()
        own = Outputs(answers(forgotten), answers(held_out))
        found = held_out_evidence(own, own, forgotten, held_out)
        assert found.leaning == "neither"
        assert found.values["auc_after"] == pytest.approx(0.5, abs=0.05)

    def test_refused_without_the_labels(self):
        with pytest.raises(DataError, match="with its labels"):
            held_out_evidence(outputs(0.0), outputs(0.0), LABELS, torch.full((60,), 7))


def retained_by_hand(model):
    module = mlp()
    model.write_to(module)
    kept = [k for k in range(25) if k not in (0, 3)]
    inputs = torch.cat([DATA["ada"][0], DATA["cyd"][0][kept]])
    labels = torch.cat([DATA["ada"][1], DATA["cyd"][1][kept]])
    return module, nn.functional.cross_entropy(module(inputs), labels)


def asked(before, after, watching=None):
    """The retained loss and gradient of two models, from those who stay."""
    outcome = Outcome("mine", ServerState(after), Cost())
    return engine_evidence(watching or engine(), before, outcome, REQUEST)[:2]


class TestRetained:
    def test_loss_by_hand(self, state):
        found, _ = asked(state.model, Snapshot.of(mlp()))
        for name, model in (("before", state.model), ("after", Snapshot.of(mlp()))):
            assert found.values[name] == pytest.approx(retained_by_hand(model)[1].item(), rel=1e-9)
        assert found.leaning == "against", "the initial model knows nothing"
        assert asked(state.model, state.model)[0].leaning == "neither"

    def test_gradient_by_hand(self, state):
        _, found = asked(state.model, Snapshot.of(mlp()))
        for name, model in (("before", state.model), ("after", Snapshot.of(mlp()))):
            module, value = retained_by_hand(model)
            value.backward()
            gradient = Layout.of(module).flatten({key: p.grad for key, p in module.named_parameters()})
            assert found.values[name] == pytest.approx(float(gradient.norm()), rel=1e-9)

    def test_a_gradient_never_speaks_for_forgetting(self, state):
        """Training on without the data brings it down, and forgets nothing."""
        start, end = Snapshot.of(mlp()), state.model
        kinds = {asked(*pair)[1].leaning for pair in ((start, end), (end, start), (end, end))}
        assert "for" not in kinds

    def test_only_those_who_stay_are_asked(self, state):
        watching = engine()
        asked(state.model, state.model, watching)
        assert all(set(tasks) == {"ada", "cyd"} for tasks in watching.asked)
        assert all(tasks["cyd"].exclude == (0, 3) for tasks in watching.asked)

    def test_where_a_rise_begins(self):
        """A twentieth of a nat is tolerated; a gradient may double; a NaN is a rise."""
        rises = [retained_loss_evidence(1.0, after).leaning for after in (0.5, 1.04, 1.06, math.nan)]
        assert rises == ["neither", "neither", "against", "against"]
        assert [gradient_evidence(1.0, after).leaning for after in (0.9, 1.0, 1.9, 2.1)] == [
            "neither",
            "neither",
            "neither",
            "against",
        ]


class TestSolver:
    def outcome(self, state, name="hf-kcu"):
        return method(name)(engine(), state, REQUEST)

    def test_from_the_details(self, state):
        outcome = self.outcome(state)
        solve = outcome.details["steps"][0]["solves"]["server"]
        found = solver_evidence(outcome.details)
        assert found.values["relative_residual"] == pytest.approx(
            solve["residual_norms"][-1] / solve["residual_norms"][0]
        )
        assert found.values["error_bound"] == pytest.approx(solve["error_bound"])
        assert "not about what was forgotten" in found.sentence

    def test_the_worst_of_several(self):
        steps = [
            {"solves": {"a": {"residual_norms": (2.0, 1.0), "iterations": 1, "error_bound": None}}},
            {"solves": {"b": {"residual_norms": (2.0, 4.0), "iterations": 1, "error_bound": None}}},
        ]
        found = solver_evidence({"steps": steps})
        assert found.values == {"relative_residual": 2.0, "iterations": 1.0}
        assert found.leaning == "against"
        steps[1]["solves"]["b"] |= {"residual_norms": (2.0, 1.5), "status": "negative-curvature"}
        found = solver_evidence({"steps": steps})
        assert (found.leaning, "negative curvature" in found.sentence) == ("against", True)

    @pytest.mark.parametrize("name", ["do-nothing", "gradient-ascent", "fine-tuning"])
    def test_methods_that_solve_nothing(self, state, name):
        found = solver_evidence(self.outcome(state, name).details)
        assert (found.leaning, found.values) == ("neither", {})


def test_all_together_and_never_a_proof(state):
    outcome = method("hf-kcu")(engine(), state, REQUEST)
    found = engine_evidence(engine(), state.model, outcome, REQUEST)
    assert [piece.what for piece in found] == ["retained loss", "retained gradient", "solver"]
    found.append(held_out_evidence(outputs(3.0), outputs(0.0), LABELS, LABELS))
    for piece in found:
        assert piece.sentence.endswith(".")
        assert "proof" not in piece.sentence.replace("no proof", "")
        assert all(math.isfinite(value) for value in piece.values.values())
