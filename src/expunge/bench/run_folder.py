"""A run on disk: the trained federation, and beside it what was tried to forget whom.

    RUN/run.json                          scenario, schedule, who has left for good
    RUN/trained/                          model.safetensors, memory.safetensors
    RUN/without-client-3/METHOD/          outcome.json, model.safetensors, memory.safetensors
    RUN/without-client-3/results.json     with plots and report.html, written by `expunge show`

A folder appears whole or not at all: it is written beside its place and then moved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.auditing.exam import Measured
from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.results import Results, Row, environment
from expunge.bench.scenario import Federation, Scenario
from expunge.core.vectors import Snapshot
from expunge.errors import DataError
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.checkpoint import load_snapshot
from expunge.federation.keeping.files import appear, read_json, require_new
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_files import load_state, save_state
from expunge.federation.training.plan import Schedule
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request

LONGEST_NAME = 100
"""File systems end at 255 bytes; a longer list of clients is cut and told apart by a digest."""


@dataclass(frozen=True, eq=False)
class Tried:
    """What a method made of the trained model, what it cost, and what it wrote down."""

    method: str
    model: Snapshot
    cost: Cost
    details: dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """One run; open it with ``RunFolder.open`` or make it with ``RunFolder.create``."""

    path: Path
    scenario: Scenario
    schedule: Schedule | None
    departed: tuple[str, ...] = ()

    @classmethod
    def create(cls, path: Path, federation: Federation, state: ServerState) -> RunFolder:
        """Write a freshly trained federation to a new folder."""
        run = cls(path, federation.scenario, state.schedule)
        require_new(path)

        def fill(folder: Path) -> None:
            save_state(state, federation.model, folder / "trained")
            (folder / "run.json").write_text(run._description())

        appear(path, fill)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run."""
        try:
            described = json.loads((path / "run.json").read_text())
            schedule = Schedule(**described["schedule"]) if described["schedule"] else None
            return cls(path, Scenario.from_dict(described["scenario"]), schedule, tuple(described["departed"]))
        except FileNotFoundError as problem:
            raise DataError(f"{path} is not a run folder: make one with `expunge train --out {path}`.") from problem
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(f"{path / 'run.json'} cannot be read: it is damaged or not ours.") from problem

    def trained(self, federation: Federation) -> ServerState:
        """The state to forget from."""
        return load_state(federation.model, self.path / "trained", self.schedule)

    def engine(self, federation: Federation) -> LocalEngine:
        """An engine on the clients that have not left for good."""
        return federation.engine().without(self.departed)

    def save(self, request: Request, outcome: Outcome, federation: Federation) -> Path:
        """Keep an outcome under its request and method; a retrained model gets a number."""
        parent = self.path / folder_name(request)
        target = parent / outcome.method
        if outcome.method == "retrain":
            target = parent / f"retrain-{self.retrained(request) + 1}"
        record = {
            "method": outcome.method,
            "request": {"clients": request.clients, "samples": request.samples},
            "cost": outcome.cost.as_dict(),
            "succeeded": outcome.succeeded,
            "warnings": outcome.warnings,
            "details": outcome.details,
        }

        def fill(folder: Path) -> None:
            save_state(outcome.state, federation.model, folder)
            (folder / "outcome.json").write_text(json.dumps(record, indent=2) + "\n")

        appear(target, fill)
        return target

    def retrained(self, request: Request) -> int:
        """The highest number that a retrained model of this request has; 0 where there is none."""
        found = (self.path / folder_name(request)).glob("retrain-*")
        return max((int(folder.name.removeprefix("retrain-")) for folder in found), default=0)

    def erase_what_remembers(self, request: Request, kept: Path) -> RunFolder:
        """Let the run go on with ``kept``: the trained model, the leavers' vectors and all other tries are deleted.

        What `show` wrote about them (numbers and plots, no weights) stays, as evidence.
        """
        after = dataclasses.replace(self, departed=(*self.departed, *request.clients))
        old = self.path / "trained.old"
        (self.path / "trained").rename(old)
        kept.rename(self.path / "trained")
        (self.path / "run.json").write_text(after._description())
        for remembering in [old, *(file.parent for file in self.path.glob("without-*/*/outcome.json"))]:
            shutil.rmtree(remembering)
        for tries in self.path.glob("without-*"):
            if not any(tries.iterdir()):
                tries.rmdir()
        return after

    def requests(self) -> dict[str, Request]:
        """The requests that something was tried for, by folder name."""
        found: dict[str, Request] = {}
        for file in sorted(self.path.glob("without-*/*/outcome.json")):
            asked = read_json(file)["request"]
            found[file.parent.parent.name] = Request.of(asked["clients"], asked["samples"])
        return found

    def tried(self, name: str, federation: Federation) -> list[Tried]:
        """Everything that was tried for one request."""
        found = []
        for file in sorted((self.path / name).glob("*/outcome.json")):
            record = read_json(file)
            model = load_snapshot(federation.model, file.parent / "model.safetensors")
            found.append(Tried(record["method"], model, Cost(**record["cost"]), record["details"]))
        return found

    def results(self, name: str, federation: Federation) -> Results:
        """Measure everything that was tried for one request."""
        request = self.requests()[name]
        evaluation = Evaluation(federation, request)
        before = evaluation.measure(self.trained(federation).model)
        tried = [(own, evaluation.measure(own.model)) for own in self.tried(name, federation)]
        references = [measured for own, measured in tried if own.method == "retrain"]
        costs = [own.cost for own, _ in tried if own.method == "retrain"]

        def row(method: str, measured: Measured, *more: Any) -> Row:
            verdict = evaluation.judgement(measured, before, references).verdict.value if references else None
            return dataclasses.replace(evaluation.row(method, measured, before, references, *more), verdict=verdict)

        rows = [row("trained", before)]
        in_order = sorted(tried, key=lambda pair: pair[0].method != "retrain")
        rows += [row(own.method, measured, own.cost, costs) for own, measured in in_order]
        noise = noise_ranges([retrain_noise(references)]) if references else {}
        forgotten = [*request.clients, *request.samples]
        described = {"forgotten": forgotten, "request": name, "departed": list(self.departed)}
        scenario = {**self.scenario.as_dict(), **described}
        return Results(f"{self.path.name}/{name}", scenario, environment(), rows, noise)

    def _description(self) -> str:
        described = {
            "scenario": self.scenario.as_dict(),
            "schedule": dataclasses.asdict(self.schedule) if self.schedule else None,
            "departed": self.departed,
        }
        return json.dumps(described, indent=2) + "\n"


def folder_name(request: Request) -> str:
    """A readable folder name for a request.

    Example:
        >>> folder_name(Request.of(["ada", "bob"]))
        'without-ada+bob'
    """
    clients = sorted(request.clients)
    name = "without-" + "+".join([*clients, *sorted(request.samples)])
    if not request.samples and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(json.dumps([clients, sorted(request.samples.items())]).encode()).hexdigest()[:8]
    return name[:LONGEST_NAME] + ("-samples-" if request.samples else "-") + digest
