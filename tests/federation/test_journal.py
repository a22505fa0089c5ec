"""Work that was killed goes on where it was, and comes to the same end, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import expunge
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, NumericalError, RequestError, SiteError
from expunge.federation.engines.engine import Cost, measured
from expunge.federation.keeping.journal import Journal, JournaledEngine
from expunge.federation.messages.tasks import Gradient, Losses
from expunge.unlearning.request import Request
from federation.small import Watching, clients, mlp
from federation.worked import MODEL, forget, local_engine
from unlearning.presets import CORRECTED, KRYLOV

DATA = clients(ada=6, bob=4)


@pytest.fixture
def engine():
    return Watching(mlp(), CrossEntropy(), DATA)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal")


def gradients(shift=0.0):
    model = Snapshot.of(mlp())
    return dict.fromkeys(DATA, Gradient(model.moved(model.parameters + shift)))


class Failing(Watching):
    """Fails at what it is asked at these numbers, from 0 on."""

    def __init__(self, *numbers, problem=SiteError):
        super().__init__(mlp(), CrossEntropy(), DATA)
        self.numbers, self.problem, self.count = numbers, problem, -1

    def ask(self, tasks):
        self.count += 1
        if self.count in self.numbers:
            raise self.problem("ada cannot do that")
        return super().ask(tasks)


@pytest.mark.parametrize("problem", [SiteError, NumericalError])
def test_what_the_work_went_on_without_fails_again_when_it_is_resumed(journal, problem):
    def work(engine):
        found, own = [], JournaledEngine(engine, journal)
        for shift in (0.0, 1.0, 2.0):
            try:
                found.append(float(own.ask(gradients(shift))["ada"].total.norm()))
            except problem as failed:
                found.append(str(failed))
        return found

    first = work(Failing(1, problem=problem))
    assert first[1] == "ada cannot do that"
    assert work(Failing()) == first
    assert len(journal) == 3


def test_who_failed_where_the_work_ended_is_asked_again(journal):
    own = JournaledEngine(Failing(1), journal)
    own.ask(gradients())
    with pytest.raises(SiteError, match="ada cannot do that"):
        own.ask(gradients(1.0))
    assert len(journal) == 1
    again = JournaledEngine(Failing(), journal)
    assert [set(again.ask(gradients(shift))) for shift in (0.0, 1.0)] == [set(DATA)] * 2


def test_replies_from_the_journal_are_the_same_and_cost_nothing_again(engine, journal):
    first = JournaledEngine(engine, journal)
    live = [first.ask(gradients(shift)) for shift in (0.0, 1.0)]
    spent = replace(engine.cost)
    fresh = Watching(mlp(), CrossEntropy(), DATA)
    again = JournaledEngine(fresh, journal)
    kept = [again.ask(gradients(shift)) for shift in (0.0, 1.0)]
    assert not hasattr(fresh, "asked")
    for one, other, truth in zip(live, kept, engine.replied, strict=True):
        for name in DATA:
            assert torch.equal(other[name].total, truth[name].total)
            assert torch.equal(one[name].total, truth[name].total)
            assert other[name].count == truth[name].count
    assert replace(again.cost, seconds=0.0) == spent
    assert again.cost.seconds > 0
    again.ask(gradients(2.0))
    assert len(fresh.asked) == 1
    assert len(journal) == 3


def test_the_time_before_the_crash_is_counted(engine, journal):
    class Slow(Watching):
        def ask(self, tasks):
            time.sleep(0.2)
            return super().ask(tasks)

    JournaledEngine(Slow(mlp(), CrossEntropy(), DATA), journal).ask(gradients())
    again = JournaledEngine(engine, journal)
    with measured(again) as cost:
        again.ask(gradients())
    assert 0.2 < cost.seconds < 2.0
    assert cost.rounds == 1
    assert cost.sample_gradients == 10


def test_clients_are_those_with_which_the_work_began(engine, journal):
    assert JournaledEngine(engine, journal).clients() == {"ada": 6, "bob": 4}
    fewer = Watching(mlp(), CrossEntropy(), clients(ada=3))
    assert JournaledEngine(fewer, journal).clients() == {"ada": 6, "bob": 4}


@pytest.mark.parametrize(
    "other",
    [
        gradients(1e-9),
        dict(reversed(gradients().items())),
        {"ada": gradients()["ada"]},
        {**gradients(), "bob": Gradient(gradients()["bob"].model, exclude=(1,))},
        dict.fromkeys(DATA, Losses(gradients()["ada"].model, torch.zeros(31, dtype=torch.float64), (0.0,))),
    ],
    ids=["model", "order", "clients", "samples", "kind"],
)
def test_the_journal_of_other_work_is_refused(engine, journal, other):
    JournaledEngine(engine, journal).ask(gradients())
    with pytest.raises(RequestError, match=r"is of other work \(round 1 asked something else\): resume with the same"):
        JournaledEngine(engine, journal).ask(other)
    assert len(engine.asked) == 1
    assert len(journal) == 1


def test_a_round_that_failed_is_not_written(engine, journal):
    overflow = dict.fromkeys(DATA, Gradient(Snapshot.of(mlp()).moved(torch.full((31,), 1e308, dtype=torch.float64))))
    with pytest.raises(NumericalError):
        JournaledEngine(engine, journal).ask(overflow)
    assert len(journal) == 0


def damaged_header(file: Path) -> None:
    file.write_bytes(b"\x00" * 20)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))


def foreign(file: Path) -> None:
    save_file({"x": torch.ones(1)}, file, metadata={"round": json.dumps({"asked": "x"})})


def bare(file: Path) -> None:
    save_file({"x": torch.ones(1)}, file)


@pytest.mark.parametrize("damage", [damaged_header, cut, flipped, foreign, bare], ids=lambda damage: damage.__name__)
def test_a_damaged_journal_is_refused(engine, journal, damage):
    JournaledEngine(engine, journal).ask(gradients())
    damage(journal.folder / "0000.safetensors")
    with pytest.raises(DataError, match="is damaged: delete it and start the request again"):
        JournaledEngine(engine, journal).ask(gradients())


def test_a_journal_of_another_version_is_refused(engine, journal):
    JournaledEngine(engine, journal).ask(gradients())
    written = journal.read(0)
    for packed in written.replies.values():
        del packed.described["fields"]["blocks"]
    journal.write(0, written)
    with pytest.raises(DataError, match="of another version: delete it and start the request again"):
        JournaledEngine(engine, journal).ask(gradients())


def test_a_half_written_round_is_as_if_it_had_not_been(engine, journal):
    JournaledEngine(engine, journal).ask(gradients())
    (journal.folder / ".staging-1-x").mkdir()
    (journal.folder / "0000.safetensors").rename(journal.folder / ".staging-1-x" / "0000.safetensors")
    cut(journal.folder / ".staging-1-x" / "0000.safetensors")
    again = JournaledEngine(engine, journal)
    again.ask(gradients())
    assert len(engine.asked) == 2
    assert sorted(path.name for path in journal.folder.iterdir()) == ["0000.safetensors"]


def test_a_folder_that_cannot_be_written(engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write the journal"):
        JournaledEngine(engine, Journal(tmp_path / "file")).ask(gradients())


@pytest.mark.parametrize("options", [KRYLOV, CORRECTED], ids=["trajectory", "gradient"])
def test_a_method_stopped_after_any_round_comes_to_the_same_end(tmp_path, options):
    """Without processes: the engine fails at each round in turn."""

    class StoppedError(Exception):
        pass

    def stopping(rounds):
        engine = local_engine()
        ask, asked = engine.ask, []

        def counted(tasks):
            asked.append(1)
            if len(asked) > rounds:
                raise StoppedError
            return ask(tasks)

        engine.ask = counted
        return engine

    truth, cost = forget(local_engine(), options)
    journal = Journal(tmp_path / "journal")
    for before in range(cost.rounds - 1):
        with pytest.raises(StoppedError):
            forget(JournaledEngine(stopping(1), journal), options)
        assert len(journal) == before + 1
    outcome, resumed = forget(JournaledEngine(stopping(1), journal), options)
    assert torch.equal(outcome, truth)
    assert replace(resumed, seconds=0.0, bytes_down=0) == replace(cost, seconds=0.0, bytes_down=0)


def test_another_request_is_refused(tmp_path):
    journal = Journal(tmp_path / "journal")
    forget(JournaledEngine(local_engine(), journal), CORRECTED)
    with pytest.raises(RequestError, match="is of other work"):
        forget(JournaledEngine(local_engine(), journal), CORRECTED, Request.of("bob"))
    with pytest.raises(RequestError, match="is of other work"):
        forget(JournaledEngine(local_engine(), journal), replace(CORRECTED, damping=0.5))


# Kill -9. The script forgets, round by round, and leaves the outcome in a file.


def start(folder: Path, *moments: str) -> subprocess.Popen[str]:
    places = [str(Path(__file__).parents[1]), str(Path(expunge.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    script = [sys.executable, str(Path(__file__).with_name("worked.py")), str(folder), *moments]
    return subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_killed_at_several_moments_it_comes_to_the_same_end(tmp_path):
    """In the middle of a round, in the middle of writing one down, and right after: each time kill -9."""
    truth, cost = forget(local_engine(), KRYLOV)
    for moment in ("asking 2", "writing 4", "written 6"):
        killed = start(tmp_path, *moment.split())
        output, _ = killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, output
        assert not (tmp_path / "outcome.safetensors").exists()
        expected = {"asking": 2, "writing": 4, "written": 7}[moment.split()[0]]
        assert len(Journal(tmp_path / "journal")) == expected
    finished = start(tmp_path)
    output, _ = finished.communicate(timeout=120)
    assert finished.returncode == 0, output
    outcome = load_file(tmp_path / "outcome.safetensors")["parameters"]
    assert torch.equal(outcome, truth)
    told = Cost(**json.loads((tmp_path / "cost.json").read_text()))
    assert (told.rounds, told.sample_gradients, told.bytes_up) == (cost.rounds, cost.sample_gradients, cost.bytes_up)
    assert told.bytes_down == cost.bytes_down + 3 * 2 * MODEL.stored_bytes  # after each restart, sites get it again
