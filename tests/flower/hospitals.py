"""The example app's hospitals, trained on this machine; what a deployment must make of them, and what it left."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state_store import Book, StateStore
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from flower_app import task

EXAMPLES = Path(__file__).parents[2] / "examples"
APP = EXAMPLES / "flower-app"
LEAVER = "hospital-2"


class Hospitals:
    """So many hospitals, trained for two rounds by the local engine."""

    def __init__(self, count: int) -> None:
        names = [f"hospital-{number + 1}" for number in range(count)]
        self.configs = {
            name: {"name": name, "partition-id": number, "num-partitions": count} for number, name in enumerate(names)
        }
        self._data = {name: task.load_data(name, number, count) for number, name in enumerate(names)}
        plan = TrainingPlan(rounds=2, epochs=2, batch_size=32, learning_rate=0.1)
        self._state = train(self._engine(), Snapshot.of(task.Net()), plan)

    def _engine(self) -> LocalEngine:
        return LocalEngine(task.Net(), CrossEntropy(), self._data)

    def store(self, folder: Path) -> Path:
        """A store as the app would have left it after training."""
        counts = {name: len(labels) for name, (_, labels) in self._data.items()}
        StateStore(folder).write(Book(counts=counts), self._state, task.Net())
        return folder

    @property
    def trained(self) -> Tensor:
        return self._state.model.parameters

    def forgotten(self, name: str) -> Tensor:
        """What a method makes of the model on the local engine."""
        outcome = method(name)(self._engine(), self._state, Request.of(LEAVER))
        assert outcome.succeeded
        return outcome.state.model.parameters


def weights_in(store: Path) -> Tensor:
    return StateStore(store).load(task.Net()).model.parameters


def relative_difference(update: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(update - expected) / torch.linalg.vector_norm(expected))


def left_behind(folder: Path) -> list[str]:
    """Living processes that were started for a deployment in this folder: it stands in the environment of all."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = str(folder.resolve()).encode() in (process / "environ").read_bytes()
            if ours and (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has gone meanwhile
    return found
