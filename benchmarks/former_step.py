"""What an earlier version's default step reaches on the federations of an experiment: a row of its own in the results.

The earlier version trains the same federation by its own code, forgets, and hands over the model alone; this version
measures it, beside the retrained models that the experiment has in its store. It works where that version knows the
experiment's training and the leavers are whole clients.

Usage: git archive REVISION src | tar -x -C FOLDER
       python benchmarks/former_step.py NAME --version 0.2.0 --source FOLDER/src --out runs/bench --scale paper

after `expunge bench NAME` with the same --out, --scale and --device; the rows go into that experiment's results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from expunge.bench.cells import RetrainedCell, TrainedCell
from expunge.bench.evaluation import Evaluation
from expunge.bench.experiments import experiment
from expunge.bench.results import Results, Row
from expunge.bench.scales import SCALES, scale_of
from expunge.bench.settings import Setting, together
from expunge.bench.store import Store

FORMER = """
import json, sys, torch
from pathlib import Path
from expunge.bench.scenario import Scenario
from expunge.federation.training.fedavg import train
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

torch.set_num_threads(1)
asked = json.load(sys.stdin)
data_dir = Path(asked["data_dir"]) if asked["data_dir"] else None
federation = Scenario.from_dict(asked["scenario"]).build(data_dir, device=asked["device"])
engine, leaving = federation.engine(), tuple(asked["leaving"])
state = train(engine, federation.initial(), federation.scenario.plan)
outcome = method("retrace")(engine.without(leaving), state, Request.of(leaving))
models = {"trained": state.model, "forgotten": outcome.state.model}
torch.save({name: model.parameters.cpu() for name, model in models.items()}, asked["path"])
print(outcome.succeeded, *outcome.warnings)
"""


def former_row(setting: Setting, name: str, source: Path, store: Store) -> Row:
    """Train and forget by the earlier version, measure by this one."""
    gone = together(setting.forgets)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "models.pt"
        asked = {
            "scenario": setting.scenario.as_dict(),
            "leaving": gone.clients,
            "data_dir": str(store.data_dir) if store.data_dir is not None else None,
            "device": store.device,
            "path": str(path),
        }
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        command = [sys.executable, "-P", "-c", FORMER]
        told = subprocess.run(command, input=json.dumps(asked), env=environment, check=True, stdout=-1, text=True)
        found = torch.load(path)
    federation = store.federation(setting.scenario)
    evaluation = Evaluation(federation, gone.request(federation))
    trained = store.kept(TrainedCell(setting.scenario)).state.model
    drift = float((found["trained"].to(trained.parameters) - trained.parameters).norm() / trained.parameters.norm())
    print(f"seed {setting.scenario.seed}: its training ends {drift:.1e} away from ours; it said: {told.stdout.strip()}")
    before = evaluation.measure(trained)
    own = evaluation.measure(trained.moved(found["forgotten"].to(trained.parameters)))
    cells = [RetrainedCell(setting.scenario, gone, number) for number in range(setting.retrains)]
    references = [evaluation.measure(store.kept(cell).state.model) for cell in cells]
    row = evaluation.row(name, own, before, references)
    verdict = evaluation.judgement(own, before, references).verdict.value
    return dataclasses.replace(row, variant=setting.label, verdict=verdict)


def main() -> None:
    """One row for every variant and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--version", required=True, help="of the earlier step, for the row's name")
    parser.add_argument("--source", type=Path, required=True, help="its folder src")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    scale, asked = scale_of(given.scale, given.data_dir), experiment(given.name)
    store = Store(given.out / given.scale, given.device, given.data_dir)
    path = given.out / given.scale / given.name / "results.json"
    results, name = Results.load(path), f"retrace {given.version}"
    settings = asked.seeded(scale, results.scenario["seeds"])
    rows = [former_row(setting, name, given.source, store) for setting in settings]
    others = [row for row in results.rows if row.method != name]
    dataclasses.replace(results, rows=[*others, *rows]).save(path)


if __name__ == "__main__":
    main()
