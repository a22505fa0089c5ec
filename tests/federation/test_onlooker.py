"""What is stated wrongly is noticed where clients train in this process, though nobody watches them."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn

import expunge
from expunge import AdamW, Memory, Recipe
from expunge.core.vectors import Snapshot
from expunge.federation.training import onlooker as onlooker_module
from expunge.federation.training import steps
from expunge.federation.training.onlooker import Onlooker
from expunge.federation.training.recipe import SGD, FedAvgM, second_moments
from federation.small import mlp, samples

DATA = {name: samples(count) for name, count in {"ada": 12, "bob": 20, "cyd": 16}.items()}
STATED = {"learning_rate": 0.05, "steps": 3}


def plain(own):
    return torch.optim.SGD(own, lr=0.05)


def trained(model, make, memory=None, rounds=3, told=STATED, steps=3):
    """As users train; where there is a memory, it is told the same whatever was done."""
    model = copy.deepcopy(model)
    for _ in range(rounds):
        before, updates = copy.deepcopy(model.state_dict()), {}
        for name, (inputs, labels) in DATA.items():
            own = copy.deepcopy(model)
            optimiser = make(own.parameters())
            for _ in range(steps):
                optimiser.zero_grad()
                nn.functional.cross_entropy(own(inputs), labels).backward()
                optimiser.step()
            updates[name] = {key: value - before[key] for key, value in own.state_dict().items()}
        if memory is not None:
            moments = {"moments": dict.fromkeys(DATA, second_moments(optimiser))} if "Adam" in repr(optimiser) else {}
            memory.record(updates, dict.fromkeys(DATA, 1), **told, **moments)
        model.load_state_dict({key: value + sum(u[key] for u in updates.values()) / 3 for key, value in before.items()})
    return model


def heard():
    return [own() for own in steps._listeners if own() is not None]


def doubts(memory, schedule=None):
    return [said for said in memory.doubts(schedule) if "otherwise than is stated" in said]


RIGHT = {
    "SGD": (plain, None),
    "weight decay, in the loss or not": (lambda own: torch.optim.SGD(own, lr=0.05, weight_decay=0.1), None),
    "momentum": (lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), SGD(momentum=0.9)),
    "FedProx": (plain, SGD(proximal_mu=0.1)),
    "AdamW": (lambda own: torch.optim.AdamW(own, lr=0.05), AdamW()),
    "groups": (lambda own: torch.optim.SGD([{"params": [each]} for each in own], lr=0.05), None),
}


@pytest.mark.parametrize("case", RIGHT)
def test_who_states_the_truth_hears_nothing(case):
    make, rule = RIGHT[case]
    model = mlp()
    memory = Memory(model, Recipe(rule) if rule is not None else None)
    trained(model, make, memory)
    assert not doubts(memory)


WRONG = {
    "momentum": (lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), r"SGD\(momentum=0.9\), where SGD\(\)", {}),
    "a rate": (lambda own: torch.optim.SGD(own, lr=0.5), r"a learning rate of 0.5, where 0.05", {}),
    "steps": (plain, r"6 steps of a client, where 3", {"steps": 6}),
    "an optimiser": (lambda own: torch.optim.RMSprop(own, lr=0.05), r"RMSprop, where SGD\(\)", {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_stated_wrongly_is_said_at_once_and_with_every_forget(case, tmp_path):
    make, text, more = WRONG[case]
    model = mlp()
    memory = Memory(model)
    with pytest.warns(UserWarning, match=text):
        model = trained(model, make, memory, **more)
    memory.save(tmp_path / "memory")
    memory = Memory.load(tmp_path / "memory")
    rest = {name: own for name, own in DATA.items() if name != "ada"}
    outcome = expunge.forget(model, rest, leaving="ada", memory=memory)
    assert [said for said in outcome.warnings if "otherwise than is stated" in said]
    assert doubts(outcome.memory)  # for the next request


@pytest.mark.parametrize(("rate", "said"), [(0.05, 0), (0.2, 1)])
def test_so_is_what_is_only_stated_with_the_request(rate, said, tmp_path):
    model = mlp()
    memory = Memory(model)
    model = trained(model, plain, memory, told={})
    memory.save(tmp_path / "memory")
    rest = {name: own for name, own in DATA.items() if name != "ada"}
    memory = Memory.load(tmp_path / "memory")
    outcome = expunge.forget(model, rest, leaving="ada", memory=memory, rounds=3, learning_rate=rate, local_steps=3)
    assert sum("otherwise than is stated" in each for each in outcome.warnings) == said


def test_models_trained_on_the_side_are_not_taken_for_clients():
    model = mlp()
    memory = Memory(model)
    trained(model, lambda own: torch.optim.Adam(own, lr=0.3))  # before the first round: it is seen, but once
    trained(nn.Linear(3, 3).double(), lambda own: torch.optim.Adam(own, lr=0.3))
    trained(model, plain, memory)
    assert not doubts(memory)
    before, beside = Memory(model), Memory(model)
    trained(model, plain, before)
    trained(model, plain, beside)  # saw both trainings in its first round
    assert not doubts(beside)


def test_some_clients_elsewhere_are_no_wrong_statement():
    model = mlp()
    memory = Memory(model)
    for _ in range(3):
        trained(model, plain, rounds=1)
        still = {key: 0.01 + torch.zeros_like(value) for key, value in model.state_dict().items()}
        steps = {f"client {number}": 3 + number for number in range(9)}
        memory.record(dict.fromkeys(steps, still), dict.fromkeys(steps, 1), learning_rate=0.05, steps=steps)
    assert not doubts(memory)


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_training_goes_on_with_a_memory_that_was_read_back(in_folder, tmp_path):
    memory = Memory(mlp(), folder=tmp_path / "memory" if in_folder else None)
    model = trained(mlp(), plain, memory)
    if not in_folder:
        memory.save(tmp_path / "memory")
    memory = Memory.load(tmp_path / "memory")
    model = trained(model, plain, memory)
    memory.require_model(Snapshot.of(model))
    assert not doubts(memory)
    with pytest.warns(UserWarning, match=r"SGD\(momentum=0.9\), where SGD\(\)"):
        trained(model, lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), memory)


def test_it_lets_go_with_the_memory_and_travels_with_it():
    model, listening = mlp(), len(heard())
    memory = Memory(model)
    copied = pickle.loads(pickle.dumps(Onlooker([torch.Size([2])])))
    assert copied.glimpse() is None
    twin = copy.deepcopy(memory)
    del memory, copied
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, plain, twin)
    del twin
    gc.collect()
    assert len(heard()) <= listening


def test_of_steps_that_a_graph_makes_again_nothing_is_told(monkeypatch):
    model = mlp()
    onlooker = Onlooker([each.shape for each in model.parameters()])
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)

    def step():
        nn.functional.cross_entropy(model(DATA["ada"][0]), DATA["ada"][1]).backward()
        optimiser.step()

    step()
    with monkeypatch.context() as recording:
        recording.setattr(onlooker_module, "is_recorded", lambda: True)
        step()
    assert onlooker.glimpse() is None
    step()
    assert onlooker.glimpse() is None  # there is a graph of its steps, of which no hook tells
    del optimiser
    gc.collect()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    step()
    assert onlooker.glimpse().steps == 1


def test_rates_in_tensors_are_added_up_where_they_lie():
    model = mlp()
    onlooker = Onlooker([each.shape for each in model.parameters()])
    rate = torch.tensor(0.1)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for value in (0.1, 0.3):
        rate.fill_(value)
        nn.functional.cross_entropy(model(DATA["ada"][0]), DATA["ada"][1]).backward()
        optimiser.step()
    assert onlooker.glimpse().rate == pytest.approx(0.2)


def parted(make, memory, told, *, rounds=3, beside=None, parts=((0,), (2,))):
    """Clients whose layers have an optimiser each; something else may be trained beside them."""
    model = mlp()
    for _ in range(rounds):
        before, updates = copy.deepcopy(model.state_dict()), {}
        for name, (inputs, labels) in DATA.items():
            own = copy.deepcopy(model)
            optimisers = [make([each for part in layers for each in own[part].parameters()]) for layers in parts]
            for _ in range(3):
                own.zero_grad()
                nn.functional.cross_entropy(own(inputs), labels).backward()
                for optimiser in optimisers:
                    optimiser.step()
            updates[name] = {key: value - before[key] for key, value in own.state_dict().items()}
            if beside is not None:
                beside(model)
        memory.record(updates, dict.fromkeys(DATA, 1), **told)
        model.load_state_dict({key: value + sum(u[key] for u in updates.values()) / 3 for key, value in before.items()})


@pytest.mark.parametrize("parts", [((0,), (2,)), ((2,),)])
def test_optimisers_of_parts_are_known_by_the_weights_that_they_begin_with(parts):
    right, wrong, rate = Memory(mlp(), Recipe(SGD(momentum=0.9))), Memory(mlp()), Memory(mlp())

    def momentum(own):
        return torch.optim.SGD(own, lr=0.05, momentum=0.9)

    parted(momentum, right, STATED, parts=parts)
    assert not doubts(right)
    with pytest.warns(UserWarning, match=r"SGD\(momentum=0.9\), where SGD\(\)"):
        parted(momentum, wrong, STATED, parts=parts)
    assert doubts(wrong)
    with pytest.warns(UserWarning, match=r"a learning rate of 0.05, where 0.5"):
        parted(plain, rate, {**STATED, "learning_rate": 0.5}, parts=parts)


def other_net(_):
    """Of shapes that the model has, too."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 1)).double()


