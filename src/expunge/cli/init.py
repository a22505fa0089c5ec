"""`expunge init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.federations import ByOption
from expunge.cli.terminal import tell


@app.command(epilog=examples("expunge init", "expunge init --folder hospitals"))
def init(
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where they go.")] = Path(),
    passphrase: Annotated[
        bool,
        typer.Option("--passphrase", help="Protect the key: by EXPUNGE_PASSPHRASE, or you are asked, now and later."),
    ] = False,
    by: ByOption = "",
) -> None:
    """Write a federation file and open a ledger.

    federation.py says which model, whose data, which store; it runs as it is, on made-up data. The ledger has a pair
    of keys: give ledger/key.pub to whoever is to check receipts. What is there already stays as it is.
    """
    from expunge.errors import RequestError
    from expunge.extras import require
    from expunge.federation.keeping.files import write_whole
    from expunge.ledger.ledger import Ledger
    from expunge.ledger.template import FEDERATION

    require("cryptography")
    file = folder / "federation.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RequestError(f"{folder} cannot be made: {problem.strerror or problem}.") from problem
    if not file.exists():
        write_whole(file, FEDERATION)
    ledger = Ledger.create(folder / "ledger", by, protected=passphrase)
    tell(f"{file} is yours to edit. The ledger is {ledger.folder}; keep its key, and a backup of the folder.")
    tell("Next: expunge train --federation federation.py, or where it is trained expunge request add")
