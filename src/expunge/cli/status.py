"""`expunge status`."""

from __future__ import annotations

import json

from expunge.cli.app import app, examples
from expunge.cli.arguments import JsonOption
from expunge.cli.federations import DEFAULT, FederationOption, ledger_of


@app.command(epilog=examples("expunge status", "expunge status --json"))
def status(federation: FederationOption = DEFAULT, as_json: JsonOption = False) -> None:
    """Show what is due when.

    Open requests with the days that are left and what each waits for, who has left, and whether the log is whole.
    """
    from expunge.ledger.showing import overview, overview_table

    ledger = ledger_of(federation)
    found = overview(ledger)
    if as_json:
        print(json.dumps(found))
        return
    from expunge.cli.terminal import output

    waiting = [request for request in found["requests"] if request["open"]]
    output().print(overview_table(waiting))
    output().print(found["summary"], highlight=False, markup=False)