@pytest.mark.parametrize("make", [other_net, lambda _: mlp(1)[2], lambda _: mlp(1)])
@pytest.mark.parametrize("parts", [((0, 2),), ((0,), (2,))])
def test_nets_with_layers_like_the_models_are_not_taken_for_parts_of_it(make, parts):
    memory = Memory(mlp())

    def beside(model):
        own = make(model)
        optimiser = torch.optim.Adam(own.parameters(), lr=0.3)
        own(torch.ones(2, next(own.parameters()).shape[1], dtype=torch.float64)).sum().backward()
        optimiser.step()

    parted(plain, memory, STATED, beside=beside, parts=parts)
    assert not doubts(memory)


@pytest.mark.parametrize("layers", [(0, 2), (2,)])
def test_a_copy_that_is_trained_once_a_round_to_be_evaluated_is_no_client(layers):
    memory, asked = Memory(mlp()), []

    def beside(model):
        asked.append(None)
        if len(asked) % len(DATA) == 0:
            own = copy.deepcopy(model)
            optimiser = torch.optim.Adam([each for part in layers for each in own[part].parameters()], lr=0.3)
            own(DATA["ada"][0]).sum().backward()
            optimiser.step()

    parted(plain, memory, STATED, beside=beside, parts=((0, 2),))
    assert not doubts(memory)


