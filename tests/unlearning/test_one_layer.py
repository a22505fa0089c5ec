"""Models of one layer are filtered by exact curvature at the middle of the way, which factors are far from."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import expunge
from core.dense_curvature import gauss_newton
from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import CurvatureProduct, Sum
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning import half_way, one_layer
from expunge.unlearning.estimate import Size
from expunge.unlearning.one_layer import CHECKED, by_exact_curvature
from expunge.unlearning.pulls import recorded
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from expunge.unlearning.retrace import HALF_WAY
from expunge.unlearning.retrace_options import estimate
from federation.small import clients, linear, norm_net, seeded
from unlearning.presets import RETRACE, forgotten
from unlearning.test_correction import WatchedEngine

LEAVER = Request.of("ada")
DATA = {
    name: (inputs, (inputs.argmax(dim=1) + (name == "ada")) % 3)  # what ada says is wrong
    for name, (inputs, _) in clients(ada=60, bob=72, cyd=48, dan=41).items()
}
PLAN = TrainingPlan(rounds=12, epochs=3, batch_size=12, learning_rate=0.2)


def trained(build=linear, loss=None, data=DATA):
    engine = WatchedEngine(build(), loss or CrossEntropy(), data)
    state = train(engine, Snapshot.of(build()), PLAN)
    engine.log.clear()
    return engine, state


def products(engine):
    """How many messages asked for products."""
    return sum(isinstance(next(iter(tasks.values())), CurvatureProduct) for tasks in engine.log)


def test_it_is_the_response_of_the_dense_matrix_at_the_middle_of_its_own_step(monkeypatch):
    """Beside Jacobians that share no code with it: with as many products as parameters nothing is left out."""
    engine, state = trained()
    stay, pull = Retained.of(engine, state, LEAVER.parties(engine.clients())), recorded(state, ("ada",))
    curvature = stay.factors(state.model)
    first = pull.left(curvature.apply)
    monkeypatch.setattr(half_way, "PRODUCTS", len(first))
    for name, value in {"SHRUNK": 0.0, "SETTLED": -1.0, "FURTHER": 0.0, "PASSES": 40}.items():
        monkeypatch.setattr(one_layer, name, value)
    found = by_exact_curvature(stay, state.model, pull, curvature, first, 1e9)
    middle = linear()
    state.model.moved(state.model.parameters - found / 2).write_to(middle)
    inputs = torch.cat([inputs for name, (inputs, _) in DATA.items() if name != "ada"])
    values, vectors = torch.linalg.eigh(gauss_newton(middle, inputs, CrossEntropy()))
    total = pull.vectors.sum(dim=0)
    lengths = pull.vectors.norm(dim=1)
    spread = (lengths @ pull.spreads.to(lengths)) / lengths.sum()
    left, _ = pull.response.left(values.clamp(min=0), spread[None].to(pull.spreads))
    torch.testing.assert_close(found, vectors @ (left[0] * (vectors.T @ total)), rtol=1e-6, atol=1e-9)


def test_few_samples_shrink_it_and_many_do_not(monkeypatch):
    engine, state = trained()
    stay, pull = Retained.of(engine, state, LEAVER.parties(engine.clients())), recorded(state, ("ada",))
    curvature, given = stay.factors(state.model), []
    asked = one_layer.by_products
    monkeypatch.setattr(one_layer, "by_products", lambda *all, **rest: given.append(all[4]) or asked(*all, **rest))
    first = pull.left(curvature.apply)
    for samples in (6, None):
        by_exact_curvature(dataclasses.replace(stay, samples=samples), state.model, pull, curvature, first, 1e9)
    assert given[0] == one_layer.SHRUNK
    assert given[-1] == pytest.approx(one_layer.SHRUNK * 12 / (72 + 48 + 41))


@pytest.mark.parametrize(
    ("build", "plan"),
    [(lambda: seeded(nn.Linear(3, 1)), PLAN), (linear, PLAN)],
    ids=["one output", "three"],
)
def test_under_a_squared_error_factors_are_right_and_two_products_tell(build, plan):
    data = {name: (inputs, build()(inputs).detach() + (name == "ada")) for name, (inputs, _) in DATA.items()}
    engine, state = trained(build, SquaredError(), data)
    outcome = forgotten(engine, state, LEAVER, RETRACE)
    assert outcome.details["steps"][0]["filter"] == "response"
    assert products(engine) == CHECKED
    assert not any("as long as the model" in warning for warning in outcome.warnings)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (norm_net, {}),
        (linear, {"coupled": False}),
        (linear, {"filter": "response"}),
        (linear, {"damping": 0.1}),
        (linear, {"correction": False, "long_step_ratio": RETRACE.long_step_ratio}),
    ],
    ids=["batch norm", "not coupled", "response", "damped", "uncorrected"],
)
def test_elsewhere_nobody_is_asked_for_products(build, options):
    engine, state = trained(build)
    outcome = forgotten(engine, state, LEAVER, dataclasses.replace(RETRACE, **options))
    assert outcome.details["steps"][0]["filter"] != HALF_WAY


def test_it_costs_no_more_than_the_bill_says():
    engine, state = trained()
    parties = LEAVER.parties(engine.clients())
    told = estimate(RETRACE, Size.of(state, parties))
    outcome = forgotten(engine, state, LEAVER, RETRACE)
    assert outcome.details["steps"][0]["filter"] == HALF_WAY
    assert products(engine) > CHECKED
    assert outcome.cost.rounds <= told.messages
    assert outcome.cost.sample_gradients <= told.sample_gradients
    assert outcome.cost.bytes_up <= told.bytes_up
    assert outcome.cost.bytes_down <= told.bytes_down


class _Liar(LocalEngine):
    """Bob's products are not those of a symmetric matrix without negative eigenvalues."""

    def ask(self, tasks):
        replies = dict(super().ask(tasks))
        if isinstance(tasks.get("bob"), CurvatureProduct):
            told = replies["bob"]
            replies["bob"] = Sum(-3 * told.total, told.count, told.sample_gradients)
        return replies


