"""The picture behind a verdict: every measure of a model beside where a further retrained model is expected."""

from __future__ import annotations

import math

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from expunge.auditing.equivalence import Finding
from expunge.auditing.verdict import Judgement
from expunge.report.audit_text import in_order, interval_text
from expunge.report.layout import method_name
from expunge.report.palette import BAND, FAINT, FONT, INK, NOISE, write_instead

GREEN, RED = "#00694d", "#b3261e"
_END = 3.0
"""Where the axis ends, in distances from the retrained mean to the edge; what is further is an arrow there."""
_TICKS = {-3: "3×", -2: "2×", -1: "edge", 0: "retrained mean", 1: "edge", 2: "2×", 3: "3×"}


def verdict_plot(method: str, judgement: Judgement) -> Figure:
    """A line a measure: a bar where a further retrained model is expected, the model, and doing nothing as a ring.

    Every measure is on one axis: 0 is the mean of the retrained models, 1 the edge of the bar.

    Example:
        >>> from expunge.auditing.verdict import Verdict
        >>> verdict_plot("retrace", Judgement(Verdict.UNDECIDED, "Too few.")).axes[0].texts[0].get_text()
        'Too few.'
    """
    findings = in_order(judgement.findings)
    before = {finding.measure.name: finding for finding in judgement.doing_nothing}
    with rc_context(FONT):
        figure = Figure(figsize=(11.2, 1.9 + 0.46 * len(findings)), layout="constrained")
        axes = figure.subplots()
        if not findings:
            write_instead(axes, judgement.reason)
            return figure
        for line, finding in enumerate(findings):
            _line(axes, line, finding, before.get(finding.measure.name))
        about = sum(finding.measure.about_forgetting for finding in findings)
        if 0 < about < len(findings):
            axes.axhline(about - 0.5, color="#cccccc", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(findings)), [finding.measure.label for finding in findings])
        axes.set_ylim(len(findings) - 0.5, -0.5)
        axes.set_xlim(-_END - 0.35, _END + 0.35)
        axes.set_xticks(list(_TICKS), list(_TICKS.values()))
        axes.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(f"{method_name(method)}: {judgement.verdict.value}", fontsize=12.5, loc="left")
        axes.text(1.02, 1.02, "value (expected)", transform=axes.transAxes, fontsize=9.5, color=FAINT)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=9.5, frameon=False)
    return figure


def position(finding: Finding, value: float) -> float:
    """Where a value lies: 0 at the retrained mean, -1 and 1 at the edges of the interval.

    On a side without an edge the other side's width counts.
    """
    below, above = finding.retrained - finding.low, finding.high - finding.retrained
    width = above if value > finding.retrained else below
    width = width if math.isfinite(width) else min(below, above)
    return (value - finding.retrained) / width


def _line(axes: Axes, line: int, finding: Finding, nothing: Finding | None) -> None:
    low = -1.0 if math.isfinite(finding.low) else -_END - 0.35
    high = 1.0 if math.isfinite(finding.high) else _END + 0.35
    axes.barh(line, high - low, left=low, height=0.5, color=BAND, alpha=0.35, gid=NOISE, zorder=0)
    if nothing is not None:
        _mark(axes, line, position(nothing, nothing.value), "o", 13, "none", INK, "doing-nothing")
    colour, shape = (RED, "X") if finding.deviates else (GREEN, "o")
    _mark(axes, line, position(finding, finding.value), shape, 9, colour, "white", "model")
    text = f"{finding.measure.shown(finding.value)}  ({interval_text(finding)})"
    axes.annotate(text, (1.02, line), xycoords=("axes fraction", "data")).set(
        va="center", fontsize=10, color=RED if finding.deviates else INK
    )


def _mark(axes: Axes, line: int, at: float, shape: str, size: int, face: str, edge: str, name: str) -> None:
    zorder = 4 if name == "doing-nothing" else 3  # the ring stays whole around the mark
    if abs(at) > _END:
        at, shape = math.copysign(_END + 0.1, at), ">" if at > 0 else "<"
    axes.plot(at, line, shape, markersize=size, markerfacecolor=face, markeredgecolor=edge, gid=name, zorder=zorder)


def _legend() -> list[Line2D | Patch]:
    def mark(shape: str, face: str, edge: str, size: int, label: str) -> Line2D:
        return Line2D([], [], marker=shape, mfc=face, mec=edge, linestyle="", markersize=size, label=label)

    return [
        Patch(color=BAND, alpha=0.35, label="expected of a further retrained model"),
        mark("o", GREEN, "white", 9, "this model, not told apart"),
        mark("X", RED, "white", 9, "this model, told apart"),
        mark("o", "none", INK, 12, "doing nothing"),
    ]
