"""Adam that is stated as SGD shows in the updates; SGD of every kind, and other losses, do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import expunge
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.recipe import SGD, Adam, Recipe
from federation.small import generator

NAMES = ("ada", "bob", "cyd", "dan")


@pytest.fixture(autouse=True)
def _clients_train_elsewhere(monkeypatch):
    """Nobody sees their optimisers, only what they send (test_onlooker.py has the others)."""
    monkeypatch.setattr(Memory, "_look_on", lambda _: None)


def data():
    found = {}
    for number, name in enumerate(NAMES):
        inputs = torch.randn(48, 12, generator=generator(number))
        found[name] = inputs, (inputs[:, :3] + 0.3 * inputs[:, 3:6]).argmax(dim=1)
    return found


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))


ADAPTIVE = {
    "Adam": lambda own: torch.optim.Adam(own, lr=0.003),
    "AdamW": lambda own: torch.optim.AdamW(own, lr=0.01, weight_decay=0.1),
    "a gentle Adam": lambda own: torch.optim.Adam(own, lr=0.0002, betas=(0.8, 0.95)),
}
OTHERS = {
    "SGD": lambda own: torch.optim.SGD(own, lr=0.1),
    "a fast SGD": lambda own: torch.optim.SGD(own, lr=1.0, weight_decay=0.001),
    "a slow SGD": lambda own: torch.optim.SGD(own, lr=0.001),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.01, momentum=0.9),
    "Nesterov": lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9, nesterov=True),
}


def trained(make, recipe=None, boost=None, scale=1.0, batch=16, rounds=4):
    """As a user trains; what is recorded is stated as SGD where nothing else is said."""
    model, chance = network(), generator(5)
    memory = Memory(model, recipe)
    for _ in range(rounds):
        before, updates, moments = copy.deepcopy(model.state_dict()), {}, {}
        for name, (inputs, labels) in data().items():
            model.load_state_dict(before)
            optimiser = make(list(model.parameters()))
            for part in torch.randperm(48, generator=chance).split(batch):
                optimiser.zero_grad()
                (scale * F.cross_entropy(model(inputs[part]), labels[part])).backward()
                optimiser.step()
            factor = (boost or {}).get(name, 1.0)
            updates[name] = {key: factor * (own - before[key]) for key, own in model.state_dict().items()}
            if recipe is not None and recipe.client.adaptive:
                moments[name] = expunge.second_moments(optimiser)
        mean = {key: sum(own[key] for own in updates.values()) / 4 for key in before}
        model.load_state_dict({key: own + mean[key] for key, own in before.items()})
        rate, steps = optimiser.param_groups[0]["lr"], -(-48 // batch)
        memory.record(updates, dict.fromkeys(NAMES, 1), learning_rate=rate, steps=steps, moments=moments)
    return model, memory


def doubts(memory):
    return [each for each in memory.doubts(None) if "look like those of Adam" in each]


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("batch", [4, 16, 48])
def test_adam_that_is_stated_as_sgd_shows(name, batch):
    assert doubts(trained(ADAPTIVE[name], batch=batch)[1])


@pytest.mark.parametrize("name", ADAPTIVE)
def test_it_shows_whatever_momentum_is_stated_and_whoever_is_loud(name):
    stated = Recipe(SGD(momentum=0.9))
    (doubt,) = doubts(trained(ADAPTIVE[name], stated, boost={"dan": 5.0})[1])
    assert "stated to train by SGD with momentum" in doubt


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("batch", [4, 16, 48])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_sgd_of_every_kind_does_not(name, batch, scale):
    assert not doubts(trained(OTHERS[name], boost={"dan": 4.0}, batch=batch, scale=scale)[1])


def test_adam_that_is_stated_is_not_doubted():
    assert not doubts(trained(ADAPTIVE["Adam"], Recipe(Adam()))[1])


def test_it_is_remembered_in_a_file_and_without_those_who_left(tmp_path):
    _, memory = trained(ADAPTIVE["Adam"])
    memory.save(tmp_path / "memory")
    read = Memory.load(tmp_path / "memory")
    assert doubts(read) == doubts(memory) != []
    left = read.without(["ada"])
    assert doubts(left)
    assert [sorted(each.peaks) for each in left._kept] == [["bob", "cyd", "dan"]] * 2 + [[]] * 2


def test_a_round_of_a_repair_is_no_evidence():
    memory = Memory(network())
    signs = {name: torch.full((12 * 24 + 24 + 24 * 3 + 3,), 0.1) for name in NAMES}
    memory.record(signs, dict.fromkeys(NAMES, 1), learning_rate=0.1, steps=1, plain=True)
    assert not doubts(memory)
    memory.record(signs, dict.fromkeys(NAMES, 1), learning_rate=0.1, steps=1)
    assert doubts(memory)


@pytest.mark.parametrize(
    ("sent", "said"), [(lambda own: own.sign() * own.abs().mean(), 1), (lambda own: own, 0), (lambda own: 0 * own, 0)]
)
def test_updates_of_signs_alone_are_told(sent, said):
    memory, source = Memory(network()), torch.Generator().manual_seed(0)
    for _ in range(2):
        own = {name: sent(torch.randn(12 * 24 + 24 + 24 * 3 + 3, generator=source)) for name in NAMES}
        memory.record(own, dict.fromkeys(NAMES, 1), learning_rate=0.1, steps=3)
    assert sum("differ by their signs alone" in each for each in memory.doubts(memory.schedule(16))) == said


def test_a_forget_by_vectors_says_so_and_one_without_does_not():
    model, memory = trained(ADAPTIVE["Adam"])
    told = {"memory": memory, "progress": False, "dry_run": True}
    planned = expunge.forget(model, data(), "ada", **told)
    assert any("look like those of Adam" in each for each in planned.warnings)
    outcome = expunge.forget(model, data(), "ada", **{**told, "dry_run": False})
    assert any("look like those of Adam" in each for each in outcome.warnings)
    other = expunge.forget(model, data(), "ada", **told, method="hf-kcu")
    assert not any("look like those of Adam" in each for each in other.warnings)