def test_products_that_cannot_be_right_are_said_and_factors_are_taken():
    _, state = trained()
    outcome = forgotten(_Liar(linear(), CrossEntropy(), DATA), state, LEAVER, RETRACE)
    assert outcome.succeeded
    assert outcome.details["steps"][0]["filter"] != HALF_WAY
    assert any("was not used" in warning for warning in outcome.warnings)


TRAININGS = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}, None),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, None),
    "weight decay": (torch.optim.SGD, {"lr": 0.5, "weight_decay": 1e-3}, None),
    "FedAvgM": (torch.optim.SGD, {"lr": 0.2}, expunge.FedAvgM(0.3, 0.9)),
    "Adam": (torch.optim.Adam, {"lr": 0.05}, None),
}


def hospitals(outputs):
    """Unequal clients; half of what ada says is wrong."""
    source, found = torch.Generator().manual_seed(1), {}
    slope = torch.randn(9, generator=source)
    for number, name in enumerate(("ada", "bob", "cyd", "dee", "eve")):
        inputs = torch.randn(60 + 15 * number, 9, generator=source) + 0.4 * torch.randn(9, generator=source)
        sick = (inputs @ slope + 1.5 * torch.randn(len(inputs), generator=source) > 0).long()
        if name == "ada":
            sick[::2] = 1 - sick[::2]
        found[name] = (inputs, sick.float()[:, None] if outputs == 1 else sick)
    return found


def run(start, data, training, loss, memory=None):
    """Minibatches, as users train."""
    make, settings, server = TRAININGS[training]
    model, held, weights = copy.deepcopy(start), {}, {name: len(labels) for name, (_, labels) in data.items()}
    for number in range(15):
        before, updates = copy.deepcopy(model.state_dict()), {}
        for name, (inputs, labels) in data.items():
            own, order = copy.deepcopy(model), torch.Generator().manual_seed(100 * number + sum(map(ord, name)))
            optimiser = make([each for each in own.parameters() if each.requires_grad], **settings)

            def local(own=own, inputs=inputs, labels=labels, order=order, optimiser=optimiser):
                for _ in range(2):
                    for part in torch.randperm(len(labels), generator=order).split(16):
                        optimiser.zero_grad()
                        loss(own(inputs[part]), labels[part]).backward()
                        optimiser.step()

            if memory is None:
                local()
            else:
                with memory.watching(name, own):
                    local()
            updates[name] = {key: value - before[key] for key, value in own.state_dict().items()}
        if memory is not None:
            memory.record(updates, weights)
        total = sum(weights.values())
        for key in before:
            mean = sum(weights[name] * updates[name][key] for name in data) / total
            if server is not None:
                mean = held[key] = server.momentum * held.get(key, 0.0) + mean
                mean = server.learning_rate * mean
            before[key] = before[key] + mean
        model.load_state_dict(before)
    return model


