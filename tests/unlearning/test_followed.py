"""The response followed by gradients: what is computed, for whom, in how many messages, and that it is nearer."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from core.dense_curvature import dense, gauss_newton
from expunge.bench.adversary import Between
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import CurvatureProduct, Gradient, Trained
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, FedAvg, FedAvgM, Recipe
from expunge.federation.training.response import Response
from expunge.federation.training.works import Round, Work
from expunge.unlearning import followed as module
from expunge.unlearning.estimate import STRETCHES, Size
from expunge.unlearning.followed import STIFFNESS, Stretch, followed
from expunge.unlearning.pulls import recorded
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from expunge.unlearning.retrace import FOLLOWED
from expunge.unlearning.retrace_options import estimate
from federation.masking import MaskedEngine
from federation.small import clients, mlp, norm_net
from unlearning.presets import RETRACE, forgotten
from unlearning.test_correction import WatchedEngine

LEAVER = Request.of("ada")
DATA = {
    name: (inputs, (inputs[:, :3].argmax(dim=1) + (name == "ada")) % 3)  # what ada says is wrong
    for name, (inputs, _) in clients(ada=60, bob=72, cyd=48, dan=41).items()
}
PLAN = TrainingPlan(rounds=8, epochs=3, batch_size=12, learning_rate=0.1)
OPTIONS = dataclasses.replace(RETRACE, seed=5)


def trained(build=mlp, plan=PLAN, data=DATA, loss=None):
    engine = WatchedEngine(build(), loss or CrossEntropy(), data)
    state = train(engine, Snapshot.of(build()), plan)
    engine.log.clear()
    return engine, state


def asked(engine, kind):
    return [tasks for tasks in engine.log if isinstance(next(iter(tasks.values())), kind)]


def filter_of(outcome):
    return outcome.details["steps"][0]["filter"]


@pytest.fixture(scope="module")
def world():
    engine, state = trained()
    retrained = train(engine.without(("ada",)), Snapshot.of(mlp()), PLAN)
    engine.log.clear()
    return engine, state, retrained


class TestStretches:
    """Of a training on a quadratic, beside the recursion written out."""

    RATES = (0.1, 0.3, 0.05, 0.2)
    VALUES = torch.tensor([0.0, 1e-9, 0.2, 1.0, 3.0], dtype=torch.float64)

    def response(self, server=1.0, rule=None):
        rounds = tuple(Round((Work(1.0, rate, 3),)) for rate in self.RATES)
        return Response(Recipe(rule or SGD(), FedAvg(server)), rounds)

    @pytest.mark.parametrize("server", [1.0, 0.7])
    def test_what_is_left_pulled_and_held(self, server):
        stretch = Stretch(self.response(server), 1, 0.4)
        left = 1 + server * ((1 - self.RATES[1] * self.VALUES) ** 3 - 1)
        torch.testing.assert_close(stretch.left(self.VALUES), left)
        assert stretch.pulled == pytest.approx(server * 0.4)
        travel = server * 3 * self.RATES[1]
        held = torch.where(self.VALUES > 1e-6, (1 - left) / self.VALUES.clamp(min=1e-9), travel)
        torch.testing.assert_close(stretch.held(self.VALUES), held, rtol=1e-5, atol=1e-8)

    @pytest.mark.parametrize("works", [(), (Work(1.0, 0.0, 3),), (Work(1.0, 0.1, 0),)])
    def test_a_round_in_which_nobody_trained_leaves_all_and_holds_nothing(self, works):
        idle = Response(Recipe(), (Round((Work(1.0, 0.1, 3),)), Round(works)))
        stretch = Stretch(idle, 1, 0.4)
        assert torch.equal(stretch.left(self.VALUES), torch.ones_like(self.VALUES))
        assert not stretch.held(self.VALUES).any()
        assert stretch.pulled == pytest.approx(0.4)

    def test_weight_decay_wears_down_what_is_flat(self):
        stretch = Stretch(self.response(rule=SGD(weight_decay=0.1)), 0, 1.0)
        assert float(stretch.left(torch.zeros(1).double())) == pytest.approx((1 - 0.1 * 0.1) ** 3)

    def test_parts_of_a_round_make_the_round(self):
        whole, half = (Stretch(self.response(), 0, 1.0, part) for part in (1, 2))
        torch.testing.assert_close(half.left(self.VALUES) ** 2, whole.left(self.VALUES))
        assert half.held(self.VALUES)[0] == pytest.approx(whole.held(self.VALUES)[0] / 2)

    @pytest.mark.parametrize(("rounds", "parts"), [(1, 14), (3, 4), (8, 1), (14, 1)])
    def test_all_rounds_are_in_them_and_no_more_gradients_than_there_may_be(self, rounds, parts):
        alike = Response(Recipe(), (Round((Work(1.0, 0.1, 2),)),) * rounds)
        found = module._stretches(alike, torch.ones(rounds) / rounds, STRETCHES)
        assert len(found) <= STRETCHES
        assert {own.part for own in found} == {parts}
        assert [own.number for own in found if own.is_last] == list(range(rounds))


def test_it_is_the_recursion_with_dense_matrices():
    """Beside matrices that share no code with it, of a network whose gradients are taken anew at every point."""
    data = {name: (inputs.double(), labels) for name, (inputs, labels) in DATA.items()}
    plan = dataclasses.replace(PLAN, rounds=5, epochs=1)
    engine, state = trained(lambda: mlp().double(), plan, data)
    stay = Retained.of(engine, state, LEAVER.parties(engine.clients()), seed=3)
    pull, curvature = recorded(state, ("ada",)), stay.factors(state.model)
    found = followed(stay, state.model, pull, curvature)
    together = pull.together
    values, vectors = torch.linalg.eigh(dense(curvature, len(found)) * STIFFNESS)
    values = values.clamp(min=0)

    def of(function, vector):
        return vectors @ (function(values) * (vectors.T @ vector))

    here, way = stay.gradient(state.model), torch.zeros_like(found)
    for stretch in module._stretches(pull.response, together.spreads[0].double(), STRETCHES):
        if float(way.norm()) > 0:
            felt = STIFFNESS * (here - stay.gradient(state.model.moved(state.model.parameters - way)))
            missed = (1 - module.SHRUNK) * (of(lambda own: own, way) - felt)
            way = of(stretch.left, way) + of(stretch.held, missed)
        way = way + (stretch.pulled * together.vectors[0] if stretch.is_last else 0)
    torch.testing.assert_close(found, way, rtol=1e-6, atol=1e-9)


def test_with_more_stretches_it_is_the_response_of_the_exact_curvature(monkeypatch):
    """Under a squared error, whose curvature is the same everywhere, whatever K-FAC knows of it."""
    data = {
        name: (inputs.double(), nn.functional.one_hot(labels, 3).double()) for name, (inputs, labels) in DATA.items()
    }
    plan = dataclasses.replace(PLAN, rounds=4, learning_rate=0.2)

    def line():
        torch.manual_seed(1)
        return nn.Linear(3, 3).double()

    engine, state = trained(line, plan, data, SquaredError())
    stay, pull = Retained.of(engine, state, LEAVER.parties(engine.clients())), recorded(state, ("ada",)).together
    curvature = stay.factors(state.model).stiffer(1.7)  # and if they were far off
    monkeypatch.setattr(module, "SHRUNK", 0.0)
    monkeypatch.setattr(module, "STIFFNESS", 1.0)
    inputs = torch.cat([own for name, (own, _) in data.items() if name != "ada"])
    values, vectors = torch.linalg.eigh(
        gauss_newton(state.model.write_to(line()) or written(line, state), inputs, SquaredError())
    )
    left, _ = pull.response.left(values.clamp(min=0), pull.spreads)
    exact = vectors @ (left[0] * (vectors.T @ pull.vectors[0]))
    off = [
        float((followed(stay, state.model, pull, curvature, most) - exact).norm() / exact.norm())
        for most in (4, 16, 64)
    ]
    assert off[0] > off[1] > off[2], off
    assert off[2] < 0.01


def written(build, state):
    model = build()
    state.model.write_to(model)
    return model.requires_grad_(False)


class TestRetrace:
    def test_it_comes_nearer_to_the_retrained_model_than_products_half_way(self, world, monkeypatch):
        """By its answers on all data, and by the way there."""
        engine, state, retrained = world
        outcome = forgotten(engine, state, LEAVER, OPTIONS)
        assert filter_of(outcome) == FOLLOWED
        monkeypatch.setattr("expunge.unlearning.retrace.followed", lambda *_: None)
        other = forgotten(engine, state, LEAVER, OPTIONS)
        assert filter_of(other) != FOLLOWED
        inputs = torch.cat([own for own, _ in DATA.values()])
        goal = written(mlp, retrained)(inputs).softmax(dim=1)
        apart = [float((written(mlp, own.state)(inputs).softmax(dim=1) - goal).norm()) for own in (outcome, other)]
        assert apart[0] < 0.7 * apart[1], apart
        true = state.model.parameters - retrained.model.parameters
        steps = [state.model.parameters - own.state.model.parameters for own in (outcome, other)]
        cosines = [float(torch.nn.functional.cosine_similarity(step, true, dim=0)) for step in steps]
        assert cosines[0] > cosines[1], cosines

    def test_it_takes_a_gradient_a_stretch_and_no_products(self, world):
        engine, state, _ = world
        engine.log.clear()
        outcome = forgotten(engine, state, LEAVER, OPTIONS)
        gradients = asked(engine, Gradient)
        assert 8 <= len(gradients) <= STRETCHES + 1  # and one that a correction asks for
        assert all(set(tasks) == {"bob", "cyd", "dan"} for tasks in gradients)
        assert not asked(engine, CurvatureProduct)
        assert outcome.details["steps"][0]["length"] == 1.0

    def test_sums_are_enough(self, world):
        _, state, _ = world
        engines = (
            LocalEngine(mlp(), CrossEntropy(), DATA),
            MaskedEngine(LocalEngine(mlp(), CrossEntropy(), DATA), ("ada",)),
        )
        options = dataclasses.replace(OPTIONS, curvature_samples=None)
        single, sums = (forgotten(each, state, LEAVER, options).details["steps"][0] for each in engines)
        assert sums["filter"] == single["filter"] == FOLLOWED
        assert sums["norm"] == pytest.approx(single["norm"], rel=1e-5)

    @pytest.mark.parametrize("rule", [SGD(momentum=0.9), SGD(momentum=0.9, nesterov=True), SGD(weight_decay=0.01)])
    def test_under_every_rule_of_one_rate(self, rule):
        rate = 0.01 if rule.momentum else 0.1
        engine, state = trained(plan=dataclasses.replace(PLAN, recipe=Recipe(rule), learning_rate=rate))
        assert filter_of(forgotten(engine, state, LEAVER, OPTIONS)) == FOLLOWED

    @pytest.mark.parametrize(
        ("build", "plan", "options"),
        [
            (mlp, dataclasses.replace(PLAN, recipe=Recipe(Adam()), learning_rate=0.01), {}),
            (mlp, dataclasses.replace(PLAN, recipe=Recipe(server=FedAvgM(0.3, 0.9))), {}),
            (norm_net, PLAN, {}),
            (mlp, PLAN, {"coupled": False}),
            (mlp, PLAN, {"filter": "response"}),
            (mlp, PLAN, {"damping": 0.1}),
            (mlp, PLAN, {"long_step_ratio": math.inf}),
            (mlp, dataclasses.replace(PLAN, rounds=STRETCHES + 1), {}),
        ],
        ids=["Adam", "FedAvgM", "batch norm", "not coupled", "response", "damped", "nothing is long", "many rounds"],
    )
    def test_elsewhere_nobody_is_asked(self, build, plan, options, monkeypatch):
        def refuse(*_):
            raise AssertionError

        monkeypatch.setattr("expunge.unlearning.retrace.followed", refuse)
        engine, state = trained(build, plan)
        assert forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, **options)).succeeded

    @pytest.mark.parametrize("ratio", [0.0, 0.1, 10.0])
    def test_the_bill_has_it(self, ratio, world):
        engine, state, _ = world
        size, options = (
            Size.of(state, LEAVER.parties(engine.clients())),
            dataclasses.replace(OPTIONS, long_step_ratio=ratio),
        )
        told, outcome = estimate(options, size), forgotten(engine, state, LEAVER, options)
        assert outcome.cost.rounds <= min(told.messages, options.expected_rounds)
        assert outcome.cost.sample_gradients <= told.sample_gradients
        assert outcome.cost.bytes_down <= told.bytes_down
        assert outcome.cost.bytes_up <= told.bytes_up


def test_a_bar_expects_no_gradients_of_a_long_training():
    told = []
    for rounds in (STRETCHES, STRETCHES + 1):
        engine, state = trained(plan=dataclasses.replace(PLAN, rounds=rounds, epochs=1))
        told.append(estimate(OPTIONS, Size.of(state, LEAVER.parties(engine.clients()))).messages)
    assert told[0] - told[1] == OPTIONS.followed_rounds


class TestRunningAway:
    def test_a_stiff_training_is_not_followed(self):
        """Hundreds of steps a round wear down more than a gradient a round can tell."""
        engine, state = trained(plan=dataclasses.replace(PLAN, rounds=14, epochs=60, learning_rate=0.5))
        stay = Retained.of(engine, state, LEAVER.parties(engine.clients()))
        assert followed(stay, state.model, recorded(state, ("ada",)), stay.factors(state.model)) is None
        assert filter_of(forgotten(engine, state, LEAVER, OPTIONS)) != FOLLOWED

    @pytest.mark.parametrize("times", [-30.0, -1.0, 1e6, 0.0])
    def test_gradients_that_do_not_agree_with_the_factors_are_not_followed(self, world, times):
        """Everybody who stays replies another gradient than its own wherever the model was moved."""
        _, state, _ = world

        class Lying(Between):
            def ask(self, tasks):
                replies = dict(self._behind.ask(tasks))
                for name, task in tasks.items():
                    if isinstance(task, Gradient) and not torch.equal(task.model.parameters, state.model.parameters):
                        replies[name] = dataclasses.replace(replies[name], total=times * replies[name].total)
                return replies

        engine = Lying(LocalEngine(mlp(), CrossEntropy(), DATA))
        stay = Retained.of(engine, state, LEAVER.parties(engine.clients()))
        assert followed(stay, state.model, recorded(state, ("ada",)), stay.factors(state.model)) is None

    def test_those_who_stay_have_the_last_word(self, world, monkeypatch):
        """A step that costs them more than the factors' own is not taken."""
        engine, state, _ = world
        far = torch.ones_like(state.model.parameters)
        monkeypatch.setattr("expunge.unlearning.retrace.followed", lambda *_: far)
        assert filter_of(forgotten(engine, state, LEAVER, OPTIONS)) != FOLLOWED

    def test_an_overflow_is_no_error(self, world, monkeypatch):
        engine, state, _ = world
        stay = Retained.of(engine, state, LEAVER.parties(engine.clients()))
        pull, curvature, gradient = recorded(state, ("ada",)), stay.factors(state.model), Retained.gradient
        calls = []

        def fails(self, model, *, drawn=False):
            calls.append(model)
            if len(calls) > 3:
                raise NumericalError("A gradient is NaN or infinite: check the model and the data.")
            return gradient(self, model, drawn=drawn)

        monkeypatch.setattr(Retained, "gradient", fails)
        assert followed(stay, state.model, pull, curvature) is None


