"""`expunge serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from expunge.cli.app import app, examples
from expunge.cli.federations import DEFAULT, FederationOption, ledger_of
from expunge.cli.terminal import tell
from expunge.errors import RequestError


@app.command(epilog=examples("expunge serve", "expunge serve --port 9000"))
def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="On this machine only.")] = 8734,
    token: Annotated[
        str, typer.Option(metavar="TEXT", envvar="EXPUNGE_TOKEN", help="By default a new one, which is printed.")
    ] = "",
    federation: FederationOption = DEFAULT,
) -> None:
    """Show the requests on a page of this machine.

    To look, to file and to accept: the work itself is done by `expunge request run`, which --watch keeps at it. Whoever
    has the address with its token can do the same.
    """
    import secrets
    import socket

    from expunge.extras import require

    require("uvicorn")
    import uvicorn

    from expunge.ledger.web.serving import application

    ledger = ledger_of(federation)
    ledger.events()  # a damaged ledger is told here, not on the page
    if (ledger.folder / "key").exists():
        _ = ledger.signer  # a passphrase is asked for here, not when somebody files a request
    own = token or secrets.token_urlsafe(24)
    if len(own) < 16 or not own.isascii() or not own.isprintable() or " " in own:
        raise RequestError("A token has at least 16 plain characters and no spaces.")
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", port))
        except OSError as problem:
            raise RequestError(f"Port {port} cannot be used: {problem.strerror}; choose another --port.") from problem
        tell(f"http://127.0.0.1:{port}/#token={own}")
        tell("Stop with Ctrl-C. Requests are worked on by `expunge request run --watch` beside it.")
        uvicorn.Server(uvicorn.Config(application(ledger.folder, own), log_level="error")).run(sockets=[door])
