"""Bars are for a person at a terminal: nothing in a log, and no time left before it can be known."""

import io

from rich.console import Console

from expunge.progress import FEWEST_STEPS, progress_bars


def shown(steps: int, *, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, color_system=None)
    with progress_bars(console) as progress:
        for done in range(1, steps + 1):
            progress("training", done, 20)
    return stream.getvalue()


def test_a_log_gets_nothing():
    assert shown(5, terminal=False) == ""


def test_the_time_left_is_dashes_until_enough_is_done():
    early = shown(FEWEST_STEPS - 1, terminal=True)
    assert "training" in early
    lines = [line for line in early.splitlines() if "training" in line]
    assert all("-:--:-- left" in line for line in lines)
    last = [line for line in shown(20, terminal=True).splitlines() if "training" in line][-1]
    assert "20/20" in last
    assert "-:--:--" not in last


def test_nothing_to_do_leaves_no_line():
    assert shown(0, terminal=True) == ""
