"""`expunge train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import DataOption, DeviceOption
from expunge.cli.choices import DATASETS, MODELS
from expunge.cli.completion import among
from expunge.cli.federations import DEFAULT
from expunge.cli.runs import built
from expunge.cli.terminal import messages, tell
from expunge.cli.train_file import train_file
from expunge.errors import RequestError


@app.command(epilog=examples("expunge train --out runs/mine --attacker client-3 --boost 4"))
def train(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The run folder to make.")] = None,
    federation: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Train what a federation file says instead, into its own store."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --federation: from fresh weights, in the place of what is there.")
    ] = False,
    dataset: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(DATASETS)}.", autocompletion=among(DATASETS))
    ] = "digits",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(MODELS)}; by default digits-net or cnn.",
            autocompletion=among(MODELS),
        ),
    ] = None,
    clients: Annotated[int, typer.Option(help="How many clients.")] = 10,
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet split: small is very unequal.")] = 1.0,
    attacker: Annotated[
        str | None, typer.Option(metavar="CLIENT", help="A client that hides a backdoor in its data.")
    ] = None,
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
    """Train a federation, and keep what forgetting needs later.

    That is one vector per client, beside the model. Everything goes to a new run folder, which `expunge forget`,
    `show` and `audit` take, and with a ledger (`expunge init --folder`) `expunge request`. Or to the store of your own
    federation file: who has left stays out.
    """
    if federation is not None:
        return train_file(context, federation, again)
    if out is None or again:
        raise RequestError("Say where the run goes with --out FOLDER; --again goes with --federation.")
    from expunge.bench.run_folder import RunFolder
    from expunge.bench.run_store import FILE
    from expunge.bench.scenario import Scenario
    from expunge.data import Backdoor
    from expunge.federation.keeping.durable import require_new
    from expunge.federation.keeping.files import write_whole
    from expunge.federation.training.fedavg import Keep
    from expunge.federation.training.fedavg import train as train_federation
    from expunge.federation.training.plan import TrainingPlan
    from expunge.progress import progress_bars

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
    made = built(scenario, data_dir, device, download=download)
    with progress_bars(messages()) as progress:
        keep = Keep(updates_every=keep_updates)
        start = made.initial()
        state = train_federation(made.engine(), start, scenario.plan, keep=keep, progress=progress)
    RunFolder.create(out, made, state)
    write_whole(out / DEFAULT, FILE, private=True)
    kept = state.memory.stored_bytes if state.memory else 0
    tell(f"Trained {clients} clients for {rounds} rounds; {kept / 1e6:.1f} MB of vectors kept. Now forget one:")
    tell(f"  expunge forget {out} --client {attacker or scenario.names[0]}")
    tell(f"Or let somebody ask for it: expunge init --folder {out}, and there expunge request add")
    return None
