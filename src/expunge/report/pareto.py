"""The paper's first figure, ours beside theirs: accuracy against how much faster, and seconds."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from expunge.bench.results import Results
from expunge.report.labels import place_labels
from expunge.report.layout import method_name, reading_order
from expunge.report.measures import retrained_range, write_value
from expunge.report.palette import (
    BAND,
    FAINT,
    FONT,
    NOISE,
    colours,
    lowest_shown,
    marker,
    plain_log_scale,
    write_instead,
)
from expunge.report.printed import beside

PAPER = "paper"
_Points = dict[str, tuple[float, float]]


def pareto_plot(results: Results) -> Figure:
    """Accuracy on new data against how many times faster than retraining; hollow marks are what the paper prints.

    Example:
        >>> from expunge.bench.results import Row
        >>> figure = pareto_plot(Results("main", {}, {}, [Row("sisa", 10, test_accuracy=0.6, speedup=3)], {}))
        >>> figure.axes[0].get_xscale()
        'log'
    """
    ours, theirs = _points(results)
    with rc_context(FONT):
        figure = Figure(figsize=(9.6, 6.6))
        figure.subplots_adjust(left=0.08, right=0.98, bottom=0.12, top=0.97)
        axes = figure.subplots()
        if not ours:
            write_instead(axes, "Neither accuracy nor speed was measured.")
            return figure
        heights = [y for _, y in (*ours.values(), *theirs.values())]
        floor = max(min(heights) - 1, lowest_shown(heights))
        shown = {method: (x, max(y, floor + 0.6)) for method, (x, y) in ours.items()}
        hollow = {method: (x, max(y, floor + 0.6)) for method, (x, y) in theirs.items()}
        _frame(axes, results, floor, max(heights) + 1, [x for x, _ in (*ours.values(), *theirs.values())])
        lines = list(axes.lines)
        if hollow:
            axes.set_xlabel(f"{axes.get_xlabel()}  ·  hollow: as the paper prints")
        shades = colours(results.methods())
        for method, (x, y) in hollow.items():
            axes.plot(x, y, marker(method), color=shades[method], markersize=11, markerfacecolor="none", gid=PAPER)
        for method, (x, y) in shown.items():
            axes.plot(x, y, marker(method), color=shades[method], markersize=10, markeredgecolor="white")
        names = {_label(method, y, floor): shown[method] for method, (_, y) in ours.items()}
        names |= {f"paper: {_label(method, y, floor)}": hollow[method] for method, (_, y) in theirs.items()}
        for label in place_labels(axes, names, [*axes.texts, *lines]):
            if label.get_text().startswith("paper: "):
                label.set(color=FAINT, fontstyle="italic")
    return figure


def seconds_plot(results: Results) -> Figure:
    """Seconds by the clock, a bar a method, on a logarithmic scale; hollow bars are what the paper prints.

    Example:
        >>> from expunge.bench.results import Row
        >>> figure = seconds_plot(Results("main", {}, {}, [Row("retrain", 10, seconds=90.0)], {}))
        >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
        [90.0, 945.0]
    """
    methods = [method for method in reading_order(results) if results.summary(method, "seconds")]
    with rc_context(FONT):
        figure = Figure(figsize=(8.6, 1.3 + 0.42 * max(2, len(methods))), layout=ConstrainedLayoutEngine())
        axes = figure.subplots()
        if not methods:
            write_instead(axes, "No time was measured.")
            return figure
        shades = colours(methods)
        for line, method in enumerate(methods):
            summary = results.summary(method, "seconds")
            assert summary is not None
            axes.barh(line, summary.mean, height=0.55, color=shades[method])
            ends = [summary.mean]
            if theirs := beside(results, method, "seconds"):
                axes.barh(line, theirs, height=0.8, facecolor="none", edgecolor=FAINT, linestyle="--", gid=PAPER)
                ends.append(theirs)
            text = write_value(summary.mean, "seconds") + (f"  (paper: {theirs:g})" if theirs else "")
            axes.annotate(text, (max(ends), line), xytext=(5, 0), textcoords="offset points", va="center", fontsize=10)
        axes.set_yticks(range(len(methods)), [method_name(method) for method in methods])
        axes.set_ylim(len(methods) - 0.4, -0.6)
        plain_log_scale(axes, "x")
        axes.set_xlim(right=axes.get_xlim()[1] * 6)
        theirs_too = any(bar.get_gid() == PAPER for bar in axes.patches)
        axes.set_xlabel("seconds by the clock" + ("  ·  dashed: as the paper prints" if theirs_too else ""))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure


def _points(results: Results) -> tuple[_Points, _Points]:
    ours, theirs = {}, {}
    for method in reading_order(results):
        accuracy, speed = (results.summary(method, key) for key in ("test_accuracy", "speedup"))
        if accuracy and speed and speed.mean > 0:
            ours[method] = (speed.mean, 100 * accuracy.mean)
        x, y = (beside(results, method, key) for key in ("speedup", "test_accuracy"))
        if x is not None and y is not None:
            theirs[method] = (x, 100 * y)
    return ours, theirs


def _label(method: str, accuracy: float, floor: float) -> str:
    name = method_name(method)
    return f"{name} ({accuracy:.1f}%)" if accuracy < floor else name


def _frame(axes: Axes, results: Results, low: float, high: float, widths: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(min(0.6, min(widths) / 1.5), max(10.0, 4 * max(widths)))
    axes.set_ylim(low, high)
    plain_log_scale(axes, "x")
    edge = axes.get_yaxis_transform()
    if limits := retrained_range(results, "test_accuracy"):
        ends = [100 * limit for limit in limits]
        axes.axhspan(*ends, facecolor=BAND, edgecolor=BAND, alpha=0.3, gid=NOISE, zorder=0)
    if nothing := results.summary("trained", "test_accuracy"):
        axes.axhline(100 * nothing.mean, color="#555555", linestyle="--", linewidth=1.4, gid="do-nothing")
        axes.text(0.99, 100 * nothing.mean, "do nothing (trained)", transform=edge, ha="right", va="bottom")
    axes.set_xlabel("times faster than retraining, by the clock (right is cheaper)")
    axes.set_ylabel("accuracy on new data (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#ececec", linewidth=0.8)
