"""A whole Flower deployment on this machine: SuperLink with TLS and SuperNode authentication, supervised SuperNodes.

Everything speaks over loopback on free ports and lives in one folder: keys, SuperLink's database, logs, and Flower's
own files (nothing in the home directory is read or changed). Whatever was started is stopped at the end of the `with`
block, also after an error or Ctrl-C. Commands to Flower go through its command line, the interface it keeps stable.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from expunge.errors import RequestError
from flower_deployment.keys import make_server_files, make_site_keys
from flower_deployment.processes import Program, Supervised, free_port

HOST = "127.0.0.1"
CONNECTION = "loopback"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Flower calls home and installs packages unless told not to."""

START_LIMIT = 60.0
"""Seconds within which SuperLink must listen."""

COMMAND_LIMIT = 120.0
"""Seconds within which a command of Flower's must end."""

Setting = str | int | float | bool


@dataclass(frozen=True)
class Run:
    """A run that has ended: Flower's number for it, its last status, its log, and how long it took."""

    number: int
    status: str
    log: str
    seconds: float

    @property
    def completed(self) -> bool:
        """Whether the ServerApp came to its end without an exception."""
        return self.status == "finished:completed"


class Deployment:
    """SuperLink and its sites on loopback; use it in a ``with`` block.

    Args:
        folder: where keys, database and logs go; made for this deployment, refused where it holds an earlier one.
        sites: the node config of each site, by the site's name.

    Attributes:
        sites: the supervised SuperNodes that are switched on, by name.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Mapping[str, Setting]]) -> None:
        self.folder = folder.resolve()
        self._server = self.folder / "server"
        if self.database.exists():
            raise RequestError(f"{folder} holds an earlier deployment: choose another folder, or delete it.")
        self._configs = {name: dict(config) for name, config in sites.items()}
        self._keys = {name: make_site_keys(self._site_folder(name)) for name in sites}
        self._server_files = make_server_files(self._server)
        self._port = free_port()
        self._link: tuple[Program, Program] | None = None
        self.sites: dict[str, Supervised] = {}
        self._node_ids: dict[str, str] = {}
        self._write_connection()

    def __enter__(self) -> Self:
        try:
            self.start_superlink()
            for name, keys in self._keys.items():
                shown = self._flwr("supernode", "register", str(keys.public), CONNECTION, "--name", name)
                self._node_ids[str(shown["node-id"])] = name
            for name in self._configs:
                self.switch_on(name)
            self.wait_online(self._configs)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def database(self) -> Path:
        """SuperLink's SQLite file."""
        return self._server / "superlink.db"

    def log_of(self, name: str) -> Path:
        """A site's log file."""
        return self._site_folder(name) / "log.txt"

    def start_superlink(self) -> None:
        """Start SuperLink and the SuperExec that runs its ServerApps, on the database that is there."""
        files, log, environment = self._server_files, self._server / "log.txt", self._environment(self._server)
        secured = _flags(ssl_ca_certfile=files.authority, ssl_certfile=files.certificate, ssl_keyfile=files.key)
        place = _flags(host=HOST, port=self._port, database=self.database)
        link = Program(
            ["flower-superlink", "--enable-supernode-auth", *_flags(isolation="process"), *secured, *place],
            environment,
            log,
        )
        # A SuperExec of our own, not one that SuperLink starts: that one would hide in another process group.
        reach = _flags(runtime_api_address=self._address, root_certificates=files.authority, parent_pid=link.pid)
        executor = Program(["flower-superexec", *reach], environment, log)
        self._link = link, executor
        end = time.monotonic() + START_LIMIT
        while not _listens(self._port):
            if not link.running or time.monotonic() > end:
                raise RequestError(f"SuperLink did not start: read {log}.")
            time.sleep(0.1)

    def kill_superlink(self) -> None:
        """End SuperLink, its SuperExec and every ServerApp with SIGKILL."""
        for program in self._link or ():
            program.kill()

    def switch_on(self, name: str) -> None:
        """Start a site's SuperNode under supervision; it may take a minute until SuperLink accepts it again."""
        self.sites[name] = Supervised(lambda: self.start_site(name, self._keys[name].private))

    def switch_off(self, name: str) -> None:
        """Stop a site's SuperNode for good."""
        self.sites.pop(name).switch_off()

    def start_site(self, name: str, key: Path | None) -> Program:
        """Start a site's SuperNode once, without supervision, with a private key or without one."""
        self._site_folder(name).mkdir(parents=True, exist_ok=True)
        config = " ".join(f"{field}={json.dumps(value)}" for field, value in self._configs.get(name, {}).items())
        reach = _flags(superlink=self._address, root_certificates=self._server_files.authority)
        known_by = _flags(auth_supernode_private_key=key) if key is not None else []
        place = _flags(host=HOST, port=free_port(), node_config=config)
        environment = self._environment(self._site_folder(name))
        return Program(["flower-supernode", *reach, *known_by, *place], environment, self.log_of(name))

    def online(self) -> set[str]:
        """The names of the registered sites that SuperLink takes for online."""
        nodes = self._flwr("supernode", "list", CONNECTION)["nodes"]
        return {self._node_ids[str(node["node-id"])] for node in nodes if node["status"] == "online"}

    def wait_online(self, names: Iterable[str], deadline: float = 150.0) -> None:
        """Wait until all these sites are online; after ``deadline`` seconds, say who is missing."""
        end = time.monotonic() + deadline
        while missing := set(names) - self.online():
            if time.monotonic() > end:
                raise RequestError(f"{', '.join(sorted(missing))} did not come online: read the logs in {self.folder}.")
            time.sleep(1.0)

    def submit(self, app: Path, config: Mapping[str, Setting] | None = None) -> int:
        """Start a run of an app (``flwr run``) and return its number."""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in (config or {}).items())
        return int(self._flwr("run", str(app), CONNECTION, *(["--run-config", settings] if settings else []))["run-id"])

    def status(self, number: int) -> str:
        """A run's status in Flower's words, such as ``running`` or ``finished:completed``."""
        return str(self._flwr("list", CONNECTION, "--run-id", str(number))["runs"][0]["status"])

    def follow(self, number: int, *, deadline: float, on_line: Callable[[str], None] | None = None) -> Run:
        """Read a run's log to its end, line by line; after ``deadline`` seconds the run is stopped and refused."""
        began = time.monotonic()
        command = ["flwr", "log", str(number), CONNECTION, "--stream"]
        lines: list[str] = []
        with subprocess.Popen(
            command, env=self._environment(self.folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as stream:
            alarm = threading.Timer(deadline, stream.kill)
            alarm.start()
            try:
                assert stream.stdout is not None
                for line in stream.stdout:
                    lines.append(line)
                    if on_line is not None:
                        on_line(line.rstrip())
            finally:
                alarm.cancel()
                stream.kill()
        while not (status := self.status(number)).startswith("finished"):
            if time.monotonic() - began > deadline:
                self._flwr("stop", str(number), CONNECTION)
                raise RequestError(f"run {number} did not end within {deadline:.0f} s and was stopped.")
            time.sleep(0.5)  # the log ends a moment before the run
        return Run(number, status, "".join(lines), time.monotonic() - began)

    def run(
        self,
        app: Path,
        config: Mapping[str, Setting] | None = None,
        *,
        deadline: float,
        on_line: Callable[[str], None] | None = None,
    ) -> Run:
        """Start a run and follow it to its end."""
        return self.follow(self.submit(app, config), deadline=deadline, on_line=on_line)

    def stop(self) -> None:
        """Stop every site, then SuperLink; nothing that was started is left."""
        with contextlib.ExitStack() as all_of_it:  # an error or a second Ctrl-C in one does not save the others
            for program in self._link or ():
                all_of_it.callback(program.stop)
            for site in self.sites.values():
                all_of_it.callback(site.switch_off)
        self.sites.clear()
        self._link = None

    @property
    def _address(self) -> str:
        return f"{HOST}:{self._port}"

    def _site_folder(self, name: str) -> Path:
        return self.folder / "sites" / name

    def _environment(self, folder: Path) -> dict[str, str]:
        programs = Path(sys.executable).parent  # Flower's programs start one another by name
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"OMP_NUM_THREADS": "1"} | os.environ | QUIET | {"PATH": path, "FLWR_HOME": str(folder / "flower")}

    def _write_connection(self) -> None:
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        authority = json.dumps(str(self._server_files.authority))
        lines = [f"[superlink.{CONNECTION}]", f'address = "{self._address}"', f"root-certificates = {authority}"]
        (home / "config.toml").write_text("\n".join(lines) + "\n")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a command of Flower's and return what it answers; its complaint becomes an error."""
        try:
            done = subprocess.run(
                ["flwr", *arguments, "--format", "json"],
                env=self._environment(self.folder),
                capture_output=True,
                text=True,
                timeout=COMMAND_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as problem:
            raise RequestError(
                f"`flwr {' '.join(arguments)}` did not end within {COMMAND_LIMIT:g} s: read the logs in {self.folder}."
            ) from problem
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            answer = {"success": False, "error-message": done.stdout + done.stderr}
        if done.returncode != 0 or not answer.get("success", True):
            complaint = " ".join(str(answer.get("error-message", done.stderr)).split())
            raise RequestError(f"`flwr {' '.join(arguments)}` was refused: {complaint}")
        return answer


def _flags(**values: object) -> list[str]:
    """Options of a command line: ``node_config="a=1"`` is ``--node-config a=1``."""
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
        return True
    return False