@pytest.mark.parametrize("leaving", [("ada",), ("ada", "bob")])
def test_where_few_take_part_and_some_rounds_have_nobody_who_stays(leaving):
    """A round of those who leave alone wears nothing down."""
    plan = dataclasses.replace(PLAN, rounds=12, epochs=2, participation=0.5)
    engine, state = trained(plan=plan)
    rounds = recorded(state, leaving).response.rounds
    assert len(leaving) == 1 or any(not each.total > 0 for each in rounds)
    outcome = forgotten(engine, state, Request.of(leaving), OPTIONS)
    assert outcome.succeeded
    assert bool(torch.isfinite(outcome.state.model.parameters).all())


def test_a_boosted_leaver_is_followed_too():
    class Boosted(Between):
        def ask(self, tasks):
            replies = dict(self._behind.ask(tasks))
            if isinstance(replies.get("ada"), Trained):
                replies["ada"] = dataclasses.replace(replies["ada"], update=2.0 * replies["ada"].update)
            return replies

    engine = WatchedEngine(mlp(), CrossEntropy(), DATA)
    state = train(Boosted(engine), Snapshot.of(mlp()), PLAN)
    retrained = train(engine.without(("ada",)), Snapshot.of(mlp()), PLAN)
    outcome = forgotten(engine, state, LEAVER, OPTIONS)
    assert filter_of(outcome) == FOLLOWED
    inputs, labels = DATA["ada"]

    def loss(own):
        return float(CrossEntropy().per_sample(written(mlp, own)(inputs), labels).mean())

    left = (loss(retrained) - loss(outcome.state)) / (loss(retrained) - loss(state))
    assert abs(left) < 0.2, left
