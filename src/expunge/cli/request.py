"""`expunge request`: what is done at the desk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.arguments import JsonOption, sample_indices
from expunge.cli.federations import DEFAULT, ByOption, FederationOption, ledger_of, tell_notes
from expunge.cli.terminal import tell

if TYPE_CHECKING:
    from expunge.ledger.ledger import Ledger

requests = typer.Typer(no_args_is_help=True, help="Deletion requests, from the desk to the receipt.")
app.add_typer(requests, name="request")

Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; kept in the table of names, which can be erased.")]


@requests.command(epilog=examples("expunge request add --client hospital-2 --checked-by 'A. Clerk'"))
def add(
    client: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A client to forget; repeatable.")] = None,
    samples: Annotated[
        list[str] | None, typer.Option(metavar="NAME:N,N,...", help="Samples of a client, by number; repeatable.")
    ] = None,
    received: Annotated[str | None, typer.Option(metavar="DAY", help="When it came; by default today.")] = None,
    due: Annotated[str | None, typer.Option(metavar="DAY", help="By default one month later.")] = None,
    ground: Annotated[str, typer.Option(metavar="LETTER", help="Of Article 17(1): b is consent withdrawn.")] = "b",
    checked_by: Annotated[
        str, typer.Option(metavar="NAME", help="Who has checked the identity; this accepts the request.")
    ] = "",
    note: Annotated[str, typer.Option(metavar="TEXT", help="For the desk; can be erased.")] = "",
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """File a request: it is written down before anything else is done."""
    from expunge.ledger import desk

    ledger = ledger_of(federation, by)
    filing = desk.Filing(tuple(client or ()), sample_indices(samples or []), received, due, ground, checked_by, note)
    number = desk.add(ledger, filing)
    _show(ledger, number, as_json)


@requests.command()
def accept(
    number: str,
    checked_by: Annotated[str, typer.Option(metavar="NAME", help="Who has checked the identity.")],
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Let a request be worked on, once it is known who asks."""
    from expunge.ledger import desk

    ledger = ledger_of(federation, by)
    desk.accept(ledger, number, checked_by)
    _show(ledger, number, as_json)


@requests.command()
def refuse(
    number: str,
    reason: Reason,
    exception: Annotated[str | None, typer.Option(metavar="LETTER", help="Of Article 17(3).")] = None,
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Refuse a request, with a reason."""
    from expunge.ledger import desk

    ledger = ledger_of(federation, by)
    desk.refuse(ledger, number, reason, exception)
    _show(ledger, number, as_json)


@requests.command()
def extend(
    number: str,
    reason: Reason,
    until: Annotated[str | None, typer.Option(metavar="DAY", help="By default two months more.")] = None,
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Take up to two months more, with a reason."""
    from expunge.ledger import desk

    ledger = ledger_of(federation, by)
    desk.extend(ledger, number, reason, until)
    _show(ledger, number, as_json)


@requests.command(epilog=examples("expunge request close R-0001 --told-all"))
def close(
    number: str,
    told: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A recipient that was told.")] = None,
    told_all: Annotated[bool, typer.Option("--told-all", help="All recipients were told.")] = False,
    on: Annotated[str | None, typer.Option(metavar="DAY", help="When they were; by default today.")] = None,
    untold: Annotated[str, typer.Option(metavar="TEXT", help="Why the others were not told.")] = "",
    forget_names: Annotated[
        bool, typer.Option("--forget-names", help="Erase the request's names and texts; the tombstone stays.")
    ] = False,
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
    as_json: JsonOption = False,
) -> None:
    """Sign the receipt, write the certificate, and end a request.

    Recipients are the sites that got the model; each has to be told (Article 19), or say why not with --untold.
    """
    from expunge.ledger import desk
    from expunge.ledger.certificate import write_certificate

    ledger = ledger_of(federation, by)
    if ledger.case(number).state != "closed":
        if told or told_all:
            desk.tell(ledger, number, () if told_all else told or (), on)
        desk.close(ledger, number, untold)
    write_certificate(ledger, number)
    if forget_names:
        desk.forget_names(ledger, number)
    receipt = ledger.folder / "receipts" / f"{number}.intoto.jsonl"
    _show(ledger, number, as_json)
    tell(f"Receipt: {receipt}   Certificate: {receipt.with_name(f'{number}.html')}")


@requests.command("list")
def list_requests(federation: FederationOption = DEFAULT, as_json: JsonOption = False) -> None:
    """List all requests, the first due first."""
    from expunge.ledger.showing import overview, overview_table

    ledger = ledger_of(federation)
    if as_json:
        print(json.dumps(overview(ledger)["requests"]))
    else:
        from expunge.cli.terminal import output

        output().print(overview_table(overview(ledger)["requests"]))


@requests.command()
def show(number: str, federation: FederationOption = DEFAULT, as_json: JsonOption = False) -> None:
    """Show one request with all its events."""
    _show(ledger_of(federation), number, as_json)


@requests.command()
def readmit(
    client: str,
    reason: Reason,
    federation: FederationOption = DEFAULT,
    by: ByOption = "",
) -> None:
    """Lift the tombstone of a client that has left: it may train again."""
    from expunge.ledger import desk
    from expunge.ledger.federation import Federation

    ledger = ledger_of(federation, by)
    desk.readmit(ledger, client, reason)
    Federation.load(federation).readmit(client)
    tell_notes(ledger)


def _show(ledger: Ledger, number: str, as_json: bool) -> None:
    from expunge.ledger.showing import details, text_of

    tell_notes(ledger)
    found = details(ledger, number)
    print(json.dumps(found) if as_json else text_of(found))
