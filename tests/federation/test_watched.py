"""A memory that watches clients train needs to be told nothing, and is as one that was told the truth."""

import copy
import pickle
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from expunge.errors import RequestError
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.recipe import SGD, Adam, AdamW, FedAvgM, Measured, Recipe, second_moments
from federation.small import mlp, samples

DATA = {name: samples(count) for name, count in {"ada": 12, "bob": 20, "cyd": 16}.items()}


def once(local, name, made):
    """One local round: the update, and the optimiser as it is after it."""
    before = {key: value.clone() for key, value in local.state_dict().items()}
    inputs, labels = DATA[name]
    optimiser = made(local.parameters())
    for number in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(local(inputs[number:]), labels[number:]).backward()
        optimiser.step()
    return {key: value - before[key] for key, value in local.state_dict().items()}, optimiser


def federate(memory, model, made, *, told, rounds=2, watched=True):
    """Rounds that are watched, or told the truth."""
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(rounds):
        updates, moments = {}, {}
        for name in DATA:
            local = mlp()
            local.load_state_dict(model.state_dict())
            if watched:
                with memory.watching(name, local):
                    updates[name], optimiser = once(local, name, made)
            else:
                updates[name], optimiser = once(local, name, made)
            if told.get("moments"):
                moments[name] = second_moments(optimiser)
        given = {"learning_rate": 0.05, "steps": 3, **({"moments": moments} if moments else {})}
        memory.record(updates, dict.fromkeys(DATA, 1), **({} if watched else given))
        state = model.state_dict()
        model.load_state_dict({key: state[key] + sum(own[key] for own in updates.values()) / 3 for key in state})
    model.load_state_dict(start)


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (lambda own: torch.optim.SGD(own, lr=0.05), SGD()),
        (lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9, weight_decay=0.01), SGD(0.9, weight_decay=0.01)),
        (lambda own: torch.optim.Adam(own, lr=0.05), Adam()),
        (lambda own: torch.optim.AdamW(own, lr=0.05), AdamW()),
    ],
)
def test_it_is_as_if_the_truth_had_been_told(made, rule, tmp_path):
    model = mlp()
    watching, told = Memory(model), Memory(model, Recipe(rule))
    federate(watching, model, made, told={})
    federate(told, model, made, told={"moments": rule.adaptive}, watched=False)
    assert watching.recipe == told.recipe
    assert watching.works(None) == told.works(None)
    watching.save(tmp_path / "memory")
    assert Memory.load(tmp_path / "memory").recipe.client == rule


def test_the_servers_rule_stays_as_it_is_stated():
    model = mlp()
    memory = Memory(model, Recipe(server=FedAvgM(0.3)))
    federate(memory, model, lambda own: torch.optim.Adam(own, lr=0.05), told={})
    assert memory.recipe == Recipe(Adam(), FedAvgM(0.3))


def test_a_folder_has_what_was_seen(tmp_path):
    model = mlp()
    federate(Memory(model, folder=tmp_path / "own"), model, lambda own: torch.optim.AdamW(own, lr=0.05), told={})
    assert Memory.load(tmp_path / "own").recipe.client == AdamW()


