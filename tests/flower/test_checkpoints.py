"""Checkpoints that a Recorder keeps: which, through restarts; and sites that replay from them what samples did."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM

from expunge.core.losses import CrossEntropy
from expunge.errors import RequestError, SiteError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.checkpoints import thinned, wanted_rounds
from expunge.federation.training.recipe import Adam, Recipe
from expunge.flower import Recorder, Site, forget, resume, unlearnable
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from federation.small import mlp, norm_net
from flower import example
from flower.example import HOSPITALS, TrainingGrid
from flower.grid import Node
from flower.training import DATA, PLAN, federation, kept, ours, recorder, sites, start
from flower_app import task
from flower_app.task import ATTACKER, Net

LONG = dataclasses.replace(PLAN, rounds=7)
SAMPLES = {"ada": [0, 4], "cyd": [1]}


class Gone(Exception):  # noqa: N818
    """The server dies."""


class Later(FedAvg):
    """Rounds are counted anew in every run, and our sites shuffle by their number."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.done = done

    def configure_train(self, server_round, arrays, config, grid):
        return super().configure_train(server_round + self.done, arrays, config, grid)


def way(store, architecture=mlp):
    found = kept(store, architecture).checkpoints
    return {} if found is None else dict(found.models)


def same_models(found, expected):
    assert list(found) == list(expected)
    for number, model in expected.items():
        torch.testing.assert_close(found[number].parameters, model.parameters, rtol=1e-9, atol=1e-12)
        assert found[number].layout == model.layout
        for name, buffer in model.buffers.items():
            if buffer.is_floating_point():
                torch.testing.assert_close(found[number].buffers[name], buffer)


@pytest.mark.parametrize("architecture", [mlp, norm_net])
def test_they_are_those_of_our_own_training(tmp_path, architecture):
    start(federation(architecture), recorder(tmp_path / "store", architecture=architecture), rounds=LONG.rounds)
    expected = ours(architecture, LONG).checkpoints.models
    assert list(expected) == [1, 3, 5]
    same_models(way(tmp_path / "store", architecture), expected)


def test_after_every_round_there_are_some_that_lie_well(tmp_path):
    """A run that dies leaves what it has: after each round at most three, of the rounds so far."""
    whole, store = ours(mlp, dataclasses.replace(LONG, rounds=6)), tmp_path / "store"
    grid, seen = federation(), []

    def handle(message):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 101:
            seen.append(list(way(store)) if store.exists() else [])
            if len(seen) == 6:
                raise Gone
        return [grid.answer(message)]

    grid.handle = handle
    with pytest.raises(Gone):
        start(grid, recorder(store), rounds=40)
    assert seen == [[], [0], [0, 1], [0, 1, 2], [1, 2, 3], [1, 3, 4]]
    start(federation(), recorder(store, Later(5)), rounds=1)
    assert list(way(store)) == [1, 3, 5] == list(thinned([1, 3, 4, 5], 3, 6))
    same_models({1: way(store)[1]}, {1: ours(mlp, dataclasses.replace(LONG, rounds=1)).model})
    torch.testing.assert_close(kept(store).model.parameters, whole.model.parameters, rtol=1e-9, atol=1e-12)


def test_two_runs_end_where_one_does(tmp_path):
    start(federation(), recorder(tmp_path / "store"), rounds=2)
    assert list(way(tmp_path / "store")) == [0, 1]
    start(federation(), recorder(tmp_path / "store", Later(2)), rounds=5)
    assert list(way(tmp_path / "store")) == list(wanted_rounds(3, 7))
    same_models(way(tmp_path / "store"), ours(mlp, LONG).checkpoints.models)


@pytest.mark.parametrize(("count", "numbers"), [(0, []), (1, [3]), (2, [1, 5]), (9, [0, 1, 2, 3, 4, 5, 6])])
def test_as_many_as_are_wanted(tmp_path, count, numbers):
    start(federation(), recorder(tmp_path / "store", keep_checkpoints=count), rounds=7)
    assert list(way(tmp_path / "store")) == numbers
    assert bool(list(tmp_path.rglob("checkpoints.safetensors"))) == bool(count)
    start(federation(), recorder(tmp_path / "store", Later(7), keep_checkpoints=0), rounds=1)
    assert not list(tmp_path.rglob("checkpoints.safetensors"))


