"""The response: how much of a client's pull is left, by curvature, measured and predicted; a picture and a table."""

import math
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from expunge.bench.response import CLEAN, LEFT, LENGTH, MEASURED, PREDICTED, STRONG, WEAK, X_NAME
from expunge.bench.results import Results, Series
from expunge.report.curves import Curve, curves
from expunge.report.markdown import drawn_table, escaped
from expunge.report.measures import MISSING
from expunge.report.palette import FAINT, FONT, plain_log_scale

_KINDS = {CLEAN: ("#0072B2", "o"), WEAK: ("#E69F00", "^"), STRONG: ("#D55E00", "s")}
"""Colour and mark of each kind of client."""
_AREA = 900.0
"""Of a mark that holds all of the pull, in square points."""
_SMALLEST = 8.0
_SHOWN = 0.002
"""Marks that hold less of the pull are left out: next to nothing divided by next to nothing."""
_SIZES = (0.01, 0.1, 0.3)
"""Shares of the pull that the legend shows."""
_RANGES = (("below 0.1", 0.0, 0.1), ("0.1 to 1", 0.1, 1.0), ("1 to 10", 1.0, 10.0), ("above 10", 10.0, math.inf))
"""Curvatures that the table puts together."""
_ASIDE = 1.06
"""By how much the kinds' marks stand apart, so that none hides another."""


def response_figures(results: Results) -> dict[str, Figure]:
    """The picture, where there is something to draw.

    Example:
        >>> curve = Series(MEASURED, f"SGD, {CLEAN}", X_NAME, LEFT, [0.1, 1.0], [1.0, 0.6])
        >>> list(response_figures(Results("response", {}, {}, [], {}, {}, [curve])))
        ['response']
    """
    return {"response": response_plot(results)} if results.series else {}


def response_plot(results: Results) -> Figure:
    """A panel a training: marks are measured, as large as the share of the pull that they hold; lines are predicted.

    A mark is the mean over the seeds, its bar reaches from the lowest to the highest.
    """
    trainings = list(dict.fromkeys(_training(curve.variant) for curve in results.series))
    with rc_context(FONT):
        figure = Figure(figsize=(max(7.0, 4.7 * len(trainings)), 5.0), layout="constrained")
        grid = figure.subplots(1, len(trainings), sharey=True, squeeze=False)[0]
        for axes, training in zip(grid, trainings, strict=True):
            _panel(axes, training, [curve for curve in results.series if _training(curve.variant) == training])
        grid[0].set_ylabel("share of the pull that is left")
        _legend(figure, results.series)
    return figure


def response_markdown(results: Results) -> str:
    """A line a variant: what is left of the pull in flat, middling and curved directions, and what is predicted.

    Means over the seeds, of several bins by the squared length of the pull in them.

    Example:
        >>> names = (f"SGD, {CLEAN}", X_NAME)
        >>> series = [Series(MEASURED, *names, LEFT, [0.01, 3.0], [0.9, 0.5])]
        >>> series += [Series(PREDICTED, *names, LEFT, [0.01, 3.0], [1.0, 0.4])]
        >>> series += [Series(MEASURED, *names, LENGTH, [0.01, 3.0], [0.2, 0.8])]
        >>> print(response_markdown(Results("response", {}, {}, [], {}, {}, series)).splitlines()[2])
        | SGD, clean | 0.90 (1.00) of 20% | – | 0.50 (0.40) of 80% | – |
    """
    headers = ["training, leaver", *(name for name, _, _ in _RANGES)]
    drawn = curves(results.series)
    lines = []
    for variant in dict.fromkeys(curve.variant for curve in drawn):
        of = {(curve.method, curve.y_name): curve for curve in drawn if curve.variant == variant}
        measured, predicted, lengths = (of[key] for key in ((MEASURED, LEFT), (PREDICTED, LEFT), (MEASURED, LENGTH)))
        points = list(zip(measured.x, measured.mean, predicted.mean, lengths.mean, strict=True))
        lines.append([escaped(variant), *(_range(points, low, high) for _, low, high in _RANGES)])
    reading = (
        "Measured, in brackets predicted, and which share of the pull's squared length lies there; curvature in units"
        " of the cut-off."
    )
    return "\n\n".join([drawn_table(headers, lines), reading]) + "\n"


def _range(points: Sequence[tuple[float, float, float, float]], low: float, high: float) -> str:
    inside = [point for point in points if low <= point[0] < high]
    total = sum(length for *_, length in inside)
    if not total > 0:
        return MISSING
    measured, predicted = (sum(point[at] * point[3] for point in inside) / total for at in (1, 2))
    return f"{measured:.2f} ({predicted:.2f}) of {total:.0%}".replace("-", "−")


def _training(variant: str) -> str:
    return variant.rpartition(", ")[0]


def _kind(variant: str) -> str:
    return variant.rpartition(", ")[2]


def _panel(axes: Axes, training: str, series: Sequence[Series]) -> None:
    drawn = curves(series)
    kinds = list(dict.fromkeys(_kind(curve.variant) for curve in drawn))
    for number, kind in enumerate(kinds):
        of = {(curve.method, curve.y_name): curve for curve in drawn if _kind(curve.variant) == kind}
        colour, mark = _KINDS.get(kind, (FAINT, "o"))
        if (PREDICTED, LEFT) in of:
            told = of[PREDICTED, LEFT]
            axes.plot(told.x, told.mean, "-", color=colour, linewidth=1.4, alpha=0.9)
        if (MEASURED, LEFT) in of:
            aside = _ASIDE ** (number - (len(kinds) - 1) / 2)
            _marks(axes, of[MEASURED, LEFT], of.get((MEASURED, LENGTH)), colour, mark, aside)
    axes.axvline(1.0, color=FAINT, linestyle=":", linewidth=1.0)
    axes.axhline(0.0, color=FAINT, linewidth=0.8)
    plain_log_scale(axes, "x")
    axes.set_title(training, fontsize=11.5, loc="left")
    axes.set_xlabel(X_NAME)
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _marks(axes: Axes, measured: Curve, lengths: Curve | None, colour: str, mark: str, aside: float) -> None:
    known = dict(zip(lengths.x, lengths.mean, strict=True)) if lengths is not None else {}
    shown = [number for number, at in enumerate(measured.x) if known.get(at, 1.0) >= _SHOWN]
    x = [aside * measured.x[number] for number in shown]
    low, high, mean = ([of[number] for number in shown] for of in (measured.low, measured.high, measured.mean))
    axes.vlines(x, low, high, color=colour, linewidth=1.0, alpha=0.7)
    sizes = [_size(known.get(measured.x[number], 0.0)) for number in shown]
    axes.scatter(x, mean, s=sizes, color=colour, marker=mark, alpha=0.75, edgecolors="white", linewidths=0.6)


def _size(length: float) -> float:
    return _SMALLEST + _AREA * length


def _legend(figure: Figure, series: Sequence[Series]) -> None:
    found = dict.fromkeys(_kind(curve.variant) for curve in series)
    handles = [
        Line2D([], [], color=colour, marker=mark, linestyle="", markersize=8, label=f"{kind}: measured")
        for kind, (colour, mark) in _KINDS.items()
        if kind in found
    ]
    handles.append(Line2D([], [], color=FAINT, label="predicted by the training's response"))
    handles += [
        Line2D(
            [],
            [],
            color=FAINT,
            marker="o",
            linestyle="",
            markersize=_size(share) ** 0.5,
            markeredgecolor="white",
            label=f"{share:.0%} of the pull's squared length",
        )
        for share in _SIZES
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