class TestRefused:
    def test_another_optimiser_than_stated(self):
        model = mlp()
        memory = Memory(model, Recipe(SGD(momentum=0.5)))
        with pytest.raises(RequestError, match=r"'ada' trains with SGD\(momentum=0.9\), where SGD\(momentum=0.5\)"):
            federate(memory, model, lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), told={})
        assert memory.rounds == 0

    def test_another_optimiser_than_before(self):
        model = mlp()
        memory = Memory(model)
        federate(memory, model, lambda own: torch.optim.SGD(own, lr=0.05), told={}, rounds=1)
        with pytest.raises(RequestError, match="the training so far"):
            federate(memory, model, lambda own: torch.optim.AdamW(own, lr=0.05), told={}, rounds=1)
        assert (memory.recipe, memory.rounds) == (Recipe(), 1)

    def test_clients_that_differ(self):
        model = mlp()
        memory, made = Memory(model), {"ada": torch.optim.SGD, "bob": torch.optim.Adam}
        updates = {}
        for name, kind in made.items():
            local = mlp()
            with memory.watching(name, local):
                updates[name], _ = once(local, name, lambda own, kind=kind: kind(own, lr=0.05))
        with pytest.raises(RequestError, match="'bob' trains with Adam"):
            memory.record(updates, dict.fromkeys(made, 1))

    @pytest.mark.parametrize(
        ("stated", "words"), [({"learning_rate": 0.5}, r"0\.05, where 0\.5"), ({"steps": 8}, "3, where 8")]
    )
    def test_rates_and_steps_that_are_stated_otherwise(self, stated, words):
        memory, local = Memory(mlp()), mlp()
        with memory.watching("ada", local):
            update, _ = once(local, "ada", lambda own: torch.optim.SGD(own, lr=0.05))
        with pytest.raises(RequestError, match=words):
            memory.record({"ada": update}, {"ada": 1}, **stated)

    def test_somebody_who_was_not_watched(self):
        memory, local = Memory(mlp()), mlp()
        with memory.watching("ada", local):
            update, _ = once(local, "ada", lambda own: torch.optim.SGD(own, lr=0.05))
        with pytest.raises(RequestError, match="'bob' was not watched"):
            memory.record({"ada": update, "bob": update}, {"ada": 1, "bob": 1})

    def test_an_optimiser_that_nobody_has_described(self):
        local = mlp()
        with (
            pytest.raises(RequestError, match=r"'ada' trains with RMSprop, .*Measured"),
            Memory(mlp()).watching("ada", local),
        ):
            once(local, "ada", lambda own: torch.optim.RMSprop(own, lr=0.05))

    def test_momentum_that_goes_on_from_round_to_round(self):
        memory, local = Memory(mlp()), mlp()
        optimiser = torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9)
        with memory.watching("ada", local):
            update, _ = once(local, "ada", lambda _: optimiser)
        memory.record({"ada": update}, {"ada": 1})
        with pytest.raises(RequestError, match="from one round to the next"), memory.watching("ada", local):
            once(local, "ada", lambda _: optimiser)

    def test_nothing_was_trained(self):
        with pytest.raises(RequestError, match="No optimiser of torch made a step"), Memory(mlp()).watching("a", mlp()):
            pass

    def test_a_part_that_no_optimiser_trained(self):
        """Somebody else moved it, so nothing is known of how it answers."""
        memory, local = Memory(mlp()), mlp()
        _, *others = local.parameters()
        with memory.watching("ada", local):
            update, _ = once(local, "ada", lambda _: torch.optim.Adam(others, lr=0.05))
        update[next(iter(update))] += 1.0
        with pytest.raises(RequestError, match=r"Second moments of .* were not seen"):
            memory.record({"ada": update}, {"ada": 1})


def test_a_failure_while_training_leaves_nothing_behind():
    memory, local = Memory(mlp()), mlp()
    with pytest.raises(TypeError), memory.watching("ada", local):
        once(local, "ada", lambda own: torch.optim.SGD(own, lr=None))
    size = sum(parameter.numel() for parameter in local.parameters())
    memory.record({"ada": torch.ones(size)}, {"ada": 1}, learning_rate=0.1, steps=2)
    assert memory.shares == [{"ada": 1.0}]


def test_what_was_watched_travels_with_the_memory():
    memory, local = Memory(mlp()), mlp()
    with memory.watching("ada", local):
        update, _ = once(local, "ada", lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9))
    for twin in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        twin.record({"ada": update}, {"ada": 1})
        assert twin.recipe.client == SGD(momentum=0.9)


def test_a_rule_of_ones_own_stands_for_whatever_is_seen():
    rule = Measured(lambda model, name: None)
    memory, local = Memory(mlp(), Recipe(rule)), mlp()
    with memory.watching("ada", local):
        update, _ = once(local, "ada", lambda own: torch.optim.RMSprop(own, lr=0.05))
    memory.record({"ada": update}, {"ada": 1})
    assert memory.recipe.client is rule
    assert memory.works(None)[0]["ada"].learning_rate == 0.05


def test_a_head_that_stays_with_the_client_trains_as_it_likes():
    model, local = mlp(), mlp()
    last = list(dict(local.named_parameters()))[-2:]
    shared = [name for name, _ in model.named_parameters() if name not in last]
    memory, named = Memory(model, parameters=shared), dict(local.named_parameters())
    before = {name: named[name].detach().clone() for name in shared}
    with memory.watching("ada", local):
        body = torch.optim.Adam([named[name] for name in shared], lr=0.05)
        head = torch.optim.SGD([named[name] for name in last], lr=0.5, momentum=0.9)
        inputs, labels = DATA["ada"]
        nn.functional.cross_entropy(local(inputs), labels).backward()
        body.step()
        head.step()
    memory.record({"ada": {name: named[name].detach() - before[name] for name in shared}}, {"ada": 1})
    assert memory.recipe.client == Adam()
    assert list(memory.works(None)[0]["ada"].moments) == second_moments(body)