@pytest.mark.parametrize("here", [True, False])
def test_a_server_that_makes_its_step_by_a_torch_optimiser_is_no_client(here):
    model = mlp()
    memory = Memory(model, Recipe(server=FedAvgM(1.0, 0.5)))
    server = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(4):
        before, updates = copy.deepcopy(model.state_dict()), {}
        for name, (inputs, labels) in DATA.items():
            own = copy.deepcopy(model)
            for _ in range(3):
                own.zero_grad()
                nn.functional.cross_entropy(own(inputs), labels).backward()
                with torch.no_grad():
                    for each in own.parameters() if not here else ():
                        each -= 0.05 * each.grad
                if here:
                    plain(own.parameters()).step()
            updates[name] = {key: value - before[key] for key, value in own.state_dict().items()}
        for key, each in model.named_parameters():
            each.grad = -sum(update[key] for update in updates.values()) / 3
        server.step()
        memory.record(updates, dict.fromkeys(DATA, 1), **STATED)
    memory.require_model(Snapshot.of(model))
    assert not doubts(memory)


def test_a_state_that_is_kept_from_round_to_round_is_noticed():
    model, kept = mlp(), {}
    memory, zeroed = (Memory(model, Recipe(SGD(momentum=0.9))) for _ in range(2))

    def federate(memory, *, forgets=False, rounds=4):
        state = copy.deepcopy(model.state_dict())
        for _ in range(rounds):
            updates = {}
            for name, (inputs, labels) in DATA.items():
                if name not in kept:
                    own = copy.deepcopy(model)
                    kept[name] = own, torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
                own, optimiser = kept[name]
                own.load_state_dict(state)
                for each in optimiser.state.values() if forgets else ():
                    each["momentum_buffer"].zero_()
                for _ in range(3):
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(own(inputs), labels).backward()
                    optimiser.step()
                updates[name] = {key: value - state[key] for key, value in own.state_dict().items()}
            memory.record(updates, dict.fromkeys(DATA, 1), **STATED)
            state = {key: value + sum(u[key] for u in updates.values()) / 3 for key, value in state.items()}

    with pytest.warns(UserWarning, match=r"SGD\(momentum=0.9\) that keeps its state .*, where SGD\(momentum=0.9\)"):
        federate(memory)
    assert doubts(memory)
    federate(zeroed, forgets=True)
    assert not doubts(zeroed)


def made_in_every_step(make, memory):
    model = mlp()
    for _ in range(3):
        before, updates = copy.deepcopy(model.state_dict()), {}
        for name, (inputs, labels) in DATA.items():
            own = copy.deepcopy(model)
            for _ in range(3):
                own.zero_grad()
                nn.functional.cross_entropy(own(inputs), labels).backward()
                make(own.parameters()).step()
            updates[name] = {key: value - before[key] for key, value in own.state_dict().items()}
        memory.record(updates, dict.fromkeys(DATA, 1), **STATED)
        model.load_state_dict({key: value + sum(u[key] for u in updates.values()) / 3 for key, value in before.items()})


def test_plain_sgd_may_be_made_anew_within_a_round_and_momentum_may_not():
    right, wrong = Memory(mlp()), Memory(mlp(), Recipe(SGD(momentum=0.9)))
    made_in_every_step(plain, right)
    assert not doubts(right)
    with pytest.warns(UserWarning, match=r"SGD\(momentum=0.9\) that is made anew within a round, where SGD"):
        made_in_every_step(lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), wrong)
