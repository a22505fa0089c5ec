"""The real `expunge serve` in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN = "a-token-for-the-tests"


@dataclass
class Server:
    """Where it answers."""

    port: int

    @property
    def page(self) -> str:
        return f"http://127.0.0.1:{self.port}/#token={TOKEN}"

    def ask(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """One question with exactly this path, as no browser would send it."""
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method or ("GET" if body is None else "POST"), path, skip_host="Host" in named)
        for name, value in named.items():
            if value:
                connection.putheader(name, value)
        if sent is not None:
            connection.putheader("Content-Length", str(len(sent)))
        connection.endheaders(sent)
        answer = connection.getresponse()
        found = answer.status, answer.read(), dict(answer.getheaders())
        connection.close()
        return found

    def json(self, path: str, body: Any = None) -> Any:
        status, content, _ = self.ask(path, body)
        assert status == 200, content
        return json.loads(content)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "EXPUNGE_TOKEN": TOKEN}
    command = [sys.executable, "-c", "from expunge.cli import main; main()", "serve", "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        server, end = Server(port), time.monotonic() + 60
        while True:
            try:
                server.ask("/")
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
