"""A loss that is told otherwise than it was trained is seen by training the first round again."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Adam, AdamW

from expunge import Memory, forget
from expunge.federation.training.recipe import FedAvgM, Recipe
from federation.small import clients, mlp

DATA = clients(ada=60, bob=80, cyd=48, dan=64, eve=56)
SLOW = partial(SGD, lr=0.1)
OTHERWISE = "Trained again by what is told here"


def cross_entropy(outputs, labels, model, start):
    del model, start
    return F.cross_entropy(outputs, labels)


def times(factor, outputs, labels, model, start):
    return factor * cross_entropy(outputs, labels, model, start)


def summed(outputs, labels, model, start):
    del model, start
    return F.cross_entropy(outputs, labels, reduction="sum")


def sharpened(outputs, labels, model, start):
    return cross_entropy(4 * outputs, labels, model, start)


def proximal(outputs, labels, model, start):
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    away = sum((own - its.detach()).square().sum() for own, its in pairs)
    return cross_entropy(outputs, labels, model, start) + 5.0 / 2 * away


def penalised(outputs, labels, model, start):
    penalty = 0.05 / 2 * sum(own.square().sum() for own in model.parameters())
    return cross_entropy(outputs, labels, model, start) + penalty


def trained(
    loss=cross_entropy, optimiser=SLOW, batch=16, epochs=2, boosts=None, noise=0.0, out=(), recipe=None, start=None
):
    """A training loop of a user's own: the model and its memory."""
    torch.manual_seed(0)
    model = mlp() if start is None else start
    memory = Memory(model, recipe)
    counts = {name: len(labels) for name, (_, labels) in DATA.items()}
    momentum = None
    for number in range(3):
        updates = {}
        for name, (inputs, labels) in DATA.items():
            if number == 0 and name in out:
                continue
            own = copy.deepcopy(model)
            with memory.watching(name, own):
                steps = optimiser(own.parameters())
                for _ in range(epochs):
                    for chosen in torch.randperm(len(labels)).split(batch):
                        steps.zero_grad()
                        loss(own(inputs[chosen]), labels[chosen], own, model).backward()
                        for parameter in own.parameters():
                            parameter.grad += noise * torch.randn_like(parameter)
                        steps.step()
            pairs = zip(own.named_parameters(), model.parameters(), strict=True)
            factor = (boosts or {}).get(name, 1.0)
            updates[name] = {key: factor * (after - before).detach() for (key, after), before in pairs}
        memory.record(updates, {name: counts[name] for name in updates})
        total = sum(counts[name] for name in updates)
        mean = {
            key: sum(counts[name] / total * updates[name][key] for name in updates)
            for key, _ in model.named_parameters()
        }
        if recipe is not None:
            momentum = {key: 0.9 * (momentum or {}).get(key, 0.0) + mean[key] for key in mean}
            mean = momentum
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter += mean[key]
    return model, memory


def told(model, memory, leaving="ada", **call):
    return [warning for warning in forget(model, DATA, leaving, memory=memory, **call).warnings if OTHERWISE in warning]


@pytest.mark.parametrize(
    "training",
    [
        {"loss": partial(times, 10.0), "optimiser": partial(SGD, lr=0.01)},
        {"loss": partial(times, 0.1), "optimiser": partial(SGD, lr=1.0)},
        {"loss": summed, "optimiser": partial(SGD, lr=0.01)},
        {"loss": sharpened},
        {"loss": proximal, "epochs": 5},
        {"loss": partial(times, 10.0), "optimiser": partial(Adam, lr=0.01)},
        {"loss": partial(times, 0.1), "optimiser": partial(AdamW, lr=0.01)},
    ],
)
def test_a_loss_of_another_scale_or_with_another_term_is_told(training):
    model, memory = trained(**training)
    (warning,) = told(model, memory)
    assert "ada" not in warning


