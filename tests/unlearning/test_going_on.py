"""Forget, train on, forget again: under SGD, Adam and a server with momentum."""

from __future__ import annotations

import copy

import pytest

import expunge
from expunge.errors import RequestError
from expunge.federation.training.recipe import SGD, Adam, FedAvgM, Recipe
from unlearning.by_rounds import Federation, linear_data, parameters

ROUNDS = 40
DATA = linear_data(features=6, clients=5, count=20)
DATA["bob"] = (DATA["bob"][0], DATA["bob"][1] - 2 * DATA["bob"][0][:, 1:2])  # both who leave are unlike the others
RECIPES = {
    "SGD": (Recipe(SGD()), 0.02),
    "Adam": (Recipe(Adam()), 0.01),
    "FedAvgM": (Recipe(server=FedAvgM(0.3, 0.9)), 0.02),
}
LEFT = {"SGD": 0.15, "Adam": 0.9, "FedAvgM": 0.15}
"""Of the distance to retraining; with Adam's moments held as they were the recursion is not exact."""


def forget(federation, model, memory, leaving):
    """The outcome, and the model that it gives."""
    staying = federation.without(leaving)
    outcome = expunge.forget(
        model, staying.clients, leaving=leaving, memory=memory, loss="squared_error", progress=False
    )
    after = copy.deepcopy(model)
    outcome.write_to(after)
    return outcome, after


@pytest.mark.parametrize("name", RECIPES)
def test_the_second_forget_comes_nearer_to_retraining_without_both(name):
    recipe, rate = RECIPES[name]
    everyone = Federation(DATA, recipe, rate, steps=3)
    model, memory = everyone.trained(ROUNDS)
    first, model = forget(everyone, model, memory, "ada")
    left, memory = everyone.without("ada"), first.memory
    assert memory.clients == ("bob", "cyd", "dan", "eve")
    remembers = left.goes_on(model, memory, ROUNDS, memory.server_momentum)
    second, _ = forget(left, remembers, memory, "bob")
    assert second.succeeded
    assert second.memory.clients == ("cyd", "dan", "eve")
    truth = parameters(everyone.without("ada", "bob").trained(2 * ROUNDS)[0])
    unforgotten = parameters(everyone.trained(2 * ROUNDS)[0])
    apart = {
        key: float((vector - truth).norm())
        for key, vector in (
            ("both", second.state.model.parameters),
            ("one", parameters(remembers)),
            ("none", unforgotten),
        )
    }
    assert apart["both"] < LEFT[name] * apart["one"]
    assert apart["both"] < LEFT[name] * apart["none"]


def test_a_server_goes_on_with_a_momentum_that_the_leaver_is_taken_out_of():
    recipe, rate = RECIPES["FedAvgM"]
    everyone = Federation(DATA, recipe, rate, steps=3)
    model, memory = everyone.trained(ROUNDS)
    held = memory.server_momentum
    first, model = forget(everyone, model, memory, "ada")
    assert (memory.server_momentum == held).all()  # the memory itself is left alone
    truth = everyone.without("ada").trained(ROUNDS)[1].server_momentum
    left = first.memory.server_momentum
    assert float((left - truth).norm()) < 0.3 * float((held - truth).norm())
    remembers = everyone.without("ada").goes_on(model, first.memory, 5, held)  # with the one that holds the leaver
    with pytest.raises(RequestError, match="do not lead to this model"):
        forget(everyone.without("ada"), remembers, first.memory, "bob")


def test_plain_averaging_has_no_momentum():
    model, memory = Federation(DATA, Recipe(), 0.02, steps=3).trained(2)
    assert memory.server_momentum is None
    assert forget(Federation(DATA, Recipe(), 0.02, steps=3), model, memory, "ada")[0].memory.server_momentum is None
