"""How long a request takes beside retraining, and how much memory, by the number of parameters: a picture."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from expunge.bench.results import Results, Series
from expunge.report.palette import FONT, colours, line_style, marker, plain_log_scale

X_NAME = "parameters"
SECONDS, MEMORY = "seconds", "peak memory, GB"


def scaling_figures(results: Results) -> dict[str, Figure]:
    """The picture, where there is something to draw.

    Example:
        >>> curve = Series("retrace", "encoder", X_NAME, SECONDS, [3e6, 2e7], [0.5, 1.0])
        >>> list(scaling_figures(Results("scaling", {}, {}, [], {}, {}, [curve])))
        ['scaling']
    """
    return {"scaling": scaling_plot(results)} if results.series else {}


def scaling_plot(results: Results) -> Figure:
    """Two panels, both axes logarithmic: seconds and memory against parameters, a mark a model, a line a method."""
    shown = [name for name in (SECONDS, MEMORY) if any(curve.y_name == name for curve in results.series)]
    with rc_context(FONT):
        figure = Figure(figsize=(5.2 * len(shown), 4.4), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            _panel(axes, name, [curve for curve in results.series if curve.y_name == name])
    return figure


def _panel(axes: Axes, name: str, series: list[Series]) -> None:
    colour = colours(list(dict.fromkeys(curve.method for curve in series)))
    for method in colour:
        points = sorted((x, y) for own in series if own.method == method for x, y in zip(own.x, own.y, strict=True))
        x, y = zip(*points, strict=True)
        (line,) = axes.plot(x, y, label=method, color=colour[method], linewidth=1.4, markersize=6, alpha=0.9)
        line.set(marker=marker(method), linestyle=line_style(method))
    plain_log_scale(axes, "x")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    plain_log_scale(axes, "y")
    axes.set_xlabel(X_NAME)
    axes.set_ylabel(name)
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def scaling_markdown(results: Results) -> str:
    """A line a model: what a request takes, beside retraining.

    Example:
        >>> from expunge.bench.results import Row, Variant
        >>> rows = [Row(name, 0, variant="cnn", seconds=took) for name, took in (("retrace", 0.5), ("retrain", 20.0))]
        >>> told = {"parameters": 188810, "first": 1.0, "retraining": "timed", "peak_gb": None}
        >>> results = Results("scaling", {}, {}, rows, {}, {"cnn": Variant(told, {}, {})})
        >>> print(scaling_markdown(results).splitlines()[2])
        | cnn | 0.189M | 0.500 | 1.000 | 20 | 40× | – |
    """
    lines = [
        "| model | parameters | seconds | of the first request | of retraining | times faster | peak memory (GB) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    guessed = False
    for label, variant in results.variants.items():
        told = variant.scenario
        own, again = (
            next(row.seconds for row in results.rows if row.variant == label and row.method == method)
            for method in ("retrace", "retrain")
        )
        assert own is not None
        assert again is not None
        star = "" if told["retraining"] == "timed" else "\\*"
        guessed = guessed or bool(star)
        peak = "–" if told["peak_gb"] is None else f"{told['peak_gb']:.1f}"
        cells = [label, f"{told['parameters'] / 1e6:.3g}M", f"{own:.3f}", f"{told['first']:.3f}", f"{again:.0f}{star}"]
        lines.append(f"| {' | '.join(cells)} | {again / own:.0f}× | {peak} |")
    note = ["", "\\* One epoch of one round was timed, and counted as often as there are."] if guessed else []
    return "\n".join([*lines, *note])
