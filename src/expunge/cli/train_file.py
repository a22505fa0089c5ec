"""`expunge train --federation FILE`."""

from __future__ import annotations

from pathlib import Path

import typer

from expunge.cli.terminal import messages, tell, warn
from expunge.errors import RequestError

_OWN = ("federation", "again")


def train_file(context: typer.Context, file: Path, again: bool) -> None:
    """Train the federation of a file into its store; options that would change nothing are refused."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in _OWN and source is not None and source.name == "COMMANDLINE":
            raise RequestError(f"{file} says how to train: leave --{name.replace('_', '-')} out, or change it there.")
    from expunge.ledger.federation import Federation
    from expunge.progress import progress_bars

    federation = Federation.load(file)
    if federation.state_store().exists and not again:
        raise RequestError(f"{federation.folder / federation.store} holds a trained model: --again replaces it.")
    with progress_bars(messages()) as progress:
        store, departed = federation.train(progress)
    for name in departed:
        warn(f"Client {name!r} has left: it was not trained with. `expunge request readmit` would let it in again.")
    tell(f"Trained {len(store.book.counts)} clients into {store.folder}. When somebody asks to be deleted:")
    tell(f"  expunge request add --client {next(iter(store.book.counts))} --checked-by 'YOUR NAME'")
