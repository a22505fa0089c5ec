"""Colours and marks of the methods: the Okabe-Ito palette, which colour-blind readers can tell apart."""

from typing import Any

from matplotlib.axes import Axes

from expunge.report.measures import RECOVERY

BAND = "#56B4E9"
INK = "#222222"
NOISE = "retrain-noise"
FAINT = "#6b6b6b"
_COLOURS = {
    "trained": "#555555",
    "retrain": "#0072B2",
    "hf-kcu-paper": "#D55E00",
    "hf-kcu-gradient": "#E69F00",
    "hf-kcu-trajectory": "#009E73",
    "hf-kcu": "#009E73",
}
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
        >>> colours(["retrain", "hf-kcu-trajectory+recovery", "fine-tuning"])["hf-kcu-trajectory+recovery"]
        '#009E73'
    """
    chosen: dict[str, str] = {}
    others: dict[str, str] = {}
    for method in methods:
        base = method.removesuffix(RECOVERY)
        if base not in _COLOURS:
            others.setdefault(base, _OTHERS[len(others) % len(_OTHERS)])
        chosen[method] = _COLOURS.get(base) or others[base]
    return chosen


def marker(method: str) -> str:
    """A circle, or a square for a method followed by recovery: colour is not the only difference.

    Example:
        >>> marker("hf-kcu-gradient"), marker("hf-kcu-gradient+recovery")
        ('o', 's')
    """
    return "s" if method.endswith(RECOVERY) else "o"


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
