"""Line plots: an experiment's variants side by side, and any curves it recorded."""

from itertools import cycle

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from expunge.bench.results import Results
from expunge.report.curves import Curve, curves, panels
from expunge.report.layout import NO_METHODS, method_name, parts, reading_order
from expunge.report.measures import retrained_range
from expunge.report.palette import (
    BAND,
    FAINT,
    FONT,
    NOISE,
    colours,
    line_style,
    lowest_shown,
    marker,
    plain_log_scale,
    write_instead,
)
from expunge.report.pareto import PAPER
from expunge.report.printed import PRINTED_SERIES, beside

_PANELS = {
    "test_accuracy": "accuracy on new data",
    "forget_accuracy": "accuracy on the forgotten data",
    "asr": "backdoor success",
    "speedup_in_gradients": "times less work than retraining",
}
_THEORY = ("bound", "theory", "o(")


def variants_plot(results: Results) -> Figure:
    """The variants from left to right, a panel a measure, a line a method with its spread, retrained as the band.

    Example:
        >>> from expunge.bench.results import Row, Variant
        >>> rows = [Row("sisa", 10, test_accuracy=0.6, variant=name) for name in ("few", "many")]
        >>> results = Results("clients", {}, {}, rows, {}, {name: Variant({}, {}, {}) for name in ("few", "many")})
        >>> [label.get_text() for label in variants_plot(results).axes[0].get_xticklabels()]
        ['few', 'many']
    """
    of = parts(results)
    shown = [key for key in _PANELS if any(getattr(row, key) is not None for row in results.rows)]
    with rc_context(FONT):
        figure = Figure(figsize=(max(7.0, 4.1 * len(shown)), 6.2), layout=ConstrainedLayoutEngine(wspace=0.05))
        grid = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
        if not shown:
            write_instead(grid[0], "Nothing was measured.")
        for axes, key in zip(grid, shown, strict=False):
            _variants_panel(axes, of, reading_order(results), key)
        _legend(figure)
    return figure


def _variants_panel(axes: Axes, of: dict[str, Results], methods: list[str], key: str) -> None:
    percent = key != "speedup_in_gradients"
    drawn = [method for method in methods if percent or method not in NO_METHODS]
    shades = colours(methods)
    for number, method in enumerate(drawn):
        _method_line(axes, of, method, key, 0.3 * ((number + 0.5) / len(drawn) - 0.5), shades[method])
    if percent:
        ranges = [(at, retrained_range(part, key)) for at, part in enumerate(of.values())]
        bands = [(at, ends) for at, ends in ranges if ends is not None]
        low, high = ([100 * ends[side] for _, ends in bands] for side in (0, 1))
        where = [at for at, _ in bands]
        axes.fill_between(where, low, high, color=BAND, alpha=0.35, gid=NOISE, label="retrained range")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    else:
        plain_log_scale(axes, "y")
    if key == "test_accuracy":
        measured = [[100 * value for name in drawn for value in part.values(name, key)] for part in of.values()]
        axes.set_ylim(bottom=max(axes.get_ylim()[0], min(lowest_shown(values) for values in measured if values)))
    shared, names = _shared_words(list(of))
    axes.set_xticks(range(len(of)), names)
    axes.set_xlabel(shared)
    axes.set_xlim(-0.35, len(of) - 0.65)
    _frame(axes, _PANELS[key])


def _method_line(axes: Axes, of: dict[str, Results], method: str, key: str, aside: float, colour: str) -> None:
    """Means and spreads, a little aside so that methods do not hide each other, and the paper's values."""
    unit = 1.0 if key == "speedup_in_gradients" else 100.0
    found = [(at, part.summary(method, key)) for at, part in enumerate(of.values())]
    known = [(at + aside, summary) for at, summary in found if summary is not None]
    axes.errorbar(
        [at for at, _ in known],
        [unit * summary.mean for _, summary in known],
        [unit * summary.spread for _, summary in known],
        fmt=marker(method) + line_style(method),
        color=colour,
        label=method_name(method),
        markersize=7,
        markeredgecolor="white",
        linewidth=1.3,
        elinewidth=1.0,
    )
    theirs = [(at, beside(part, method, key)) for at, part in enumerate(of.values())]
    if hollow := [(at, unit * value) for at, value in theirs if value is not None]:
        name = f"paper: {method_name(method)}"
        _hollow(axes, [at for at, _ in hollow], [y for _, y in hollow], marker(method), colour, name)


def _shared_words(labels: list[str]) -> tuple[str, list[str]]:
    """What all labels share, and what is left of each: "alpha=0.1" is 0.1 of alpha, "10 clients" 10 of clients."""
    before, after = {label.partition("=")[0] for label in labels}, {label.partition(" ")[2] for label in labels}
    if len(before) == 1 and all("=" in label for label in labels):
        return before.pop(), [label.partition("=")[2] for label in labels]
    if len(after) == 1 and after != {""}:
        return after.pop(), [label.partition(" ")[0] for label in labels]
    return "", labels


