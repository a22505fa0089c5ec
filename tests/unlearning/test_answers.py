"""How those who stay answer a displaced model: what is found, who is asked, and that no liar chooses it."""

import dataclasses
import math

import pytest
import torch

from expunge.bench.adversary import Between
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.messages.tasks import CurvatureProduct, Train, Trained
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, AdamW, FedAvgM, Recipe
from expunge.unlearning import answers, doubts, retrace
from expunge.unlearning.answers import DISPLACED, LEAST, MOST, Answer, Contraction, answered
from expunge.unlearning.estimate import ASKED, Size
from expunge.unlearning.pulls import recorded
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from expunge.unlearning.retrace_options import estimate
from federation.masking import MaskedEngine
from federation.small import clients, linear, mlp, norm_net
from unlearning.presets import RETRACE, forgotten
from unlearning.test_correction import WatchedEngine

LEAVER = Request.of("ada")
DATA = {
    name: (inputs, (inputs[:, :3].argmax(dim=1) + (name == "ada")) % 3)  # what ada says is wrong
    for name, (inputs, _) in clients(ada=60, bob=72, cyd=48, dan=41, eve=30).items()
}
PLAN = TrainingPlan(rounds=6, epochs=3, batch_size=12, learning_rate=0.01, recipe=Recipe(Adam()))


class Boosted(Between):
    """One client sends its updates several times as long."""

    def ask(self, tasks):
        replies = dict(self._behind.ask(tasks))
        own = replies.get("ada")
        if isinstance(own, Trained):
            replies["ada"] = dataclasses.replace(own, update=8.0 * own.update)
        return replies


class Lying(Between):
    """One of those who are asked answers with something else, whenever it trains."""

    def __init__(self, engine, lie):
        super().__init__(engine)
        self._lie = lie

    def ask(self, tasks):
        replies = dict(self._behind.ask(tasks))
        return {
            name: dataclasses.replace(reply, update=self._lie(reply.update))
            if name == "bob" and isinstance(reply, Trained)
            else reply
            for name, reply in replies.items()
        }


class Answering(Between):
    """Those who stay answer a displaced model as gradient descent would on curvature of a stiffness that is known."""

    def __init__(self, engine, state, pull, curvature, known, steps=9):
        super().__init__(engine)
        self._steps = steps
        self._trained, self._pull, self._curvature, self._known = state.model.parameters, pull, curvature, known
        self.ways = []

    def ask(self, tasks):
        return {name: self._answer(name, task) for name, task in tasks.items()}

    def _answer(self, name, task):
        assert isinstance(task, Train)
        way = task.model.parameters - self._trained
        self.ways.append(way)
        left = self._curvature.apply(Contraction(self._pull.response, self._steps, self._known[name]), way)
        return Trained(left - way, {}, count=self.clients()[name], sample_gradients=0.0, steps=self._steps)


def trained(plan=PLAN, build=mlp):
    engine = WatchedEngine(build(), CrossEntropy(), DATA)
    state = train(Boosted(engine), Snapshot.of(build()), plan)
    engine.log.clear()
    return engine, state


def known(engine, state):
    parties = LEAVER.parties(engine.clients())
    stay = Retained.of(engine, state, parties, seed=3)
    return stay, recorded(state, ("ada",)), stay.factors(state.model)


