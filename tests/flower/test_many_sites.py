"""A round of a Recorder touches the vectors of those who took part, a forget those of the sites that met the leaver."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Error, Message

from expunge.federation.keeping import vector_files
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import forget
from federation.small import mlp
from flower.training import federation, kept, ours, recorder, same, start

NODES = {"ada": 101, "bob": 102, "cyd": 103}


def without(name: str):
    """The federation while a site is away."""
    grid = federation()

    def handle(message):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == NODES[name]:
            return [Message(Error(1, "out of memory"), reply_to=message)]
        return [grid.answer(message)]

    grid.handle = handle
    return grid


def files(store) -> dict[tuple[int, str], int]:
    """The file of every vector, by block and site, known by its inode."""
    source = next(iter(kept(store).memory._stretches)).vectors.source
    return {
        (block, name): source.place(block, name).stat().st_ino
        for block in source.blocks
        for name in source.names(block)
    }


@pytest.fixture
def read(monkeypatch):
    """Whose vectors are read from the disk."""
    found, real = set(), vector_files.VectorFiles.read

    def reading(self, block, name):
        found.add(name)
        return real(self, block, name)

    monkeypatch.setattr(vector_files.VectorFiles, "read", reading)
    return found


@pytest.fixture
def one_stretch(monkeypatch):
    """As of a larger model: of this one a vector is kept for each of several stretches of rounds."""
    monkeypatch.setattr(Memory, "_most", 1)


def test_a_round_reads_and_writes_the_vectors_of_those_who_took_part(tmp_path, read, one_stretch):
    store = tmp_path / "store"
    start(federation(), recorder(store), rounds=1)
    before = files(store)
    own = recorder(store)
    assert read == set()
    start(without("cyd"), own, rounds=1)
    after = files(store)
    assert {name for block, name in after if after[block, name] != before[block, name]} == {"ada", "bob"}
    assert read == {"ada", "bob"}
    assert not [block for stretch in own._memory._stretches for block in stretch.vectors.blocks if block.edits]


def test_what_is_recorded_is_what_is_recorded_in_one_process(tmp_path, one_stretch):
    start(federation(), recorder(tmp_path / "store"))
    same(kept(tmp_path / "store"), ours())


def test_a_forget_touches_those_who_met_the_leaver(tmp_path, read, one_stretch):
    store = tmp_path / "store"
    start(without("cyd"), recorder(store), rounds=1)
    start(without("ada"), recorder(store), rounds=1)
    before, expected = files(store), kept(store).memory.without(["ada"])
    expected = {name: expected.vectors[name] for name in ("bob", "cyd")}
    read.clear()
    outcome = forget(federation(), "ada", store=store, model=mlp(), tau=None)
    assert outcome.succeeded
    assert read == {"ada", "bob"}
    after = files(store)
    assert after.keys() == before.keys() - {(0, "ada")}
    assert (after[0, "cyd"], after[0, "bob"] != before[0, "bob"]) == (before[0, "cyd"], True)
    for memory in (kept(store).memory, outcome.memory):  # whose old state is gone
        assert set(memory.clients) == {"bob", "cyd"}
        for name, vector in expected.items():
            torch.testing.assert_close(memory.vectors[name], vector)


def test_a_run_that_goes_on_knows_where_the_first_one_began(tmp_path):
    """A site that stays trains that round again, when somebody leaves."""
    store, first = tmp_path / "store", torch.nn.utils.parameters_to_vector(mlp().parameters()).detach()
    for _ in range(2):
        start(federation(), recorder(store), rounds=1)
        torch.testing.assert_close(kept(store).memory.place.beginning, first)
    forget(federation(), "ada", store=store, model=mlp(), tau=None)
    assert kept(store).memory.place.beginning is None  # the first round was another one without her


def test_the_leaver_is_gone_from_every_byte_of_the_store(tmp_path, one_stretch):
    store = tmp_path / "store"
    start(without("cyd"), recorder(store), rounds=1)
    start(without("ada"), recorder(store), rounds=1)
    gone = [kept(store).memory.vectors[name].numpy().tobytes()[:64] for name in ("ada", "bob")]
    everything = lambda: b"".join(file.read_bytes() for file in store.rglob("*") if file.is_file())  # noqa: E731
    assert all(trace in everything() for trace in gone)
    assert forget(federation(), "ada", store=store, model=mlp(), tau=None).succeeded
    assert not [trace for trace in gone if trace in everything()]
    assert {file.stat().st_nlink for file in (StateStore(store).state / "vectors").iterdir()} == {1}