@pytest.mark.parametrize("count", [-1, 1.5, True, None])
def test_what_is_no_number_of_checkpoints_is_refused(tmp_path, count):
    with pytest.raises(RequestError, match="keeps 0, 1, 2 or more checkpoints"):
        recorder(tmp_path / "store", keep_checkpoints=count)


def test_a_start_that_does_not_say_how_many_rounds_there_will_be(tmp_path):
    class Own(FedAvg):
        def start(self, grid, initial_arrays, how_long):
            return super().start(grid, initial_arrays, num_rounds=how_long)

    own = recorder(tmp_path / "store", Own())
    own.start(federation(), own.arrays, 7)
    expected = ()
    for number in range(7):
        expected = thinned((*expected, number), 3)
    assert list(way(tmp_path / "store")) == list(expected)


@pytest.fixture
def store(tmp_path):
    start(federation(), recorder(tmp_path / "store"), rounds=LONG.rounds)
    return tmp_path / "store"


def local(state, request, **options):
    """The same request on our own engine."""
    engine = LocalEngine(mlp(), CrossEntropy(), {name: site.data for name, site in sites().items()})
    return method("retrace").configured(options)(engine, state, request)


def test_samples_of_a_site_that_stays_are_replayed_by_it(store):
    expected = local(kept(store), Request.of(samples=SAMPLES))
    on = federation()
    outcome = forget(on, samples=SAMPLES, store=store, model=mlp())
    assert (outcome.method, outcome.details["source"], outcome.succeeded) == ("retrace", "replay", True)
    assert "Samples whose client stays have no vector" in outcome.warnings[0]
    assert "replay a round from each of 3 checkpoints" in outcome.warnings[0]
    torch.testing.assert_close(kept(store).model.parameters, expected.state.model.parameters, rtol=1e-9, atol=1e-12)
    assert outcome.cost.rounds == expected.cost.rounds + 2  # the losses then and now, and the first round again


def test_a_forget_drops_them_and_the_next_request_says_that_one_gradient_has_to_do(store):
    old = [model.parameters.numpy().tobytes() for model in way(store).values()]
    found = [file.name for file in store.rglob("*") if file.is_file() and old[0] in file.read_bytes()]
    assert found == ["checkpoints.safetensors"]
    forget(federation(), "bob", store=store, model=mlp())
    assert way(store) == {}
    for file in (file for file in store.rglob("*") if file.is_file()):
        assert not any(each in file.read_bytes() for each in old), file
    outcome = forget(federation(), samples=SAMPLES, store=store, model=mlp(), tau=None)
    assert outcome.method == "hf-kcu"
    assert "no checkpoints are there to replay from, so hf-kcu runs: one gradient" in outcome.warnings[0]


def test_after_a_forget_new_ones_are_kept_and_it_is_said_that_they_begin_late(store):
    forget(federation(), "bob", store=store, model=mlp())
    before = kept(store)
    start(federation(), recorder(store, Later(7)), rounds=2)
    numbers = list(way(store))
    assert numbers == [before.memory.rounds, before.memory.rounds + 1]
    same_models({numbers[0]: way(store)[numbers[0]]}, {numbers[0]: before.model})
    outcome = forget(federation(), samples=SAMPLES, store=store, model=mlp())
    assert outcome.details["source"] == "replay"
    assert any(f"first checkpoint comes after {numbers[0]} of" in each for each in outcome.warnings)


def test_a_request_that_died_on_the_way_is_resumed_to_the_same_bits(store, tmp_path):
    whole = shutil.copytree(store, tmp_path / "whole")
    undisturbed = forget(federation(), samples=SAMPLES, store=whole, model=mlp())
    dying = federation()

    def handle(message):
        if len(dying.tasks_sent()) > 4:
            raise Gone
        return [dying.answer(message)]

    dying.handle = handle
    with pytest.raises(Gone):
        forget(dying, samples=SAMPLES, store=store, model=mlp())
    assert list(way(store)) == [1, 3, 5]
    outcome = resume(federation(), store=store, model=mlp())
    assert torch.equal(kept(store).model.parameters, kept(whole).model.parameters)
    assert outcome.cost.rounds == undisturbed.cost.rounds
    assert way(store) == {}


