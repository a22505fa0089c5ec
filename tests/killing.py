"""Kill -9 before the n-th file operation of some work, for every n."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "fcntl.flock"}
"""Audit events of Python; each comes before the operation itself."""


def killed(work: Callable[[], object], before: int) -> bool:
    """Do the work in a fork that dies before its n-th file operation; whether it did."""
    child = os.fork()
    if child == 0:
        _die_before(before)
        try:
            work()
        except SystemExit as left:
            os._exit(left.code if isinstance(left.code, int) else 0)
        except BaseException as problem:
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


def _die_before(number: int) -> None:
    seen = 0

    def hook(event: str, _arguments: object) -> None:
        nonlocal seen
        if event in OPERATIONS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
