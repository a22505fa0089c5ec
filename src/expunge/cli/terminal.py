"""What a person reads: results on standard output, messages beside them on standard error."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from expunge.bench.results import Results


@cache
def output() -> Console:
    """Standard output, for results."""
    from rich.console import Console

    return Console()


@cache
def messages() -> Console:
    """Standard error, for everything else."""
    from rich.console import Console

    return Console(stderr=True)


def tell(text: str) -> None:
    """A message for the person, beside the results on standard output()."""
    messages().print(text, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """A sentence of a method for the person who asked; it may contain brackets."""
    from rich.markup import escape

    tell(f"[yellow]note:[/] {escape(text)}")


def complain(text: str) -> None:
    """What is wrong, in one line."""
    from rich.markup import escape

    tell(f"[bold red]error:[/] {escape(text)}")


def publish_results(results: Results, out: Path, *, show_table: bool) -> None:
    """Files in the folder, and the tables on the terminal."""
    from expunge.report import publish, terminal_tables
    from expunge.report.headline import headline

    report = publish(results, out)
    if show_table:
        for table in terminal_tables(results, output().width):
            output().print(table)
        if len(results.variants) < 2 and results.rows:
            output().print(f"\n[bold]{headline(results).title}[/]")
    tell_where(report, out / "results.json")


def tell_where(report: Path, numbers: Path) -> None:
    """Where to look, and what is missing where pictures could not be drawn."""
    from expunge.extras import missing

    tell(f"Report: {report}   Numbers: {numbers}")
    if sentence := missing("matplotlib"):
        warn(sentence)
