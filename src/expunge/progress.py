"""Progress bars with an honest ETA, for anything that takes more than a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import Progress as Callback

FEWEST_STEPS = 4
"""Before so many are done, the time that is left is not known: side by side, the first ones end together."""


class _Left(TimeRemainingColumn):
    """The time that is left, once enough is done to tell."""

    def render(self, task: Task) -> Text:
        """Return dashes at first, then the estimate."""
        if task.completed < FEWEST_STEPS:
            return Text("-:--:--", style="progress.remaining")
        return super().render(task)


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Callback]:
    """A callback ``(what, done, total)`` that draws one bar for each ``what``; they vanish at the end.

    Example:
        >>> with progress_bars(Console(quiet=True)) as progress:
        ...     progress("training", 1, 2)
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:  # nobody watches; rich would leave an empty line in the log
        yield lambda *_: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        _Left(),
        TextColumn("left"),
    )
    known: dict[str, TaskID] = {}
    bars = Progress(*columns, console=console, transient=True)

    def progress(what: str, done: int, total: int) -> None:
        bars.start()  # only once there is something to show; starting again does nothing
        if what not in known:
            known[what] = bars.add_task(what, total=total)
        bars.update(known[what], completed=done, total=total)

    try:
        yield progress
    finally:
        if known:
            bars.stop()


def watch_rounds(engine: LocalEngine, expected: int | None, progress: Callback) -> None:
    """Let the engine tell a bar of every message round, where it is known how many to expect."""
    if expected is not None:
        engine.on_round = lambda done: progress("forgetting", done, max(done, expected))
