"""The example app in Flower's own simulation, with its processes: trained, two sites forgotten one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from expunge.bench.demo import run_demo
from expunge.bench.results import Results
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state_store import StateStore
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from flower.example import EXAMPLE, HOSPITALS, SMALL, TrainingGrid, grid
from flower.grid import Node
from flower_app import task
from flower_app.task import ATTACKER, Net, load_data

SCRIPT = """
import json, pathlib, shutil, sys
from flower.example import HOSPITALS, SMALL, client_app, run
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from expunge.bench.demo import run_demo
from expunge.errors import ExpungeError

folder, said = sys.argv[1], {}
app = ServerApp()

def attempt(grid, store, **changes):
    try:
        run(grid, store, **changes)
    except ExpungeError as problem:
        return f"{type(problem).__name__}: {problem}"

@app.main()
def main(grid, context):
    run(grid, f"{folder}/store", num_server_rounds=4)
    shutil.copytree(f"{folder}/store", f"{folder}/trained")
    said["unknown"] = attempt(grid, f"{folder}/store", forget="hospital-9")
    run(grid, f"{folder}/store", forget="hospital-2")
    shutil.copytree(f"{folder}/store", f"{folder}/once")
    run(grid, f"{folder}/store", forget="hospital-4")
    said["again"] = attempt(grid, f"{folder}/store", forget="hospital-4")

run_simulation(app, client_app.app, len(HOSPITALS), backend_config={"client_resources": {"num_cpus": 1}})
open(f"{folder}/said.json", "w").write(json.dumps(said))
demo = run_demo([10], scenario=SMALL, retrains=1, workers=1, engine="flower-simulation")
demo.save(pathlib.Path(folder, "demo.json"))
"""


@pytest.mark.slow
def test_the_example_and_the_demo_in_flowers_simulation(tmp_path):
    """One test, since it takes ten seconds to start; a process of its own, since ray leaves things behind."""
    simulate(tmp_path)
    the_poisoned_site_is_forgotten_and_then_another(tmp_path)
    the_simulation_gives_what_our_own_engine_gives(tmp_path)
    what_cannot_be_done_is_told_in_one_line(tmp_path)
    the_demo_has_the_numbers_of_the_demo_here(tmp_path)


def simulate(folder):
    root = EXAMPLE.parents[1]
    paths = os.pathsep.join(map(str, [EXAMPLE, root / "tests", root / "src"]))
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FLWR_HOME": str(folder)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def state(store):
    return StateStore(store).load(Net())


def measured(store) -> dict[str, float]:
    model = Net()
    state(store).model.write_to(model)
    return task.test(model)


def here(store, leaving, names):
    """The same request in this process."""
    data = {name: load_data(name, HOSPITALS.index(name), len(HOSPITALS)) for name in names}
    engine = LocalEngine(Net(), CrossEntropy(), data)
    return method("retrace")(engine, state(store), Request.of(leaving)).state


def the_poisoned_site_is_forgotten_and_then_another(simulated):
    trained, once, twice = (measured(simulated / name) for name in ("trained", "once", "store"))
    assert trained["accuracy"] > 0.9
    assert trained["backdoor"] > 0.7
    assert once["backdoor"] < 0.02
    assert once["accuracy"] > trained["accuracy"] - 0.02
    assert twice["backdoor"] < 0.1
    assert twice["accuracy"] > 0.88
    assert set(state(simulated / "store").memory.clients) == {"hospital-1", "hospital-3"}
    assert StateStore(simulated / "store").book.departed == (ATTACKER, "hospital-4")


def the_simulation_gives_what_our_own_engine_gives(simulated):
    first = here(simulated / "trained", ATTACKER, ("hospital-1", "hospital-3", "hospital-4"))
    second = here(simulated / "once", "hospital-4", ("hospital-1", "hospital-3"))
    for store, own in (("once", first), ("store", second)):
        flower = state(simulated / store)
        difference = torch.linalg.vector_norm(flower.model.parameters - own.model.parameters)
        assert float(difference / torch.linalg.vector_norm(own.model.parameters)) < 1e-5
        assert flower.memory.clients == own.memory.clients


def what_cannot_be_done_is_told_in_one_line(simulated):
    said = json.loads((simulated / "said.json").read_text())
    known = "hospital-1, hospital-2, hospital-3, hospital-4"
    assert said["unknown"] == f"RequestError: There is no client 'hospital-9'; there are {known}."
    assert said["again"] == "RequestError: Site 'hospital-4' was forgotten already."


def test_the_ten_lines_of_the_docs_run(tmp_path, monkeypatch):
    """With the example's own model, data and training."""
    text = (EXAMPLE.parents[1] / "docs" / "flower.md").read_text()
    block = text.split("## In ten lines")[1].split("```python\n")[1].split("```")[0]
    assert len(block.strip().splitlines()) <= 10
    client, server = block.split("# server_app.py, while training")
    monkeypatch.chdir(tmp_path)

    def name_of(context):
        return HOSPITALS[context.node_config["partition-id"]]

    def own_data(context):
        return load_data(name_of(context), context.node_config["partition-id"], len(HOSPITALS))

    names = {"ClientApp": ClientApp, "Net": Net, "name_of": name_of, "load_data": own_data}
    names |= {"FedAvg": partial(FedAvg, fraction_evaluate=0.0)}
    exec(client, names)
    names["app"].train()(training)
    names["grid"] = TrainingGrid(
        {101 + number: Node(names["app"], {"partition-id": number}) for number in range(len(HOSPITALS))}
    )
    exec(server.replace("num_rounds=8", "num_rounds=1"), names)
    assert names["outcome"].succeeded
    assert StateStore(tmp_path / "store").book.departed == ("hospital-2",)


