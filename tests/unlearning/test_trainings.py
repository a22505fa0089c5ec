"""Linear models trained by every linear rule, through the public API: what is left of the way to retraining."""

from __future__ import annotations

import pytest

import expunge
from expunge.federation.training.recipe import SGD, FedAvg, FedAvgM, Recipe
from unlearning.by_rounds import Federation, linear_data, parameters

PLAIN = Recipe()
RULES = {
    "SGD": PLAIN,
    "momentum": Recipe(SGD(0.9)),
    "Nesterov": Recipe(SGD(0.9, nesterov=True)),
    "weight decay": Recipe(SGD(weight_decay=0.05)),
    "FedProx": Recipe(SGD(proximal_mu=0.5)),
    "FedAvg at half the rate": Recipe(server=FedAvg(0.5)),
    "FedAvgM": Recipe(server=FedAvgM(0.3, 0.9)),
}


def left_of(federation: Federation, rounds: int) -> tuple[float, expunge.Outcome]:
    """How much of the distance to the model retrained without the client is left after it was forgotten."""
    model, memory = federation.trained(rounds)
    staying = {name: data for name, data in federation.clients.items() if name != "ada"}
    retrained, _ = federation.without("ada").trained(rounds)
    outcome = expunge.forget(
        model, staying, leaving="ada", memory=memory, loss="squared_error", l2=federation.l2, progress=False
    )
    assert (outcome.method, outcome.succeeded) == ("retrace", True)
    truth = parameters(retrained)
    before, after = parameters(model) - truth, outcome.state.model.parameters - truth
    return float(after.norm() / before.norm()), outcome


@pytest.mark.parametrize("rule", RULES)
def test_three_hundred_rounds_of_every_linear_rule(rule):
    left, outcome = left_of(Federation(linear_data(), RULES[rule], rate=0.005, steps=5), rounds=300)
    assert left <= 0.15
    assert outcome.details["source"] == "recorded"


@pytest.mark.parametrize(("rate", "l2"), [(0.01, 0.0), (0.03, 0.1), (0.05, 0.0), (0.05, 0.1)])
def test_ridge_by_fifty_rounds_of_eight_local_steps(rate, l2):
    left, _ = left_of(Federation(linear_data(), PLAIN, rate=rate, steps=8, l2=l2), rounds=50)
    assert left <= 0.1
