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


@pytest.mark.parametrize(
    "way",
    [{"method": "retrace", "filter": "damped", "damping": 1e9}, {"method": "retrace-krylov", "filter": "none"}],
    ids=["damped", "none"],
)
@pytest.mark.parametrize("rule", ["FedAvg at half the rate", "FedAvgM"])
def test_a_pull_is_as_long_as_the_server_made_it_where_nobody_corrects_it(rule, way):
    """Without data that answers, a pull lies in the model with the server's rate and momentum, whichever the filter."""
    federation = Federation(linear_data(), RULES[rule], rate=1e-7, steps=1)  # so small that nobody corrects
    model, memory = federation.trained(20)
    retrained, _ = federation.without("ada").trained(20)
    staying = {name: data for name, data in federation.clients.items() if name != "ada"}
    outcome = expunge.forget(
        model, staying, leaving="ada", memory=memory, loss="squared_error", progress=False, tau=1e6, **way
    )
    truth = parameters(model) - parameters(retrained)
    assert outcome.details["steps"][0]["norm"] == pytest.approx(float(truth.norm()), rel=1e-4)


DRAWN = {
    "a few of them": ("ab", "acd", "bc", "ade", "a", "bcde", "ac", "be", "abcde", "cd"),
    "alone whenever it is there": ("bcd", "a", "cde", "a", "bcde", "bd"),
    "in one round": ("bcd", "bc", "abe", "cde"),
}


@pytest.mark.parametrize("rule", ["SGD", "FedAvgM"])
@pytest.mark.parametrize("drawn", DRAWN)
def test_whatever_the_leaver_s_weight_in_each_round_the_step_is_what_it_added(drawn, rule):
    """Unequal clients take part now and then; where nobody answers the step is the difference of the two trainings."""
    data = linear_data(count=80)
    data |= {name: (data[name][0][:count], data[name][1][:count]) for name, count in (("bob", 20), ("cyd", 5))}
    rounds = len(DRAWN[drawn])
    federation = Federation(data, RULES[rule], rate=1e-7, steps=1, drawn=DRAWN[drawn])
    model, memory = federation.trained(rounds)
    retrained, _ = federation.without("ada").trained(rounds)
    staying = {name: own for name, own in data.items() if name != "ada"}
    way = {"method": "retrace-krylov", "tau": 1e6, "progress": False}
    outcome = expunge.forget(model, staying, leaving="ada", memory=memory, loss="squared_error", **way)
    truth, found = parameters(retrained), outcome.state.model.parameters
    left = float((found - truth).norm() / (parameters(model) - truth).norm())
    assert left < (1e-4 if rule == "SGD" else 0.3)  # how momentum came over a stretch of rounds is told by lengths
    assert not any("is not known" in each for each in outcome.warnings)


@pytest.mark.parametrize("seed", range(3))
def test_unequal_clients_of_which_a_few_take_part_in_each_round(seed):
    data = linear_data(count=80, seed=seed)
    data |= {name: (data[name][0][:count], data[name][1][:count]) for name, count in (("bob", 20), ("cyd", 5))}
    order = [name[0] for name in data]
    draws = tuple("".join(order[(at * 2 + k * (1 + at % 3)) % 5] for k in range(1 + at % 3)) for at in range(60))
    left, _ = left_of(Federation(data, PLAIN, rate=0.005, steps=5, drawn=draws), rounds=60)
    assert left < 0.3


def test_a_server_rule_without_the_training_s_rate_is_refused():
    federation = Federation(linear_data(), RULES["FedAvgM"], rate=0.005, steps=5, told=False)
    model, memory = federation.trained(5)
    staying = {name: data for name, data in federation.clients.items() if name != "ada"}
    with pytest.raises(expunge.RequestError, match="FedAvgM made of a pull cannot be told"):
        expunge.forget(model, staying, leaving="ada", memory=memory, loss="squared_error", damping=0.1, progress=False)
