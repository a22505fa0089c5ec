"""A memory whose vectors are on disk: the same as one in memory, whatever happens in between."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.recipe import FedAvgM, Recipe
from expunge.forgetting import forget

SIZE = 5
NAMES = ("ada", "bob", "c/../d", 'd"\n', "e\x00", "\ud800")  # whatever a client calls itself
RECIPES = {"plain": Recipe(), "momentum": Recipe(server=FedAvgM(1.0, 0.5))}


def rounds_of(count, seed, names=NAMES, size=SIZE, least=2):
    """Updates and weights of rounds, each of some of the clients."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = torch.randint(least, len(names) + 1, (), generator=source).item()
        taken = [names[at] for at in torch.randperm(len(names), generator=source)[:drawn].tolist()]
        updates = {name: torch.randn(size, generator=source, dtype=torch.float64) for name in taken}
        yield updates, {name: 1.0 + len(name) for name in taken}


def both(folder, recipe, count=6, seed=0, start=None):
    start = Snapshot(torch.zeros(SIZE, dtype=torch.float64), {}) if start is None else start
    held, filed = Memory(start, recipe), Memory(start, recipe, folder=folder)
    for updates, weights in rounds_of(count, seed):
        for memory in (held, filed):
            memory.record(updates, weights, learning_rate=0.1, steps=2)
    return held, filed


def assert_same(one, other):
    assert set(one.clients) == set(other.clients) == set(other.vectors)
    assert one.rounds == other.rounds
    assert one.shares == other.shares
    assert one.size == other.size
    for name in one.clients:
        torch.testing.assert_close(one.vectors[name], other.vectors[name], rtol=1e-12, atol=1e-14)
        assert one.loudness([name]) == pytest.approx(other.loudness([name]))
        assert_same_pulls(one, other, name)


def assert_same_pulls(one, other, name):
    try:
        expected = one.pulls([name], None)
    except RequestError as problem:  # it was alone in all rounds of a stretch
        with pytest.raises(RequestError, match=str(problem)):
            other.pulls([name], None)
        return
    for mine, theirs in zip(expected, other.pulls([name], None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
class TestAsInMemory:
    def test_after_every_round_also_read_anew(self, tmp_path, recipe):
        start = Snapshot(torch.zeros(SIZE, dtype=torch.float64), {})
        held, filed = Memory(start, recipe), Memory(start, recipe, folder=tmp_path / "kept")
        for updates, weights in rounds_of(11, seed=1):
            for memory in (held, filed):
                memory.record(updates, weights, learning_rate=0.1, steps=2)
            assert_same(held, filed)
            assert_same(held, Memory.load(tmp_path / "kept"))
        assert filed.clients == held.clients
        assert torch.equal(Memory.load(tmp_path / "kept")._place.now, held._place.now)

    @settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), st.integers(0, 50), st.integers(1, 9))
    def test_after_departures_and_more_rounds(self, tmp_path_factory, recipe, gone, seed, count):
        folder = tmp_path_factory.mktemp("memory") / "kept"
        held, filed = both(folder, recipe, count, seed)
        held, draft = held.without(gone), filed.without(gone)
        assert_same(held, draft)
        stay = tuple(name for name in NAMES if name not in gone)
        for number, (updates, weights) in enumerate(rounds_of(4, seed, names=stay)):
            for memory in (held, draft):
                memory.record(updates, weights, learning_rate=0.1, steps=2)
            if number == 1:
                draft.save()
            assert_same(held, draft)
        assert_same(held, Memory.load(folder))
        assert_same(held.without(stay[:1]), draft.without(stay[:1]))


class TestUntilItIsSaved:
    def test_the_folder_is_as_it_was(self, tmp_path):
        held, filed = both(tmp_path / "kept", Recipe())
        before = (tmp_path / "kept" / "rows.sqlite").read_bytes()
        left = filed.without(["ada"])
        left.record(*next(rounds_of(1, seed=9, names=NAMES[1:])))
        filed.copy().record(*next(rounds_of(1, seed=9)))
        filed.bound_to(Snapshot(torch.ones(SIZE, dtype=torch.float64), {}))
        assert (tmp_path / "kept" / "rows.sqlite").read_bytes() == before
        assert_same(held, filed)

    def test_then_nothing_is_left_of_the_leaver_in_any_byte(self, tmp_path):
        names = ("lovelace", "bob", "cyd")
        filed = Memory(Snapshot(torch.zeros(2000), {}), folder=tmp_path / "kept")
        for updates, weights in rounds_of(3, seed=3, names=names, size=2000, least=3):
            filed.record({name: own.float() for name, own in updates.items()}, weights)
        gone, met = (filed.vectors[name].numpy().tobytes()[:64] for name in ("lovelace", "bob"))
        for trace in (b"lovelace", gone, met):
            assert trace in _all_bytes(tmp_path)
        left = filed.without(["lovelace"])
        assert set(left.clients) == {"bob", "cyd"}
        left.save()
        for trace in (b"lovelace", gone, met):  # what the clients that met it had before tells its vector, too
            assert trace not in _all_bytes(tmp_path)
        total = left.vectors["bob"] + left.vectors["cyd"]
        torch.testing.assert_close(total, torch.zeros(2000), atol=2e-6, rtol=0)

    @pytest.mark.parametrize("first", [True, False])
    def test_a_leaver_who_was_alone_in_its_stretch_goes_too(self, tmp_path, first):
        filed = Memory(Snapshot(torch.zeros(2), {}), folder=tmp_path / "kept")
        rounds = [{"lovelace": torch.tensor([3.0, 4.0])}, {"bob": torch.tensor([1.0, 4.0]), "cyd": torch.ones(2)}]
        for updates in rounds if first else reversed(rounds):
            filed.record(updates, dict.fromkeys(updates, 1))
        left = filed.without(["lovelace"]).bound_to(Snapshot(torch.zeros(2), {}))
        left.record({"bob": torch.tensor([1.0, 4.0]), "cyd": torch.ones(2)}, {"bob": 1, "cyd": 1})
        left.save()
        assert b"lovelace" not in _all_bytes(tmp_path)
        assert Memory.load(tmp_path / "kept").clients == ("bob", "cyd")
        torch.testing.assert_close(left.vectors["bob"], torch.tensor([0.0, 3.0]))  # (1, 4) - (1, 1), twice


