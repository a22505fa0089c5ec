"""The command line: thin. Each command reads its arguments, calls the library, shows what came out."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

import expunge
from expunge.auditing.verdict import RETRAINS
from expunge.bench.auditing import audit, retrain_more, retrain_options
from expunge.bench.demo import SCENARIO, SEEDS, run_demo
from expunge.bench.experiments import EXPERIMENTS, experiment
from expunge.bench.results import Results
from expunge.bench.run_folder import RunFolder
from expunge.bench.runner import require_data, unmeasured
from expunge.bench.runner import run as run_experiment
from expunge.bench.scales import LEAVER, SCALES, scale_of
from expunge.bench.scenario import Scenario
from expunge.bench.store import Store
from expunge.data import DATASETS, Backdoor
from expunge.errors import ExpungeError, RequestError
from expunge.federation.keeping.files import require_new, require_writable
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.models import MODELS
from expunge.progress import progress_bars, watch_rounds
from expunge.report import publish, publish_audit, terminal_audit, terminal_tables
from expunge.report.headline import headline
from expunge.report.measures import FEWEST_RETRAINS
from expunge.unlearning.registry import Outcome, method, methods
from expunge.unlearning.request import Request

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Take a client's contribution out of a federated model, and show how well it is gone.",
    epilog="Start with [bold]expunge demo[/bold]. Any command: --help. Tab completion: --install-completion.",
    pretty_exceptions_enable=False,
)
ENGINES = ("local", "flower-simulation", "flower")
output, messages = Console(), Console(stderr=True)
_debug = {"on": False}

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, made by `expunge train`.")]
DataOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with MNIST, FashionMNIST or cifar-10-batches-bin.", envvar="EXPUNGE_DATA"),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print results as JSON on standard output.")]


def main() -> None:
    """Entry point: our own errors are one line and exit code 1; --debug shows where they came from."""
    try:
        app()
    except ExpungeError as problem:
        if _debug["on"]:
            raise
        _tell(f"[bold red]error:[/] {escape(str(problem))}")
        sys.exit(1)


def _tell(text: str) -> None:
    """A message for the person, beside the results on standard output."""
    messages.print(text, highlight=False, soft_wrap=True)


def _version(asked: bool) -> None:
    if asked:
        output.print(f"expunge {expunge.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version  # its callback has done the work
    _debug["on"] = debug


@app.command(epilog="Example: [bold]expunge demo --out runs/demo[/bold]")
def demo(
    out: Annotated[Path, typer.Option(help="Where results, plots and the report go.")] = Path("runs/demo"),
    seeds: Annotated[
        str | None,
        typer.Option(help=f"By default {','.join(map(str, SEEDS))}; in Flower the first."),
    ] = None,
    engine: Annotated[str, typer.Option(help=f"Where the clients are: {', '.join(ENGINES)}.")] = "local",
    as_json: JsonOption = False,
) -> None:
    """Train a small federation with a poisoned client, forget it in several ways, compare with retraining.

    Uses the handwritten digits that come with scikit-learn: no files, no network, under two minutes on two cores.
    --engine flower-simulation sends every message through Flower's simulation, which takes longer; --engine flower
    starts a Flower deployment on this machine, with keys and certificates, and forgets a site that is switched off.
    """
    if engine not in ENGINES:
        raise RequestError(f"--engine can be {', '.join(ENGINES)}, not {engine!r}.")
    require_writable(out)
    if engine == "flower":
        _deployed_demo(out, seeds, as_json)
        return
    numbers = _numbers(seeds, "--seeds") if seeds is not None else list(SEEDS if engine == "local" else SEEDS[:1])
    backdoor = SCENARIO.backdoors[LEAVER]
    messages.print(
        f"{SCENARIO.clients} clients train a digit classifier together. One of them, [bold]{LEAVER}[/], "
        f"hides a trigger in its data: a {backdoor.size}x{backdoor.size} white square makes any digit a "
        f"{backdoor.target}. It must be forgotten, without retraining and without its data.\n",
        highlight=False,
    )
    with progress_bars(messages) as progress:
        in_flower = engine == "flower-simulation"
        results = run_demo(numbers, engine="flower-simulation" if in_flower else "local", progress=progress)
    _publish(results, out, show_table=not as_json)
    if as_json:
        print((out / "results.json").read_text())


@app.command(
    "bench",
    epilog="Examples: [bold]expunge bench backdoor[/bold]; [bold]expunge bench main backdoor --scale paper --device "
    "cuda[/bold]. Stop it whenever you like: it goes on where it was.",
)
def bench_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help=f"One of {', '.join(EXPERIMENTS)}, or all.")],
    scale: Annotated[str, typer.Option(help=f"One of {', '.join(SCALES)}.")] = "small",
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas; each scale has its own.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go, and the models that experiments share.")] = Path(
        "runs/bench"
    ),
    data_dir: DataOption = None,
    device: DeviceOption = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes side by side; by default one a core.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every method, in the paper's tables and figures and beyond them.

    Each experiment leaves results.json, rows.csv, table.md, plots and a report in a folder of its own.
    """
    chosen = [experiment(name) for name in (EXPERIMENTS if names == ["all"] else names)]
    size = scale_of(scale, data_dir)
    numbers = _numbers(seeds, "--seeds") if seeds is not None else None
    measured = (out / size.name / "measured").exists()  # maybe elsewhere: put together without a GPU and without data
    if not measured:
        for each in chosen:
            require_data(each.settings(size), data_dir)
    store = Store(out / size.name, device if measured and device == "cuda" else _device(device), data_dir)
    for each in chosen:
        require_data(unmeasured(each, size, numbers or each.default_seeds(size), store), data_dir)
    if size.name == "small" and size.base.dataset == "digits" and any(each.settings(size) for each in chosen):
        _tell("Fashion-MNIST is not in the data folder (see --data-dir), so this runs on digits.")
    for each in chosen:
        _tell(f"[bold]{each.name}[/]: {each.title}.")
        with progress_bars(messages) as progress:
            chosen_seeds = numbers or each.default_seeds(size)
            results = run_experiment(each, size, chosen_seeds, store, workers=workers, progress=progress)
        _publish(results, store.root / each.name, show_table=not as_json)
        if as_json:
            print((store.root / each.name / "results.json").read_text())


