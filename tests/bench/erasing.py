"""Erase inside a run folder, and die on the way: kill -9 before any file operation, or at any moment.

Each try is a fork of this process, on a copy of one run folder. Afterwards the folder must be as it was before or as
it was to be after, with nothing of the leaver in any of its bytes.

    python erasing.py FOLDER every          before each file operation of an erasure, one after another
    python erasing.py FOLDER twice STEP     the same, and again while the next run tidies up; every STEP-th only
    python erasing.py FOLDER random COUNT   the whole command, at random moments
    python erasing.py FOLDER saving         before each file operation of keeping a try in the place of another
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from expunge import cli
from expunge.bench.run_folder import RunFolder
from expunge.bench.scenario import Scenario
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from killing import killed
from traces import Traces, remembering

SCENARIO = Scenario(
    model="softmax", clients=3, plan=TrainingPlan(rounds=1, epochs=1, batch_size=64, learning_rate=0.1), seed=2
)
LEAVER = "client-1"
METHOD = "fine-tuning"


class Erasure:
    """A run folder with tries and a report in it, what erasing makes of it, and what must then be gone.

    Args:
        place: where the folder and its copies go.
    """

    def __init__(self, place: Path) -> None:
        torch.set_num_threads(1)
        self.pristine, self.copy = place / "pristine", place / "run"
        self.federation = SCENARIO.build()
        state = train(self.federation.engine(), self.federation.initial(), SCENARIO.plan)
        self.run = RunFolder.create(self.pristine, self.federation, state)
        for name in (LEAVER, "client-0"):
            outcome = method(METHOD)(self.federation.engine(), state, Request.of(name))
            self.run.save(Request.of(name), outcome, self.federation)
        (self.pristine / f"without-{LEAVER}" / "results.json").write_text("evidence")
        self.outcome = method(METHOD)(self.federation.engine(), state, Request.of(LEAVER))
        self.before, self.after = state.model.digest, self.outcome.state.model.digest
        memories = [Memory.load(file) for file in self.pristine.rglob("memory.safetensors")]
        kept = [dataclasses.replace(state, memory=memory) for memory in memories if LEAVER in memory.clients]
        assert len(kept) == 2
        gone = [tensor for own in kept for tensor in remembering(own, [LEAVER])]
        self.traces = Traces(gone, self.federation.initial().parameters)
        found = self.traces.kinds_in(self.run.state)
        assert found == {"model.safetensors", "memory.safetensors", "vectors"}, "the search can find it"

    def fresh(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.pristine, self.copy)

    def erase(self) -> None:
        RunFolder.open(self.copy).erase(Request.of(LEAVER), self.outcome, self.federation)

    def command(self) -> None:
        sys.argv = ["expunge", "forget", str(self.copy), "--client", LEAVER, "--method", METHOD, "--erase"]
        sys.argv += ["--override", "a test needs no audit"]
        cli.main()

    def left(self) -> bool:
        return bool(self.traces.found_in(self.copy))

    def check(self) -> str:
        """Open the folder as the next run does; says in which of the two states it is, or fails."""
        run = RunFolder.open(self.copy)
        state = run.trained(self.federation)
        assert state.memory is not None
        assert not list(self.copy.rglob(".staging*"))
        evidence = self.copy / f"without-{LEAVER}" / "results.json"
        assert evidence.read_text() == "evidence"
        if run.departed == ():
            assert state.model.digest == self.before
            assert set(state.memory.clients) == {"client-0", "client-1", "client-2"}
            tried = {name: run.tried(name, self.federation) for name in run.requests()}
            assert {name: [own.method for own in tries] for name, tries in tried.items()} == {
                "without-client-0": [METHOD],
                "without-client-1": [METHOD],
            }
            return "before"
        assert run.departed == (LEAVER,)
        assert state.model.digest == self.after
        assert set(state.memory.clients) == {"client-0", "client-2"}
        assert not self.left(), "something of the leaver is left"
        vectors = set((self.copy / "state-2" / "vectors").iterdir())
        assert len(vectors) == 2
        found = {str(file.relative_to(self.copy)) for file in files(self.copy) if file not in vectors}
        kept = {"state-2/memory.safetensors", "state-2/model.safetensors", str(evidence.relative_to(self.copy))}
        assert found == {".lock", "run.json"} | kept
        return "after"

    def checked(self) -> str:
        """In which state the folder is; where it was not erased, it can be."""
        found = self.check()
        if found == "before":
            self.erase()
            assert self.check() == "after"
        return found


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def every(erasure: Erasure) -> dict[str, int]:
    counts = {"before": 0, "after": 0}
    number = 1
    while True:
        erasure.fresh()
        if not killed(erasure.erase, before=number):
            assert erasure.check() == "after"
            return counts
        counts[erasure.checked()] += 1
        number += 1


def saving(erasure: Erasure) -> dict[str, int]:
    """A try takes the place of an older one of the same method: the old one or the new one is there, whole."""
    counts = {"before": 0, "after": 0}
    parameters = erasure.outcome.state.model.parameters + 1
    model = erasure.outcome.state.model.moved(parameters)
    outcome = dataclasses.replace(erasure.outcome, state=dataclasses.replace(erasure.outcome.state, model=model))
    digests = {erasure.after: "before", model.digest: "after"}
    request, number = Request.of(LEAVER), 1
    while True:
        erasure.fresh()
        again = killed(lambda: RunFolder.open(erasure.copy).save(request, outcome, erasure.federation), before=number)
        run = RunFolder.open(erasure.copy)
        assert not list(erasure.copy.rglob(".staging*"))
        assert run.trained(erasure.federation).model.digest == erasure.before
        (tried,) = run.tried(f"without-{LEAVER}", erasure.federation)
        found = digests[tried.model.digest]
        shown = (erasure.copy / f"without-{LEAVER}" / "results.json").exists()
        assert not shown or found == "before"  # numbers are never those of another model
        if not again:
            assert found == "after"
            return counts
        counts[found] += 1
        number += 1


def twice(erasure: Erasure, step: int) -> dict[str, int]:
    counts = {"before": 0, "after": 0}
    first = 1
    while True:
        second = 1
        while True:
            erasure.fresh()
            if not killed(erasure.erase, before=first):
                return counts
            again = killed(lambda: RunFolder.open(erasure.copy), before=second)
            counts[erasure.checked()] += 1
            if not again:
                break
            second += step
        first += step


def at_random(erasure: Erasure, count: int) -> dict[str, int]:
    """Between the moment at which the command has its new model and a little after the erasure is over."""
    counts = {"before": 0, "after": 0}
    chance, begun = random.Random(11), erasure.copy.with_name("begun")
    erase = RunFolder.erase

    def marked(self: RunFolder, *arguments: object) -> RunFolder:
        begun.touch()
        return erase(self, *arguments)  # type: ignore[arg-type]

    RunFolder.erase = marked  # type: ignore[method-assign]
    longest = _seconds(erasure)
    while sum(counts.values()) < count:
        erasure.fresh()
        begun.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            erasure.command()
        while not begun.exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the command ended before it erased"
        time.sleep(chance.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts[erasure.checked()] += 1
    return counts


def _seconds(erasure: Erasure) -> float:
    erasure.fresh()
    start = time.perf_counter()
    erasure.erase()
    return time.perf_counter() - start


def main(place: str, how: str, number: str = "1") -> None:
    erasure = Erasure(Path(place))
    if how == "every":
        counts = every(erasure)
    elif how == "saving":
        counts = saving(erasure)
    elif how == "twice":
        counts = twice(erasure, int(number))
    else:
        counts = at_random(erasure, int(number))
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
