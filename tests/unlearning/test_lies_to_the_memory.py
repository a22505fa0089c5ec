"""A memory that does not belong to the model is refused by name, and one that does not know its model still works."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import expunge
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.training.recipe import Adam, FedAdam, FedAvg, FedAvgM, Recipe
from unlearning.by_rounds import Federation, linear_data, parameters

ROUNDS = 6
TRUE = Federation(linear_data(features=6, clients=4, count=20), Recipe(), rate=0.05, steps=3)


class Recorded:
    """Hands every round on to the memory as often as ``times`` says, and changed by ``sign``."""

    def __init__(self, memory, times=lambda _: 1, sign=1.0):
        self.memory, self.times, self.sign, self.number = memory, times, sign, 0

    def record(self, updates, weights, **how):
        for _ in range(self.times(self.number)):
            self.memory.record({name: self.sign * update for name, update in updates.items()}, weights, **how)
        self.number += 1


def trained(federation=TRUE, stated=None, **lie):
    """The model, and a memory that was told something else."""
    memory = expunge.Memory(federation.start(), stated if stated is not None else federation.recipe)
    return federation.goes_on(federation.start(), Recorded(memory, **lie), ROUNDS), memory


def forget(model, memory, leaving="ada", federation=TRUE, **more):
    staying = {name: data for name, data in federation.clients.items() if name != leaving and name in memory.clients}
    return expunge.forget(model, staying, leaving=leaving, memory=memory, loss="squared_error", progress=False, **more)


def test_the_truth_is_accepted():
    assert forget(*trained()).succeeded


@pytest.mark.parametrize("missed", [0, 2, ROUNDS - 1])
def test_rounds_missing(missed):
    with pytest.raises(RequestError, match="do not lead to this model: rounds are missing"):
        forget(*trained(times=lambda number: int(number != missed)))


@pytest.mark.parametrize("twice", [0, 3])
def test_a_round_recorded_twice(twice):
    with pytest.raises(RequestError, match=f"round {twice + 2} was recorded twice"):
        forget(*trained(times=lambda number: 1 + (number == twice)))


def test_flipped_signs():
    with pytest.raises(RequestError, match="signs are flipped"):
        forget(*trained(sign=-1.0))


def test_another_model():
    _, memory = trained()
    torch.manual_seed(5)
    with pytest.raises(RequestError, match="it is another one"):
        forget(nn.Linear(6, 1).double(), memory)
    with pytest.raises(RequestError, match="another length"):
        expunge.forget(
            nn.Linear(5, 1).double(),
            {name: (inputs[:, :5], targets) for name, (inputs, targets) in TRUE.clients.items()},
            leaving="ada",
            memory=memory,
            loss="squared_error",
        )


def test_an_old_memory_after_a_forget():
    model, memory = trained()
    outcome = forget(model, memory)
    after = copy.deepcopy(model)
    outcome.write_to(after)
    with pytest.raises(RequestError, match=r"'ada' had been taken out of it already.*outcome\.memory"):
        forget(after, memory, leaving="bob")
    assert forget(after, outcome.memory, leaving="bob").succeeded
    with pytest.raises(RequestError, match="do not lead to this model"):
        forget(model, outcome.memory, leaving="bob")  # nor the new memory with the old model


@pytest.mark.parametrize(
    ("true", "stated", "said"),
    [
        (FedAvgM(0.5, 0.9), FedAvg(), "the server's rule is not FedAvg as stated"),
        (FedAvg(0.5), FedAvg(), r"the server took 0\.5 times the step of FedAvg"),
        (FedAvg(), FedAvg(0.25), "the server took 4 times the step of FedAvg"),
        (FedAvg(), FedAvgM(1.0, 0.9), "the server's rule is not FedAvgM as stated"),
    ],
)
def test_a_server_rule_other_than_stated(true, stated, said):
    federation = replace(TRUE, recipe=Recipe(server=true))
    with pytest.raises(RequestError, match=said):
        forget(*trained(federation, Recipe(server=stated)))


def test_adam_without_moments():
    with pytest.warns(UserWarning, match=r"SGD\(\), where Adam\(\) is stated"):
        model, memory = trained(stated=Recipe(Adam()))
    with pytest.raises(RequestError, match=r"second_moments\(optimiser\) with every update"):
        forget(model, memory)


def test_a_server_that_divides_by_moments():
    model, memory = trained(stated=Recipe(server=FedAdam))
    with pytest.raises(RequestError, match=r"FedAdam divides by moments.*hf-kcu"):
        forget(model, memory)


def test_a_memory_that_knows_no_model_works_and_is_bound_afterwards():
    memory = expunge.Memory()
    model = TRUE.goes_on(TRUE.start(), memory, ROUNDS)
    assert not memory.is_bound
    outcome = forget(model, memory, tau=None)  # six rounds have not converged: whoever leaves takes help along
    truth = parameters(TRUE.without("ada").trained(ROUNDS)[0])
    left, before = (vector - truth for vector in (outcome.state.model.parameters, parameters(model)))
    assert float(left.norm()) < 0.3 * float(before.norm())
    assert outcome.memory.is_bound
    with pytest.raises(RequestError, match="do not lead to this model"):
        outcome.memory.require_model(Snapshot.of(model))


def test_wrong_weights_a_median_and_further_training_are_told_as_what_they_may_be():
    """Nobody was taken out: what is known is how far off it is, and what that may come from."""
    model, memory = trained()
    wrong = expunge.Memory(TRUE.start(), TRUE.recipe)
    weights = {"ada": 20, "bob": 20, "cyd": 60, "dan": 20}
    lie = SimpleNamespace(record=lambda updates, _, **how: wrong.record(updates, weights, **how))
    TRUE.goes_on(TRUE.start(), lie, ROUNDS)
    with pytest.raises(
        RequestError,
        match=r"less of 'cyd' in it than was recorded.*weights.*its rule is not FedAvg.*It lies \d+% of their way from",
    ):
        forget(model, wrong)
    weights["cyd"] = 2
    wrong = expunge.Memory(TRUE.start(), TRUE.recipe)
    TRUE.goes_on(TRUE.start(), lie, ROUNDS)
    with pytest.raises(RequestError, match=r"more of 'cyd' in it than was recorded\. The weights are not"):
        forget(model, wrong)
    further = TRUE.without("ada").goes_on(model, expunge.Memory(), 3)
    with pytest.raises(RequestError, match="trained on after the last recorded round"):
        forget(further, memory)
    middle, memory = TRUE.start(), expunge.Memory(TRUE.start())
    for _ in range(ROUNDS):
        updates = {name: TRUE.local(middle, name)[0] for name in TRUE.clients}
        memory.record(updates, dict.fromkeys(updates, 1))
        Snapshot(parameters(middle) + torch.stack(list(updates.values())).median(dim=0).values, {}).write_to(middle)
    with pytest.raises(RequestError, match="median"):
        forget(middle, memory)


def half(dtype, averaged, rounds, clients=6, rate=0.3, seed=0):
    """A network in half precision, whose first client has wrong labels; the server averages in it, or in single."""
    torch.manual_seed(seed)
    inputs, way = torch.randn(clients, 60, 24).to(dtype), torch.randn(24, 4)
    targets = (inputs.float() @ way).argmax(dim=2)
    targets[0] = (targets[0] + 1) % 4
    data = {f"client-{number}": (inputs[number], targets[number]) for number in range(clients)}
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)).to(dtype)
    memory = expunge.Memory(model)
    for _ in range(rounds):
        before = {name: own.detach().clone() for name, own in model.state_dict().items()}
        sent = {}
        for name, (own, wanted) in data.items():
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), lr=rate)
            for _ in range(3):
                optimiser.zero_grad()
                nn.functional.cross_entropy(local(own).float(), wanted).backward()
                optimiser.step()
            sent[name] = local.state_dict()
        updates = {name: {key: own[key] - before[key] for key in before} for name, own in sent.items()}
        memory.record(updates, dict.fromkeys(data, 60), learning_rate=rate, steps=3)
        model.load_state_dict({key: sum(own[key].to(averaged) / clients for own in sent.values()) for key in before})
    return model, memory, data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("averaged", ["as it is", "in single precision"])
def test_in_half_precision_an_old_memory_is_refused_and_honest_rounding_is_not(dtype, averaged):
    averaged = dtype if averaged == "as it is" else torch.float32
    for rounds, clients, rate in ((4, 3, 0.5), (20, 6, 0.3), (20, 4, 0.02), (80, 5, 0.1)):
        model, memory, data = half(dtype, averaged, rounds, clients, rate)
        memory.require_model(Snapshot.of(model))
        assert not memory.rounded(Snapshot.of(model))
    model, memory, data = half(dtype, averaged, 15)
    for leaving in ("client-0", "client-3"):
        staying = {name: own for name, own in data.items() if name != leaving}
        outcome = expunge.forget(model, staying, leaving=leaving, memory=memory, progress=False)
        with pytest.raises(RequestError, match="do not lead to this model"):
            memory.require_model(outcome.state.model)
        with pytest.raises(RequestError, match="do not lead to this model"):
            outcome.memory.require_model(Snapshot.of(model))
        outcome.memory.require_model(outcome.state.model)


@pytest.mark.parametrize("times", [-1.0, 0.25, 3.0])
def test_in_half_precision_another_server_is_refused(times):
    _, memory, _ = half(torch.bfloat16, torch.float32, 15)
    start, now = memory._place.start, memory._place.now
    with pytest.raises(RequestError, match="do not lead to this model"):
        memory.require_model(Snapshot((start + times * (now - start)).bfloat16(), {}))


def test_updates_that_were_lost_in_rounding_are_said():
    model, memory, data = half(torch.bfloat16, torch.bfloat16, 30, rate=0.001)
    staying = {name: own for name, own in data.items() if name != "client-0"}
    warnings = expunge.forget(model, staying, leaving="client-0", memory=memory, progress=False).warnings
    assert any("in bfloat16 small updates were lost in rounding" in each for each in warnings)
