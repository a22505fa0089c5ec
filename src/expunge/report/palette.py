"""Colours and marks of the methods: the Okabe-Ito palette, which colour-blind readers can tell apart."""

from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from expunge.report.layout import RECOVERY

BAND = "#56B4E9"
INK = "#222222"
NOISE = "retrain-noise"
FAINT = "#6b6b6b"
_METHODS = {
    "trained": ("#555555", "o"),
    "do-nothing": ("#555555", "o"),
    "retrain": ("#0072B2", "o"),
    "retrain-same-start": ("#0072B2", "d"),
    "retrain-same-init": ("#0072B2", "d"),
    "hf-kcu-paper": ("#D55E00", "o"),
    "hf-kcu": ("#E69F00", "o"),
    "retrace-krylov": ("#004D40", "o"),
    "retrace": ("#009E73", "o"),
    "unfiltered": ("#661100", "o"),
    "gradient-ascent": ("#CC79A7", "X"),
    "projected-gradient-ascent": ("#CC79A7", "P"),
    "fine-tuning": ("#7F5539", ">"),
    "fine-tuning-same-budget": ("#7F5539", "<"),
    "fed-eraser": ("#332288", "^"),
    "sisa": ("#882255", "D"),
    "trained-sisa": ("#882255", "d"),
    "not": ("#999933", "v"),
    "fed-osd": ("#44546A", "p"),
}
"""Colour and mark: relatives share a colour, and no two methods share both."""
_OTHERS = ("#CC79A7", "#7F5539", "#332288", "#882255", "#999933")
FONT: dict[Any, Any] = {
    "font.size": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "svg.hashsalt": "expunge",
}


def colours(methods: list[str]) -> dict[str, str]:
    """A colour for every method: fixed for ours, in turn for others; recovery keeps its method's colour.

    Example:
        >>> colours(["retrain", "retrace-krylov+recovery", "fine-tuning"])["retrace-krylov+recovery"]
        '#004D40'
    """
    chosen: dict[str, str] = {}
    others: dict[str, str] = {}
    for method in methods:
        base = method.removesuffix(RECOVERY)
        if base not in _METHODS:
            others.setdefault(base, _OTHERS[len(others) % len(_OTHERS)])
        chosen[method] = _METHODS[base][0] if base in _METHODS else others[base]
    return chosen


def marker(method: str) -> str:
    """A square for a method followed by recovery, else the method's own: colour is not the only difference.

    Example:
        >>> marker("hf-kcu"), marker("hf-kcu+recovery")
        ('o', 's')
    """
    return "s" if method.endswith(RECOVERY) else _METHODS.get(method, ("", "o"))[1]


def line_style(method: str) -> str:
    """Broken where nothing was forgotten, dotted for retraining, dash-dotted behind recovery, else whole.

    Example:
        >>> line_style("trained"), line_style("retrain"), line_style("retrace+recovery"), line_style("sisa")
        ('--', ':', '-.', '-')
    """
    if method.startswith("retrain"):
        return ":"
    return "--" if method in ("trained", "do-nothing") else "-." if method.endswith(RECOVERY) else "-"


def write_instead(axes: Axes, text: str) -> None:
    """Empty axes with a sentence that says why they are empty.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> write_instead(axes, "Nothing was measured.")
        >>> axes.texts[0].get_text()
        'Nothing was measured.'
    """
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color=FAINT, transform=axes.transAxes)


def plain_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, or at powers of ten alone where there are many.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> axes.set_xlim(1, 100) and plain_log_scale(axes, "x")
        >>> axes.get_xscale()
        'log'
    """
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 3000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def lowest_shown(accuracies: list[float]) -> float:
    """The accuracy, in percent, below which a model is ruined and only marked on the edge of a picture.

    Example:
        >>> lowest_shown([62.0, 60.0, 10.0])
        37.0
    """
    return max(accuracies, default=0.0) - 25.0
