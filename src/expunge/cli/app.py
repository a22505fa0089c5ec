"""The program itself: its options, and how it ends when something is wrong."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import typer.core

from expunge.cli.terminal import complain
from expunge.errors import ExpungeError
from expunge.version import __version__

typer.core.HAS_RICH = False  # framed help takes twice as long: it imports all of rich, and parsers of Markdown and code
app = typer.Typer(
    no_args_is_help=True,
    help="Take a client's contribution out of a federated model, and show how well it is gone.",
    epilog="\b\nStart with `expunge demo`, or on your own:\n"
    "  expunge train --out runs/mine\n"
    "  expunge forget runs/mine --client client-3\n"
    "  expunge audit runs/mine",
    pretty_exceptions_enable=False,
)
_debug = {"on": False}


def examples(*commands: str) -> str:
    """Commands to copy, one a line, for the end of a help text."""
    return "\b\n" + "\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in commands)])


def main() -> None:
    """Entry point: our own errors are one line and exit code 1; --debug shows where they came from."""
    try:
        app()
    except ExpungeError as problem:
        if _debug["on"]:
            raise
        complain(str(problem))
        sys.exit(1)


def _version(asked: bool) -> None:
    if asked:
        print(f"expunge {__version__}")
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
