"""Clients train by the optimiser they are asked for: torch's own, begun anew in every round; servers have momentum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, AdamW, FedAdam, FedAvg, FedAvgM, Recipe
from federation.small import clients, mlp, theta

L2, MU, RATE = 0.1, 0.3, 0.05
DATA = clients(a=6, b=9)
RULES = {
    "momentum": (SGD(0.9), lambda p: torch.optim.SGD(p, momentum=0.9)),
    "dampened": (SGD(0.9, dampening=0.4), lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.4)),
    "nesterov": (SGD(0.5, nesterov=True), lambda p: torch.optim.SGD(p, momentum=0.5, nesterov=True)),
    "decay": (SGD(weight_decay=0.2), lambda p: torch.optim.SGD(p, weight_decay=0.2)),
    "Adam": (Adam((0.8, 0.9), 1e-6, 0.2), lambda p: torch.optim.Adam(p, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)),
    "AdamW": (AdamW(weight_decay=0.2), lambda p: torch.optim.AdamW(p, weight_decay=0.2)),
    "FedProx": (SGD(proximal_mu=MU), lambda p: torch.optim.SGD(p)),
    "FedProx with Adam": (Adam(proximal_mu=MU), lambda p: torch.optim.Adam(p)),
}


def by_hand(plan: TrainingPlan, optimiser_of, mu: float) -> Snapshot:
    """The same training with torch's optimiser, the L2 and FedProx's pull as parts of the loss, one batch an epoch."""
    model, momentum = mlp(), torch.zeros(31, dtype=torch.float64)
    beta = getattr(plan.recipe.server, "momentum", 0.0)
    for number in range(plan.rounds):
        before, updates = theta(model), []
        for inputs, targets in DATA.values():
            local = copy.deepcopy(model)
            optimiser = optimiser_of(local.parameters())
            for group in optimiser.param_groups:
                group["lr"] = plan.rate(number)
            for _ in range(plan.epochs):
                far = sum((new - old.detach()).square().sum() for new, old in zip(*_both(local, model), strict=True))
                size = sum(weight.square().sum() for weight in local.parameters())
                loss = nn.functional.cross_entropy(local(inputs), targets) + L2 / 2 * size + mu / 2 * far
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            updates.append(theta(local) - before)
        momentum = beta * momentum + (6 * updates[0] + 9 * updates[1]) / 15
        step = before + plan.recipe.server.learning_rate * momentum
        Snapshot.of(model).moved(step).write_to(model)
    return Snapshot.of(model)


def _both(one: nn.Module, other: nn.Module):
    return list(one.parameters()), list(other.parameters())


@pytest.mark.parametrize("name", RULES)
def test_equals_torch_by_hand(name):
    rule, optimiser_of = RULES[name]
    plan = TrainingPlan(rounds=3, epochs=4, batch_size=100, learning_rate=RATE, recipe=Recipe(rule))
    state = train(LocalEngine(mlp(), CrossEntropy(L2), DATA), Snapshot.of(mlp()), plan)
    expected = by_hand(plan, optimiser_of, rule.proximal_mu)
    torch.testing.assert_close(state.model.parameters, expected.parameters, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("server", [FedAvg(0.7), FedAvgM(0.5, 0.6)])
def test_a_server_with_a_rate_or_a_momentum_and_a_rate_that_falls(server):
    plan = TrainingPlan(4, 2, 100, RATE, recipe=Recipe(server=server), cosine=True)
    state = train(LocalEngine(mlp(), CrossEntropy(L2), DATA), Snapshot.of(mlp()), plan)
    expected = by_hand(plan, lambda weights: torch.optim.SGD(weights), 0.0)
    torch.testing.assert_close(state.model.parameters, expected.parameters, rtol=1e-10, atol=1e-12)
    state.memory.require_model(state.model)


def test_slow_devices_train_fewer_epochs_and_what_they_did_is_recorded():
    plan = TrainingPlan(rounds=6, epochs=5, batch_size=3, learning_rate=RATE, min_epochs=1)
    state = train(LocalEngine(mlp(), CrossEntropy(), DATA), Snapshot.of(mlp()), plan)
    response = state.memory.response(["b"], None, state.model.layout)
    steps = [each.works[0].steps for each in response.rounds]
    assert set(steps) <= {2.0 * epochs for epochs in range(1, 6)}
    assert len(set(steps)) > 1


def test_moments_are_recorded_under_adam_only():
    for rule, expected in ((SGD(), 0), (Adam(), 4)):
        plan = TrainingPlan(rounds=2, epochs=2, batch_size=3, learning_rate=RATE, recipe=Recipe(rule))
        state = train(LocalEngine(mlp(), CrossEntropy(), DATA), Snapshot.of(mlp()), plan)
        works = state.memory.response(["b"], None, state.model.layout).rounds[-1].works
        assert [len(work.moments) for work in works] == [expected]
        assert all(moment > 0 for work in works for moment in work.moments)


def test_what_cannot_be_trained_here_is_refused():
    engine, start = LocalEngine(mlp(), CrossEntropy(), DATA), Snapshot.of(mlp())
    with pytest.raises(RequestError, match="FedAdam"):
        train(engine, start, TrainingPlan(recipe=Recipe(server=FedAdam)))
    with pytest.raises(RequestError, match="fewest epochs"):
        TrainingPlan(epochs=2, min_epochs=3)


def test_a_plan_reads_back_from_its_numbers():
    plan = TrainingPlan(3, 2, 8, 0.1, recipe=Recipe(AdamW(), FedAvgM()), cosine=True, min_epochs=1)
    assert TrainingPlan.from_dict(plan.as_dict()) == plan
    assert set(TrainingPlan().as_dict()) == {
        "rounds",
        "epochs",
        "batch_size",
        "learning_rate",
        "participation",
        "seed",
    }