def by_adam(site: Site) -> ClientApp:
    """A site that trains with torch's Adam, which nobody is told of."""
    app = ClientApp()

    @app.train()
    def training(message, context):
        model = mlp()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser, (inputs, labels) = torch.optim.Adam(model.parameters(), lr=0.02), DATA[site.name]
        for _ in range(4):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
        metrics = MetricRecord({"num-examples": len(labels)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return unlearnable(app, lambda context: site)


def adam_federation(names=tuple(DATA)) -> TrainingGrid:
    own = sites()
    return TrainingGrid({101 + at: Node(by_adam(own[name])) for at, name in enumerate(DATA) if name in names})


def test_a_site_of_which_no_vector_is_left_is_replayed_by_the_recipe_of_the_training(tmp_path):
    """The vectors are lost; model, checkpoints and how the sites trained are not."""
    store = tmp_path / "store"
    own = Recorder(FedAvg(fraction_evaluate=0.0), model=mlp(), store=store)
    own.start(adam_federation(), own.arrays, num_rounds=7)
    vectors = forget_a_copy(store, tmp_path / "whole")
    assert vectors.details["source"] == "recorded"
    (file,) = store.glob("state-*/memory.safetensors")
    file.unlink()
    assert kept(store).trained_by == Recipe(Adam())
    planned = forget(adam_federation(), "bob", store=store, model=mlp(), dry_run=True)
    assert (planned.method, planned.asked_owners) == ("retrace", True)
    with pytest.raises(SiteError, match="Not online within 1 s: 'bob'"):
        forget(adam_federation(("ada", "cyd")), "bob", store=store, model=mlp(), deadline=1.0)
    before = kept(store).model.parameters
    outcome = forget(adam_federation(), "bob", store=store, model=mlp(), tau=None)
    assert outcome.details["source"] == "replay"
    assert "There are no vectors here, so its owners replay a round from each of 3 checkpoints" in outcome.warnings[0]
    step, known = before - kept(store).model.parameters, before - vectors.state.model.parameters
    assert float((step - known).norm()) < 0.3 * float(known.norm())  # whole batches: nothing is shuffled


def forget_a_copy(store, place):
    return forget(adam_federation(), "bob", store=shutil.copytree(store, place), model=mlp(), tau=None)


def test_a_server_with_momentum_keeps_none_and_is_named(tmp_path):
    store = tmp_path / "store"
    start(federation(), recorder(store, FedAvgM(server_momentum=0.5)))
    assert way(store) == {}
    with pytest.raises(RequestError, match="follows FedAvg, not FedAvgM: use hf-kcu"):
        forget(federation(), samples=SAMPLES, store=store, model=mlp(), method="retrace")
    outcome = forget(federation(), samples=SAMPLES, store=store, model=mlp(), tau=None)
    assert outcome.method == "hf-kcu"
    assert "a replay follows FedAvg, not FedAvgM" in outcome.warnings[0]


@pytest.mark.slow
def test_a_backdoor_in_samples_of_a_site_that_stays_is_replayed_away(tmp_path):
    """The example's app, whose attacker trains by code of its own and boosts what it sends: a replay does not."""
    store, model = tmp_path / "store", Net()
    example.run(example.grid(), store)
    kept(store, Net).model.write_to(model)
    before = task.test(model)
    outcome = forget(example.grid(), samples={ATTACKER: poisoned_rows()}, store=store, model=Net())
    outcome.write_to(model)
    after = task.test(model)
    assert outcome.details["source"] == "replay"
    assert (before["backdoor"] > 0.9, after["backdoor"] < 0.2) == (True, True)
    assert after["accuracy"] > before["accuracy"] - 0.02


def poisoned_rows() -> list[int]:
    _, labels = task.load_data(ATTACKER, HOSPITALS.index(ATTACKER), len(HOSPITALS))
    return list(range(int(task.POISONED * len(labels))))
