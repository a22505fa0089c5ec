"""Killed at any moment inside `--erase`, a run folder still has the leaver, or nothing of it, and is usable."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import expunge
from bench import erasing
from bench.erasing import LEAVER, Erasure
from expunge.bench.run_folder import RunFolder
from expunge.errors import ModelError, RequestError
from expunge.unlearning.request import Request


def outcome_of(place, *how):
    """Run the script that kills, and what it counted."""
    places = [str(Path(erasing.__file__).parents[1]), str(Path(expunge.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, erasing.__file__, str(place), *map(str, how)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_before_every_file_operation(tmp_path):
    counts = outcome_of(tmp_path, "every")
    assert min(counts.values()) > 10


@pytest.mark.slow
def test_again_while_the_next_run_tidies_up(tmp_path):
    counts = outcome_of(tmp_path, "twice", 9)
    assert min(counts.values()) > 3


@pytest.mark.slow
def test_a_dozen_at_random_moments_of_the_command(tmp_path):
    assert sum(outcome_of(tmp_path, "random", 12).values()) == 12


@pytest.mark.slow
def test_before_every_file_operation_of_keeping_a_try(tmp_path):
    counts = outcome_of(tmp_path, "saving")
    assert counts["before"] > 20
    assert counts["after"] > 0


@pytest.fixture(scope="module")
def erasure(tmp_path_factory):
    return Erasure(tmp_path_factory.mktemp("erasure"))


@pytest.fixture
def fresh(erasure):
    erasure.fresh()
    return erasure


def test_a_power_cut_finds_the_new_state_before_the_book_and_the_book_before_anything_is_deleted(fresh, monkeypatch):
    """What is not on the disk itself may be lost, in any order: so the order is looked at."""
    done = []

    def watched(name, describe):
        real = getattr(os, name)

        def call(*arguments, **named):
            told = describe(*arguments)
            answer = real(*arguments, **named)
            done.append((name, told))
            return answer

        monkeypatch.setattr(os, name, call)

    watched("fsync", lambda handle: os.path.realpath(f"/proc/self/fd/{handle}"))
    watched("rename", lambda source, target: (str(source), str(target)))
    watched("replace", lambda source, target: (str(source), str(target)))
    watched("unlink", lambda path: str(path))
    fresh.erase()
    run, state = str(fresh.copy), str(fresh.copy / "state-2")
    books = [at for at, (name, told) in enumerate(done) if name == "replace" and told[1] == f"{run}/run.json"]
    (moved,) = (at for at, (name, told) in enumerate(done) if name == "rename" and told[1] == state)
    staged = done[moved][1][0]
    on_disk = {told for name, told in done[:moved] if name == "fsync"}
    written = [file.relative_to(state) for file in (fresh.copy / "state-2").rglob("*")]
    assert len(written) == 5
    assert {staged, *(f"{staged}/{file}" for file in written)} <= on_disk
    assert ("fsync", run) in done[moved : books[0]]
    new_book = done[books[0]][1][0]
    assert ("fsync", new_book) in done[: books[0]]
    deleted = next(at for at, (name, told) in enumerate(done) if name == "unlink" and at > books[0])
    assert ("fsync", run) in done[books[0] : deleted]
    assert not [told for name, told in done[: books[0]] if name == "unlink"]


class TestTwoAtOnce:
    def test_the_second_is_told_at_once_and_nothing_is_lost(self, fresh):
        first, second = RunFolder.open(fresh.copy), RunFolder.open(fresh.copy)
        with first.alone():
            with pytest.raises(RequestError, match=f"Another run is at work on {fresh.copy}: wait"):
                second.erase(Request.of(LEAVER), fresh.outcome, fresh.federation)
            assert RunFolder.open(fresh.copy) == first  # looking is allowed
        assert fresh.check() == "before"

    def test_who_comes_too_late_is_told_and_nothing_is_lost(self, fresh):
        first, second = RunFolder.open(fresh.copy), RunFolder.open(fresh.copy)
        first.erase(Request.of(LEAVER), fresh.outcome, fresh.federation)
        for late in (second.erase, second.save):
            with pytest.raises(RequestError, match=f"Another run has changed {fresh.copy} meanwhile: nothing was"):
                late(Request.of("client-0"), fresh.outcome, fresh.federation)
        assert fresh.check() == "after"

    def test_whoever_looks_while_another_erases_is_told(self, fresh):
        first = RunFolder.open(fresh.copy)
        with first.alone():
            content = json.loads((fresh.copy / "run.json").read_text())
            content.pop("digest")
            (fresh.copy / "run.json").write_text(json.dumps({**content, "erasing": True}))
            with pytest.raises(RequestError, match="Another run is at work on"):
                RunFolder.open(fresh.copy)

    @pytest.mark.slow
    def test_two_commands(self, fresh):
        """One deletion was lost here without a word: now it is done, or the command says so and can be repeated."""
        environment = {**os.environ, "PYTHONPATH": str(Path(expunge.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-c", "from expunge.cli import main; main()", "forget", str(fresh.copy), "--erase"]

        def start(name):
            arguments = [*program, "--override", "two at once", "--method", "fine-tuning", "--client", name]
            return subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)

        said = {}
        running = {name: start(name) for name in (LEAVER, "client-0")}
        for name, process in running.items():
            said[name] = process.communicate(timeout=300)[1]
        failed = {name for name, process in running.items() if process.returncode}
        assert set(RunFolder.open(fresh.copy).departed) == set(running) - failed
        assert len(failed) <= 1
        for name in failed:
            assert "Another run " in said[name]
            assert start(name).communicate(timeout=300)
        assert set(RunFolder.open(fresh.copy).departed) == {LEAVER, "client-0"}


def test_what_cannot_be_deleted_is_told(fresh, monkeypatch):
    """The old state is still there, and the next run knows that it does not count."""
    real = shutil.rmtree

    def all_but_the_old_state(path, **how):
        if Path(path).name != "state-1":
            real(path, **how)

    monkeypatch.setattr("expunge.federation.keeping.files.shutil.rmtree", all_but_the_old_state)
    with pytest.raises(RequestError, match=r"state-1 cannot be deleted: remove it yourself"):
        fresh.erase()
    monkeypatch.undo()
    assert fresh.check() == "after"


def test_a_state_that_cannot_be_read_back_does_not_take_the_place_of_one_that_can(fresh):
    parameters = fresh.outcome.state.model.parameters * float("nan")
    broken = dataclasses.replace(fresh.outcome.state, model=fresh.outcome.state.model.moved(parameters))
    with pytest.raises(ModelError, match="NaN or infinite"):
        RunFolder.open(fresh.copy).erase(
            Request.of(LEAVER), dataclasses.replace(fresh.outcome, state=broken), fresh.federation
        )
    assert fresh.check() == "before"


def test_what_dead_processes_left_is_gone_after_the_next_opening(fresh):
    """Who has the lock is alone in the folder itself; beside the tries somebody may be writing a report."""
    for parent, process in ((fresh.copy, os.getpid()), (fresh.copy / "without-client-0", 999999999)):
        left = parent / f".staging-{process}-x"
        left.mkdir()
        (left / "memory.safetensors").write_bytes(min(fresh.traces.pieces))
    (fresh.copy / "state-7").mkdir()
    (fresh.copy / "state-7" / "memory.safetensors").write_bytes(min(fresh.traces.pieces))
    aside = fresh.copy / "without-client-0" / ".staging-999999999-x.old-fine-tuning"
    (fresh.copy / "without-client-0" / "fine-tuning").rename(aside)
    assert fresh.check() == "before"  # with all that was tried: what had been moved aside is back
    assert not (fresh.copy / "state-7").exists()


def test_a_report_that_is_being_written_is_left_alone_until_somebody_leaves_for_good(fresh):
    writing = fresh.copy / "without-client-0" / f".staging-{os.getpid()}-x"
    writing.mkdir()
    run = RunFolder.open(fresh.copy)
    assert writing.exists()
    run.erase(Request.of(LEAVER), fresh.outcome, fresh.federation)
    assert fresh.check() == "after"


def test_folders_are_for_their_owner_only(fresh):
    fresh.erase()
    assert fresh.copy.stat().st_mode & 0o777 == 0o700
    for place in (fresh.copy / "state-2", *(fresh.copy / "state-2").rglob("*")):
        assert place.stat().st_mode & 0o777 == (0o700 if place.is_dir() else 0o600)
