"""The example app, on a grid in this process or in Flower's simulation."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from expunge.bench.scales import LEAVER
from expunge.bench.scenario import Scenario
from expunge.data import Backdoor
from expunge.federation.training.plan import TrainingPlan
from flower.grid import InProcessGrid, Node
from flower_app import client_app, server_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-app"
CONFIG = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
SMALL = Scenario(
    clients=4,
    plan=TrainingPlan(rounds=2, epochs=1, batch_size=32, learning_rate=0.05),
    train_samples=300,
    test_samples=100,
    backdoors={LEAVER: Backdoor(target=7, size=3, fraction=0.5, boost=4.0)},
)
"""The demo's federation, made small."""

HOSPITALS = ("hospital-1", "hospital-2", "hospital-3", "hospital-4")


class TrainingGrid(InProcessGrid):
    """A grid on which strategies can train."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))


def grid(names: Iterable[str] = HOSPITALS) -> TrainingGrid:
    """Some of the four hospitals, each a node with the example's own app."""
    numbers = {name: HOSPITALS.index(name) for name in names}
    return TrainingGrid(
        {
            101 + number: Node(client_app.app, {"partition-id": number, "num-partitions": len(HOSPITALS)})
            for number in numbers.values()
        }
    )


def run(on, store, **changes) -> None:
    """What `flwr run . --run-config` does."""
    settings = {name.replace("_", "-"): value for name, value in changes.items()}
    context = Context(1, 1, {}, RecordDict(), {**CONFIG, "store": str(store), **settings})
    server_app.app(on, context)
