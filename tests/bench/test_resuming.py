"""Killed at random moments and started again, an experiment ends with the results of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMINGS = {"seconds", "speedup", "training_overhead"}


def bench(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", "from expunge.cli import main; main()", "bench", "backdoor", "--scale", "smoke"]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [*command, "--out", str(out), "--workers", "2", "--device", "cpu"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def untimed(out: Path) -> dict:
    results = json.loads((out / "smoke" / "backdoor" / "results.json").read_text())
    rows = [{key: value for key, value in row.items() if key not in TIMINGS} for row in results["rows"]]
    assert results["date"] is not None
    return {**results, "rows": rows, "date": None}


def running(session: int) -> bool:
    """Whether a process of that session is left, besides zombies that wait to be collected."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see orphans")
def test_killed_and_resumed_equals_undisturbed(tmp_path):
    undisturbed = bench(tmp_path / "calm")
    assert undisturbed.wait() == 0, (tmp_path / "calm.log").read_text()
    chance, cells = random.Random(0), tmp_path / "wild" / "smoke" / "cells"
    finished = [0]
    for _ in range(4):
        victim = bench(tmp_path / "wild")
        while victim.poll() is None and len(list(cells.glob("*/cell.json"))) < finished[-1] + chance.randint(1, 6):
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(victim.pid, signal.SIGKILL)  # the main process alone: its workers must notice
        victim.wait()
        for _ in range(100):
            if not running(victim.pid):
                break
            time.sleep(0.1)
        assert not running(victim.pid), "workers outlive the process that started them"
        finished.append(len(list(cells.glob("*/cell.json"))))
    assert finished[-1] > finished[1] > 0, "it went on where it was"
    resumed = bench(tmp_path / "wild")
    assert resumed.wait() == 0, (tmp_path / "wild.log").read_text()
    assert untimed(tmp_path / "wild") == untimed(tmp_path / "calm")