def test_the_docs_way_without_a_recorder_runs():
    """The leaver must be there; its data are asked for."""
    text = (EXAMPLE.parents[1] / "docs" / "flower.md").read_text()
    block = text.split("### Without a Recorder")[1].split("```python\n")[1].split("```")[0]
    assert "deadline=900" in block
    names = {"grid": grid(), "model": Net()}
    before = Snapshot.of(names["model"]).parameters
    exec(block.replace("deadline=900", "deadline=20"), names)
    assert names["outcome"].method == "hf-kcu"
    assert torch.equal(Snapshot.of(names["model"]).parameters, names["outcome"].state.model.parameters)
    assert names["outcome"].succeeded != torch.equal(before, names["outcome"].state.model.parameters)


def training(message, context):
    """The example's training, with settings of its own."""
    name, model = HOSPITALS[context.node_config["partition-id"]], Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = load_data(name, context.node_config["partition-id"], len(HOSPITALS))
    task.train(model, data, name, epochs=5, batch_size=32, lr=0.1, seed=0)
    metrics = MetricRecord({"num-examples": len(data[1])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def the_demo_has_the_numbers_of_the_demo_here(simulated):
    here = run_demo([10], scenario=SMALL, retrains=1, workers=1).rows
    flower = Results.load(simulated / "demo.json").rows
    assert [row.method for row in flower] == [row.method for row in here]
    counted = ("test_accuracy", "asr", "forget_loss", "kl_forget", "parameter_gap", "sample_gradients", "rounds")
    for one, other in zip(flower, here, strict=True):
        for name in counted:
            expected = getattr(other, name)  # None where it is not measured: doing nothing takes no rounds
            close = expected if expected is None else pytest.approx(expected, rel=1e-4)
            assert getattr(one, name) == close, (other.method, name)
    assert all(row.bytes > 0 for row in flower if row.method.startswith("retrace"))


def test_an_engine_that_does_not_exist_is_refused(expunge, tmp_path):
    code, _, said = expunge("demo", "--out", tmp_path / "new", "--engine", "pigeons")
    assert (code, said.strip()) == (1, "error: --engine can be local, flower-simulation, flower, not 'pigeons'.")
    code, _, said = expunge("demo", "--out", tmp_path / "new", "--engine", "flower", "--seeds", "3")
    assert (code, said.strip()) == (1, "error: --engine flower has a federation of its own, without --seeds.")