def series_plot(results: Results) -> Figure:
    """Any curves: a panel for each variant and thing measured, a line a method; the paper's points are hollow.

    The shade around a line reaches from the lowest to the highest run.

    Example:
        >>> from expunge.bench.results import Series
        >>> curve = Series("retrace", "", "clients that left", "test accuracy", [1, 2], [0.9, 0.8])
        >>> figure = series_plot(Results("sequential", {}, {}, [], {}, {}, [curve]))
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_title(loc="left")
        ('clients that left', 'test accuracy')
    """
    names, variants = panels(results.series), list(dict.fromkeys(curve.variant for curve in results.series))
    places = [(variant, name) for variant in variants for name in names] or [("", "")]
    columns = len(names) if len(names) > 1 else len(places)
    shades = colours([curve.method for curve in results.series])
    with rc_context(FONT):
        size = (max(7.5, 4.6 * columns), 1.6 + 4.2 * (len(places) // columns))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.05))
        grid = figure.subplots(len(places) // columns, columns, squeeze=False)
        for axes, (variant, name) in zip(grid.flat, places, strict=True):
            own = [curve for curve in results.series if (curve.variant, curve.y_name) == (variant, name)]
            if not own:
                write_instead(axes, "No curve was recorded.")
                continue
            printed = PRINTED_SERIES.get(results.experiment, ())
            theirs = [curve for curve in printed if name == (curve.y_name if curve.y_name in names else names[0])]
            _series_panel(axes, curves(own), curves(theirs), shades)
            axes.set_xlabel(own[0].x_name)
            _frame(axes, f"{name} ({variant})" if len(variants) > 1 else name)
        _legend(figure)
    return figure


def _series_panel(axes: Axes, ours: list[Curve], theirs: list[Curve], shades: dict[str, str]) -> None:
    unit = 100.0 if ours and all(curve.is_rate for curve in ours) else 1.0
    dashes = cycle(("--", "-.", ":"))
    for curve in ours:
        theory = any(word in curve.method.lower() for word in _THEORY)
        colour = FAINT if theory else shades[curve.method]
        # Retrained models are made at a few places only: marks, and no line that would claim more.
        style = next(dashes) if theory else "" if curve.method == "retrain" else line_style(curve.method)
        mean, low, high = ([unit * y for y in values] for values in (curve.mean, curve.low, curve.high))
        points = "" if theory or len(curve.x) > 30 else marker(curve.method)
        axes.plot(curve.x, mean, points + style, color=colour, label=method_name(curve.method), markersize=6)
        shade = axes.fill_between(curve.x, low, high, color=colour, alpha=0.15, linewidth=0)
        if curve.method == "retrain":
            shade.set(color=BAND, alpha=0.35, gid=NOISE)
    for number, curve in enumerate(theirs):
        if any(word in curve.method.lower() for word in _THEORY):
            axes.plot(curve.x, curve.mean, ":", color="#111111", linewidth=1.2, label=f"paper: {curve.method}")
        else:
            _hollow(axes, curve.x, curve.mean, "os^"[number % 3], "#111111", f"paper: {curve.method}")
    _choose_scales(axes, [*ours, *theirs], rates=unit != 1.0)
    if unit != 1.0:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def _choose_scales(axes: Axes, drawn: list[Curve], rates: bool) -> None:
    """Logarithmic where values span more than a factor of 20; a horizontal axis that begins at 0 stays linear.

    Rates stay linear: `rates` says that these are.
    """
    widths, heights = [x for curve in drawn for x in curve.x], [y for curve in drawn for y in curve.mean if y > 0]
    if all(x == int(x) for x in widths):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if widths and min(widths) > 0 and max(widths) > 20 * min(widths):
        axes.set_xscale("log")
    if not rates and heights and max(heights) > 20 * min(heights):
        axes.set_yscale("log")


def _hollow(axes: Axes, x: list[float], y: list[float], mark: str, colour: str, name: str) -> None:
    axes.plot(x, y, mark, color=colour, markerfacecolor="none", markersize=8, label=name, gid=PAPER)


def _legend(figure: Figure) -> None:
    """One legend below all panels, every name once."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        found, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, found, strict=True))
    if named:
        columns = max(1, int(figure.get_figwidth() / (0.085 * max(map(len, named)) + 0.7)))
        handles = list(named.values())
        figure.legend(handles, list(named), loc="outside lower center", ncols=columns, frameon=False, fontsize=10)


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11.5, loc="left")
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