def test_a_contraction_is_gradient_descent_with_the_layers_mean_rate():
    _, state = trained()
    response = state.memory.response(("ada",), state.schedule, state.model.layout)
    names = (state.model.layout.shapes[0][0],)
    curvature = torch.tensor([0.0, 0.01, 0.2], dtype=torch.float64)
    steps = sum(sum(w.share * w.steps for w in each.works) / each.total for each in response.rounds)
    left = torch.ones(3, dtype=torch.float64)
    for _ in range(7):
        left = left - 0.5 * response.travel(names) / steps * curvature * left
    torch.testing.assert_close(Contraction(response, 7, 0.5)(curvature, names), left, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wanted", [0.15, 0.4, 0.9, 1.7, 6.0])
def test_the_stiffness_that_explains_an_answer_is_found_again(wanted):
    engine, state = trained()
    _, pull, curvature = known(engine, state)
    way = 0.2 * pull.total
    left = float(way @ curvature.apply(Contraction(pull.response, 9, wanted), way))
    assert answers._explaining(curvature, pull.response, way, left, 9) == pytest.approx(wanted, rel=1e-2)


def test_the_median_of_what_those_who_stay_answer_is_found_along_what_was_worn_down():
    engine, state = trained()
    stay, pull, curvature = known(engine, state)
    answering = Answering(engine, state, pull, curvature, {"bob": 0.2, "cyd": 0.5, "dan": 0.9})
    found = answered(dataclasses.replace(stay, engine=answering), state, pull, curvature).stiffness
    assert found == pytest.approx(0.5, rel=1e-2)
    worn = pull.total - pull.left(curvature.apply)
    assert [float(way @ worn / (worn @ worn)) for way in answering.ways] == pytest.approx([0.0] * 3 + [-DISPLACED] * 3)


@pytest.mark.parametrize(
    ("known_", "steps", "found"), [(0.25, 2, 0.25**0.25), (0.25, 4, 0.5), (0.25, 20, 0.25), (3.0, 2, 3.0)]
)
def test_few_steps_tell_in_part_that_they_are_less_stiff(known_, steps, found):
    engine, state = trained()
    stay, pull, curvature = known(engine, state)
    answering = Answering(engine, state, pull, curvature, dict.fromkeys(("bob", "cyd", "dan"), known_), steps)
    told = answered(dataclasses.replace(stay, engine=answering), state, pull, curvature).stiffness
    assert told == pytest.approx(found, rel=0.02)


def test_the_less_stiff_they_are_the_longer_the_step(monkeypatch):
    norms = []
    for told in (4.0, 1.0, 0.5, 0.2):
        engine, state = trained()
        monkeypatch.setattr(retrace, "answered", lambda *_, told=told: Answer(told))
        outcome = forgotten(engine, state, LEAVER, dataclasses.replace(RETRACE, tau=10.0))
        step = outcome.details["steps"][0]
        assert step["filter"] == ("answered" if told < 1 else "response")
        assert outcome.details["stiffness"] == told
        norms.append(step["norm"])
    assert norms[0] < norms[1] < norms[2] < norms[3]


@pytest.mark.parametrize(("answered", "found"), [(-9.0, MOST), (2.0, LEAST)])
def test_it_stays_between_its_bounds(answered, found):
    engine, state = trained()
    _, pull, curvature = known(engine, state)
    way = pull.total
    told = answers._explaining(curvature, pull.response, way, answered * float(way @ way), 9)
    assert told == pytest.approx(found, rel=1e-3)


def test_a_server_with_momentum_answers_as_its_clients_do():
    engine, state = trained(dataclasses.replace(PLAN, recipe=Recipe(Adam(), FedAvgM(0.3, 0.9))))
    stay, pull, curvature = known(engine, state)
    seen = []
    local = dataclasses.replace(pull.response, recipe=Recipe(Adam()))
    original = answers._explaining
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_explaining", lambda *own: seen.append(own[1]) or original(*own))
        answered(stay, state, pull, curvature)
    names = [[name] for name, _ in state.model.layout.shapes]
    assert seen[0].travels(names) == local.travels(names) != pull.response.travels(names)


@pytest.mark.parametrize("rule", [Adam(), AdamW()])
@pytest.mark.parametrize("leaver", ["ada", "bob"])  # loud, and not
def test_a_few_are_asked_twice_on_the_same_batches(rule, leaver):
    engine, state = trained(dataclasses.replace(PLAN, recipe=Recipe(rule)))
    outcome = forgotten(engine, state, Request.of(leaver), dataclasses.replace(RETRACE, long_step_ratio=math.inf))
    assert LEAST <= outcome.details["stiffness"] <= MOST
    training = [tasks for tasks in engine.log if any(isinstance(task, Train) for task in tasks.values())]
    assert len(training) == 2
    plain, displaced = training
    assert set(plain) == set(displaced) == {"ada", "bob", "cyd", "dan"} - {leaver}
    assert len(plain) == ASKED
    for name, task in plain.items():
        other = displaced[name]
        assert (task.seed, task.draw, task.batch_size) == (other.seed, other.draw, other.batch_size)
        assert not torch.equal(task.model.parameters, other.model.parameters)
        assert torch.equal(task.model.parameters, state.model.parameters)
        assert task.optimiser == rule


@pytest.mark.parametrize(
    ("plan", "build", "options"),
    [
        (dataclasses.replace(PLAN, learning_rate=0.1, recipe=Recipe(SGD())), mlp, {}),
        (PLAN, norm_net, {}),
        (PLAN, linear, {}),
        (PLAN, mlp, {"filter": "response"}),
        (PLAN, mlp, {"coupled": False}),
    ],
)
def test_nobody_is_asked_under_sgd_with_batch_norm_of_one_layer_or_where_that_is_not_wanted(plan, build, options):
    engine, state = trained(plan, build)
    outcome = forgotten(engine, state, LEAVER, dataclasses.replace(RETRACE, long_step_ratio=math.inf, **options))
    assert not any(isinstance(task, Train) for tasks in engine.log for task in tasks.values())
    assert "stiffness" not in outcome.details


def test_under_masked_sums_nobody_is_asked():
    engine, state = trained()
    engine.log.clear()
    outcome = forgotten(MaskedEngine(engine), state, LEAVER, dataclasses.replace(RETRACE, seed=1))
    assert "stiffness" not in outcome.details


@pytest.mark.parametrize(
    ("told", "steps", "beyond"), [(LEAST, 4, True), (0.3, 4, False), (MOST, 20, True), (3.0, 20, False)]
)
def test_an_answer_at_the_bounds_is_said_however_few_steps_tell_it(told, steps, beyond):
    engine, state = trained()
    stay, pull, curvature = known(engine, state)
    answering = Answering(engine, state, pull, curvature, dict.fromkeys(("bob", "cyd", "dan"), told), steps)
    answer = answered(dataclasses.replace(stay, engine=answering), state, pull, curvature)
    assert answer.beyond == beyond
    assert (doubts.BEYOND in doubts.doubts(state.model, curvature, answer)) == beyond


def test_one_of_two_who_lies_does_not_choose_it():
    engine, state = trained()
    stay, pull, curvature = known(engine, state)
    two = dataclasses.replace(stay, clients={name: stay.clients[name] for name in ("bob", "cyd")})
    for lie in (LEAST, MOST):
        answering = Answering(engine, state, pull, curvature, {"bob": lie, "cyd": 0.6}, 20)
        answer = answered(dataclasses.replace(two, engine=answering), state, pull, curvature)
        assert answer.stiffness == pytest.approx(0.6, rel=0.02)


def test_nobody_is_asked_where_nothing_was_worn_down():
    engine, state = trained(dataclasses.replace(PLAN, rounds=1))
    stay, pull, curvature = known(engine, state)
    assert answered(stay, state, pull, curvature) == Answer(1.0)
    assert not engine.log or not any(isinstance(task, Train) for tasks in engine.log for task in tasks.values())


def test_an_exact_product_takes_the_place_of_asking_where_it_is_wanted(monkeypatch):
    engine, state = trained()
    monkeypatch.setattr(retrace, "answered", None)
    outcome = forgotten(engine, state, LEAVER, dataclasses.replace(RETRACE, coupled=True))
    assert outcome.details["stiffness"] >= 1
    assert any(isinstance(task, CurvatureProduct) for tasks in engine.log for task in tasks.values())


def test_one_who_lies_does_not_choose_it():
    engine, state = trained()
    stay, pull, curvature = known(engine, state)
    honest = [answer_of(stay, name, state, pull, curvature) for name in ("cyd", "dan")]
    for lie in (lambda update: 1e6 * update, torch.zeros_like, lambda update: -update):
        told = answered(dataclasses.replace(stay, engine=Lying(engine, lie)), state, pull, curvature).stiffness
        assert min(honest) - 1e-9 <= told <= max(honest) + 1e-9


def answer_of(stay, name, state, pull, curvature):
    """Of one client alone."""
    plan, draws = answers._asked(stay, state, pull.response)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_asked", lambda *_: (plan, {name: draws[name]}))
        return answered(stay, state, pull, curvature).stiffness


def test_what_is_not_a_number_is_refused_by_name():
    engine, state = trained()
    stay, pull, curvature = known(engine, state)
    broken = dataclasses.replace(stay, engine=Lying(engine, lambda update: update * math.nan))
    with pytest.raises(NumericalError, match="'bob'"):
        answered(broken, state, pull, curvature)


@pytest.mark.parametrize("changes", [{}, {"tau": 0.02, "long_step_ratio": 0.0, "correction_lengths": (0.0, 1e-6)}])
def test_the_estimate_has_it(changes):
    """Also where three filters are tried in vain."""
    engine, state = trained()
    options = dataclasses.replace(RETRACE, round_lengths=(0.0,) if changes else RETRACE.round_lengths, **changes)
    size = Size.of(state, LEAVER.parties(engine.clients()))
    assert size.measured > 0
    told = estimate(options, size)
    engine.cost.sample_gradients, engine.cost.rounds = 0.0, 0
    outcome = forgotten(engine, state, LEAVER, options)
    assert outcome.cost.sample_gradients <= told.sample_gradients
    assert outcome.cost.rounds <= told.messages
