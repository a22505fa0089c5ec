"""`expunge forget`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import DataOption, DeviceOption, JsonOption, RunArgument, sample_indices
from expunge.cli.choices import METHODS
from expunge.cli.completion import among, clients_of_run
from expunge.cli.runs import built
from expunge.cli.terminal import messages, tell, warn
from expunge.errors import RequestError

if TYPE_CHECKING:
    from expunge.bench.run_folder import RunFolder
    from expunge.bench.scenario import Federation
    from expunge.unlearning.registry import Outcome
    from expunge.unlearning.request import Request


@app.command(
    epilog=examples(
        "expunge forget runs/mine --client client-3",
        "expunge forget runs/mine --samples client-2:0,5,9",
        "expunge forget runs/mine --client client-3 --method retrain",
        "expunge forget runs/mine --client client-3 --dry-run",
    )
)
def forget(
    run: RunArgument,
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A client to forget; may be repeated.", autocompletion=clients_of_run),
    ] = None,
    samples: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:N,N,...", help="Samples of a client to forget, by number; may be repeated."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto is retrace where vectors were kept, else hf-kcu; `expunge methods` lists all.",
            autocompletion=among(METHODS),
        ),
    ] = "auto",
    iterations: Annotated[
        int | None, typer.Option("--iterations", "-k", help="Krylov iterations, of methods that have them.")
    ] = None,
    damping: Annotated[float | None, typer.Option(help="Lambda; by default from the training's schedule.")] = None,
    curvature_samples: Annotated[int | None, typer.Option(help="Retained samples behind the curvature.")] = None,
    tau: Annotated[float | None, typer.Option(help="How much the retained loss may rise, in nats.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the samples drawn, or of retraining: by default one not used yet.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done, and what it would cost at most.")
    ] = False,
    erase: Annotated[
        bool, typer.Option("--erase", help="Then delete what remembers: the trained model, the vectors, other tries.")
    ] = False,
    override: Annotated[
        str, typer.Option(metavar="TEXT", help="--erase without an audit that passed, and why: it is written down.")
    ] = "",
    data_dir: DataOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Forget clients or samples of a run.

    RUN is a folder that `expunge train` has made. Say --client or --samples. The result stands beside the trained
    model until you --erase that: after an audit that passed, or with --override. A method refuses options that it does
    not have.
    """
    from expunge.bench.auditing import retrain_options
    from expunge.bench.run_folder import RunFolder, folder_name
    from expunge.forgetting import choose
    from expunge.ledger.gate import Gate
    from expunge.progress import progress_bars, watch_rounds
    from expunge.unlearning.registry import method as registered
    from expunge.unlearning.request import Request

    folder = RunFolder.open(run)
    request = Request.of(client or (), sample_indices(samples or []))
    if erase and request.samples:
        raise RequestError("--erase works for whole clients: samples must be deleted from the client's own data.")
    if override and not erase:
        raise RequestError("--override goes with --erase: without it nothing is deleted.")
    gate = Gate(folder.path / folder_name(request), override) if erase else None
    if gate is not None:
        gate.require(registered(method))
    federation = built(folder.scenario, data_dir, device)
    given = {"iterations": iterations, "damping": damping, "curvature_samples": curvature_samples, "tau": tau}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with folder.alone() if erase else nullcontext(), progress_bars(messages()) as progress:
        engine, state = folder.engine(federation), folder.trained(federation)
        if method == "retrain":
            which = ("next", folder.retrained(request)) if seed is None else ("chosen", seed)
            changed |= {**vars(retrain_options(folder, federation, *which)), "progress": progress}
        elif seed is not None:
            changed["seed"] = seed
        parties = request.parties(engine.clients(), state.memory.clients if state.memory is not None else ())
        choice = choose(state, parties, method, changed).of_a_store(state, parties)
        if dry_run:
            planned = choice.dry_run(engine, state, request)
            print(json.dumps(planned.as_dict()) if as_json else planned)
            return
        watch_rounds(engine, choice.expected_rounds(state, parties), progress)
        outcome = choice.run(engine, state, request)
        if gate is not None and outcome.succeeded:
            outcome = gate.passed(outcome)
        kept = _kept(folder, request, outcome, federation, erase)
    _tell(outcome, kept, folder.path, erase, as_json)


def _kept(folder: RunFolder, request: Request, outcome: Outcome, federation: Federation, erase: bool) -> Path:
    """Where the new model is."""
    if not outcome.succeeded:
        return folder.state
    return folder.erase(request, outcome, federation).state if erase else folder.save(request, outcome, federation)


def _tell(outcome: Outcome, kept: Path, run: Path, erased: bool, as_json: bool) -> None:
    for warning in outcome.warnings:
        warn(warning)
    if not outcome.succeeded:
        raise RequestError("The request failed: the safety belt held, and nothing was changed.")
    cost = outcome.cost
    if as_json:
        told = {"method": outcome.method, "cost": cost.as_dict(), "warnings": outcome.warnings}
        print(json.dumps({"folder": str(kept), **told, "details": outcome.details}))
    tell(
        f"{outcome.method}: {cost.seconds:.1f} s, {cost.sample_gradients:,.0f} sample-gradients, {cost.rounds} rounds."
    )
    if erased:
        tell(f"{run} goes on without them; what remembered them is deleted.")
        return
    tell(f"The new model is {kept / 'model.safetensors'}. Look at it: expunge show {run}")
