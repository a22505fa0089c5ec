"""What tab completion offers: names from a list, and the clients of the run folder that is already typed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from expunge.cli.choices import HOSPITALS


def among(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Offer those of the names that begin as typed.

    Example:
        >>> among(["retrain", "sisa"])("re")
        ['retrain']
    """
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def clients_of_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Offer the clients that are still in the run; nothing where no run is typed yet or it cannot be read."""
    typed = [ctx.params.get("run"), *ctx.args]  # behind an option without its value yet, arguments are not told apart
    return among(next(filter(None, map(client_names, typed)), []))(incomplete)


def client_names(run: Path | str | None) -> list[str]:
    """Who is in a run folder, from its description alone: the run itself would need torch.

    Example:
        >>> client_names("nowhere")
        []
    """
    if run is None:
        return []
    try:
        described = json.loads((Path(run) / "run.json").read_text())
        scenario = described["scenario"]
        names = [f"client-{number}" for number in range(scenario["clients"])]
        if scenario["dataset"] == "hospitals":
            names = list(HOSPITALS)
        return [name for name in names if name not in described["departed"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a shell wants no complaints
        return []
