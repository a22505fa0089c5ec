"""Child processes: a group each, none left behind, started again when supervised. Plain shells play the programs."""

import os
import time
from pathlib import Path

import pytest

from flower_deployment import processes
from flower_deployment.processes import Program, Supervised


@pytest.fixture
def start(tmp_path):
    """Start a shell script as a program; whatever the test leaves of it is killed."""
    started = []

    def program(script):
        started.append(Program(["sh", "-c", script], os.environ, tmp_path / "log.txt"))
        return started[-1]

    yield program
    for each in started:
        each.kill()


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid):
    """Whether a process lives; one that nobody has asked about since its death does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def child_of(folder):
    wait_for(lambda: (folder / "log.txt").exists() and (folder / "log.txt").read_text().strip())
    return int((folder / "log.txt").read_text().split()[-1])


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_the_whole_group_ends(start, tmp_path, way):
    program = start("sleep 600 & echo $!; wait")
    child = child_of(tmp_path)
    assert alive(child)
    getattr(program, way)()
    assert not program.running
    wait_for(lambda: not alive(child))


def test_what_a_dead_program_has_left_ends_with_it(start, tmp_path):
    program = start("sleep 600 & echo $!")
    child = child_of(tmp_path)
    program.wait()
    wait_for(lambda: not alive(child))


def test_one_that_does_not_listen_is_killed_after_a_grace(start, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.3)
    program = start("trap '' TERM; echo $$; while true; do sleep 0.1; done")
    child_of(tmp_path)
    program.stop()
    assert not program.running


def test_a_supervised_program_comes_back_until_it_is_switched_off(start, monkeypatch):
    monkeypatch.setattr(processes, "RETRY", 0.05)
    site = Supervised(lambda: start("sleep 600"))
    first = site.program
    site.kill()
    wait_for(lambda: site.program is not first)
    second = site.program
    assert second.running
    assert site.starts == 2
    site.switch_off()
    time.sleep(0.3)
    assert not second.running
    assert site.program is second


def test_switching_off_does_not_wait_for_the_next_start(start):
    site = Supervised(lambda: start("true"))
    wait_for(lambda: not site.program.running)
    began = time.monotonic()
    site.switch_off()
    assert time.monotonic() - began < 2.0
    assert site.starts == 1
