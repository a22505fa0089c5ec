"""The LoRA example in Flower's own simulation, with its processes: adapters trained, a site forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import get_peft_model_state_dict

from expunge.federation.keeping.state_store import StateStore
from flower.example import TrainingGrid
from flower.grid import Node
from flower_lora import client_app, server_app, task

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "flower-lora"
CONFIG = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
SCRIPT = """
import shutil, sys, tomllib
from flower_lora import client_app, server_app
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

folder, config = sys.argv[1], tomllib.load(open(sys.argv[2], "rb"))["tool"]["flwr"]["app"]["config"]
app = ServerApp()

@app.main()
def main(grid, context):
    for more in ({}, {"forget": "site-2"}):
        server_app.app(grid, Context(1, 1, {}, RecordDict(), {**config, "store": f"{folder}/store", **more}))
        shutil.copytree(f"{folder}/store", f"{folder}/{'forgotten' if more else 'trained'}")

run_simulation(app, client_app.app, 4, backend_config={"client_resources": {"num_cpus": 1}})
"""


def simulate(folder: Path) -> str:
    paths = os.pathsep.join(map(str, [EXAMPLE, ROOT / "src"]))
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FLWR_HOME": str(folder)}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(EXAMPLE / "pyproject.toml")]
    # Alone it takes less than two minutes.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def known(store: Path) -> dict[str, float]:
    """How well the model in a store knows each site's sentences."""
    model = task.adapted()
    StateStore(store).load(model).model.write_to(model)
    return task.test(model)


def retrained(store: Path) -> dict[str, float]:
    """The same without the leaver, in this process."""
    nodes = {101 + number: Node(client_app.app, {"partition-id": number}) for number in (0, 2, 3)}
    context = Context(1, 1, {}, RecordDict(), {**CONFIG, "store": str(store)})
    server_app.app(TrainingGrid(nodes), context)
    return known(store)


@pytest.mark.slow
def test_a_site_is_forgotten_from_federated_adapters_in_flowers_simulation(tmp_path):
    said = simulate(tmp_path)
    trained, forgotten, gold = known(tmp_path / "trained"), known(tmp_path / "forgotten"), retrained(tmp_path / "gold")
    assert said.count("site-2") == 2, said
    assert gold["site-2"] - trained["site-2"] > 0.5
    assert abs(forgotten["site-2"] - gold["site-2"]) < 0.3 * (gold["site-2"] - trained["site-2"])
    assert all(abs(forgotten[name] - gold[name]) < 0.1 for name in task.SITES if name != "site-2")
    store = StateStore(tmp_path / "forgotten")
    assert store.book.departed == ("site-2",)
    state, sent = store.load(task.adapted()), get_peft_model_state_dict(task.adapted())
    assert state.memory.clients == ("site-1", "site-3", "site-4")
    assert state.memory.recipe.client.decoupled  # AdamW was seen
    assert state.model.parameters.numel() == sum(own.numel() for own in sent.values())  # the base is nowhere in it
