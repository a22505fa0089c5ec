"""Clients that are held together by more than is told are seen by training the last round again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from expunge import SGD, Memory, Recipe, forget
from expunge.core.vectors import Snapshot
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.last_round import LastRound
from expunge.unlearning.request import Request
from federation.small import generator

TOGETHER, OTHERWISE = "as far apart from each other", "Trained again by what is told here"
NAMES = ("ada", "bob", "cyd", "dan", "eve")
INPUTS, CLASSES = 20, 4


def teacher(skew, count=80):
    """Labels of one teacher; ada's are wrong. With skew each has two classes mostly."""
    source = generator(7)
    first, second = torch.randn(INPUTS, 12, generator=source), torch.randn(12, CLASSES, generator=source)
    found = {}
    for number, name in enumerate(NAMES):
        inputs = torch.randn(6 * count, INPUTS, generator=source)
        labels = ((inputs @ first).tanh() @ second).argmax(dim=1)
        own = (labels - number) % CLASSES < 2 if skew else torch.ones(len(labels), dtype=torch.bool)
        own = own.nonzero()[:count, 0]
        found[name] = inputs[own], (labels[own] + (name == "ada")) % CLASSES
    return found


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), nn.Linear(24, CLASSES))


def trained(
    data,
    controls="none",
    rate=0.1,
    batch=16,
    momentum=0.0,
    rounds=8,
    falling=1.0,
    out=0.0,
    boost=1.0,
    multiple=1.0,
    recipe=None,
):
    """A loop of a user's own, where no optimiser is seen: SGD with control variates, or another linear term."""
    model, source = network(), generator(1)
    memory, size = Memory(model, recipe), parameters_to_vector(model.parameters()).numel()
    own, mean_control = {name: torch.zeros(size) for name in NAMES}, torch.zeros(size)
    for number in range(rounds):
        here = [name for name in NAMES if not torch.rand((), generator=source) < out] or NAMES[:2]
        start, now = parameters_to_vector(model.parameters()).detach(), rate * falling**number
        updates, steps, found = {}, {}, {}
        for name in here:
            inputs, labels = data[name]
            weights, velocity, steps[name] = start.clone(), torch.zeros(size), 0
            for _ in range(2):
                for chosen in torch.randperm(len(labels), generator=source).split(batch):
                    vector_to_parameters(weights, model.parameters())
                    loss = multiple * F.cross_entropy(model(inputs[chosen]), labels[chosen])
                    gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
                    if controls == "scaffold":
                        gradient = gradient + mean_control - own[name]
                    if controls == "linear term":
                        gradient = gradient - own[name] + 0.3 * (weights - start)
                    velocity = momentum * velocity + gradient
                    weights, steps[name] = weights - now * velocity, steps[name] + 1
            updates[name] = weights - start
            found[name] = own[name] - mean_control - updates[name] / (steps[name] * now)
            if controls == "linear term":
                found[name] = own[name] - 0.3 * updates[name]
        mean_control = mean_control + sum(found[name] - own[name] for name in here) / len(NAMES)
        own |= found
        updates = {name: update * (boost if name == "ada" else 1.0) for name, update in updates.items()}
        memory.record(updates, dict.fromkeys(here, 1.0), learning_rate=now, steps=steps)
        vector_to_parameters(start + sum(updates.values()) / len(here), model.parameters())
    return model, memory


def told(model, memory, data, said=TOGETHER, **call):
    outcome = forget(model, data, "ada", memory=memory, progress=False, **call)
    return [warning for warning in outcome.warnings if said in warning]


@pytest.mark.parametrize("skew", [True, False])
@pytest.mark.parametrize(
    "training",
    [
        {"controls": "scaffold"},
        {"controls": "scaffold", "batch": 8},
        {"controls": "scaffold", "batch": 100, "rounds": 20},
        {"controls": "scaffold", "out": 0.4, "rounds": 16},
        {"controls": "scaffold", "falling": 0.8},
        {"controls": "linear term", "rounds": 16},
    ],
)
def test_control_variates_are_told(training, skew):
    data = teacher(skew)
    (warning,) = told(*trained(data, **training), data)
    assert "SCAFFOLD" in warning
    assert "ada" not in warning


@pytest.mark.parametrize("skew", [True, False])
@pytest.mark.parametrize(
    ("training", "call"),
    [
        ({}, {}),
        ({}, {"batch_size": 16}),
        ({"batch": 4, "rate": 0.03}, {}),
        ({"batch": 100, "rounds": 20}, {}),
        ({"rounds": 20}, {}),
        ({"falling": 0.7}, {}),
        ({"out": 0.4, "rounds": 16}, {}),
        ({"momentum": 0.9, "rate": 0.02, "recipe": Recipe(SGD(momentum=0.9))}, {}),
        ({"boost": 4.0, "rate": 0.05}, {}),
        ({"boost": -2.0}, {}),
        ({}, {"method": "retrace-krylov"}),
    ],
)
def test_who_trains_as_is_told_hears_nothing(training, call, skew):
    data = teacher(skew)
    assert told(*trained(data, **training), data, **call) == []


def test_noise_of_batches_that_differ_each_time_holds_nobody_together():
    """Labels by chance, at rest: what tells clients apart in a round are their batches."""
    source = generator(3)
    data = {
        name: (torch.randn(80, INPUTS, generator=source), torch.randint(CLASSES, (80,), generator=source))
        for name in NAMES
    }
    for batch in (1, 2, 8):
        assert told(*trained(data, batch=batch, rate=0.02 * batch, rounds=12), data) == []


def test_it_is_in_the_bill_and_nobody_is_asked_where_something_else_was_told_otherwise():
    data = teacher(skew=True)
    model, memory = trained(data, controls="scaffold")
    outcome, planned = (
        forget(model, data, "ada", memory=memory, progress=False, dry_run=dry_run) for dry_run in (False, True)
    )
    assert any(TOGETHER in each for each in outcome.warnings)
    assert outcome.cost.rounds <= planned.estimate.messages
    louder, other = trained(data, controls="scaffold", multiple=10.0, rate=0.01)
    assert told(louder, other, data, OTHERWISE)
    assert told(louder, other, data) == []


def asked(model, memory, data):
    """Who is asked; nobody where nothing could be told."""
    state = ServerState(Snapshot.of(model), memory.schedule(16), memory)
    counts = {name: len(labels) for name, (_, labels) in data.items()}
    check = LastRound.of(state, Request.of("ada").parties(counts, memory.clients))
    return None if check is None else tuple(check.tasks)


def test_nobody_is_asked_where_drifts_stayed_as_long_or_after_a_forget():
    data = teacher(skew=True)
    model, memory = trained(data, controls="scaffold")
    assert asked(model, memory, data) == ("bob", "cyd", "dan")
    longer = memory.copy()
    longer._kept = [
        replace(each, pulls={name: length * 2**number for name, length in each.pulls.items()})
        for number, each in enumerate(memory._kept)
    ]
    assert asked(model, longer, data) is None
    outcome = forget(model, data, "bob", memory=memory, progress=False)
    outcome.write_to(model)
    assert asked(model, outcome.memory, data) is None


def test_who_took_part_in_the_latest_rounds_is_asked():
    data = teacher(skew=True)
    model, memory = trained(data, controls="scaffold", out=0.5, rounds=24)
    last = {
        name: max(n for n, own in enumerate(memory.shares) if name in own and len(own) > 1)
        for name in NAMES
        if name != "ada"
    }
    found = asked(model, memory, data)
    assert sorted(last[name] for name in found) == sorted(last.values())[-3:]
