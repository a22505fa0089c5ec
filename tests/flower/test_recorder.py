"""What the Recorder keeps is what our own training keeps, whoever trains; and it refuses what would make it wrong."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum
from torch import nn
from torch.utils.data import DataLoader

from expunge.errors import DataError, ModelError, RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import unlearnable
from federation.small import mlp, norm_net
from flower.example import TrainingGrid
from flower.grid import Node
from flower.training import (
    PLAN,
    federation,
    handlers,
    kept,
    legacy_federation,
    ours,
    recorder,
    same,
    sites,
    start,
)


@pytest.mark.parametrize("architecture", [mlp, norm_net])
@pytest.mark.parametrize("strategy", [FedAvg, lambda: FedProx(proximal_mu=0.1)])
def test_the_vectors_are_those_of_our_own_training(tmp_path, architecture, strategy):
    result = start(federation(architecture), recorder(tmp_path / "store", strategy(), architecture))
    state, reference = kept(tmp_path / "store", architecture), ours(architecture)
    same(state, reference)
    if architecture is mlp:  # batch norm takes a last sample into the batch before: fewer steps, which are seen
        assert asdict(state.schedule) == pytest.approx(asdict(reference.schedule))
    for name, buffer in reference.model.buffers.items():
        assert state.model.buffers[name].dtype == buffer.dtype
        if buffer.is_floating_point():
            torch.testing.assert_close(state.model.buffers[name], buffer)
        else:  # the strategy takes the mean of counters, too
            mean = float(result.arrays[name].numpy())
            assert mean % 1 > 0.5
            assert int(state.model.buffers[name]) == round(mean)


def test_the_result_of_training_is_the_strategys_own(tmp_path):
    recorded = start(federation(), recorder(tmp_path / "store"))
    own = mlp()
    plain = FedAvg().start(federation(wrap=lambda app, _: app), ArrayRecord(own.state_dict()), num_rounds=PLAN.rounds)
    for name, array in plain.arrays.items():  # sites are drawn in any order, so sums are rounded otherwise
        np.testing.assert_allclose(recorded.arrays[name].numpy(), array.numpy(), rtol=1e-12)
    assert recorded.evaluate_metrics_clientapp[3]["reached"] == 1.0


def test_a_legacy_client_is_recorded_under_its_name(tmp_path):
    """Its arrays have numbers instead of names, and its app is one client function."""
    keys = {"arrayrecord_key": "fitins.parameters", "configrecord_key": "fitins.config"}
    strategy = FedAvg(fraction_evaluate=0.0, weighted_by_key="num_examples", **keys)
    start(legacy_federation(), recorder(tmp_path / "store", strategy))
    same(kept(tmp_path / "store"), ours())


def test_training_goes_on_where_the_store_is(tmp_path):
    start(federation(), recorder(tmp_path / "store"), rounds=1)

    class Shifted(FedAvg):  # rounds are counted anew in every run
        def configure_train(self, server_round, arrays, config, grid):
            return super().configure_train(server_round + 1, arrays, config, grid)

    start(federation(), recorder(tmp_path / "store", Shifted()), rounds=2)
    same(kept(tmp_path / "store"), ours())
    assert kept(tmp_path / "store").schedule.rounds == 3
    assert len(list((tmp_path / "store").glob("state-*"))) == 1


def test_partial_participation_and_a_failed_site(tmp_path):
    """Only those who sent something are recorded, with their share of what was averaged."""
    grid = federation()
    away = {0: 103, 1: 101}
    trained = {"rounds": 0}

    def handle(message):
        number = message.content["config"]["server-round"] - 1
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == away.get(number):
            return [Message(Error(1, "out of memory"), reply_to=message)]
        trained["rounds"] += message.metadata.message_type == "train"
        return [grid.answer(message)]

    grid.handle = handle
    start(grid, recorder(tmp_path / "store"))
    assert trained["rounds"] == 7
    shares = json.loads(_metadata(tmp_path / "store")["expunge"].partition(" ")[2])["content"]["rounds"]
    shares = [each["shares"] for each in shares]
    assert [sorted(each) for each in shares] == [["ada", "bob"], ["bob", "cyd"], ["ada", "bob", "cyd"]]
    assert shares[0]["ada"] == pytest.approx(9 / 14)
    memory = kept(tmp_path / "store").memory
    assert [len(stretch.rounds) for stretch in memory._stretches] == [1, 1, 1]
    for each, stretch in zip(shares, memory._stretches, strict=True):
        left = sum((1 - share) * stretch.vectors[name] for name, share in each.items())
        assert float(left.norm()) < 1e-12  # in every round what those who took part added to the mean cancels


def _metadata(store):
    from safetensors import safe_open

    (file,) = store.glob("state-*/memory.safetensors")
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def test_sampled_sites(tmp_path):
    start(federation(), recorder(tmp_path / "store", FedAvg(fraction_train=0.7)), rounds=4)
    shares = json.loads(_metadata(tmp_path / "store")["expunge"].partition(" ")[2])["content"]["rounds"]
    assert [len(each["shares"]) for each in shares] == [2, 2, 2, 2]


@pytest.mark.parametrize("strategy", [FedMedian, Krum, lambda: FedTrimmedAvg(beta=0.34)])
def test_a_strategy_that_does_not_average_is_refused(tmp_path, strategy):
    chosen = strategy()
    with pytest.raises(RequestError, match=f"^{type(chosen).__name__} does not take the plain weighted mean"):
        start(federation(), recorder(tmp_path / "store", chosen))
    assert not (tmp_path / "store").exists()


def test_a_site_left_out_of_the_average_is_noticed(tmp_path):
    class Careless(FedAvg):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, list(replies)[1:])

    with pytest.raises(RequestError, match="plain weighted mean"):
        start(federation(), recorder(tmp_path / "store", Careless()))


def test_a_reply_with_a_nan_is_reported_by_name_and_not_recorded(tmp_path):
    def spoil(name, number, tensors):
        return {key: t * float("nan") for key, t in tensors.items()} if (name, number) == ("bob", 1) else tensors

    with pytest.raises(DataError, match="'bob'"):
        start(federation(spoil=spoil), recorder(tmp_path / "store"))
    assert StateStore(tmp_path / "store").book.state == 1
    kept(tmp_path / "store").model.require_finite()


def test_a_site_without_a_name_or_with_anothers_is_refused(tmp_path):
    with pytest.raises(RequestError, match="wrap the ClientApp with unlearnable"):
        start(federation(wrap=lambda app, site: app), recorder(tmp_path / "store"))
    ada = sites()["ada"]
    with pytest.raises(RequestError, match="Two sites call themselves 'ada'"):
        start(federation(wrap=lambda app, site: unlearnable(app, lambda _: ada)), recorder(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("stamp", "sentence"),
    [
        ({"samples": 3}, "has a stamp without the name of its site"),
        ({"site": "", "samples": 3}, "has a stamp without the name of its site"),
        ({"site": "bob"}, "The training reply of site 'bob' needs a sample count"),
        ({"site": "bob", "samples": "many"}, "The training reply of site 'bob' needs a sample count"),
        ({"site": "bob", "samples": -1}, "The training reply of site 'bob' needs a sample count"),
    ],
)
def test_a_malformed_stamp_is_refused(tmp_path, stamp, sentence):
    grid = federation()

    def handle(message):
        reply = grid.answer(message)
        if message.metadata.dst_node_id == 102:
            reply.content["expunge"] = ConfigRecord(stamp)
        return [reply]

    grid.handle = handle
    with pytest.raises(RequestError, match=sentence):
        start(grid, recorder(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_another_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="The arrays are of another model: 2 of them, where the model has 4"):
        recorder(tmp_path / "store").start(federation(), ArrayRecord(nn.Linear(2, 2).state_dict()), num_rounds=1)
    start(federation(), recorder(tmp_path / "store"), rounds=1)
    with pytest.raises(RequestError, match=r"start from recorder\.arrays"):
        recorder(tmp_path / "store").start(federation(), ArrayRecord(mlp(seed=3).state_dict()), num_rounds=1)
    with pytest.raises(ModelError, match="another architecture"):
        recorder(tmp_path / "store", architecture=norm_net)


def test_only_the_parameters_that_train_may_be_sent(tmp_path):
    def frozen():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    def spoil(name, number, tensors):
        return {key: tensor for key, tensor in tensors.items() if key.startswith("2.")}

    class Partial(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            whole = {**ArrayRecord(frozen().state_dict()), **arrays}
            return super().configure_train(server_round, ArrayRecord(whole), config, grid)

    start(federation(frozen, spoil=spoil), recorder(tmp_path / "store", Partial(), frozen))
    same(kept(tmp_path / "store", frozen), ours(frozen))


def test_handlers_may_be_registered_before_and_after():
    site, seen = sites()["ada"], []
    app = unlearnable(handlers(site, mlp), lambda _: site)

    @app.query("greeting")
    def greeting(message: Message, context: Context) -> Message:
        return Message(RecordDict({"said": ConfigRecord({"hello": "there"})}), reply_to=message)

    @app.lifespan()
    def lifespan(context: Context):
        seen.append("begun")
        yield
        seen.append("ended")

    grid = TrainingGrid({101: Node(app)})
    asked = Message(RecordDict(), dst_node_id=101, message_type="query.greeting")
    (reply,) = grid.send_and_receive([asked])
    assert reply.content["said"]["hello"] == "there"
    assert "expunge" not in reply.content
    assert seen == ["begun", "ended"]


def test_an_app_that_cannot_train_says_so_as_before():
    site = sites()["ada"]
    grid = TrainingGrid({101: Node(unlearnable(ClientApp(), lambda _: site))})
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=101, message_type="train")])
    assert reply.has_error()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: (DataLoader(data, 4), DataLoader(data, 4)), "two DataLoaders: give the one"),
        (
            lambda data: [{"pixels": inputs, "label": label} for inputs, label in data],
            "unexpected keyword argument.*give \\(input, target\\) pairs",
        ),
        (lambda data: [(inputs, label + 40) for inputs, label in data], "has labels 40 to"),
    ],
)
def test_data_that_could_not_be_used_later_is_refused_in_the_first_round(tmp_path, change, reason):
    odd = {name: dataclasses.replace(site, data=change(list(site.data))) for name, site in sites().items()}
    apps = [unlearnable(handlers(plain, mlp), lambda _, name=name: odd[name]) for name, plain in sites().items()]
    grid = TrainingGrid({101 + number: Node(app) for number, app in enumerate(apps)})
    with pytest.raises(RequestError, match=rf"Site '\w+' trains, but could not help to forget: .*{reason}"):
        start(grid, recorder(tmp_path / "store"), rounds=1)
    assert not StateStore(tmp_path / "store").exists


def test_a_loader_of_dicts_is_taken_as_it_is(tmp_path):
    """The handlers train on pairs; what expunge works on later is a loader of the same samples as dicts."""
    plain = sites()
    dicts = {
        name: dataclasses.replace(
            site,
            data=DataLoader([{"input": inputs, "label": label} for inputs, label in site.data], 4, shuffle=True),
        )
        for name, site in plain.items()
    }
    apps = [unlearnable(handlers(site, mlp), lambda _, name=name: dicts[name]) for name, site in plain.items()]
    grid = TrainingGrid({101 + number: Node(app) for number, app in enumerate(apps)})
    start(grid, recorder(tmp_path / "store"), rounds=1)
    assert StateStore(tmp_path / "store").book.counts == {"ada": 9, "bob": 5, "cyd": 7}
