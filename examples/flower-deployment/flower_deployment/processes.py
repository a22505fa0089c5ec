"""Flower's long-running programs as child processes: each in a process group of its own, none left behind.

A program that is killed takes its group with it (a SuperNode's ClientApp, a SuperExec's ServerApp). A `Supervised` one
is started again until it is switched off, as systemd or a container runtime would do at a site: within a minute of its
death Flower refuses a SuperNode's key (HTTP 412, "still online"), so the first attempts may fail.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GRACE = 10.0
"""Seconds a program has to end by itself before it is killed."""

RETRY = 4.0
"""Seconds between the end of a supervised program and its next start."""


def free_port() -> int:
    """A TCP port on loopback that nothing listens on.

    Example:
        >>> 0 < free_port() < 65536
        True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """One running program in a process group of its own, its output at the end of a log file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches us alone, and we stop it in order
            )

    @property
    def pid(self) -> int:
        """The program's process id, which is also its group's."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the program itself still runs."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait for its end, then end what is left of its group."""
        self._process.wait()
        self._signal_group(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and kill what is left of its group after a grace."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.running:
                self._process.terminate()
            self._process.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        """End the program and its group at once (SIGKILL), as a power failure would."""
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Supervised:
    """A program that is started again whenever it ends, until it is switched off.

    Args:
        start: starts the program; called anew each time.
    """

    def __init__(self, start: Callable[[], Program]) -> None:
        self._start = start
        self._off = threading.Event()
        self._lock = threading.Lock()
        self.program = start()
        self.starts = 1
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self.program.wait()
            self._off.wait(RETRY)
            with self._lock:
                if self._off.is_set():
                    return
                self.program = self._start()
                self.starts += 1

    def kill(self) -> None:
        """Kill the program with SIGKILL; its supervisor starts it again."""
        self.program.kill()

    def switch_off(self) -> None:
        """Stop the program for good."""
        with self._lock:
            self._off.set()
        self.program.stop()
        self._thread.join()