@pytest.mark.parametrize(
    ("training", "call"),
    [
        ({}, {}),
        ({"batch": 4}, {}),
        ({"batch": 4}, {"batch_size": 4}),
        ({"batch": 100, "epochs": 10}, {}),
        ({"optimiser": partial(SGD, lr=0.02, momentum=0.9, nesterov=True), "epochs": 4}, {}),
        ({"optimiser": partial(SGD, lr=0.1, weight_decay=0.01)}, {}),
        ({"optimiser": partial(Adam, lr=0.01)}, {}),
        ({"optimiser": partial(Adam, lr=0.01), "batch": 2}, {}),
        ({"optimiser": partial(AdamW, lr=0.01), "batch": 100, "epochs": 10}, {}),
        ({"recipe": Recipe(server=FedAvgM(momentum=0.9)), "optimiser": partial(SGD, lr=0.02)}, {}),
        ({"out": ("bob", "cyd")}, {}),
        ({"boosts": {"bob": 8.0}}, {}),
        ({"noise": 0.5}, {}),
        ({"loss": penalised}, {"l2": 0.05}),
        ({}, {"method": "retrace-krylov"}),
        ({"loss": partial(times, 10.0), "optimiser": partial(SGD, lr=0.01)}, {"loss": "times ten"}),
    ],
)
def test_who_tells_the_loss_as_it_was_hears_nothing(training, call):
    if call.get("loss") == "times ten":
        call = {"loss": lambda outputs, labels: 10 * F.cross_entropy(outputs, labels, reduction="none")}
    assert told(*trained(**training), **call) == []


def unseen(memory):
    """As it is of clients in other processes, which state rates and steps."""
    other = memory.copy()
    other._kept = [replace(each, batches={}) for each in memory._kept]
    return other


@pytest.mark.parametrize(
    "training",
    [
        {"batch": 1, "epochs": 1},
        {"batch": 2, "epochs": 1, "optimiser": partial(SGD, lr=0.3)},
        {"batch": 100, "epochs": 10, "optimiser": partial(Adam, lr=0.01)},
        {"batch": 2, "epochs": 1, "optimiser": partial(Adam, lr=0.01)},
    ],
)
def test_from_weights_at_rest_noise_of_batches_is_no_other_training(training):
    start, _ = trained(epochs=20)
    model, memory = trained(**training, start=start)
    assert told(model, memory) == told(model, unseen(memory)) == []


def test_far_too_large_a_loss_is_told_though_batches_were_not_seen():
    model, memory = trained(partial(times, 10.0), partial(SGD, lr=0.01))
    assert told(model, unseen(memory))


def test_a_memory_on_disk_knows_the_batches(tmp_path):
    model, memory = trained(partial(times, 3.0), batch=8)
    memory.save(tmp_path / "memory.safetensors")
    again = Memory.load(tmp_path / "memory.safetensors")
    assert again._kept[0].batches == memory._kept[0].batches
    assert again._kept[0].batches["bob"] == 8
    assert len(told(model, again)) == 1


def test_inputs_of_another_scale_are_told_under_adam_by_the_layer_that_feels_them():
    model, memory = trained(optimiser=partial(Adam, lr=0.01))
    data = {name: (inputs / 16, labels) for name, (inputs, labels) in DATA.items()}
    assert any(OTHERWISE in warning for warning in forget(model, data, "ada", memory=memory).warnings)


def test_one_message_mostly_which_is_in_the_bill_and_none_after_a_forget():
    model, memory = trained()
    outcome, planned = (forget(model, DATA, "ada", memory=memory, dry_run=dry_run) for dry_run in (False, True))
    unchecked = forget(model, DATA, "ada", memory=memory.without(()))  # it knows no start
    assert outcome.cost.rounds == unchecked.cost.rounds + 1
    assert outcome.cost.sample_gradients > unchecked.cost.sample_gradients
    assert outcome.cost.rounds <= planned.estimate.messages
    assert outcome.state.model.digest == unchecked.state.model.digest
    outcome.write_to(model)
    assert told(model, outcome.memory, "bob") == []


def test_the_one_with_the_least_to_do_is_asked_unless_what_it_sent_was_boosted():
    for boosts, least in (({}, 48), ({"cyd": 8.0}, 56)):
        model, memory = trained(boosts=boosts)
        outcome = forget(model, DATA, "ada", memory=memory)
        unchecked = forget(model, DATA, "ada", memory=memory.without(()))
        assert outcome.cost.sample_gradients - unchecked.cost.sample_gradients == 2 * least
        assert told(model, memory) == []
