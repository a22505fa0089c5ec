"""`expunge audit`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import DataOption, DeviceOption, JsonOption, RunArgument, torch_device
from expunge.cli.choices import RETRAINS
from expunge.cli.runs import built, tried_requests
from expunge.cli.terminal import messages, output, tell_where


@app.command(
    epilog=examples(
        "expunge audit runs/mine",
        "expunge audit runs/mine --retrains 10 --json",
        "expunge audit runs/mine --nonce 'drawn by the auditor'",
        "expunge audit runs/mine --persistence 5 --relearning 1",
    ),
)
def audit(
    run: RunArgument,
    retrains: Annotated[
        int,
        typer.Option(
            help="Retrained models to compare with; missing ones are made first. 0 makes none; from 10 on five more are"
            " made from the training's own start, which tell mixtures."
        ),
    ] = RETRAINS,
    nonce: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Draws the questions, with the model's digest. By default the one a model was asked with before, else"
            " a new one. Whoever made the model must not know it; another nonce counts as another attempt.",
        ),
    ] = None,
    persistence: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="ROUNDS",
            help="Judge again after so many more rounds of those who stay: does it last? Trains every model on.",
        ),
    ] = 0,
    relearning: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="EPOCHS",
            help="Judge again after so many epochs on the forgotten data: what was only hidden comes back sooner.",
        ),
    ] = 0,
    data_dir: DataOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Judge what was tried in a run, beside retrained models.

    RUN is a folder that `expunge train` has made. For each method that was tried there is a verdict in a sentence, how
    much of the data is still there, a picture, and what no audit sees; then what membership attacks reach, and evidence
    that needs no retrained models. A page goes to the folder.

    Every model counts: the second that is audited for a request is judged at half the level, and so on.
    """
    from expunge.bench.auditing import audit as audit_run
    from expunge.bench.auditing import retrain_more
    from expunge.bench.run_folder import RunFolder
    from expunge.progress import progress_bars
    from expunge.report import publish, publish_audit, terminal_audit

    folder = RunFolder.open(run)
    federation, chosen = built(folder.scenario, data_dir, device), torch_device(device)
    audits = {}
    for name, request in tried_requests(folder).items():
        with progress_bars(messages()) as progress:
            retrain_more(
                folder, request, federation, count=retrains, data_dir=data_dir, device=chosen, progress=progress
            )
        audits[name] = audit_run(folder, name, federation, nonce, persistence=persistence, relearning=relearning)
        publish(audits[name].results, run / name)  # what was shown before may be of other models
        page = publish_audit(audits[name], run / name)
        if not as_json:
            for part in terminal_audit(audits[name], output().width):
                output().print(part)
        tell_where(page, run / name / "audit.json")
    if as_json:
        print(json.dumps({name: own.as_dict() for name, own in audits.items()}))
