"""Vectors that a state has in common with the one before: as in memory, untouched unless they change."""

import errno
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.keeping import vector_files
from expunge.federation.keeping.book import Book
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.keeping.stretches import Held
from expunge.federation.keeping.vector_files import write_vectors
from federation.test_memory_folder import NAMES, RECIPES, SIZE, assert_same, rounds_of

WIDE = 1500
"""More than a small model has, so that there is one stretch."""


def model(size):
    return nn.Linear(size - 1, 1).double()


def written(folder):
    """All files with everything about them but when they were last read."""
    found = {file: file.stat() for file in folder.rglob("*")}
    return {
        file: (own.st_ino, own.st_mode, own.st_size, own.st_mtime_ns, own.st_ctime_ns) for file, own in found.items()
    }


class Kept:
    """A store that goes on with a memory; another one is kept beside it in this process."""

    def __init__(self, folder, recipe, size=SIZE):
        start = Snapshot(torch.zeros(size, dtype=torch.float64), {})
        self.model = model(size)
        self.store, self.held = StateStore(folder), Memory(start, recipe)
        self.put(Memory(start, recipe))

    def put(self, memory):
        self.store.write(Book(), ServerState(Snapshot.of(self.model), memory=memory), self.model)

    def record(self, updates, weights):
        memory = self.store.memory()
        for own in (memory, self.held):
            own.record(updates, weights, learning_rate=0.1, steps=2)
        assert_same(self.held, memory)
        self.put(memory)
        assert_same(self.held, self.store.memory())

    def forget(self, gone):
        memory, self.held = self.store.memory().without(gone), self.held.without(gone)
        assert_same(self.held, memory)
        self.put(memory)
        assert_same(self.held, self.store.memory())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
class TestAsInMemory:
    @settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), st.integers(0, 50), st.integers(1, 7))
    def test_from_state_to_state(self, tmp_path_factory, recipe, gone, seed, count):
        kept = Kept(tmp_path_factory.mktemp("states") / "store", recipe)
        for updates, weights in rounds_of(count, seed):
            kept.record(updates, weights)
        kept.forget(gone)
        stay = tuple(name for name in NAMES if name not in gone)
        for updates, weights in rounds_of(3, seed, names=stay):
            kept.record(updates, weights)
        kept.forget(stay[:1])

    def test_several_rounds_and_departures_before_it_is_written(self, tmp_path, recipe):
        kept = Kept(tmp_path / "store", recipe)
        for updates, weights in rounds_of(5, seed=2):
            kept.record(updates, weights)
        memory = kept.store.memory().without(["ada"])
        kept.held = kept.held.without(["ada"])
        for updates, weights in rounds_of(4, seed=3, names=NAMES[1:]):
            for own in (memory, kept.held):
                own.record(updates, weights, learning_rate=0.1, steps=2)
        kept.put(memory)
        assert_same(kept.held, kept.store.memory())


def test_a_round_after_a_leaver_who_was_alone_in_its_stretch(tmp_path):
    """Its block is no more, but its vector is still on the disk when the next block begins."""
    kept = Kept(tmp_path / "store", RECIPES["momentum"])
    pair, alone = (
        {"bob": torch.ones(SIZE).double(), "cyd": torch.zeros(SIZE).double()},
        torch.full((SIZE,), 7.0).double(),
    )
    kept.record(pair, dict.fromkeys(pair, 1))
    kept.record({"ada": alone}, {"ada": 1})
    memory, kept.held = kept.store.memory().without(["ada"]), kept.held.without(["ada"])
    for own in (memory, kept.held):
        own.record({**pair, "ada": alone}, dict.fromkeys(("ada", *pair), 1), learning_rate=0.1, steps=2)
    assert_same(kept.held, memory)
    kept.put(memory)
    assert_same(kept.held, kept.store.memory())


def names_of(folder):
    return {file.name: file.stat().st_ino for file in (folder / "vectors").iterdir()}


@pytest.fixture
def touched(monkeypatch):
    """Whose vectors are read from the disk, and how many are written."""
    found = {"read": set(), "written": 0}
    read, write = vector_files.VectorFiles.read, vector_files._written

    def reading(self, block, name):
        found["read"].add(name)
        return read(self, block, name)

    def writing(folder, vector):
        found["written"] += 1
        return write(folder, vector)

    monkeypatch.setattr(vector_files.VectorFiles, "read", reading)
    monkeypatch.setattr(vector_files, "_written", writing)
    return found


