"""Who has left stays out of the training, under its own name and another; one name is one node's."""

import dataclasses
import logging

import pytest
from flwr.app import RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import FedAvg

from expunge.errors import RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import Site, unlearnable
from federation.small import Pairs, mlp
from flower.example import TrainingGrid
from flower.grid import Node
from flower.training import DATA, handlers, kept, recorder, start


class KeyedGrid(TrainingGrid):
    """Nodes with keys: by default each its own."""

    def __init__(self, nodes, keys=None):
        super().__init__(nodes)
        self.keys = keys or {number: f"key of {number}" for number in nodes}

    def get_nodes(self):
        return [
            NodeInfo(node_id=number, last_activated_at="2026-01-01T00:00:01", public_key=self.keys[number].encode())
            for number in self.get_node_ids()
        ]


def node(data, name=None):
    site = Site(name or data, mlp(), Pairs(DATA[data]))
    return Node(unlearnable(handlers(site, mlp), lambda _: site), state=RecordDict())


def federation(**names):
    """Three sites; each may go by another name."""
    return KeyedGrid({101 + number: node(data, names.get(data)) for number, data in enumerate(DATA)})


def left(store, *names):
    """Somebody has left: as the store has it afterwards."""
    own = StateStore(store)
    counts = {name: count for name, count in own.book.counts.items() if name not in names}
    state = own.load(mlp())
    memory = state.memory.without(list(names))
    own.write(
        dataclasses.replace(own.book, departed=names, counts=counts), dataclasses.replace(state, memory=memory), mlp()
    )


class Chosen(FedAvg):
    """Asks these nodes, round by round."""

    def __init__(self, *rounds):
        super().__init__(min_train_nodes=1, min_available_nodes=1)
        self.rounds = rounds

    def configure_train(self, server_round, arrays, config, grid):
        wanted = self.rounds[server_round - 1]
        return [
            m for m in super().configure_train(server_round, arrays, config, grid) if m.metadata.dst_node_id in wanted
        ]


def asked(grid):
    return {message.metadata.dst_node_id for message in grid.sent if message.metadata.message_type == "train"}


def test_keys_are_written_down_with_the_names(tmp_path):
    start(federation(), recorder(tmp_path / "store"), rounds=1)
    keys = StateStore(tmp_path / "store").book.keys
    assert set(keys) == set(DATA)
    assert {len(own) for own in keys.values()} == {1}
    assert len({own[0] for own in keys.values()}) == 3


def test_a_departed_site_is_left_out_and_the_others_go_on(tmp_path, caplog):
    start(federation(), recorder(tmp_path / "store"), rounds=1)
    left(tmp_path / "store", "bob")
    grid = federation()
    with caplog.at_level(logging.WARNING, "flwr"):
        start(grid, recorder(tmp_path / "store"), rounds=2)
    assert set(kept(tmp_path / "store").memory.clients) == {"ada", "cyd"}
    assert kept(tmp_path / "store").memory.rounds == 3
    assert asked(grid) == {101, 103}, "it does not even get the model"
    assert caplog.text.count("which has left; readmit it, or switch it off") == 1


def test_under_another_name_it_is_known_by_its_key(tmp_path, caplog):
    start(federation(), recorder(tmp_path / "store"), rounds=1)
    left(tmp_path / "store", "bob")
    grid = federation(bob="robert")
    with caplog.at_level(logging.WARNING, "flwr"):
        start(grid, recorder(tmp_path / "store"), rounds=1)
    assert set(kept(tmp_path / "store").memory.clients) == {"ada", "cyd"}
    assert asked(grid) == {101, 103}


def test_with_another_key_it_is_known_by_its_name(tmp_path, caplog):
    start(federation(), recorder(tmp_path / "store"), rounds=1)
    left(tmp_path / "store", "bob")
    grid = federation()
    grid.keys[102] = "a new key"
    with caplog.at_level(logging.WARNING, "flwr"):
        start(grid, recorder(tmp_path / "store"), rounds=1)
    assert set(kept(tmp_path / "store").memory.clients) == {"ada", "cyd"}
    assert "site 'bob' has left" in caplog.text


def test_one_name_from_two_nodes_is_refused_in_one_round_and_in_two(tmp_path):
    for name, strategy in (("one", FedAvg()), ("two", Chosen({101, 103}, {102, 103}))):
        with pytest.raises(RequestError, match="Two sites call themselves 'ada'"):
            start(federation(bob="ada"), recorder(tmp_path / name, strategy), rounds=2)


def test_a_site_that_was_set_up_anew_keeps_its_name_and_has_two_keys(tmp_path, caplog):
    grid = federation()
    grid.nodes[104] = node("bob")
    grid.keys[104] = "a new key"
    grid.stop(104)
    own = recorder(tmp_path / "store")
    start(grid, own, rounds=1)
    grid.stop(102)
    grid.nodes[104].online = True
    with caplog.at_level(logging.WARNING, "flwr"):
        start(grid, own, rounds=1)
    assert "has another key than before" in caplog.text
    assert len(StateStore(tmp_path / "store").book.keys["bob"]) == 2
