"""The folder of a federation that lives on: the old state or the new one, whole; older ones are read or refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

import expunge
from expunge.bench.run_folder import RunFolder
from expunge.bench.scenario import Scenario
from expunge.errors import DataError, ExpungeError, RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.plan import Schedule
from federation import storing
from federation.storing import AFTER, BEFORE, FIRST, SECOND, found, model, write
from federation.test_wire import FOREIGN, changed, leaves


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.slow
def test_killed_before_every_file_operation(tmp_path):
    places = [str(Path(storing.__file__).parents[1]), str(Path(expunge.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, storing.__file__, str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert min(counts.values()) > 4


class TestTwoAtOnce:
    def test_the_second_is_told(self, folder):
        first, second = StateStore(folder), StateStore(folder)
        with first.alone():
            with pytest.raises(RequestError, match=f"Another run is at work on {folder}: wait until it has ended"):
                second.write(SECOND, AFTER, model())
            first.write(SECOND, AFTER, model())
        with pytest.raises(RequestError, match=f"Another run has changed {folder} meanwhile: nothing was written"):
            second.write(SECOND, AFTER, model())
        assert found(folder) == "after"

    def test_what_another_run_is_writing_is_not_tidied_away(self, folder):
        first = StateStore(folder)
        with first.alone():
            for name in ("state-2", ".staging-999999999-x"):
                (folder / name).mkdir()
            assert StateStore(folder).book == first.book
            assert (folder / "state-2").exists()
            assert (folder / ".staging-999999999-x").exists()
        assert found(folder) == "before"


def test_only_the_owner_may_look(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    for place in folder.rglob("*"):
        assert place.stat().st_mode & 0o777 == (0o700 if place.is_dir() else 0o600), place


def test_vectors_that_are_missing_are_told_by_name(folder):
    file = folder / "state-1" / "memory.safetensors"
    file.unlink()
    state = StateStore(folder).load(model())
    assert state.memory is None
    (sentence,) = state.lost
    assert sentence.startswith(f"{file} is missing, though vectors were kept: ")


class TestVersions:
    """In version 1: vectors under the clients' own names, no digests, methods under other names."""

    @staticmethod
    def first_version(folder, **changes):
        store, state = StateStore(folder), folder / "state-1"
        rounds = json.dumps(BEFORE.memory.shares)
        vectors = {name: vector.clone() for name, vector in BEFORE.memory.vectors.items()}
        save_file(vectors, state / "memory.safetensors", metadata={"rounds": rounds})
        parts = {
            "weight": BEFORE.model.parameters[:120].view(3, 40).clone(),
            "bias": BEFORE.model.parameters[120:].clone(),
        }
        save_file(parts, state / "model.safetensors")
        content = {
            name: value for name, value in store.book.as_dict().items() if name not in ("version", "state", "kept")
        }
        old = {"format": 1, "number": 1, **content, **changes}
        (folder / "store.json").write_text(json.dumps(old))

    def test_the_first_is_converted(self, folder):
        names = [
            "hf-kcu",
            "hf-kcu+recovery",
            "hf-kcu-trajectory",
            "hf-kcu-gradient+recovery",
            "hf-kcu-paper",
            "retrain",
        ]
        schedule = dataclasses.asdict(Schedule(0.1, 5.0, 2))
        records = [{"method": name, "clients": ["zoe"]} for name in names]
        self.first_version(folder, forgotten=records, schedule=schedule)
        store = StateStore(folder)
        now = [record["method"] for record in store.book.forgotten]
        assert now == ["retrace", "retrace+recovery", "retrace-krylov", "hf-kcu+recovery", "hf-kcu-paper", "retrain"]
        loaded = store.load(model())
        assert loaded.schedule == Schedule(0.1, 5.0, 2)
        assert loaded.model.digest == BEFORE.model.digest
        assert set(loaded.memory.clients) == set(BEFORE.memory.clients)
        store.write(dataclasses.replace(store.book, **{"departed": ("ada",)}), AFTER, model())
        assert found(folder) == "after"
        assert json.loads((folder / "store.json").read_text())["version"] == 2

    def test_an_unfinished_request_of_the_first_is_refused(self, folder):
        """It was begun by a method that is called otherwise now, and what has its name does something else."""
        self.first_version(folder, pending={"method": "hf-kcu", "clients": ["ada"], "samples": {}})
        with pytest.raises(DataError, match="unfinished request: finish it with the expunge that began it"):
            StateStore(folder)

    @pytest.mark.parametrize("version", [1, 3, None, "2"])
    def test_another_one_is_refused(self, folder, version):
        content = json.loads((folder / "store.json").read_text())
        del content["digest"]
        (folder / "store.json").write_text(json.dumps({**content, "version": version}))
        with pytest.raises(DataError, match=r"store.json is of version .*, not 2: use the expunge that made it"):
            StateStore(folder)


def refused_or_sound(file, look):
    """Every place in the book with every wrong thing: an error of ours in one line, or something that can be used."""
    good, refusals = file.read_text(), []
    content = json.loads(good)
    del content["digest"]  # that alone would tell
    for path in leaves(content):
        for value in [*FOREIGN, 1e308, -1, 10**30, "\udcff"]:
            file.write_text(json.dumps(changed(content, path, value)))
            try:
                look()
            except ExpungeError as problem:
                refusals.append(str(problem))
    file.write_text(good)
    assert len(refusals) > 30
    assert not [sentence for sentence in refusals if "\n" in sentence]


def test_no_flipped_bit_in_the_book_passes(folder):
    file, book = folder / "store.json", StateStore(folder).book
    good = file.read_bytes()
    for bit in range(0, 8 * len(good), 3):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            assert StateStore(folder).book == book  # a blank that is another blank now
        except ExpungeError:
            continue
        assert "digest" not in json.loads(changed) or json.loads(changed) == json.loads(good)
    file.write_bytes(good)
    assert StateStore(folder).book == book


def test_a_book_with_something_else_in_it(folder):
    record = {"method": "retrace", "clients": ["zoe"]}
    store = StateStore(folder)
    state = dataclasses.replace(BEFORE, schedule=Schedule(0.1, 5.0, 2, epochs=1))
    store.write(dataclasses.replace(FIRST, pending={"clients": []}, forgotten=(record,)), state, model())
    refused_or_sound(folder / "store.json", lambda: StateStore(folder).load(model()))
    assert store.load(model()).model.digest == BEFORE.model.digest  # whatever the book said, nothing was deleted


def test_a_run_with_something_else_in_it(tmp_path):
    federation = Scenario(model="softmax", clients=2).build()
    snapshot = federation.initial()
    run = RunFolder.create(tmp_path / "run", federation, dataclasses.replace(BEFORE, model=snapshot))
    refused_or_sound(run.path / "run.json", lambda: RunFolder.open(run.path).trained(federation))
    assert run.trained(federation).model.digest == snapshot.digest
