"""Tests run side by side, each on one core: threads of one would only take turns with those of another.

Their temporary files lie in memory where there is room: a program that is killed leaves there what it leaves on a disk,
and nobody waits for one. PYTEST_DEBUG_TEMPROOT=/tmp puts them on the disk.

Property tests draw the same examples in every run, and none fails for being slow on a busy machine.
"""

import os
import shutil
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background: what tests start would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines advertise AMX and kill whoever uses it: said before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One process more than there are cores: some tests wait, for Flower, for ray, for a span of grace to pass."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items):
    """Files with slow tests come first: at the end nobody waits for one of them alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def expunge(monkeypatch, capsys):
    """Run the real entry point in this process: exit code, standard output, standard error."""
    from expunge import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["expunge", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call
