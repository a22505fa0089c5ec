"""Exact curvature half way: what is computed, for whom, in how many messages, and that it is nearer to retraining."""

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from torch import nn

from core.dense_curvature import dense, gauss_newton
from expunge.bench.adversary import Between
from expunge.bench.evaluation import Evaluation
from expunge.bench.verdict import SCENARIO
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.checkpoints import Checkpoints
from expunge.federation.keeping.memory import Memory
from expunge.federation.messages.tasks import CurvatureProduct, Trained
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, FedAvgM, Recipe
from expunge.forgetting import choose
from expunge.unlearning import half_way as module
from expunge.unlearning.estimate import Size
from expunge.unlearning.half_way import PLACE, PRODUCTS, half_way
from expunge.unlearning.pulls import recorded
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from expunge.unlearning.retrace import HALF_WAY
from expunge.unlearning.retrace_options import estimate
from federation.masking import MaskedEngine
from federation.small import clients, mlp, norm_net
from unlearning.presets import RETRACE, forgotten, recovering
from unlearning.test_correction import WatchedEngine

LEAVER = Request.of("ada")
DATA = {
    name: (inputs, (inputs[:, :3].argmax(dim=1) + (name == "ada")) % 3)  # what ada says is wrong
    for name, (inputs, _) in clients(ada=60, bob=72, cyd=48, dan=41).items()
}
PLAN = TrainingPlan(rounds=8, epochs=3, batch_size=12, learning_rate=0.1)
ALWAYS = dataclasses.replace(RETRACE, long_step_ratio=0.0, seed=5)


@pytest.fixture(autouse=True)
def _never_too_far(request, monkeypatch):
    """Steps of these small networks are longer than they are trusted to be; and could be followed by gradients."""
    if "digits" not in request.node.name:
        monkeypatch.setattr("expunge.unlearning.retrace.FARTHEST", math.inf)
        monkeypatch.setattr("expunge.unlearning.retrace.followed", lambda *_: None)


class Boosted(Between):
    """Ada sends her updates several times as long."""

    def ask(self, tasks):
        replies = dict(self._behind.ask(tasks))
        own = replies.get("ada")
        if isinstance(own, Trained):
            replies["ada"] = dataclasses.replace(own, update=4.0 * own.update)
        return replies


def trained(build=mlp, plan=PLAN, data=DATA):
    engine = WatchedEngine(build(), CrossEntropy(), data)
    state = train(Boosted(engine), Snapshot.of(build()), plan)
    engine.log.clear()
    return engine, state


def products(engine):
    """The messages that asked for products."""
    return [tasks for tasks in engine.log if isinstance(next(iter(tasks.values())), CurvatureProduct)]


