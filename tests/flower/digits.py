"""One federation on digits, trained and made to forget a client, on whatever engine; run as a script, on Flower's.

python digits.py FOLDER      trains and forgets in Flower's simulation, and leaves the outcome in the folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data.datasets import load
from expunge.federation.engines.engine import Engine
from expunge.federation.engines.flower.site import Site
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.models.digits import DigitsNet
from expunge.unlearning.request import Request
from unlearning.presets import KRYLOV, forgotten

NAMES = ("ada", "bob", "cyd", "dan")
LEAVER = "cyd"
PLAN = TrainingPlan(rounds=3, epochs=1, batch_size=32, learning_rate=0.05)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DigitsNet()


def shares() -> dict[str, tuple[Tensor, Tensor]]:
    """Unequal shares of 400 digits."""
    digits = load("digits")
    inputs, labels = digits.train_inputs[:400], digits.train_labels[:400]
    parts = torch.split(torch.arange(400), [130, 60, 120, 90])
    return {name: (inputs[part], labels[part]) for name, part in zip(NAMES, parts, strict=True)}


def site(name: str) -> Site:
    return Site(name, model(), shares()[name])


def local_engine() -> LocalEngine:
    return LocalEngine(model(), CrossEntropy(), shares())


def trained_and_forgotten(engine: Engine) -> dict[str, Tensor]:
    """The model after training, and after forgetting by trajectory."""
    state = train(engine, Snapshot.of(model()), PLAN)
    outcome = forgotten(engine, state, Request.of(LEAVER), KRYLOV)
    assert outcome.succeeded
    return {"trained": state.model.parameters, "forgotten": outcome.state.model.parameters}


def simulate(folder: Path) -> None:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from expunge.federation.engines.flower.engine import FlowerEngine
    from flower.grid import site_app

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        engine = FlowerEngine(grid, deadline=120.0, poll=0.2, wait_for=NAMES)
        save_file(trained_and_forgotten(engine), folder / "outcome.safetensors")
        (folder / "cost.json").write_text(json.dumps(engine.cost.as_dict()))

    clients = site_app(lambda context: site(NAMES[int(context.node_config["partition-id"])]))
    run_simulation(app, clients, num_supernodes=len(NAMES), backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    simulate(Path(sys.argv[1]))
