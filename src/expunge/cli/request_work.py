"""`expunge request run`, `resume` and `rollback`: the work itself."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expunge.cli.app import examples
from expunge.cli.arguments import JsonOption
from expunge.cli.choices import METHODS
from expunge.cli.completion import among
from expunge.cli.federations import DEFAULT, ByOption, FederationOption, ledger_of, tell_notes
from expunge.cli.request import requests
from expunge.cli.terminal import messages, tell, warn
from expunge.errors import RequestError

if TYPE_CHECKING:
    from expunge.ledger.ledger import Ledger
    from expunge.ledger.making import Settings


@requests.command(
    epilog=examples(
        "expunge request run",
        "expunge request run R-0003 --method retrain --retrains 5 --grace 7d",
        "expunge request run R-0003 --override 'the officer has looked at the audit'",
        "expunge request run --watch",
    )
)
def run(
    numbers: Annotated[list[str] | None, typer.Argument(metavar="[R-0001]...")] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="As of `expunge forget`.", autocompletion=among(METHODS))
    ] = "auto",
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the method; repeatable.")
    ] = None,
    retrains: Annotated[
        int, typer.Option(min=0, help="Retrain so many models for a verdict; 0 asks for evidence without.")
    ] = 0,
    grace: Annotated[str, typer.Option(metavar="SPAN", help="Keep the old model so long, such as 7d.")] = "0",
    override: Annotated[
        str, typer.Option(metavar="TEXT", help="Go on without an audit that passed, and why: stands in the receipt.")
    ] = "",
    together: Annotated[bool, typer.Option("--together", help="All in one step.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Wait for more requests, and for the end of --grace.")] = False,
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Work on accepted requests: forget, audit, go over to the new model, destroy the old one.

    Without a number: on all of them, the first due first. The old model is destroyed only after an audit that passed
    (EQUIVALENT, or SUPPORTED), or with --override. A request that failed, or needs another method, runs again when it
    is named. Whatever a crash left unfinished is finished first.
    """
    from expunge.ledger.law import duration
    from expunge.ledger.making import Settings
    from expunge.ledger.work import is_over

    ledger = ledger_of(federation, by)
    settings = Settings(method, _options(option or []), retrains, duration(grace), override)
    if override and not numbers:
        raise RequestError("Say which request to override: `expunge request run R-0001 --override TEXT`.")
    head, problems = ledger.head().number, _work(ledger, federation, settings, numbers or [], together)
    with suppress(KeyboardInterrupt):
        while watch:
            _tell(ledger, head, as_json=False)
            head = ledger.head().number
            time.sleep(0.5)
            if any(case.state == "accepted" or is_over(case, ledger.clock()) for case in ledger.cases().values()):
                problems = _work(ledger, federation, settings, [], together)
    _tell(ledger, head, as_json)
    if problems:
        raise RequestError(" ".join(problems))


@requests.command()
def resume(federation: FederationOption = DEFAULT, by: ByOption = "", as_json: JsonOption = False) -> None:
    """Finish what a crash has cut off, and destroy old models whose time is over."""
    from expunge.ledger.making import Settings

    ledger = ledger_of(federation, by)
    head = ledger.head().number
    _work(ledger, federation, Settings(), None, False)
    _tell(ledger, head, as_json)


@requests.command()
def rollback(
    number: str,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why.")],
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Go back to the old model, while it is still kept (--grace); the request counts as failed."""
    from expunge.ledger.federation import Federation
    from expunge.ledger.work import Work

    ledger = ledger_of(federation, by)
    head = ledger.head().number
    Work(ledger, Federation.load(federation)).roll_back(number, reason)
    _tell(ledger, head, as_json)


def _work(ledger: Ledger, federation: Path, settings: Settings, numbers: list[str] | None, together: bool) -> list[str]:
    """Run these requests, or all; None only finishes what is unfinished."""
    from expunge.ledger.federation import Federation
    from expunge.ledger.watching import Watch
    from expunge.ledger.work import Work
    from expunge.progress import progress_bars

    with progress_bars(messages()) as progress:
        work = Work(ledger, Federation.load(federation), settings, watch=Watch(ledger, progress))
        if numbers is None:
            work.resume()
            return []
        return work.run(numbers, together=together)


def _tell(ledger: Ledger, head: int, as_json: bool) -> None:
    """What has happened since an event."""
    from expunge.ledger.showing import advice, sentence

    tell_notes(ledger)
    ledger.notes.clear()
    new = ledger.events()[head:]
    if as_json:
        print(json.dumps([event.as_dict() for event in new]))
        return
    for event in new:
        tell(f"{', '.join(event.requests)}: {sentence(event, ledger.names())}")
    for number in dict.fromkeys(number for event in new for number in event.requests):
        if todo := advice(ledger.case(number)):
            warn(todo)


def _options(texts: list[str]) -> dict[str, Any]:
    """Options of a method: values as in JSON, else as texts.

    Example:
        >>> _options(["damping=0.1", "source=gradient"])
        {'damping': 0.1, 'source': 'gradient'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not given:
            raise RequestError(f"--option takes NAME=VALUE, not {text!r}.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