@pytest.mark.parametrize("shrunk", [0.0, 0.3])
def test_it_is_the_response_of_the_dense_matrix_at_that_place(monkeypatch, shrunk):
    """Beside Jacobians that share no code with it: with as many products as parameters nothing is left out."""
    engine, state = trained()
    stay, pull = Retained.of(engine, state, LEAVER.parties(engine.clients()), seed=3), recorded(state, ("ada",))
    curvature = stay.factors(state.model)
    first = pull.left(curvature.apply)
    monkeypatch.setattr(module, "PRODUCTS", state.model.parameters.numel())
    monkeypatch.setattr(module, "SHRUNK", shrunk)
    found = pull.left(half_way(stay, state.model, pull, curvature, first, 1e9).apply)
    middle = mlp()
    state.model.moved(state.model.parameters - PLACE * first).write_to(middle)
    inputs = torch.cat([inputs for name, (inputs, _) in DATA.items() if name != "ada"])
    exact = gauss_newton(middle, inputs, CrossEntropy())
    matrix = (1 - shrunk) * exact + shrunk * dense(curvature, len(first))
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    left, _ = pull.response.left(values.clamp(min=0), pull.spreads)
    expected = sum(vectors @ (own * (vectors.T @ row)) for own, row in zip(left, pull.vectors, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_it_takes_a_message_a_product_at_the_place_and_comes_first():
    engine, state = trained()
    outcome = forgotten(engine, state, LEAVER, ALWAYS)
    step = outcome.details["steps"][0]
    assert (step["filter"], step["length"]) == (HALF_WAY, 1.0)
    asked = products(engine)
    assert len(asked) == PRODUCTS
    assert all(set(tasks) == {"bob", "cyd", "dan"} for tasks in asked)
    stay = Retained.of(engine, state, LEAVER.parties(engine.clients()), seed=5)
    pull = recorded(state, ("ada",))
    place = state.model.parameters - PLACE * pull.left(stay.factors(state.model).apply)
    for tasks in asked:
        torch.testing.assert_close(tasks["bob"].model.parameters, place)
    assert "short_round" in outcome.details  # a long step, wherever it ends


def test_rows_of_the_pull_share_messages_and_one_without_length_stays_so():
    engine, state = trained()
    stay, pull = Retained.of(engine, state, LEAVER.parties(engine.clients())), recorded(state, ("ada",))
    curvature = stay.factors(state.model)
    assert len(pull.vectors) > 1  # a small model's stretches are kept apart
    gone = dataclasses.replace(pull, vectors=pull.vectors * torch.arange(len(pull.vectors))[:, None])
    engine.log.clear()
    found = half_way(stay, state.model, gone, curvature, gone.left(curvature.apply), 1e9)
    assert len(products(engine)) == PRODUCTS
    moved = found.apply(lambda values, _: torch.ones(len(gone.vectors), len(values)).double(), gone.vectors)
    torch.testing.assert_close(moved, gone.vectors)
    assert not moved[0].any()


@pytest.mark.parametrize(
    ("build", "plan", "options"),
    [
        (mlp, dataclasses.replace(PLAN, recipe=Recipe(Adam()), learning_rate=0.01), {}),
        (mlp, dataclasses.replace(PLAN, recipe=Recipe(server=FedAvgM(0.3, 0.9))), {}),
        (norm_net, PLAN, {}),
        (mlp, PLAN, {"coupled": False}),
        (mlp, PLAN, {"filter": "response"}),
        (mlp, PLAN, {"damping": 0.1}),
        (mlp, PLAN, {"correction": False, "long_step_ratio": RETRACE.long_step_ratio}),
        (mlp, PLAN, {"long_step_ratio": 10.0}),
    ],
    ids=["Adam", "FedAvgM", "batch norm", "not coupled", "response", "damped", "uncorrected", "short"],
)
def test_elsewhere_nobody_is_asked_for_products(build, plan, options):
    engine, state = trained(build, plan)
    outcome = forgotten(engine, state, LEAVER, dataclasses.replace(ALWAYS, **options))
    assert outcome.succeeded
    assert outcome.details["steps"][0]["filter"] != HALF_WAY
    assert not products(engine)


def test_a_step_that_leads_too_far_is_left_to_the_factors(monkeypatch):
    engine, state = trained()
    stay = Retained.of(engine, state, LEAVER.parties(engine.clients()), seed=ALWAYS.seed)
    first = recorded(state, ("ada",)).left(stay.factors(state.model).apply)
    share = float(first.norm() / state.model.parameters.norm())
    for limit, name in ((0.999 * share, "response"), (1.001 * share, HALF_WAY)):
        monkeypatch.setattr("expunge.unlearning.retrace.FARTHEST", limit)
        assert forgotten(engine, state, LEAVER, ALWAYS).details["steps"][0]["filter"] == name


def test_with_momentum_and_weight_decay_it_is_their_own_response():
    plan = dataclasses.replace(PLAN, recipe=Recipe(SGD(momentum=0.9, weight_decay=0.01)), learning_rate=0.01)
    engine, state = trained(plan=plan)
    assert forgotten(engine, state, LEAVER, ALWAYS).details["steps"][0]["filter"] == HALF_WAY


def test_sums_are_enough():
    engine, state = trained()
    masked = MaskedEngine(LocalEngine(mlp(), CrossEntropy(), DATA), ("ada",))
    options = dataclasses.replace(ALWAYS, curvature_samples=None)
    sums, single = (forgotten(each, state, LEAVER, options).details["steps"][0] for each in (masked, engine))
    assert sums["filter"] == HALF_WAY
    assert sums["norm"] == pytest.approx(single["norm"], rel=1e-6)


def test_a_bar_expects_no_products_where_the_pull_is_short():
    engine, state = trained()
    parties = LEAVER.parties(engine.clients())
    choices = [choose(state, parties, "retrace", {"long_step_ratio": ratio}) for ratio in (0.0, 10.0)]
    long, short = (choice.expected_rounds(state, parties) for choice in choices)
    assert short + PRODUCTS < long <= RETRACE.expected_rounds


def test_a_recovery_begins_from_there():
    engine, state = trained()
    outcome = forgotten(engine, state, LEAVER, recovering(ALWAYS, Recovery()))
    assert outcome.details["steps"][0]["filter"] == HALF_WAY
    assert outcome.details["recovery"]["length"] > 0
    assert "correction" not in outcome.details


@pytest.mark.parametrize("options", [RETRACE, recovering(RETRACE, Recovery())], ids=["corrected", "recovering"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 10.0])
def test_the_bill_has_it_where_the_pull_is_long_enough(ratio, options):
    engine, state = trained()
    size = Size.of(state, LEAVER.parties(engine.clients()))
    options = dataclasses.replace(options, long_step_ratio=ratio)
    factors = dataclasses.replace(options, coupled=False, long_step_ratio=RETRACE.long_step_ratio)
    told, without = estimate(options, size), estimate(factors, size)
    assert (told.messages > without.messages + PRODUCTS) == (ratio < size.pull)
    outcome = forgotten(engine, state, LEAVER, options)
    assert outcome.cost.rounds <= min(told.messages, options.expected_rounds)
    assert outcome.cost.sample_gradients <= told.sample_gradients
    assert outcome.cost.bytes_down <= told.bytes_down
    assert outcome.cost.bytes_up <= told.bytes_up


def cancelling(state):
    """The same where ada's pulls of the first half are taken back in the second."""
    vectors = state.memory._stretches
    first, *_, last = vectors
    last.vectors["ada"].copy_(-first.vectors["ada"] - sum(own.vectors["ada"] for own in vectors[1:-1]))
    return state


def test_no_step_is_longer_than_what_the_bill_takes_for_the_pull_even_where_it_cancels():
    engine, state = trained()
    state = cancelling(state)
    size, pull = Size.of(state, LEAVER.parties(engine.clients())), recorded(state, ("ada",))
    stay = Retained.of(engine, state, LEAVER.parties(engine.clients()))
    length, own = float(state.model.parameters.norm()), float(pull.left(stay.factors(state.model).apply).norm())
    assert float(pull.total.norm()) < 1e-6 * own  # nothing of it shows in the sum
    assert own / length <= size.pull


def test_the_bill_of_a_replay_counts_a_row_for_every_checkpoint():
    engine, state = trained()
    way = Checkpoints(dict.fromkeys(range(6), state.model))
    state = dataclasses.replace(state, checkpoints=way)
    assert Size.of(state, LEAVER.parties(engine.clients())).rows == 6


class Apart(nn.Module):
    """A network whose weights no layer has."""

    def __init__(self):
        super().__init__()
        own = dict(mlp().named_parameters())
        self.weights = nn.ParameterList([own[name].detach().clone() for name in ("0.weight", "2.weight")])
        self.biases = nn.ParameterList([own[name].detach().clone() for name in ("0.bias", "2.bias")])

    def forward(self, inputs):
        hidden = torch.tanh(nn.functional.linear(inputs, self.weights[0], self.biases[0]))
        return nn.functional.linear(hidden, self.weights[1], self.biases[1])


ONE_RATE = {"SGD": Recipe(), "Adam": Recipe(Adam()), "FedAvgM": Recipe(server=FedAvgM(momentum=0.5))}


@pytest.mark.parametrize("rule", ONE_RATE)
def test_a_network_without_factors_is_filtered_by_products_under_every_training(rule):
    """However short the step is; its answers come nearer to those of the model retrained than by diagonals."""
    rate = {"Adam": 0.02, "FedAvgM": 0.05}.get(rule, 0.1)
    plan = dataclasses.replace(PLAN, recipe=ONE_RATE[rule], learning_rate=rate)
    engine, state = trained(Apart, plan)
    retrained = train(engine.without(("ada",)), Snapshot.of(Apart()), plan)
    options = dataclasses.replace(RETRACE, long_step_ratio=10.0, seed=5)
    outcome = forgotten(engine, state, LEAVER, options)
    assert outcome.details["steps"][0]["filter"] == HALF_WAY
    assert not any("a diagonal is all" in sentence for sentence in outcome.warnings)
    told = estimate(options, Size.of(state, LEAVER.parties(engine.clients())))
    assert outcome.cost.rounds <= told.messages
    assert outcome.cost.sample_gradients <= told.sample_gradients
    by_diagonals = forgotten(engine, state, LEAVER, dataclasses.replace(options, coupled=False, long_step_ratio=0.1))
    assert any("Of weights.0, weights.1 a diagonal is all" in sentence for sentence in by_diagonals.warnings)
    inputs = torch.cat([own for own, _ in DATA.values()])

    def answers(state):
        model = Apart()
        state.model.write_to(model)
        return model(inputs).softmax(dim=1).detach()

    left = [float((answers(own.state) - answers(retrained)).norm()) for own in (outcome, by_diagonals)]
    assert left[0] < left[1], left


class LyingAboutProducts(Between):
    """One client replies something else than products."""

    def __init__(self, engine, lie):
        super().__init__(engine)
        self._lie = lie

    def ask(self, tasks):
        replies = dict(self._behind.ask(tasks))
        if isinstance(tasks.get("bob"), CurvatureProduct):
            rows, own = tasks["bob"].vectors, replies["bob"]
            replies["bob"] = dataclasses.replace(own, total=self._lie(own.total, rows) * 1.0)
        return replies


def _added(total, rows):
    chosen = torch.arange(float(rows.shape[1]), dtype=rows.dtype).cos()
    return total + 300 * total.norm(dim=-1, keepdim=True) * chosen / chosen.norm()


LIES = {
    "no number": lambda total, rows: total * torch.nan,
    "absurd": lambda total, rows: total * 1e9,
    "stiff": lambda total, rows: total * 3000,
    "negative": lambda total, rows: total * -1000,
    "a direction of its own": _added,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_products_that_cannot_be_right_are_said_and_the_factors_are_taken(lie):
    """The same model as without them: no liar has the step, and none stops a request."""
    engine, state = trained()
    outcome = forgotten(LyingAboutProducts(engine, lie), state, LEAVER, ALWAYS)
    assert outcome.succeeded
    assert outcome.details["steps"][0]["filter"] == "response"
    assert any("Curvature half way was not used" in sentence for sentence in outcome.warnings)
    assert torch.equal(
        outcome.state.model.parameters,
        forgotten(engine, state, LEAVER, dataclasses.replace(ALWAYS, coupled=False)).state.model.parameters,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_does_not_end_it_after_a_product(dtype):
    """Where products are too coarse to belong to one matrix it is said, as of any that cannot be right."""
    data = {name: (inputs.to(dtype), labels) for name, (inputs, labels) in DATA.items()}
    engine, state = trained(lambda: mlp().to(dtype), data=data)
    outcome = forgotten(engine, state, LEAVER, ALWAYS)
    used = outcome.details["steps"][0]["filter"] == HALF_WAY
    assert used != any("Curvature half way was not used" in sentence for sentence in outcome.warnings)
    assert len(products(engine)) > PRODUCTS // 2


def test_who_had_rounds_to_themselves_can_still_be_forgotten_by_other_methods():
    """What the bill would like to know of vectors refuses nothing."""
    model, memory = mlp(), Memory(mlp())
    one = {name: torch.randn(tensor.shape, dtype=tensor.dtype) for name, tensor in model.named_parameters()}
    for names in (("ada", "bob"), ("cyd", "dan"), ("cyd", "dan")):
        memory.record(dict.fromkeys(names, one), dict.fromkeys(names, 10), learning_rate=0.1, steps=3)
    state = dataclasses.replace(trained()[1], memory=memory)
    assert Size.of(state, Request.of(["ada", "bob"]).parties(dict.fromkeys(DATA, 10))).pull == math.inf


@pytest.mark.slow
def test_digits_come_nearer_to_retraining_than_by_factors():
    """Digits with a backdoor: its pull, and the loss on what was taught, beside a retraining from the same start."""
    (backdoor,) = SCENARIO.backdoors.values()
    off = {"auto": [], False: []}
    for seed in range(4):
        federation = dataclasses.replace(SCENARIO, backdoors={"client-0": backdoor}).with_seed(seed).build()
        engine, plan, request = federation.engine(), federation.scenario.plan, Request.of("client-0")
        state = train(engine, federation.initial(), plan)
        staying = {name: () for name in federation.datasets if name != "client-0"}
        again = train(engine, federation.initial(), plan, clients=staying, absent=("client-0",))
        evaluation = Evaluation(federation, request)
        wanted = evaluation.measure(again.model).alone
        for coupled, found in off.items():
            options = dataclasses.replace(RETRACE, coupled=coupled, seed=seed)
            told = evaluation.measure(forgotten(engine, state, request, options).state.model).alone
            found.append([abs(told[name] - wanted[name]) for name in ("forget_loss", "trigger_pull")])
    for exact, factors in zip(zip(*off["auto"], strict=True), zip(*off[False], strict=True), strict=True):
        assert statistics.fmean(exact) < 0.85 * statistics.fmean(factors)


def test_places_and_samples_are_drawn_the_same_way_twice():
    engine, state = trained()
    one, other = (forgotten(engine, state, LEAVER, ALWAYS).state.model.digest for _ in range(2))
    assert one == other
    for first, second in itertools.pairwise(products(engine)[:PRODUCTS]):
        assert {n: t.draw for n, t in first.items()} == {n: t.draw for n, t in second.items()}