def epochs(local, name, optimiser, count, memory=None):
    """Local epochs of three batches, each in a block of its own where a memory watches."""
    inputs, labels = DATA[name]
    for number in range(count):
        own = optimiser(number)
        with nullcontext() if memory is None else memory.watching(name, local):
            for batch in range(3):
                own.zero_grad()
                nn.functional.cross_entropy(local(inputs[batch::3]), labels[batch::3]).backward()
                own.step()


class TestSeveralBlocksInARound:
    """A client that is watched by epochs is as one that is watched at once."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda own, _: torch.optim.SGD(own, lr=0.05),
            lambda own, _: torch.optim.SGD(own, lr=0.05, momentum=0.9),
            lambda own, number: torch.optim.Adam(own, lr=0.05 * 0.5**number),
        ],
    )
    def test_they_add_up(self, make):
        works = []
        for watched_by_epochs in (True, False):
            memory, local = Memory(mlp()), mlp()
            before = {key: value.clone() for key, value in local.state_dict().items()}
            first = make(local.parameters(), 0)

            def kept(number, first=first, local=local):
                first.param_groups[0]["lr"] = make(local.parameters(), number).param_groups[0]["lr"]
                return first

            if watched_by_epochs:
                epochs(local, "ada", kept, 4, memory)
            else:
                with memory.watching("ada", local):
                    epochs(local, "ada", kept, 4)
            update = {key: value - before[key] for key, value in local.state_dict().items()}
            memory.record({"ada": update}, {"ada": 1})
            works.append((memory.recipe, memory.works(None)[0]["ada"]))
        (one, by_epochs), (other, at_once) = works
        assert one == other
        assert by_epochs.steps == at_once.steps == 12
        assert by_epochs.learning_rate == pytest.approx(at_once.learning_rate, rel=1e-12)
        assert by_epochs.moments == at_once.moments

    def test_plain_sgd_may_be_made_anew_in_each_and_what_keeps_a_state_may_not(self):
        memory, local = Memory(mlp()), mlp()
        epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 2, memory)
        memory.record({"ada": torch.ones(memory._layout.size)}, {"ada": 1})
        assert memory.works(None)[0]["ada"].steps == 6
        with pytest.raises(RequestError, match="'ada' begins anew with SGD with momentum within a round"):
            epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9), 2, memory)

    def test_several_ways_of_training_are_refused(self):
        memory, local = Memory(mlp()), mlp()
        other = torch.optim.SGD(local.parameters(), lr=0.05, weight_decay=0.1)
        epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 1, memory)
        with pytest.raises(RequestError, match="'ada' trains with several rules"):
            epochs(local, "ada", lambda _: other, 1, memory)
        local = mlp()
        epochs(local, "bob", lambda _: torch.optim.SGD(local[0].parameters(), lr=0.05), 1, memory)
        with pytest.raises(RequestError, match="'bob' trains with several rules"):
            epochs(local, "bob", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 1, memory)

    def test_one_that_begins_again_takes_the_others_place(self):
        memory, local = Memory(mlp()), mlp()
        epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 2, memory)
        local = mlp()
        epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.01), 1, memory)
        memory.record({"ada": torch.ones(memory._layout.size)}, {"ada": 1})
        work = memory.works(None)[0]["ada"]
        assert (work.steps, work.learning_rate) == (3, 0.01)

    @pytest.mark.parametrize("factor", [1.0, 7.0])
    @pytest.mark.parametrize("sent", [0, 1, 2])
    def test_of_several_attempts_the_one_counts_that_is_sent(self, sent, factor):
        memory, updates = Memory(mlp()), []
        for rate in (0.05, 0.5, 0.002):
            local = mlp()
            before = {key: value.clone() for key, value in local.state_dict().items()}
            optimiser = torch.optim.SGD(local.parameters(), lr=rate)
            epochs(local, "ada", lambda _, own=optimiser: own, 2, memory)
            updates.append({key: factor * (value - before[key]) for key, value in local.state_dict().items()})
        memory.record({"ada": updates[sent]}, {"ada": 1})
        work = memory.works(None)[0]["ada"]
        assert (work.steps, work.learning_rate) == (6, (0.05, 0.5, 0.002)[sent])

    def test_other_weights_are_refused(self):
        memory, local = Memory(mlp()), mlp()
        epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 1, memory)
        with torch.no_grad():
            local[0].weight *= 0.9
        with pytest.raises(RequestError, match=r"'ada' was watched .* already, and begins with other weights"):
            epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 1, memory)

    def test_a_model_that_does_not_move_tells_nothing_of_blocks(self):
        memory, local = Memory(mlp()), mlp()
        with memory.watching("ada", mlp()):
            epochs(local, "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 1)
        with pytest.raises(RequestError, match=r"give memory\.watching the model that is trained"):
            epochs(mlp(), "ada", lambda _: torch.optim.SGD(local.parameters(), lr=0.05), 1, memory)

    def test_what_was_done_before_a_failure_counts_where_training_goes_on(self):
        memory, local = Memory(mlp()), mlp()
        optimiser = torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9)

        def failing():
            with memory.watching("ada", local):
                epochs(local, "ada", lambda _: optimiser, 1)
                raise MemoryError

        with pytest.raises(MemoryError):
            failing()
        with memory.watching("bob", other := mlp()):
            update, _ = once(other, "bob", lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9))
        with pytest.raises(RequestError, match="'ada' was not watched to its end"):
            memory.record({"ada": update, "bob": update}, {"ada": 1, "bob": 1})
        epochs(local, "ada", lambda _: optimiser, 1, memory)
        memory.record({"ada": update, "bob": update}, {"ada": 1, "bob": 1})
        assert {name: work.steps for name, work in memory.works(None)[0].items()} == {"ada": 6, "bob": 3}


def aside(train):
    """In a thread of its own."""
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def test_a_model_is_watched_in_whatever_thread_it_trains():
    memory, local, other = Memory(mlp()), mlp(), mlp()
    optimiser, others = (torch.optim.SGD(own.parameters(), lr=0.05) for own in (local, other))
    with memory.watching("ada", local):
        aside(lambda: epochs(local, "ada", lambda _: optimiser, 2))
        aside(lambda: epochs(other, "bob", lambda _: others, 2))
        epochs(local, "ada", lambda _: optimiser, 1)
    memory.record({"ada": torch.ones(memory._layout.size)}, {"ada": 1})
    assert memory.works(None)[0]["ada"].steps == 9


@pytest.mark.parametrize("watched", [range(1), range(2, 3), range(3)])
@pytest.mark.parametrize("factor", [1, 5])
def test_training_outside_of_the_with_block_is_said(watched, factor):
    """What is boosted or clipped, and personal training after a round, are not taken for it."""
    model = mlp()
    memory = Memory(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            updates = {}
            for name in DATA:
                local = mlp()
                local.load_state_dict(state)
                optimiser = torch.optim.SGD(local.parameters(), lr=0.05)
                epochs(local, name, lambda _, own=optimiser: own, watched.start)
                with memory.watching(name, local):
                    epochs(local, name, lambda _, own=optimiser: own, len(watched))
                epochs(local, name, lambda _, own=optimiser: own, 3 - watched.stop)
                updates[name] = {key: factor * (value - state[key]) for key, value in local.state_dict().items()}
                if factor == 1 and len(watched) == 3:
                    epochs(local, name, lambda _, own=optimiser: own, 1)
            memory.record(updates, dict.fromkeys(DATA, 1))
            state = {key: state[key] + sum(own[key] for own in updates.values()) / 3 for key in state}
    said = [each for each in memory.doubts(None) if "9 steps of a client, where 3 is what was watched" in each]
    assert bool(said) == (len(watched) < 3)
    assert len([each for each in heard if "otherwise than" in str(each.message)]) == (1 if said else 0)


def sent(change, rounds=1):
    """The rates that count where clients send what they trained changed like this."""
    model = mlp()
    memory = Memory(model)
    for _ in range(rounds):
        updates = {}
        for name in DATA:
            local = mlp()
            with memory.watching(name, local):
                update, _ = once(local, name, lambda own: torch.optim.SGD(own, lr=0.05))
            updates[name] = {key: change(value) for key, value in update.items()}
        memory.record(updates, dict.fromkeys(DATA, 1))
    return memory.works(None)[-1]


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_rate_counts_by_as_much_as_was_sent_of_what_was_trained(part):
    assert all(work.learning_rate == pytest.approx(0.05 * part) for work in sent(lambda own: part * own).values())


def test_noise_is_not_taken_for_less_and_who_boosts_cannot_claim_a_rate():
    torch.manual_seed(0)
    assert all(work.learning_rate == 0.05 for work in sent(lambda own: 7 * own).values())
    assert all(work.learning_rate == 0.05 for work in sent(lambda own: own + 0.3 * torch.randn_like(own)).values())
    kept = sent(lambda own: 0.1 * own + 1e-4 * torch.randn_like(own))
    assert all(work.learning_rate == pytest.approx(0.005, rel=0.2) for work in kept.values())
    assert all(work.learning_rate == pytest.approx(0.0005) for work in sent(lambda own: -own).values())  # the least
