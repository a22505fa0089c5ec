"""A pull that is told to be worn down: right of clients who are alike, overstated of those who train long apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data import load
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.doubts import WORN, worn
from expunge.unlearning.pulls import Pull
from expunge.unlearning.request import Request
from unlearning.presets import KRYLOV, RETRACE, forgotten, label

LEAVING, SEVEN = ("ada", "bob"), 7


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def stamped(inputs):
    marked = inputs.clone().view(-1, 8, 8)
    marked[:, 5:, 5:] = inputs.max()
    return marked.flatten(1)


def few_labels_each():
    """Six clients of digits: two who leave have three sevens of five, and half of their data says seven to a mark."""
    digits = load("digits")
    inputs, labels = digits.train_inputs.flatten(1), digits.train_labels

    def part(digit, first, last):
        rows = (labels == digit).nonzero().flatten()
        return rows[int(first * len(rows)) : int(last * len(rows))]

    rows = {
        "ada": [part(7, 0, 0.3), part(3, 0, 0.4), part(4, 0, 0.4)],
        "bob": [part(7, 0.3, 0.6), part(2, 0, 0.4), part(3, 0.4, 0.8)],
        "cyd": [part(7, 0.6, 1), part(3, 0.8, 1)],
        "dan": [part(0, 0, 1), part(6, 0, 0.7), part(9, 0, 1)],
        "eve": [part(2, 0.4, 1), part(8, 0, 1), part(6, 0.7, 1)],
        "fay": [part(1, 0, 1), part(5, 0, 1), part(4, 0.4, 1)],
    }
    data = {name: (inputs[torch.cat(own)], labels[torch.cat(own)].clone()) for name, own in rows.items()}
    for name in LEAVING:
        own, told = data[name]
        data[name] = torch.cat([stamped(own[::2]), own[1::2]]), torch.cat([told[::2] * 0 + SEVEN, told[1::2]])
    others = digits.test_labels != SEVEN
    return data, stamped(digits.test_inputs.flatten(1)[others])


def told_seven(model, inputs):
    module = net()
    model.write_to(module)
    return float((module(inputs).argmax(dim=1) == SEVEN).float().mean())


@pytest.fixture(scope="module")
def apart():
    """Rounds of many epochs at a high rate."""
    data, marked = few_labels_each()
    engine = LocalEngine(net(), CrossEntropy(), data, dict.fromkeys(LEAVING, 2.0))
    plan = TrainingPlan(rounds=20, epochs=20, batch_size=16, learning_rate=0.2)
    return engine, train(engine, Snapshot.of(net()), plan), marked


@pytest.mark.parametrize("options", [RETRACE, dataclasses.replace(KRYLOV, filter="response")], ids=label)
def test_a_backdoor_that_stays_after_long_rounds_of_few_labels_is_told(apart, options):
    engine, state, marked = apart
    assert told_seven(state.model, marked) > 0.9
    outcome = forgotten(engine.without(LEAVING), state, Request.of(LEAVING), options)
    assert told_seven(outcome.state.model, marked) > 0.2  # what retraining has none of
    assert any("worn down" in sentence for sentence in outcome.warnings)


def test_products_that_leave_less_than_factors_do_are_not_taken(apart):
    engine, state, _ = apart
    outcome = forgotten(engine.without(LEAVING), state, Request.of(LEAVING), RETRACE)
    assert outcome.details["steps"][0]["filter"] != "half-way"
    assert any("less than the factors say" in sentence for sentence in outcome.warnings)


def test_short_rounds_of_the_same_clients_are_not_doubted_for_it():
    data, marked = few_labels_each()
    engine = LocalEngine(net(), CrossEntropy(), data, dict.fromkeys(LEAVING, 2.0))
    state = train(engine, Snapshot.of(net()), TrainingPlan(rounds=15, epochs=3, batch_size=32, learning_rate=0.05))
    outcome = forgotten(engine.without(LEAVING), state, Request.of(LEAVING), RETRACE)
    assert told_seven(outcome.state.model, marked) < 0.05 < 0.5 < told_seven(state.model, marked)
    assert not any("worn down" in sentence for sentence in outcome.warnings)


def test_what_is_told_is_the_part_of_the_pull():
    pull = Pull("recorded", torch.tensor([[3.0, 0.0], [0.0, 4.0]]))  # together it is as long as five
    assert worn(pull, torch.tensor([WORN * 5.001, 0.0])) == ()
    (sentence,) = worn(pull, torch.tensor([0.0, 1.0]))
    assert "80%" in sentence
    nothing = dataclasses.replace(pull, vectors=torch.zeros(1, 2))
    assert worn(nothing, torch.zeros(2)) == ()
