"""A small page and REST API on a ledger: to look, to file and to accept. It never forgets anybody by itself.

Bound to this machine, and readable only with the token that `expunge serve` prints. The token comes in a header that
no other site's page can set, so a foreign page can neither read nor write; a foreign name for this machine is refused.
"""

from __future__ import annotations

import hmac
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from expunge.errors import DataError, ExpungeError, RequestError
from expunge.ledger import desk
from expunge.ledger.certificate import page as certificate_page
from expunge.ledger.certificate import summary
from expunge.ledger.ledger import Ledger
from expunge.ledger.receipt import verified, verify
from expunge.ledger.showing import details, overview, subject

LARGEST_BODY = 1_000_000
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names under which this machine may be asked for the page: any other is a trick of somebody else's."""

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FIELDS: dict[str, type] = {
    "clients": list,
    "samples": dict,
    "received": str,
    "due": str,
    "ground": str,
    "checked_by": str,
    "note": str,
}


class _Desk:
    """The ledger for requests that come at the same time: one reads at a time, and remembers what it has checked."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._reader = Ledger(folder)

    @contextmanager
    def reading(self) -> Iterator[Ledger]:
        with self._lock:
            yield self._reader

    def writing(self) -> Ledger:
        return Ledger(self._folder)


def application(folder: Path, token: str) -> FastAPI:
    """The application.

    Args:
        folder: of the ledger.
        token: what every question about it has to come with.
    """
    app, ledgers = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), _Desk(folder)

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        refused = _refused(request, token)
        answer: Response
        if refused is not None:
            answer = JSONResponse({"sentence": refused[1]}, refused[0])
        else:
            try:
                answer = await call(request)
            except ExpungeError as problem:
                answer = JSONResponse({"sentence": str(problem)}, 503 if isinstance(problem, DataError) else 409)
            except OSError as problem:
                sentence = f"{problem.filename} cannot be read: {problem.strerror}; take it from a backup."
                answer = JSONResponse({"sentence": sentence}, 503)
        answer.headers.update(_HEADERS)
        return answer

    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, _static(name, kind), methods=["GET"])
    _add_reading(app, ledgers)
    _add_writing(app, ledgers)
    return app


def _static(name: str, kind: str) -> Callable[[], Response]:
    def found() -> Response:
        return Response((files("expunge.ledger.web") / name).read_bytes(), media_type=kind)

    return found


def _add_reading(app: FastAPI, ledgers: _Desk) -> None:
    @app.get("/api/overview")
    def all_requests() -> dict[str, Any]:
        with ledgers.reading() as ledger:
            return overview(ledger)

    @app.get("/api/requests/{number}")
    def one_request(number: str) -> dict[str, Any]:
        with ledgers.reading() as ledger:
            return details(ledger, _number(number))

    @app.get("/api/requests/{number}/receipt")
    def receipt(number: str) -> Response:
        with ledgers.reading() as ledger:
            file = _receipt(ledger, number)
            verify(file, ledger.folder / "key.pub", ledger.folder / "log.jsonl")  # a damaged one helps nobody
            return PlainTextResponse(file.read_bytes(), headers=_download(file.name))

    @app.get("/api/requests/{number}/certificate")
    def certificate(number: str) -> Response:
        with ledgers.reading() as ledger:
            found = verify(_receipt(ledger, number), ledger.folder / "key.pub", ledger.folder / "log.jsonl")
            page = certificate_page(found, subject(details(ledger, number)))
        return Response(page, media_type="text/html", headers=_download(f"{number}.html"))

    @app.get("/api/{name}")
    def public(name: str) -> Response:
        if name not in ("key.pub", "log.jsonl"):
            raise RequestError("There is nothing of that name.")
        with ledgers.reading() as ledger:
            return PlainTextResponse((ledger.folder / name).read_bytes(), headers=_download(name))


def _add_writing(app: FastAPI, ledgers: _Desk) -> None:
    async def file(request: Request) -> dict[str, Any]:
        filing = _filing(await _body(request))
        return _filed(ledgers.writing(), filing)

    async def accept(request: Request) -> dict[str, Any]:
        number, body = _number(request.path_params["number"]), await _body(request)
        ledger = ledgers.writing()
        desk.accept(ledger, number, _text(body, "checked_by"))
        return details(ledger, number)

    async def check(request: Request) -> dict[str, Any]:
        text = _text(await _body(request), "receipt")
        with ledgers.reading() as ledger:
            log = ledger.folder / "log.jsonl"
            try:
                found = verified(text.encode(), ledger.key, "The receipt", (log, log.read_bytes()))
            except (DataError, UnicodeEncodeError) as problem:
                return {"valid": False, "lines": [str(problem)]}
        return {"valid": True, "lines": [*summary(found), *found.notes]}

    app.add_api_route("/api/requests", file, methods=["POST"])
    app.add_api_route("/api/requests/{number}/accept", accept, methods=["POST"])
    app.add_api_route("/api/verify", check, methods=["POST"])


def _filed(ledger: Ledger, filing: desk.Filing) -> dict[str, Any]:
    number = desk.add(ledger, filing)
    return {**details(ledger, number), "notes": ledger.notes}


def _refused(request: Request, token: str) -> tuple[int, str] | None:
    """Why a question is not answered; None where it is."""
    host = request.headers.get("host", "")
    if host.rsplit(":", 1)[0] not in HOSTS and host not in HOSTS:
        return 421, "This page is for this machine alone: ask for 127.0.0.1."
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, "Another site's page may not ask this one."
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return 403, "Another site's page may not ask this one."
    if request.url.path.startswith("/api"):
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return 401, "Give the token that `expunge serve` has printed."
    return None


async def _body(request: Request) -> dict[str, Any]:
    """The object in a body of bearable length."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError("The body must be JSON, and say so.")
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > LARGEST_BODY:
            raise RequestError(f"The body is longer than {LARGEST_BODY} bytes.")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise RequestError("The body is no JSON.") from problem
    if not isinstance(found, dict):
        raise RequestError("The body must be a JSON object.")
    return found


def _filing(body: dict[str, Any]) -> desk.Filing:
    """What a form says, each field of its kind."""
    for name, value in body.items():
        if name not in _FIELDS or not isinstance(value, _FIELDS[name]):
            raise RequestError(f"{name[:40]!r} is no field of a request, or not of its kind.")
    clients, samples = body.get("clients", []), body.get("samples", {})
    sound = all(isinstance(name, str) for name in clients)
    sound &= all(isinstance(own, list) and all(type(index) is int for index in own) for own in samples.values())
    if not sound:
        raise RequestError("Clients are a list of names; samples are lists of numbers, by client.")
    rest = {name: value for name, value in body.items() if name not in ("clients", "samples")}
    return desk.Filing(tuple(clients), samples, **rest)


def _text(body: dict[str, Any], name: str) -> str:
    if not isinstance(body.get(name), str):
        raise RequestError(f"The field {name!r} is missing.")
    return str(body[name])


def _number(number: str) -> str:
    if not re.fullmatch(r"R-\d{4,9}", number, re.ASCII):
        raise RequestError("There is no such request.")
    return number


def _receipt(ledger: Ledger, number: str) -> Path:
    if "receipt" not in ledger.case(_number(number)).facts:
        raise RequestError(f"{number} has no receipt yet.")
    return ledger.folder / "receipts" / f"{number}.intoto.jsonl"


def _download(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
