"""Pictures of the study of the verdict: its power against the number of retrained models, and mixtures against it."""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from expunge.auditing.intervals import clopper_pearson
from expunge.bench.results import Results
from expunge.bench.verdict_curves import MIXTURES, Point, mixing_points, power_points
from expunge.report.layout import parts
from expunge.report.palette import FONT

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_DODGE = 0.01
"""How far intervals at the same place stand apart, as a share of the axis."""


def verdict_figures(results: Results) -> dict[str, Figure]:
    """The pictures of the study; each only where it has points.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("weights-20", 10, verdict="UNDECIDED"), Row("retrain", 10, verdict="EQUIVALENT")]
        >>> list(verdict_figures(Results("verdict", {"retrains_per_seed": 10}, {}, rows, {})))
        ['mixing']
    """
    of = parts(results)
    power = {label: power_points(part.rows, part.scenario.get("retrains_per_seed", 0)) for label, part in of.items()}
    mixing = {
        f"{label}, {start}".removeprefix(", "): mixing_points(part.rows, start)
        for label, part in of.items()
        for start in MIXTURES
    }
    drawn = {
        "power": (power, "retrained models beside it", "An honest retrain is called EQUIVALENT"),
        "mixing": (mixing, "percent of trained weights mixed in", "A mixture is called EQUIVALENT"),
    }
    return {
        name: _drawn({label: points for label, points in of_it.items() if len(points) > 1}, x_name, title)
        for name, (of_it, x_name, title) in drawn.items()
        if any(len(points) > 1 for points in of_it.values())
    }


def _drawn(lines: dict[str, list[Point]], x_name: str, title: str) -> Figure:
    with rc_context(FONT):
        figure = Figure(figsize=(8.0, 4.8), layout="constrained")
        axes = figure.subplots()
        places = sorted({point.x for points in lines.values() for point in points})
        for number, (label, points) in enumerate(lines.items()):
            _line(axes, label, points, number, aside=_DODGE * number * (places[-1] - places[0]))
        axes.set_title(f"{title}, share of the runs", fontsize=11.5, loc="left")
        axes.set_xlabel(x_name)
        axes.set_ylim(-3, 103)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axes.set_xticks(places)
        axes.grid(color="#ececec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return figure


def _line(axes: Axes, label: str, points: Sequence[Point], number: int, aside: float) -> None:
    """The share at every point with its exact interval, a little aside of the other lines."""
    limits = [clopper_pearson(point.called, point.runs) for point in points]
    axes.errorbar(
        [point.x + aside for point in points],
        [100 * limit.value for limit in limits],
        [
            [100 * (limit.value - limit.low) for limit in limits],
            [100 * (limit.high - limit.value) for limit in limits],
        ],
        fmt="o-" if number % 2 == 0 else "s--",
        color=_COLOURS[number % len(_COLOURS)],
        label=label or "all runs",
        markersize=6,
        linewidth=1.3,
        elinewidth=1.0,
        capsize=2.5,
    )
