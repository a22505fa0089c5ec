"""Curvature where those who stay train, and how it is spread: beside local trainings, sums by hand and integrals."""

import dataclasses

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.keeping.memory import Memory
from expunge.federation.messages.tasks import CurvatureFactors, CurvatureProduct, Losses, Train
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, AdamW, Recipe
from expunge.federation.training.response import Response
from expunge.federation.training.works import Round, Work
from expunge.forgetting import choose
from expunge.unlearning import at_work as module
from expunge.unlearning.at_work import MOST, at_work, is_adapted, is_at_work, told
from expunge.unlearning.doubts import BEYOND, doubts
from expunge.unlearning.estimate import Size
from expunge.unlearning.filters import Answered, gamma_nodes
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from expunge.unlearning.retrace_options import estimate
from federation.small import clients, linear, seeded
from unlearning.presets import RETRACE, forgotten
from unlearning.test_correction import WatchedEngine

DOUBLE = torch.float64
LEAVER = Request.of("ada")
DATA = {
    name: (inputs, (inputs.argmax(dim=1) + (name == "ada")) % 3)  # what ada says is wrong
    for name, (inputs, _) in clients(ada=60, bob=72, cyd=48, dan=41, eve=30).items()
}
PLAN = TrainingPlan(rounds=5, epochs=3, batch_size=12, learning_rate=0.02, recipe=Recipe(AdamW()))


