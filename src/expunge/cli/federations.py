"""Options that the ledger's commands share, and how they open it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expunge.cli.terminal import warn

if TYPE_CHECKING:
    from expunge.ledger.ledger import Ledger

FederationOption = Annotated[
    Path, typer.Option("--federation", metavar="FILE", help="The federation file that `expunge init` wrote.")
]
ByOption = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Who does this; by default you.", envvar="EXPUNGE_BY")
]
DEFAULT = Path("federation.py")


def ledger_of(file: Path, by: str = "") -> Ledger:
    """The ledger beside a federation file; the file itself is not read."""
    from expunge.ledger.ledger import Ledger

    return Ledger(file.parent / "ledger", by)


def tell_notes(ledger: Ledger) -> None:
    """What the ledger has to say beside the result."""
    for note in ledger.notes:
        warn(note)