class Written(nn.Module):
    """Logistic regression without a layer of torch's."""

    def __init__(self):
        super().__init__()
        self.slope, self.offset = nn.Parameter(0.1 * torch.randn(9, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        return inputs @ self.slope + self.offset


def trunk_and_head():
    trunk = nn.Sequential(nn.Linear(9, 12), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(trunk, nn.Linear(12, 2))


@pytest.mark.parametrize(
    ("training", "build", "outputs"),
    [
        *((name, lambda: nn.Linear(9, 1), 1) for name in TRAININGS),
        ("SGD", lambda: nn.Linear(9, 2), 2),
        ("SGD", trunk_and_head, 2),
        ("SGD", Written, 2),
    ],
    ids=[*TRAININGS, "two outputs", "a head on a frozen trunk", "no layer of torch's"],
)
def test_logistic_regression_comes_near_retraining(training, build, outputs):
    torch.manual_seed(0)
    start, data = build(), hospitals(outputs)
    loss = nn.BCEWithLogitsLoss() if outputs == 1 else nn.CrossEntropyLoss()
    server = TRAININGS[training][2]
    memory = expunge.Memory(start, expunge.Recipe(server=server) if server is not None else None)
    rest = {name: own for name, own in data.items() if name != "ada"}
    model, retrained = run(start, data, training, loss, memory), run(start, rest, training, loss)

    def left(**options):
        outcome = expunge.forget(
            model, rest, leaving="ada", memory=memory, method="retrace", loss=loss, batch_size=16, **options
        )
        new = copy.deepcopy(model)
        outcome.write_to(new)
        with torch.no_grad():
            return [abs(float(loss(own(data["ada"][0]), data["ada"][1])) - known) for own in (new, model)]

    with torch.no_grad():
        known = float(loss(retrained(data["ada"][0]), data["ada"][1]))
    own, trained = left()
    by_factors, _ = left(coupled=False)
    assert own < 0.25 * trained
    assert own < max(by_factors, 0.1 * trained)


class Scaled(nn.Module):
    """A number scales the outputs, as CLIP's do, after a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.head, self.scale = nn.LayerNorm(9), nn.Linear(9, 2), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        return self.scale * self.head(self.norm(inputs))


def test_a_far_step_of_a_model_with_more_than_a_layer_is_warned_of():
    torch.manual_seed(0)
    start, data, loss = Scaled(), hospitals(2), nn.CrossEntropyLoss()
    memory, rest = expunge.Memory(start), {name: own for name, own in data.items() if name != "ada"}
    model = run(start, data, "SGD", loss, memory)
    for share in (0.01, 1.0):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("expunge.unlearning.doubts.FAR", share)
            outcome = expunge.forget(model, rest, leaving="ada", memory=memory, batch_size=16)
        assert outcome.succeeded
        assert any("as long as the model itself" in own for own in outcome.warnings) is (share < 1)


@pytest.mark.parametrize(("training", "said"), [("momentum", False), ("Adam", True)])
def test_squared_errors_under_adam_are_warned_of(training, said):
    """Factors are exact where clients have one rate, and Adam's differ from weight to weight."""
    start, loss, data = nn.Linear(9, 1), nn.MSELoss(), hospitals(1)
    memory, rest = expunge.Memory(start), {name: own for name, own in data.items() if name != "ada"}
    model = run(start, data, training, loss, memory)
    outcome = expunge.forget(model, rest, leaving="ada", memory=memory, batch_size=16, loss=loss)
    assert outcome.succeeded
    assert outcome.details["steps"][0]["filter"] == "response"
    assert any("rates differ from weight to weight" in own for own in outcome.warnings) is said


def test_a_far_step_is_warned_of_under_adam_even_where_the_loss_is_a_squared_error(monkeypatch):
    monkeypatch.setattr("expunge.unlearning.doubts.FAR", 0.001)
    start, loss, data = nn.Linear(9, 1), nn.MSELoss(), hospitals(1)
    rest = {name: own for name, own in data.items() if name != "ada"}
    for training, said in (("momentum", False), ("Adam", True)):
        memory = expunge.Memory(start)
        model = run(start, data, training, loss, memory)
        outcome = expunge.forget(model, rest, leaving="ada", memory=memory, batch_size=16, loss=loss)
        assert any("as long as the model itself" in own for own in outcome.warnings) is said


def test_binary_cross_entropy_through_the_engine():
    data = {name: (inputs, (labels == 0).double()[:, None]) for name, (inputs, labels) in DATA.items()}
    engine, state = trained(lambda: seeded(nn.Linear(3, 1)), BinaryCrossEntropy(), data)
    assert forgotten(engine, state, LEAVER, RETRACE).details["steps"][0]["filter"] == HALF_WAY
