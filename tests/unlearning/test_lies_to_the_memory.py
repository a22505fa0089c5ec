"""A memory that does not belong to the model is refused by name, and one that does not know its model still works."""

from __future__ import annotations

import copy
from dataclasses import replace

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
