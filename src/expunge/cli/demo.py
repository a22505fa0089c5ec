"""`expunge demo`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import JsonOption, whole_numbers
from expunge.cli.choices import DEMO_SEEDS, DEMOS, ENGINES
from expunge.cli.completion import among
from expunge.cli.terminal import messages, publish_results, tell
from expunge.errors import RequestError
from expunge.extras import require


@app.command(epilog=examples("expunge demo --out runs/demo", "expunge demo hospitals"))
def demo(
    what: Annotated[
        str, typer.Argument(metavar="DATA", help=f"One of {', '.join(DEMOS)}.", autocompletion=among(DEMOS))
    ] = "digits",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results, plots and the report go.")] = Path(
        "runs/demo"
    ),
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help=f"By default {','.join(map(str, DEMO_SEEDS))}; in Flower the first; hospitals have 20.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Where the clients are: {', '.join(ENGINES)}.", autocompletion=among(ENGINES)
        ),
    ] = "local",
    as_json: JsonOption = False,
) -> None:
    """Forget a poisoned client in several ways, beside retraining.

    A small federation is trained first, on the handwritten digits that come with scikit-learn: no files, no network,
    under two minutes on two cores. `hospitals` are four real ones with their heart patients, and one of them leaves:
    logistic regression with a certificate, and a small network.

    --engine flower-simulation sends every message through Flower's simulation, which takes longer. --engine flower
    starts a Flower deployment on this machine, with keys and certificates, and forgets a site that is switched off.
    """
    if what not in DEMOS:
        raise RequestError(f"There is no demo of {what!r}; there are {', '.join(DEMOS)}.")
    if engine not in ENGINES:
        raise RequestError(f"--engine can be {', '.join(ENGINES)}, not {engine!r}.")
    from expunge.bench.demo import SCENARIO, SEEDS, run_demo
    from expunge.bench.scales import LEAVER
    from expunge.federation.keeping.files import require_writable
    from expunge.progress import progress_bars

    require_writable(out)
    if what == "hospitals":
        _hospitals_demo(out, seeds, engine, as_json)
        return
    if engine == "flower":
        _deployed_demo(out, seeds, as_json)
        return
    require("flwr" if engine == "flower-simulation" else "sklearn")
    numbers = whole_numbers(seeds, "--seeds") if seeds is not None else list(SEEDS if engine == "local" else SEEDS[:1])
    backdoor = SCENARIO.backdoors[LEAVER]
    messages().print(
        f"{SCENARIO.clients} clients train a digit classifier together. One of them, [bold]{LEAVER}[/], "
        f"hides a trigger in its data: a {backdoor.size}x{backdoor.size} white square makes any digit a "
        f"{backdoor.target}. It must be forgotten, without retraining and without its data.\n",
        highlight=False,
    )
    with progress_bars(messages()) as progress:
        in_flower = engine == "flower-simulation"
        results = run_demo(numbers, engine="flower-simulation" if in_flower else "local", progress=progress)
    publish_results(results, out, show_table=not as_json)
    if as_json:
        print((out / "results.json").read_text())


def _hospitals_demo(out: Path, seeds: str | None, engine: str, as_json: bool) -> None:
    """One of four hospitals leaves."""
    if engine != "local":
        raise RequestError("The demo of hospitals runs with --engine local only.")
    from expunge.bench.hospitals import HOSPITALS, LEAVER, SEEDS, certificate_line, run_hospitals
    from expunge.progress import progress_bars

    tell(
        f"Four hospitals ({', '.join(HOSPITALS)}) learn together who has heart disease; no patient's data leaves its "
        f"hospital. [bold]{LEAVER}[/] leaves and must be forgotten, without retraining and without its data. "
        "Beside it: models retrained by the other three.\n"
    )
    with progress_bars(messages()) as progress:
        numbers = whole_numbers(seeds, "--seeds") if seeds is not None else list(SEEDS["small"][:1])
        results = run_hospitals(numbers, progress=progress)
    publish_results(results, out, show_table=not as_json)
    tell(certificate_line(results))
    if as_json:
        print((out / "results.json").read_text())


def _deployed_demo(out: Path, seeds: str | None, as_json: bool) -> None:
    """Run the deployment example; it stops everything that it started, also after Ctrl-C."""
    if seeds is not None:
        raise RequestError("--engine flower has a federation of its own, without --seeds.")
    require("flwr")
    import runpy

    script = Path(__file__).parents[3] / "examples" / "flower-deployment" / "deploy.py"
    if not script.exists():
        raise RequestError("--engine flower runs an example of the source folder, and there is none here: clone it.")
    sys.argv = [str(script), "--out", str(out)]
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        runpy.run_path(str(script), run_name="__main__")
    if as_json:
        print((out / "results.json").read_text())
