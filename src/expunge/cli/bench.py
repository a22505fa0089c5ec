"""`expunge bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import DataOption, DeviceOption, JsonOption, torch_device, whole_numbers
from expunge.cli.choices import EXPERIMENTS, SCALES
from expunge.cli.completion import among
from expunge.cli.terminal import messages, publish_results, tell


@app.command(
    help=f"""Run the paper's tables and figures, and those beyond them.

    NAME is one of {", ".join(EXPERIMENTS)}, or all. Each experiment leaves results.json, rows.csv, table.md, plots
    and a report in a folder of its own. Stop it whenever you like: it goes on where it was.
    """,
    epilog=examples("expunge bench backdoor", "expunge bench main backdoor --scale paper --device cuda"),
)
def bench(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=among([*EXPERIMENTS, "all"]), show_default=False)
    ],
    scale: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(SCALES)}.", autocompletion=among(SCALES))
    ] = "small",
    seeds: Annotated[str | None, typer.Option(metavar="N,N,...", help="By default each scale's own.")] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where results go, and the models that experiments share.")
    ] = Path("runs/bench"),
    data_dir: DataOption = None,
    device: DeviceOption = "auto",
    workers: Annotated[
        int | None, typer.Option(help="Processes side by side; by default one a core, and one on a GPU.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run experiments, each with its own report."""
    from expunge.bench.experiments import experiment
    from expunge.bench.runner import require_data, run, unmeasured
    from expunge.bench.scales import scale_of
    from expunge.bench.store import Store
    from expunge.progress import progress_bars

    chosen = [experiment(name) for name in (EXPERIMENTS if names == ["all"] else names)]
    size = scale_of(scale, data_dir)
    numbers = whole_numbers(seeds, "--seeds") if seeds is not None else None
    measured = (out / size.name / "measured").exists()  # maybe elsewhere: put together without a GPU and without data
    if not measured:
        for each in chosen:
            require_data(each.settings(size), data_dir)
    store = Store(out / size.name, device if measured and device == "cuda" else torch_device(device), data_dir)
    for each in chosen:
        require_data(unmeasured(each, size, numbers or each.default_seeds(size), store), data_dir)
    if size.name == "small" and size.base.dataset == "digits" and any(each.settings(size) for each in chosen):
        tell("Fashion-MNIST is not in the data folder (see --data-dir), so this runs on digits.")
    for each in chosen:
        tell(f"[bold]{each.name}[/]: {each.title}.")
        with progress_bars(messages()) as progress:
            chosen_seeds = numbers or each.default_seeds(size)
            results = run(each, size, chosen_seeds, store, workers=workers, progress=progress)
        publish_results(results, store.root / each.name, show_table=not as_json)
        if as_json:
            print((store.root / each.name / "results.json").read_text())
