"""What the verdict makes of mixtures: the measured curve that every audit shows beside its limits.

It comes from the study of the verdict, and travels with the package in a small file that docs/build.py writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from expunge.bench.results import Results, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = Path(__file__).with_name("mixing.json")
SHARE, CALLED = "trained weights", "EQUIVALENT"
"""Words in the names of the axes by which the study's curves are known."""


def mixing_curves(results: Results) -> list[Series]:
    """How often mixtures are called EQUIVALENT, by the percentage of trained weights in them.

    Example:
        >>> curve = Series("fresh", "digits", "percent of trained weights", "share called EQUIVALENT", [20], [0.05])
        >>> len(mixing_curves(Results("verdict", {}, {}, [], {}, series=[curve])))
        1
    """
    return [curve for curve in results.series if SHARE in curve.x_name and CALLED in curve.y_name]


def as_text(curves: Sequence[Series]) -> str:
    """The content of the file."""
    return json.dumps([asdict(curve) for curve in curves], indent=1) + "\n"


def known_curves(file: Path = FILE) -> list[Series]:
    """What was measured; empty where the study was not run."""
    if not file.exists():
        return []
    return [Series(**curve) for curve in json.loads(file.read_text(encoding="utf-8"))]


def mixing_sentence(curves: Sequence[Series]) -> str:
    """The curves in words, the one that lets most through at each percentage; empty without any.

    Example:
        >>> names = ("digits", "percent of trained weights", "share called EQUIVALENT")
        >>> curves = [Series("fresh", *names, [10, 20], [0.5, 0.0]), Series("same", *names, [10, 20], [0.6, 0.02])]
        >>> print(mixing_sentence(curves))
        Measured: called EQUIVALENT were up to 60% of the models with 10% of the trained weights in them, 2% with 20%.
    """
    most: dict[float, float] = {}
    for curve in curves:
        for percent, share in zip(curve.x, curve.y, strict=True):
            if percent > 0:
                most[percent] = max(share, most.get(percent, 0.0))
    said = [f"{most[percent]:.0%} with {percent:g}%" for percent in sorted(most)]
    if not said:
        return ""
    first = said[0].replace(" with ", " of the models with ") + " of the trained weights in them"
    return f"Measured: called EQUIVALENT were up to {', '.join([first, *said[1:]])}."


def mixing_plot(curves: Sequence[Series]) -> Figure:
    """The curves, a line for each way of mixing.

    Example:
        >>> curve = Series("fresh", "digits", "percent of trained weights", "share called EQUIVALENT", [20], [0.05])
        >>> mixing_plot([curve]).axes[0].get_xlabel()
        'percent of trained weights'
    """
    from expunge.report.lines import series_plot

    return series_plot(Results("verdict", {}, {}, [], {}, series=list(curves)))
