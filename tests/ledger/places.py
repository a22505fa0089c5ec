"""A small federation with a ledger on disk: three clients, a linear model, two rounds."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from expunge.ledger import desk
from expunge.ledger.federation import Federation
from expunge.ledger.ledger import Ledger
from expunge.ledger.making import Settings
from expunge.ledger.work import Work

FILE = """
import torch
from torch import nn
from expunge import Federation, TrainingPlan


def samples(count, seed):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(1)


def clients():
    return {name: samples(24, number) for number, name in enumerate(NAMES, start=1)}


NAMES = ("ada", "bob", "cyd", "dee")
federation = Federation(
    model=lambda: nn.Linear(6, 3),
    clients=clients,
    plan=TrainingPlan(rounds=2, epochs=1, batch_size=8, learning_rate=0.1),
    EXTRA
)
"""
UNSEEN = "unseen=lambda: samples(200, 0),"
QUICK = Settings(method="fine-tuning", override="a test needs no audit")
START = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


class Clock:
    """A clock that a test sets; it goes on by a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


class Place:
    """A folder with a federation file, a trained store and a ledger.

    Args:
        folder: made here.
        extra: more of the federation file.
    """

    def __init__(self, folder: Path, extra: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.file, self.clock = folder, folder / "federation.py", Clock()
        if not self.file.exists():
            self.file.write_text(FILE.replace("EXTRA", extra))
            Ledger.create(folder / "ledger", "the desk", self.clock)
            self.federation.train()

    @classmethod
    def written(cls, folder: Path, file: str) -> Place:
        """With a federation file of its own."""
        folder.mkdir()
        (folder / "federation.py").write_text(file)
        place = cls(folder)
        Ledger.create(folder / "ledger", "the desk", place.clock)
        place.federation.train()
        return place

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger", "the desk", self.clock)

    @property
    def federation(self) -> Federation:
        return Federation.load(self.file)

    def ask(self, *clients: str, **more: object) -> str:
        return desk.add(self.ledger, desk.Filing(clients, checked_by="the clerk", **more))

    def work(self, settings: Settings = QUICK) -> Work:
        return Work(self.ledger, self.federation, settings)

    def close(self, number: str) -> None:
        desk.tell(self.ledger, number, ())
        desk.close(self.ledger, number)

    def weights(self):
        return self.federation.state_store().load(self.federation.model()).model.parameters

    def files(self) -> list[Path]:
        return [file for file in self.folder.rglob("*") if file.is_file()]

    def copy(self, folder: Path) -> Place:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        other = Place(folder)
        other.clock.now = self.clock.now
        return other
