"""`expunge receipt`: for whoever gets one. Nothing of it needs torch, a ledger or a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import JsonOption
from expunge.cli.terminal import tell, warn

receipts = typer.Typer(no_args_is_help=True, help="Receipts of deletions: check them, or make a certificate of one.")
app.add_typer(receipts, name="receipt")

KeyOption = Annotated[Path, typer.Option(metavar="FILE", help="The issuer's public key, ledger/key.pub.")]


@receipts.command(epilog=examples("expunge receipt verify R-0001.intoto.jsonl --key key.pub --log log.jsonl"))
def verify(
    file: Path,
    key: KeyOption,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="A copy of the ledger's log.jsonl.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a receipt, bit by bit: is it what the owner of the key has signed, and does the log know it?"""
    from expunge.ledger.certificate import summary
    from expunge.ledger.receipt import verify as verified

    found = verified(file, key, log)
    if as_json:
        print(json.dumps({"valid": True, "properties": found.properties, "receipt": found.content}))
        return
    for line in summary(found):
        print(line)
    for note in found.notes:
        warn(note)


@receipts.command(epilog=examples("expunge receipt certificate R-0001.intoto.jsonl --key key.pub --out page.html"))
def certificate(
    file: Path,
    key: KeyOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")],
    name: Annotated[str, typer.Option("--for", metavar="NAME", help="Whose data it was, as the page is to say.")] = "",
) -> None:
    """Make a one-page certificate in plain words from a receipt that is valid."""
    from expunge.federation.keeping.files import write_whole
    from expunge.ledger.certificate import page
    from expunge.ledger.receipt import verify as verified

    write_whole(out, page(verified(file, key), name))
    tell(f"Certificate: {out}")
