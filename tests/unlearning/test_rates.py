"""An optimiser that nobody has described: its rate is measured, and what it forgets lies nearer to retraining."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import expunge
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.recipe import SGD, Adam, Measured, Recipe
from federation.small import generator

NAMES = ("ada", "bob", "cyd", "dan", "eve")
LEAVER = "ada"


class Lion(torch.optim.Optimizer):
    """Signs of a momentum (Chen et al. 2023): no second moments, and not linear at all."""

    def __init__(self, own, lr):
        super().__init__(own, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for own in group["params"]:
                mean = self.state[own].setdefault("mean", torch.zeros_like(own))
                own.sub_(group["lr"] * (0.9 * mean + 0.1 * own.grad).sign())
                mean.mul_(0.99).add_(own.grad, alpha=0.01)


OWN = {
    "Lion": lambda own: Lion(own, 0.003),
    "RMSprop": lambda own: torch.optim.RMSprop(own, lr=0.003),
    "Adagrad": lambda own: torch.optim.Adagrad(own, lr=0.02),
}


def classes(count=48):
    """All follow one rule, and the leaver another."""
    found = {}
    for number, name in enumerate(NAMES):
        inputs = torch.randn(count, 12, generator=generator(number), dtype=torch.float64)
        labels = (inputs @ torch.randn(12, 3, generator=generator(99), dtype=torch.float64)).argmax(dim=1)
        found[name] = inputs, (labels + 1) % 3 if name == LEAVER else labels
    return found


def numbers(count=200):
    """A quadratic: inputs of unequal scales, so that their curvatures differ."""
    found, scales = {}, torch.logspace(-1, 0.3, 6, dtype=torch.float64)
    for number, name in enumerate(NAMES):
        inputs = scales * torch.randn(count, 6, generator=generator(number), dtype=torch.float64)
        noise = 0.1 * torch.randn(count, 1, generator=generator(50 + number), dtype=torch.float64)
        found[name] = inputs, inputs.sum(dim=1, keepdim=True) * (0.5 if name == LEAVER else 1.0) + noise
    return found


def network(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "quadratic":
            return nn.Linear(6, 1, bias=False).double()
        return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)).double()


class Federation:
    """Trained as a user does it, by an optimiser of the user's own."""

    def __init__(self, make, kind="network", batch=16, epochs=3, rounds=10):
        self.make, self.kind, self.batch, self.epochs, self.rounds = make, kind, batch, epochs, rounds
        self.data = numbers() if kind == "quadratic" else classes()

    def loss(self, outputs, targets):
        if self.kind == "quadratic":
            return 0.5 * (outputs - targets).square().sum(dim=1).mean()
        return F.cross_entropy(outputs, targets)

    def local(self, model, name):
        """One local round, in place; shuffled by torch's own generator."""
        optimiser, (inputs, targets) = self.make(list(model.parameters())), self.data[name]
        for _ in range(self.epochs):
            for part in torch.randperm(len(targets)).split(self.batch):
                optimiser.zero_grad()
                self.loss(model(inputs[part]), targets[part]).backward()
                optimiser.step()
        return optimiser

    def trained(self, recipe=None, without=()):
        model = network(self.kind)
        memory, names = Memory(model, recipe), [name for name in NAMES if name not in without]
        for number in range(self.rounds):
            before, updates, moments = copy.deepcopy(model.state_dict()), {}, {}
            for name in names:
                model.load_state_dict(before)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1000 * number + NAMES.index(name))
                    optimiser = self.local(model, name)
                updates[name] = {key: own.clone() - before[key] for key, own in model.state_dict().items()}
                if recipe is not None and recipe.client.adaptive:
                    moments[name] = expunge.second_moments(optimiser)
            mean = {key: sum(own[key] for own in updates.values()) / len(names) for key in before}
            model.load_state_dict({key: own + mean[key] for key, own in before.items()})
            rate, steps = optimiser.param_groups[0]["lr"], self.epochs * -(-len(self.data[LEAVER][1]) // self.batch)
            memory.record(updates, dict.fromkeys(names, 1), learning_rate=rate, steps=steps, moments=moments)
        return model, memory

    def forgotten(self, recipe, **more):
        model, memory = self.trained(recipe)
        told = {"loss": "squared_error"} if self.kind == "quadratic" else {}
        options = {"method": "retrace", "tau": None, "curvature_samples": None, **told, **more}
        return model, memory, expunge.forget(model, self.data, LEAVER, memory=memory, progress=False, **options)

    def left(self, recipe):
        """How far from retraining what is left lies, where doing nothing is 1."""
        model, _, outcome = self.forgotten(recipe)
        truth = Snapshot.of(self.trained(recipe, without=(LEAVER,))[0]).parameters
        nothing = float((Snapshot.of(model).parameters - truth).norm())
        return float((outcome.state.model.parameters - truth).norm()) / nothing


def measured_rate(outcome) -> float:
    (note,) = (each for each in outcome.warnings if "was measured by" in each)
    return float(note.partition("a learning rate of ")[2].split()[0])


@pytest.mark.parametrize("rate", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("stated", [1.0, 5.0])
def test_of_sgd_on_a_quadratic_it_is_the_true_rate_whatever_was_stated(rate, stated):
    own = Federation(lambda parameters: torch.optim.SGD(parameters, lr=rate), "quadratic", 200, 4, 5)
    recipe = Recipe(Measured(own.local))
    model, memory = own.trained(recipe)
    for number, each in enumerate(memory._kept):
        memory._kept[number] = each.__class__.from_dict(
            {**each.as_dict(), "rates": dict.fromkeys(NAMES, stated * rate)}
        )
    outcome = expunge.forget(
        *(model, own.data, LEAVER), memory=memory, progress=False, loss="squared_error", method="retrace", tau=None
    )
    assert measured_rate(outcome) == pytest.approx(rate, rel=0.05)
    _, _, known = own.forgotten(Recipe(SGD()))
    before = Snapshot.of(model).parameters
    step, truth = (before - each.state.model.parameters for each in (outcome, known))
    assert float((step - truth).norm()) < 0.05 * float(truth.norm())


def test_of_adam_it_lies_near_what_second_moments_say():
    own = Federation(lambda parameters: torch.optim.Adam(parameters, lr=0.01), batch=48, epochs=4)
    _, _, outcome = own.forgotten(Recipe(Measured(own.local)))
    _, memory = own.trained(Recipe(Adam()))
    roots = [moment for name, values in memory._kept[-1].moments.items() if name != LEAVER for moment in values]
    said = 0.01 / (sum(roots) / len(roots))
    assert said > 0.2  # far from the rate as it is stated
    assert said / 5 < measured_rate(outcome) < 2 * said


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("batch", "epochs"), [(48, 4), (16, 3)])
def test_what_it_forgets_is_nearer_to_retraining_than_by_a_wrong_statement_and_than_nothing(name, batch, epochs):
    own = Federation(OWN[name], batch=batch, epochs=epochs)
    measured = own.left(Recipe(Measured(own.local)))
    with pytest.warns(UserWarning, match=f"{name}, where SGD"):
        stated = own.left(Recipe(SGD()))
    assert measured < 0.9
    assert measured < 0.95 * stated


def test_the_same_twice_and_the_users_own_chance_is_left_alone():
    own = Federation(OWN["RMSprop"])
    state = torch.get_rng_state()
    first, second = (own.forgotten(Recipe(Measured(own.local)))[2] for _ in range(2))
    assert torch.equal(first.state.model.parameters, second.state.model.parameters)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_asked_of_those_who_stay_twice_each_and_paid_for():
    own, asked = Federation(OWN["RMSprop"]), []

    def train(model, name):
        asked.append(name)
        own.local(model, name)

    _, memory, outcome = own.forgotten(Recipe(Measured(train)))
    assert asked == ["bob", "cyd", "dan", "eve"] * 2
    assert outcome.cost.sample_gradients > 2 * 4 * own.epochs * 48
    assert memory.recipe.client.train is train  # the memory is as it was


def test_a_dry_run_counts_the_measuring_and_does_not_do_it():
    def never(model, name):
        raise AssertionError(name)

    own = Federation(OWN["RMSprop"])
    model, memory = own.trained(Recipe(Measured(never)))
    plain = Memory(recipe=Recipe(SGD()))  # with no start, from which it would be trained again
    plain._kept, plain._stretches = memory._kept, memory._stretches
    call = {"progress": False, "batch_size": 16, "dry_run": True, "method": "retrace", "coupled": False}
    bills = [expunge.forget(model, own.data, LEAVER, memory=each, **call).estimate for each in (memory, plain)]
    assert bills[0].messages == bills[1].messages + 2
    assert bills[0].sample_gradients == bills[1].sample_gradients + 2 * own.epochs * 4 * 48


def test_a_function_that_does_not_train_is_refused_and_so_is_what_does_not_measure():
    own = Federation(OWN["RMSprop"], rounds=3)
    with pytest.raises(RequestError, match="no rate explains how their optimiser answers"):
        own.forgotten(Recipe(Measured(lambda model, name: None)))
    with pytest.raises(RequestError, match="Only retrace measures an optimiser"):
        own.forgotten(Recipe(Measured(own.local)), method="retrace-krylov", filter="response")


def test_a_memory_that_was_saved_is_read_with_the_function_given_again(tmp_path):
    own = Federation(OWN["RMSprop"], rounds=3)
    model, memory, outcome = own.forgotten(Recipe(Measured(own.local)))
    memory.save(tmp_path / "memory")
    with pytest.raises(expunge.ExpungeError):
        Memory.load(tmp_path / "memory")
    read = Memory.load(tmp_path / "memory", client=Measured(own.local))
    options = {"method": "retrace", "tau": None, "curvature_samples": None}
    again = expunge.forget(model, own.data, LEAVER, memory=read, progress=False, **options)
    assert torch.equal(again.state.model.parameters, outcome.state.model.parameters)
