"""The first picture: is the client gone. Drawn on a Figure object, without pyplot's state."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from expunge.bench.results import Results
from expunge.report.layout import method_name, reading_order
from expunge.report.measures import retrained_range, write_value
from expunge.report.palette import BAND, FONT, INK, NOISE, colours, lowest_shown, marker, write_instead

_PANELS = {
    "asr": "backdoor success",
    "forget_accuracy": "accuracy on forgotten data",
    "test_accuracy": "accuracy on new data",
}


def forgetting_plot(results: Results) -> Figure:
    """At a glance whether the client is gone: a panel a measure, a line a method, the retrained range as a band.

    Small points are single runs, the large mark is their mean. A measure that no run has gets no panel.

    Example:
        >>> from expunge.bench.results import Row
        >>> figure = forgetting_plot(Results("demo", {}, {}, [Row("trained", 0, test_accuracy=0.9)], {}))
        >>> len(figure.axes)
        1
    """
    methods = reading_order(results)
    panels = [key for key in _PANELS if any(results.values(method, key) for method in methods)]
    with rc_context(FONT):
        figure = Figure(
            figsize=(2.7 + 2.4 * max(1, len(panels)), 1.4 + (0.52 if len(methods) < 10 else 0.44) * len(methods)),
            layout=ConstrainedLayoutEngine(wspace=0.06),
        )
        axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
        if not panels:
            write_instead(axes[0], "No accuracy was measured.")
            return figure
        for ax, key in zip(axes, panels, strict=True):
            _forgetting_panel(ax, results, key)
        axes[0].set_yticks(range(len(methods)), [method_name(method) for method in methods])
        axes[0].set_ylim(len(methods) - 0.5, -0.6)
        parts = ["large mark: mean", "small points: single runs"]
        if any(retrained_range(results, key) for key in panels):
            parts.insert(0, "blue band: models retrained without the forgotten data")
        figure.supxlabel("  ·  ".join(parts), fontsize=10)
    return figure


def _forgetting_panel(axes: Axes, results: Results, key: str) -> None:
    limits = retrained_range(results, key)
    if limits is not None:
        low, high = (100 * limit for limit in limits)
        axes.axvspan(low, high, facecolor=BAND, edgecolor=BAND, alpha=0.35, linewidth=2, gid=NOISE, zorder=0)
    methods = reading_order(results)
    shades = colours(methods)
    floor = lowest_shown([100 * value for method in methods for value in results.values(method, key)])
    for line, method in enumerate(methods):
        values = [100 * value for value in results.values(method, key)]
        if not values:
            continue
        mean = sum(values) / len(values)
        # A ruined model far to the left would press all others together: the edge, an arrow and its value do.
        ruined = key == "test_accuracy" and mean < floor
        at = floor if ruined else mean
        if not ruined:
            axes.plot(values, [line] * len(values), "o", color=shades[method], markersize=4, alpha=0.45, zorder=2)
        axes.plot(at, line, marker(method), color=shades[method], markersize=9, markeredgecolor="white", zorder=3)
        text = ("← " if ruined else "") + write_value(mean / 100, "percent")
        place = axes.annotate(text, (at, line), xytext=(0, 8), textcoords="offset points")
        place.set(ha="center", fontsize=9.5, color=INK)
    _frame_panel(axes, results, key)


def _frame_panel(axes: Axes, results: Results, key: str) -> None:
    axes.set_title(_PANELS[key], fontsize=11, loc="left")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if key == "test_accuracy":
        # What matters here are points of accuracy, so this axis alone does not start at zero.
        values = [100 * value for method in reading_order(results) for value in results.values(method, key)]
        values += [100 * limit for limit in retrained_range(results, key) or ()]
        low, high = max(min(values), lowest_shown(values)), max(values)
        room = max(1.0, 0.12 * (high - low), (4 - (high - low)) / 2)
        axes.set_xlim(low - room, high + room)
    else:
        axes.set_xlim(-9, 109)
        axes.set_xticks([0, 25, 50, 75, 100])