class Adapted(nn.Module):
    """Two frozen layers with adapters, as PEFT names them."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 6), nn.Linear(6, 3)
        self.lora_A, self.lora_B = nn.Linear(3, 4, bias=False), nn.Linear(4, 6, bias=False)
        for layer in (self.base, self.head):
            layer.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(inputs) + self.lora_B(self.lora_A(inputs))))


def adapted() -> nn.Module:
    return seeded(Adapted())


def convolved(*more: nn.Module) -> nn.Module:
    kernels = (nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), *more, nn.Tanh(), nn.Conv1d(4, 4, 2), nn.Tanh())
    return seeded(nn.Sequential(*kernels, nn.Flatten(), nn.Linear(4, 3)))


def trained(plan=PLAN, build=adapted):
    engine = WatchedEngine(build(), CrossEntropy(), DATA)
    state = train(engine, Snapshot.of(build()), plan)
    engine.log.clear()
    return engine, state


def staying(engine, state):
    parties = LEAVER.parties(engine.clients())
    return Retained.of(engine, state, parties, seed=3)


def descended(start, points, rate, steps):
    """Gradient descent on ``mean of log(1 + exp(-x theta))``, differentiable by where it began."""
    theta = start
    for _ in range(steps):
        theta = theta + rate * (points * torch.sigmoid(-points * theta)).mean()
    return theta


def test_the_middle_of_a_clients_round_tells_how_it_answers_a_displaced_model():
    """Oracle: the derivative of one round by its start, in a model of one weight and two clients that disagree."""
    rate, steps, mean = 0.1, 12, torch.tensor(0.1, dtype=DOUBLE)
    points = {"ada": torch.tensor([3.0, 2.0], dtype=DOUBLE), "bob": torch.tensor([-3.5, -1.5], dtype=DOUBLE)}
    ends = {name: descended(mean, own, rate, steps) for name, own in points.items()}
    memory = Memory()
    memory.record({name: (end - mean)[None] for name, end in ends.items()}, dict.fromkeys(ends, 1))
    middle = sum(ends.values()) / 2 - mean

    def left(place, own):
        curvature = (own**2 * torch.sigmoid(own * place) * torch.sigmoid(-own * place)).mean()
        return float((1 - rate * curvature) ** steps)

    for name, own in points.items():
        start = mean.clone().requires_grad_()
        (exact,) = torch.autograd.grad(descended(start, own, rate, steps), start)
        half_way = mean + (memory.drift(name)[0] + middle) / 2
        assert abs(left(half_way, own) - float(exact)) < abs(left(mean, own) - float(exact)) / 2


def test_a_drift_is_the_mean_of_how_far_a_client_led_from_the_mean():
    memory = Memory()
    rounds = [{"ada": 1.0, "bob": 3.0, "cyd": 5.0}, {"ada": 2.0, "bob": 8.0}]
    for each in rounds:
        memory.record({name: torch.tensor([value]) for name, value in each.items()}, dict.fromkeys(each, 1))
    assert memory.drift("cyd").tolist() == [2.0]
    # its weight is a third and a half, so that its rounds count by w / (1 - w)
    assert memory.drift("ada").tolist() == pytest.approx([(0.5 * -2.0 + 1.0 * -3.0) / 1.5])
    assert memory.drift("eve") is None


def test_factors_and_products_are_those_of_each_clients_own_model():
    engine, state = trained()
    stay = at_work(staying(engine, state), state.memory)
    vector = torch.randn(state.model.parameters.numel(), generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    total, product = sum(stay.left.values()), torch.zeros_like(vector)
    places = {name: state.model.parameters + state.memory.drift(name) / 2 for name in stay.left}
    for name, count in stay.left.items():
        alone = dataclasses.replace(stay, clients={name: ()}, drifts={})
        product += count / total * alone.product(state.model.moved(places[name]))(vector)
    torch.testing.assert_close(stay.product(state.model)(vector), product)
    stay.factors(state.model)
    for name, task in engine.log[-1].items():
        assert isinstance(task, CurvatureFactors)
        torch.testing.assert_close(task.model.parameters, places[name])


def test_who_is_much_louder_than_others_is_looked_at_the_mean():
    memory = Memory()
    usual = {f"client-{number}": torch.tensor([(-1.0) ** number]) for number in range(9)}
    updates = {**usual, "loud": torch.tensor([90.0])}
    for _ in range(2):
        memory.record(updates, dict.fromkeys(updates, 1))
    engine, state = trained()
    stay = dataclasses.replace(staying(engine, state), clients=dict.fromkeys((*updates, "new"), ()))
    assert set(at_work(stay, memory).drifts) == set(usual)
    assert at_work(stay, Memory()).drifts == {}


@pytest.mark.parametrize("spread", [0.05, 0.4, 1.0, 3.0])
def test_what_is_left_is_the_mean_over_a_gamma_distribution(spread):
    rounds = (Round((Work(1.0, 0.1, 4),)),) * 6
    answered = Answered(Response(Recipe(SGD()), rounds), torch.full((1, 6), 1 / 6, dtype=DOUBLE), 0.7, spread)
    curvature = torch.tensor([0.0, 0.1, 1.0, 5.0], dtype=DOUBLE)
    gamma = torch.distributions.Gamma(torch.tensor(1 / spread, dtype=DOUBLE), torch.tensor(1 / spread, dtype=DOUBLE))
    edges = torch.logspace(-14, 2.5, 40001, dtype=DOUBLE)
    middles = (edges[1:] * edges[:-1]).sqrt()
    weights = gamma.log_prob(middles).exp() * edges.diff()
    plain = dataclasses.replace(answered, spread=0.0)
    many = plain((middles[:, None] * curvature).reshape(-1), ())[0].view(len(middles), -1)
    expected = (weights[:, None] * many).sum(dim=0) / weights.sum()
    torch.testing.assert_close(answered(curvature, ())[0], expected, rtol=0.04, atol=0.005)
    assert bool((answered(curvature, ())[0] >= plain(curvature, ())[0] - 1e-12).all())  # it is convex


def test_without_a_spread_there_is_one_curvature():
    assert gamma_nodes(0.0) == [(1.0, 1.0)]
    nodes = gamma_nodes(2.0)
    assert sum(weight for _, weight in nodes) == pytest.approx(1.0)
    assert all(number > 0 for number, _ in nodes)


def messages(engine, state):
    """What is asked while the leaver is forgotten, and the outcome."""
    away = engine.without(("ada",))
    away.log = []
    outcome = forgotten(away, state, LEAVER, RETRACE)
    return away.log, outcome


def test_of_adapters_under_adam_a_product_is_asked_for_and_nobody_trains_twice():
    engine, state = trained()
    log, outcome = messages(engine, state)
    kinds = [type(next(iter(tasks.values()))) for tasks in log]
    assert is_at_work(state)
    assert outcome.succeeded
    assert outcome.details["stiffness"] >= 1.0
    assert kinds[:3] == [CurvatureFactors, CurvatureProduct, Losses]


def test_a_convolutional_network_under_adam_is_looked_at_there_and_those_who_stay_are_asked():
    engine, state = trained(build=convolved)
    log, outcome = messages(engine, state)
    assert is_at_work(state)
    assert not is_adapted(state)
    assert outcome.succeeded
    kinds = [type(next(iter(tasks.values()))) for tasks in log]
    assert kinds[:3] == [CurvatureFactors, Train, Train]
    for name, task in log[0].items():
        place = state.model.parameters + state.memory.drift(name) / 2
        torch.testing.assert_close(task.model.parameters, place)
    assert all(task.model is state.model for task in log[1].values())  # they are asked where they always are


def test_where_all_drifts_together_would_not_fit_everybody_is_looked_at_the_mean(monkeypatch):
    engine, state = trained(build=convolved)
    stay = staying(engine, state)
    monkeypatch.setattr(module, "ROOM", 4 * state.memory.size)
    assert len(at_work(stay, state.memory).drifts) == 4
    monkeypatch.setattr(module, "ROOM", 4 * state.memory.size - 1)
    assert at_work(stay, state.memory).drifts == {}


@pytest.mark.parametrize(
    ("plan", "build"),
    [
        (dataclasses.replace(PLAN, recipe=Recipe(SGD())), adapted),
        (dataclasses.replace(PLAN, recipe=Recipe(SGD())), convolved),
        (PLAN, linear),
        (PLAN, lambda: convolved(nn.BatchNorm1d(4))),
    ],
    ids=["SGD", "SGD on convolutions", "no adapters", "batch norm"],
)
def test_other_trainings_and_models_are_looked_at_the_mean(plan, build):
    engine, state = trained(plan, build)
    assert not is_at_work(state)
    assert all(task.model is state.model for task in messages(engine, state)[0][0].values())


def test_a_spread_that_cannot_be_is_not_believed_and_warned_of():
    engine, state = trained()
    curvature = staying(engine, state).factors(state.model)
    vector = torch.randn(state.model.parameters.numel(), generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    exact = curvature.apply(lambda values, _: values, vector)
    plain = told(curvature, vector, 2.0 * exact)
    assert (plain.stiffness, plain.beyond) == (pytest.approx(2.0), False)
    assert plain.spread == pytest.approx(0.0, abs=1e-9)
    aside = torch.randn(len(vector), generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    aside -= (aside @ vector) / (vector @ vector) * vector
    claimed = told(curvature, vector, 2.0 * exact + 100.0 * float(exact.norm()) * aside)
    assert (claimed.spread, claimed.beyond) == (MOST, True)
    assert BEYOND in doubts(state.model, curvature, claimed)
    assert BEYOND not in doubts(state.model, curvature, plain)


def test_the_bill_of_adapters_bounds_what_is_spent():
    engine, state = trained()
    away = engine.without(("ada",))
    parties = LEAVER.parties(away.clients(), state.memory.clients)
    bound = estimate(RETRACE, Size.of(state, parties))
    spent = forgotten(away, state, LEAVER, RETRACE).cost
    assert spent.sample_gradients <= bound.sample_gradients
    assert spent.rounds <= bound.messages
    assert spent.bytes_down <= bound.bytes_down
    assert spent.bytes_up <= bound.bytes_up
    assert choose(state, parties, "retrace", None, sums_only=False).method.name == "retrace"
    assert not Size.of(state, parties).asked
    assert Size.of(trained(PLAN, linear)[1], parties).asked
    assert isinstance(state.trained_by.client, Adam)
