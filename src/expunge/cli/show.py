"""`expunge show`."""

from __future__ import annotations

import json

from expunge.cli.app import app, examples
from expunge.cli.arguments import DataOption, DeviceOption, JsonOption, RunArgument
from expunge.cli.runs import built, tried_requests
from expunge.cli.terminal import publish_results, tell, warn


@app.command(epilog=examples("expunge show runs/mine"))
def show(
    run: RunArgument, data_dir: DataOption = None, device: DeviceOption = "cpu", as_json: JsonOption = False
) -> None:
    """Measure what was tried in a run: a table, plots, a report.

    RUN is a folder that `expunge train` has made. The table is printed; plots and the report go to the folder, beside
    what they are about.
    """
    from expunge.bench.run_folder import RunFolder
    from expunge.bench.run_results import run_results
    from expunge.report.measures import FEWEST_RETRAINS

    folder = RunFolder.open(run)
    federation = built(folder.scenario, data_dir, device)
    found = tried_requests(folder)
    measured = {name: run_results(folder, name, federation) for name in found}
    for name, results in measured.items():
        publish_results(results, run / name, show_table=not as_json)
        for warning in results.scenario["warnings"]:
            warn(warning)
        few = FEWEST_RETRAINS - len(results.values("retrain", "test_accuracy"))
        if few > 0:
            tell(f"For a range to compare with, retrain {few} more: expunge forget {run} ... --method retrain")
    if as_json:
        print(json.dumps([json.loads((run / name / "results.json").read_text()) for name in measured]))