class TestWhatIsTouched:
    """A round and a departure cost by who is concerned, not by the size of the federation."""

    @pytest.fixture
    def many(self, tmp_path):
        """2000 clients in 100 rounds of 20, so that everybody takes part once, and client-7 in two rounds."""
        names = [f"client-{number}" for number in range(2000)]
        memory = Memory(Snapshot(torch.zeros(1500), {}), folder=tmp_path / "kept")
        for start in range(0, 2000, 20):
            chosen = names[start : start + 20]
            if start == 1000:
                chosen = [*chosen[1:], "client-7"]
            memory.record({name: torch.full((1500,), float(len(name))) for name in chosen}, dict.fromkeys(chosen, 1.0))
        return memory

    def test_a_round_its_participants(self, many):
        asked, names = _heard(many), ("client-3", "client-1999", "new")
        many.record({name: torch.ones(1500) for name in names}, dict.fromkeys(names, 1.0))
        assert _rows(asked, "SELECT") == {"client-3", "client-1999", "new"}
        assert _rows(asked, "INSERT") == {"client-3", "client-1999", "new"}
        assert sum("'round " in text for text in asked) == 1

    def test_a_departure_those_who_met_the_leaver(self, many):
        asked = _heard(many)
        many.require_model(Snapshot(many._place.now, {}))
        many.influence(["client-7"])
        many.loudness(["client-7"])
        many.norms(["client-7"])
        left = many.without(["client-7"])
        assert _rows(asked, "SELECT") == {"client-7"}
        assert _rows(asked, "INSERT") == set()
        left.save()
        met = {f"client-{number}" for number in (*range(20), *range(1001, 1020))} - {"client-7"}
        assert _rows(asked, "INSERT") == met
        assert _rows(asked, "DELETE") == {"client-7"}
        assert sum("'round " in text for text in asked) == 2
        assert len(left.clients) == 1998  # client-1000 was never drawn


class TestGoingOn:
    def test_before_the_first_round_recipe_and_start_are_known(self, tmp_path):
        model = nn.Linear(2, 1)
        Memory(model, RECIPES["momentum"], folder=tmp_path / "kept")
        found = Memory.load(tmp_path / "kept")
        assert found.recipe == RECIPES["momentum"]
        found.require_model(Snapshot.of(model))
        with pytest.raises(RequestError, match="do not lead to this model"):
            found.require_model(Snapshot.of(nn.Linear(2, 1)))

    def test_named_tensors_are_recorded_after_a_restart(self, tmp_path):
        model = nn.Linear(2, 1)
        held, filed = Memory(model), Memory(model, folder=tmp_path / "kept")
        for number in range(3):
            named = {
                name: {"bias": torch.tensor([2.0 + number]), "weight": torch.tensor([[float(len(name)), 4.0]])}
                for name in ("ada", "b")
            }
            for memory in (held, filed):
                memory.record(named, {"ada": 1, "b": 3}, learning_rate=0.1, steps=1)
            filed = Memory.load(tmp_path / "kept")
        assert_same(held, filed)

    def test_a_draft_that_cannot_be_saved_stays_one(self, tmp_path):
        _, filed = both(tmp_path / "kept", Recipe())
        draft, other = filed.without(["ada"]), filed.without(["bob"])
        other.save()
        with pytest.raises(RequestError, match="gone on"):
            draft.save()
        assert "ada" in Memory.load(tmp_path / "kept").clients