class TestWhatIsTouched:
    """40 clients in 10 rounds of 4, so that everybody takes part once, and client-2 in two rounds."""

    @pytest.fixture
    def store(self, tmp_path):
        store, memory = StateStore(tmp_path / "store"), Memory(Snapshot(torch.zeros(WIDE), {}))
        for start in range(0, 40, 4):
            names = [f"client-{number}" for number in range(start, start + 4)]
            names = [*names[1:], "client-2"] if start == 20 else names
            source = torch.Generator().manual_seed(start)
            memory.record({name: torch.randn(WIDE, generator=source) for name in names}, dict.fromkeys(names, 1.0))
        store.write(Book(), ServerState(Snapshot.of(model(WIDE)), memory=memory), model(WIDE))
        return store

    def changed(self, store, memory):
        """How many files are taken over as they are, new, and gone."""
        before = names_of(store.state)
        store.write(Book(), ServerState(Snapshot.of(model(WIDE)), memory=memory), model(WIDE))
        after = names_of(store.state)
        assert all(before[name] == after[name] for name in before.keys() & after.keys())
        return len(before.keys() & after.keys()), len(after.keys() - before.keys()), len(before.keys() - after.keys())

    def test_a_round_its_participants(self, store, touched):
        memory, names = store.memory(), ("client-3", "client-38", "new")
        memory.record({name: torch.ones(WIDE) * len(name) for name in names}, dict.fromkeys(names, 1.0))
        assert touched == {"read": set(), "written": 0}
        assert self.changed(store, memory) == (37, 3, 2)
        assert touched == {"read": set(names), "written": 3}

    def test_a_departure_those_who_met_the_leaver(self, store, touched):
        memory = store.memory()
        memory.require_model(Snapshot(memory.place.now, {}))
        memory.influence(["client-2"])
        memory.loudness(["client-2"])
        left = memory.without(["client-2"])
        assert touched == {"read": {"client-2"}, "written": 0}
        met = {f"client-{number}" for number in (0, 1, 3, 21, 22, 23)}
        assert self.changed(store, left) == (32, 6, 7)
        assert touched == {"read": {"client-2", *met}, "written": 6}
        assert len(store.memory().clients) == 38  # client-20 was never drawn

    def test_a_draft_that_is_never_written_nothing(self, store):
        before = written(store.folder)
        left = store.memory().without(["client-2"])
        left.record({"client-3": torch.ones(WIDE), "b": torch.zeros(WIDE)}, {"client-3": 1, "b": 1})
        left.bound_to(Snapshot(torch.zeros(WIDE), {}))
        assert written(store.folder) == before

    def test_what_a_later_state_has_taken_over_outlives_the_earlier_one_and_the_rest_does_not(self, store, tmp_path):
        other = tmp_path / "other" / "state"
        shutil.copytree(store.state, other, copy_function=os.link)
        assert {file.stat().st_nlink for file in (other / "vectors").iterdir()} == {2}
        self.changed(store, store.memory().without(["client-2"]))
        assert sorted(file.stat().st_nlink for file in (other / "vectors").iterdir()) == [1] * 7 + [2] * 32
        shutil.rmtree(other)
        assert {file.stat().st_nlink for file in (store.state / "vectors").iterdir()} == {1}
        assert len(store.memory().vectors) == 38
        assert all(bool(vector.isfinite().all()) for vector in store.memory().vectors.values())