@app.command(
    "train",
    epilog="Example: [bold]expunge train --out runs/mine --clients 10 --attacker client-3 --patch 3 --boost 4[/bold]",
)
def train_command(
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    dataset: Annotated[str, typer.Option(help=f"One of {', '.join(DATASETS)}.")] = "digits",
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODELS)}.")] = None,
    clients: Annotated[int, typer.Option(help="How many clients.")] = 10,
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet split: small is very unequal.")] = 1.0,
    attacker: Annotated[str | None, typer.Option(help="A client that hides a backdoor in its data.")] = None,
    target: Annotated[int, typer.Option(help="The class that the trigger leads to.")] = 7,
    patch: Annotated[int, typer.Option(help="Side of the trigger's square, in pixels.")] = 3,
    poisoned: Annotated[float, typer.Option(help="Share of the attacker's samples that are poisoned.")] = 0.5,
    boost: Annotated[float, typer.Option(help="Factor on the attacker's updates.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="FedAvg rounds.")] = 20,
    epochs: Annotated[int, typer.Option(help="Local epochs per round.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Of the clients' SGD.")] = 0.05,
    participation: Annotated[float, typer.Option(help="Share of the clients in each round.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the split, the poisoning, the initial weights, the training.")] = 0,
    keep_updates: Annotated[
        int | None, typer.Option(help="Also store all updates of every so many rounds: fed-eraser needs them.")
    ] = None,
    data_dir: DataOption = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch a missing dataset.")] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Train a federation and keep what forgetting needs later: one vector per client."""
    require_new(out)
    scenario = Scenario(
        dataset=dataset,
        model=model or ("digits-net" if dataset == "digits" else "cnn"),
        clients=clients,
        alpha=alpha,
        backdoors={attacker: Backdoor(target, patch, poisoned, boost)} if attacker else {},
        plan=TrainingPlan(rounds, epochs, batch_size, learning_rate, participation, seed),
        seed=seed,
    )
    _few_threads(scenario)
    federation = scenario.build(data_dir, download=download, device=_device(device))
    with progress_bars(messages) as progress:
        keep = Keep(updates_every=keep_updates)
        state = train(federation.engine(), federation.initial(), scenario.plan, keep=keep, progress=progress)
    RunFolder.create(out, federation, state)
    kept = state.memory.stored_bytes if state.memory else 0
    _tell(f"Trained {clients} clients for {rounds} rounds; {kept / 1e6:.1f} MB of vectors kept. Now forget one:")
    _tell(f"  expunge forget {out} --client {attacker or scenario.names[0]}")


@app.command(
    "forget",
    epilog="Examples: [bold]expunge forget runs/mine --client client-3[/bold]; "
    "[bold]expunge forget runs/mine --samples client-2:0,5,9[/bold]; "
    "[bold]expunge forget runs/mine --client client-3 --method retrain[/bold]",
)
def forget_command(
    run: RunArgument,
    client: Annotated[list[str] | None, typer.Option(help="A client to forget; may be repeated.")] = None,
    samples: Annotated[list[str] | None, typer.Option(help="CLIENT:INDEX,INDEX,...; may be repeated.")] = None,
    use: Annotated[str, typer.Option("--method", help="See `expunge methods`.")] = "hf-kcu",
    iterations: Annotated[int | None, typer.Option("--iterations", "-k", help="Krylov iterations.")] = None,
    damping: Annotated[float | None, typer.Option(help="Lambda; by default from the training's schedule.")] = None,
    curvature_samples: Annotated[int | None, typer.Option(help="Retained samples behind the curvature.")] = None,
    tau: Annotated[float | None, typer.Option(help="How much the retained loss may rise, in nats.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the samples drawn, or of retraining: by default one not used yet.")
    ] = None,
    erase: Annotated[
        bool, typer.Option("--erase", help="Then delete what remembers: the trained model, the vectors, other tries.")
    ] = False,
    data_dir: DataOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Forget clients or samples of a run; the result stands beside the trained model until you --erase that."""
    folder = RunFolder.open(run)
    request = Request.of(client or (), _sample_indices(samples or []))
    if erase and request.samples:
        raise RequestError("--erase works for whole clients: samples must be deleted from the client's own data.")
    _few_threads(folder.scenario)
    federation = folder.scenario.build(data_dir, device=_device(device))
    chosen = method(use)
    given = {"iterations": iterations, "damping": damping, "samples": curvature_samples, "tau": tau}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "seed" in vars(chosen.options):
        changed["seed"] = seed or 0
    engine, state = folder.engine(federation), folder.trained(federation)
    with progress_bars(messages) as progress:
        if chosen.name == "retrain":
            which = ("next", folder.retrained(request)) if seed is None else ("chosen", seed)
            changed |= {**vars(retrain_options(folder, federation, *which)), "progress": progress}
        chosen = chosen.configured(**changed)
        watch_rounds(engine, chosen.options, progress)
        outcome = chosen(engine, state, request)
    _finish_forget(folder, request, outcome, federation, erase, as_json)


@app.command(epilog="Example: [bold]expunge show runs/mine[/bold]")
def show(
    run: RunArgument, data_dir: DataOption = None, device: DeviceOption = "cpu", as_json: JsonOption = False
) -> None:
    """Measure what was tried in a run, and show it: a table here, plots and a report in the folder."""
    folder = RunFolder.open(run)
    _few_threads(folder.scenario)
    federation = folder.scenario.build(data_dir, device=_device(device))
    found = _requests(folder)
    measured = {name: folder.results(name, federation) for name in found}
    for name, results in measured.items():
        _publish(results, run / name, show_table=not as_json)
        few = FEWEST_RETRAINS - len(results.values("retrain", "test_accuracy"))
        if few > 0:
            _tell(f"For a range to compare with, retrain {few} more: expunge forget {run} ... --method retrain")
    if as_json:
        print(json.dumps([json.loads((run / name / "results.json").read_text()) for name in measured]))


@app.command(
    "audit",
    epilog="Examples: [bold]expunge audit runs/mine[/bold]; [bold]expunge audit runs/mine --retrains 10 --json[/bold]",
)
def audit_command(
    run: RunArgument,
    retrains: Annotated[
        int, typer.Option(help="Retrained models to compare with; missing ones are made first. 0 makes none.")
    ] = RETRAINS,
    data_dir: DataOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Judge what was tried in a run: a verdict beside retrained models, membership attacks, evidence without them."""
    folder = RunFolder.open(run)
    _few_threads(folder.scenario)
    chosen = _device(device)
    federation = folder.scenario.build(data_dir, device=chosen)
    found = _requests(folder)
    audits = {}
    for name, request in found.items():
        with progress_bars(messages) as progress:
            retrain_more(
                folder, request, federation, count=retrains, data_dir=data_dir, device=chosen, progress=progress
            )
        audits[name] = audit(folder, name, federation)
        page = publish_audit(audits[name], run / name)
        if not as_json:
            for part in terminal_audit(audits[name], output.width):
                output.print(part)
        _tell(f"Report: {page}   Numbers: {run / name / 'audit.json'}")
    if as_json:
        print(json.dumps({name: own.as_dict() for name, own in audits.items()}))


@app.command("methods")
def methods_command() -> None:
    """List the methods that can forget."""
    for name, known in sorted(methods().items()):
        output.print(f"[bold]{name:28}[/] {known.summary}")


def _deployed_demo(out: Path, seeds: str | None, as_json: bool) -> None:
    """Run the deployment example; it stops everything that it started, also after Ctrl-C."""
    if seeds is not None:
        raise RequestError("--engine flower has a federation of its own, without --seeds.")
    if importlib.util.find_spec("flwr") is None:
        raise RequestError("Flower is not installed: pip install 'expunge[flower]'.")
    script = Path(expunge.__file__).parents[2] / "examples" / "flower-deployment" / "deploy.py"
    if not script.exists():
        raise RequestError("--engine flower runs an example of the source folder, and there is none here: clone it.")
    sys.argv = [str(script), "--out", str(out)]
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        runpy.run_path(str(script), run_name="__main__")
    if as_json:
        print((out / "results.json").read_text())


def _requests(folder: RunFolder) -> dict[str, Request]:
    """What was tried in a run; refused where there is nothing."""
    found = folder.requests()
    if found:
        return found
    if folder.departed:
        raise RequestError(f"{', '.join(folder.departed)} left for good, and nothing else was tried in {folder.path}.")
    raise RequestError(
        f"Nothing was forgotten in {folder.path} yet: try `expunge forget {folder.path} --client client-0`."
    )


def _finish_forget(
    folder: RunFolder, request: Request, outcome: Outcome, federation: Any, erase: bool, as_json: bool
) -> None:
    for warning in outcome.warnings:
        _tell(f"[yellow]note:[/] {escape(warning)}")
    if not outcome.succeeded:
        raise RequestError("The request failed: the safety belt held, and nothing was changed.")
    kept = folder.save(request, outcome, federation)
    cost = outcome.cost
    if erase:
        folder.erase_what_remembers(request, kept)
        kept = folder.path / "trained"
    if as_json:
        print(
            json.dumps(
                {"folder": str(kept), "method": outcome.method, "cost": cost.as_dict(), "details": outcome.details}
            )
        )
    _tell(
        f"{outcome.method}: {cost.seconds:.1f} s, {cost.sample_gradients:,.0f} sample-gradients, {cost.rounds} rounds."
    )
    if erase:
        _tell(f"{folder.path} goes on without them; what remembered them is deleted.")
        return
    _tell(f"The new model is {kept / 'model.safetensors'}. Look at it: expunge show {folder.path}")


def _publish(results: Results, out: Path, *, show_table: bool) -> None:
    """Files in the folder, and the tables on the terminal."""
    report = publish(results, out)
    if show_table:
        for table in terminal_tables(results, output.width):
            output.print(table)
        if len(results.variants) < 2 and results.rows:
            output.print(f"\n[bold]{headline(results).title}[/]")
    _tell(f"Report: {report}   Numbers: {out / 'results.json'}")


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as problem:
        raise RequestError(f"{option} takes whole numbers separated by commas, not {text!r}.") from problem
    if option == "--seeds" and min(numbers) < 0:
        raise RequestError(f"A seed is a whole number of at least 0, not {min(numbers)}.")
    return numbers


def _sample_indices(values: list[str]) -> dict[str, list[int]]:
    chosen: dict[str, list[int]] = {}
    for value in values:
        name, found, indices = value.partition(":")
        if not found or not indices:
            raise RequestError(f"--samples takes CLIENT:INDEX,INDEX,..., not {value!r}.")
        chosen.setdefault(name, []).extend(_numbers(indices, "--samples"))
    return chosen


def _few_threads(scenario: Scenario) -> None:
    """On images of 8x8 pixels a second thread costs more than it brings, much more where cores are busy."""
    if scenario.dataset == "digits":
        torch.set_num_threads(1)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("There is no CUDA device here: use --device cpu or --device auto.")
    if name not in ("cpu", "cuda"):
        raise RequestError(f"--device can be cpu, cuda or auto, not {name!r}.")
    return name