class TestRefusals:
    def test_a_memory_that_the_folder_has_gone_on_from(self, tmp_path):
        _, filed = both(tmp_path / "kept", Recipe())
        filed.without(["ada"]).save()
        for use in (
            lambda: filed.influence(["bob"]),
            lambda: filed.record(*next(rounds_of(1, seed=0))),
            filed.save,
            lambda: filed.without(["bob"]),
        ):
            with pytest.raises(RequestError, match="gone on"):
                use()

    def test_a_folder_that_is_in_use_or_holds_none(self, tmp_path):
        both(tmp_path / "kept", Recipe())
        with pytest.raises(RequestError, match=r"Memory\.load"):
            Memory(folder=tmp_path / "kept")
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match="no memory"):
            Memory.load(tmp_path / "empty")
        with pytest.raises(RequestError, match=r"memory\.save\(path\)"):
            Memory().save()

    def test_a_damaged_vector_is_told(self, tmp_path):
        _, filed = both(tmp_path / "kept", Recipe())
        with sqlite3.connect(tmp_path / "kept" / "rows.sqlite") as rows:
            rows.execute("UPDATE rows SET value = zeroblob(length(value)) WHERE key LIKE 'vector % \"ada\"'")
        with pytest.raises(DataError, match="not the one that was written"):
            filed.influence(["ada"])
        (tmp_path / "kept" / "rows.sqlite").write_bytes(b"no database" * 1000)
        with pytest.raises(DataError, match="damaged"):
            Memory.load(tmp_path / "kept")

    def test_a_round_that_cannot_be_written_is_not_recorded(self, tmp_path):
        held, filed = both(tmp_path / "kept", Recipe())
        other = sqlite3.connect(tmp_path / "kept" / "rows.sqlite", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        filed._folder.rows._connection.execute("PRAGMA busy_timeout = 0")
        with pytest.raises(RequestError, match="locked"):
            filed.record(*next(rounds_of(1, seed=4)))
        other.execute("ROLLBACK")
        other.close()
        assert_same(held, filed)


def test_a_kill_at_any_moment_leaves_a_whole_memory(tmp_path):
    """Killed while it records, it holds the rounds that were recorded, and nothing of the one that was cut off."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path / "kept")], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 12:
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    found = Memory.load(tmp_path / "kept")
    assert found.rounds >= 12
    total = torch.stack([found.vectors[name] for name in found.clients]).sum(dim=0)
    torch.testing.assert_close(total, torch.zeros(30_000), atol=1e-4, rtol=0)  # a round in half would not add up
    moved = Memory(Snapshot(torch.zeros(30_000), {}))
    for number in range(found.rounds):
        moved.record(*_round(number))
    found.require_model(Snapshot(moved._place.now, {}))
    assert_close_vectors(moved, found)


def test_a_forget_gives_a_draft_and_says_so(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = {name: (torch.randn(12, 3), torch.randint(0, 2, (12,))) for name in ("ada", "bob", "cyd")}
    memories = Memory(model), Memory(model, folder=tmp_path / "kept")
    for _ in range(3):
        updates = {}
        for name, (inputs, targets) in data.items():
            loss = nn.functional.cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            named = zip(dict(model.named_parameters()), gradients, strict=True)
            updates[name] = {key: -0.1 * gradient for key, gradient in named}
        for memory in memories:
            memory.record(updates, dict.fromkeys(data, 12), learning_rate=0.1, steps=1)
        with torch.no_grad():
            for key, own in model.named_parameters():
                own += torch.stack([update[key] for update in updates.values()]).mean(dim=0)
    held, filed = (forget(model, data, "ada", memory=memory, progress=False) for memory in memories)
    torch.testing.assert_close(held.state.model.parameters, filed.state.model.parameters)
    assert any("outcome.memory.save()" in warning for warning in filed.warnings)
    assert not any("save()" in warning for warning in held.warnings)
    assert "ada" in Memory.load(tmp_path / "kept").clients
    filed.memory.save()
    assert_same(held.memory, Memory.load(tmp_path / "kept"))


def assert_close_vectors(one, other):
    for name in one.clients:
        torch.testing.assert_close(one.vectors[name], other.vectors[name])


def _round(number):
    source = torch.Generator().manual_seed(number)
    names = [f"client-{at}" for at in torch.randperm(40, generator=source)[:10].tolist()]
    return {name: torch.randn(30_000, generator=source) for name in names}, dict.fromkeys(names, 1.0)


def _heard(memory):
    """What the database is asked for from now on."""
    asked = []
    memory._folder.rows._connection.set_trace_callback(asked.append)
    return asked


def _rows(asked, verb):
    """Whose vectors are read, put or deleted."""
    keys = [re.search(r"'vector \d+ \"(.*?)\"'", text) for text in asked if text.startswith(verb)]
    return {key.group(1) for key in keys if key is not None}


def _all_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


_CHILD = """
import sys, torch
from expunge.core.vectors import Snapshot
from expunge.federation.keeping.memory import Memory
memory = Memory(Snapshot(torch.zeros(30_000), {}), folder=sys.argv[1])
for number in range(10_000):
    source = torch.Generator().manual_seed(number)
    names = [f"client-{at}" for at in torch.randperm(40, generator=source)[:10].tolist()]
    memory.record({name: torch.randn(30_000, generator=source) for name in names}, dict.fromkeys(names, 1.0))
    print(memory.rounds, flush=True)
"""