class TestRefusals:
    @pytest.fixture
    def kept(self, tmp_path):
        kept = Kept(tmp_path / "store", RECIPES["plain"], WIDE)
        for updates, weights in rounds_of(4, seed=1, least=4, size=WIDE):
            kept.record(updates, weights)
        return kept

    def file_of(self, kept, name):
        (stretch,) = kept.store.memory()._stretches
        return stretch.vectors.source.place(0, name)

    def test_a_flipped_bit_is_told_when_the_vector_is_read_and_stops_nobody_else(self, kept):
        file = self.file_of(kept, "bob")
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        kept.store.memory().influence(["ada"])
        for use in (
            lambda memory: memory.influence(["bob"]),
            lambda memory: memory.without(["bob"]),
            lambda memory: kept.put(memory.without(["ada"])),  # bob's is corrected
        ):
            with pytest.raises(DataError, match="it is not the one that was written, so take it from a backup"):
                use(kept.store.memory())
        assert "ada" in kept.store.memory().clients

    def test_one_clients_vector_in_the_place_of_anothers(self, kept):
        shutil.copyfile(self.file_of(kept, "ada"), self.file_of(kept, "bob"))
        with pytest.raises(DataError, match="it is not the one that was written"):
            kept.store.memory().influence(["bob"])

    def test_a_vector_that_is_missing(self, kept):
        memory, file = kept.store.memory(), self.file_of(kept, "bob")
        file.unlink()
        with pytest.raises(DataError, match="is missing: take it from a backup"):
            memory.influence(["bob"])
        with pytest.raises(DataError, match="is missing: take it from a backup"):
            kept.put(memory)
        with pytest.raises(DataError, match=r"The vectors of 'bob' are missing in .*/vectors: take it from a backup"):
            kept.store.load(kept.model)
        shutil.rmtree(file.parent)
        with pytest.raises(DataError, match=r"The vectors of .* and 5 more are missing"):
            kept.store.load(kept.model)

    def test_a_memory_of_a_state_that_is_no_more(self, kept):
        memory = kept.store.memory()
        kept.forget(["ada"])
        for use in (lambda: memory.influence(["bob"]), lambda: kept.put(memory)):
            with pytest.raises(RequestError, match="a later state has taken its place: load the store again"):
                use()
        assert "ada" not in kept.store.memory().clients

    def test_another_run_has_changed_the_store_before_its_memory_is_looked_at(self, kept):
        other = StateStore(kept.store.folder)
        kept.forget(["ada"])
        with pytest.raises(RequestError, match="another run has changed"):
            other.memory()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_vectors_that_are_no_numbers_are_never_put_there(self, tmp_path, value):
        with pytest.raises(DataError, match="NaN or infinite"):
            list(write_vectors(tmp_path / "vectors", Held(ada=torch.tensor([1.0, value]))))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_a_file_can_have_no_second_name_it_is_copied(tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    on_disk, fsync = [], os.fsync
    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(
        os, "fsync", lambda handle: (on_disk.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    kept = Kept(tmp_path / "store", RECIPES["plain"])
    for updates, weights in rounds_of(3, seed=4):
        kept.record(updates, weights)
    on_disk.clear()
    kept.forget(["ada"])
    for file in (kept.store.state / "vectors").iterdir():
        assert [place for place in on_disk if place.endswith(file.name)], "a copy is on the disk before it counts"
        assert file.stat().st_mode & 0o777 == 0o600


def test_two_stretches_with_the_same_pulls_have_one_file_which_nobody_writes_into(tmp_path):
    kept, updates = Kept(tmp_path / "store", RECIPES["momentum"]), next(rounds_of(1, seed=5))
    kept.record(*updates)
    before, other = names_of(kept.store.state), tmp_path / "other"
    shutil.copytree(kept.store.state, other, copy_function=os.link)
    times = {file.name: file.stat().st_mtime_ns for file in (other / "vectors").iterdir()}
    kept.record(*updates)
    assert names_of(kept.store.state) == before
    assert {file.name: file.stat().st_mtime_ns for file in (other / "vectors").iterdir()} == times


def test_a_store_of_an_earlier_version_goes_on(tmp_path):
    """Its vectors are in the memory's own file."""
    kept = Kept(tmp_path / "store", RECIPES["momentum"])
    for updates, weights in rounds_of(6, seed=6):
        kept.record(updates, weights)
    memory = kept.store.memory()
    memory.save(tmp_path / "memory.safetensors")
    shutil.rmtree(kept.store.state / "vectors")
    shutil.move(tmp_path / "memory.safetensors", kept.store.state / "memory.safetensors")
    assert_same(kept.held, StateStore(kept.store.folder).memory())
    for updates, weights in rounds_of(2, seed=7):
        kept.record(updates, weights)
    kept.forget(["ada"])


def test_a_memory_in_a_folder_of_its_own_can_be_put_into_a_store(tmp_path):
    kept = Kept(tmp_path / "store", RECIPES["momentum"])
    filed = Memory(Snapshot(torch.zeros(SIZE, dtype=torch.float64), {}), RECIPES["momentum"], folder=tmp_path / "own")
    for updates, weights in rounds_of(5, seed=8):
        for own in (filed, kept.held):
            own.record(updates, weights, learning_rate=0.1, steps=2)
    kept.put(filed)
    assert_same(kept.held, kept.store.memory())
    kept.forget(["ada"])
    assert "ada" in Memory.load(tmp_path / "own").clients
