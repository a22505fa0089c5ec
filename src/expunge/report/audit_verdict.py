"""The picture behind a verdict: how much of what the trained model showed is left, measure by measure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from expunge.auditing.margins import Finding
from expunge.auditing.verdict import Judgement
from expunge.auditing.words import Left, counts, in_order, left
from expunge.report.audit_text import margin_text
from expunge.report.layout import method_name
from expunge.report.palette import BAND, FAINT, FONT, INK, NOISE, write_instead

GREEN, AMBER, RED = "#00694d", "#8a5a00", "#b3261e"
_FIRST, _LAST = -0.5, 1.3
"""Where the axis ends, as shares; what is further out is an arrow there."""
_TICKS = {-0.5: "too far", 0.0: "retrained\nmodels", 0.5: "half", 1.0: "doing\nnothing"}
_USE_TICKS = {0.0: "retrained\nmodels", 1.0: "least that\npasses"}
_LEFT_OUT = 0.3
"""How faint a measure is that cannot carry a claim."""


def verdict_plot(method: str, judgement: Judgement) -> Figure:
    """A line a measure: the margin as a bar, the model, and doing nothing as a ring; left out measures are faint.

    Measures of forgetting are on one axis: 0 is where retrained models are, 1 where the trained model is. Measures of
    use have their own below: 0 is retrained, 1 the margin.

    Example:
        >>> from expunge.auditing.verdict import Verdict
        >>> verdict_plot("retrace", Judgement(Verdict.UNDECIDED, "Too few.")).axes[0].texts[0].get_text()
        'Too few.'
    """
    shown = [(one, scale) for one in in_order(judgement.findings) if (scale := scaled(one)) is not None]
    groups = [[pair for pair in shown if pair[0].measure.about_forgetting is about] for about in (True, False)]
    groups = [group for group in groups if group]
    with rc_context(FONT):
        height = 1.6 + sum(0.75 + 0.42 * len(group) for group in groups)
        figure = Figure(figsize=(11.2, height), layout="constrained")
        if not groups:
            write_instead(figure.subplots(), judgement.reason)
            return figure
        sizes = [len(group) for group in groups]
        panels = figure.subplots(len(groups), squeeze=False, gridspec_kw={"height_ratios": sizes})[:, 0]
        for axes, group in zip(panels, groups, strict=True):
            _panel(axes, group)
        title = f"{method_name(method)}: {judgement.verdict.value}"
        title += f" after {judgement.after}" if judgement.after else ""
        panels[0].set_title(title, fontsize=12.5, loc="left", pad=14)
        panels[0].text(1.02, 1.0, "value (what passes)", transform=panels[0].transAxes, fontsize=9.5, color=FAINT)
        figure.legend(handles=_legend(shown), loc="outside lower center", ncols=3, fontsize=9.5, frameon=False)
    return figure


def scaled(found: Finding) -> Left | None:
    """A measure on its axis: shares of what there was to forget, or for one of use, margins; None without a scale."""
    if found.measure.about_forgetting:
        return left(found)
    worse = (1 if found.measure.side == "above" else -1) / found.margin
    value, trained = (worse * (own - found.retrained) for own in (found.value, found.trained))
    return Left(value, found.reach / found.margin, 1.0, trained)


def _panel(axes: Axes, group: Sequence[tuple[Finding, Left]]) -> None:
    about = group[0][0].measure.about_forgetting
    for line, (found, scale) in enumerate(group):
        _line(axes, line, found, scale)
    labels = [found.measure.label + ("" if counts(found) else " (left out)") for found, _ in group]
    axes.set_yticks(range(len(group)), labels)
    for label, (found, _) in zip(axes.get_yticklabels(), group, strict=True):
        label.set_color(INK if counts(found) else FAINT)
    axes.set_ylim(len(group) - 0.5, -0.5)
    axes.set_xlim(_FIRST - 0.1, _LAST + 0.1)
    ticks = _TICKS if about else _USE_TICKS
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _line(axes: Axes, line: int, found: Finding, scale: Left) -> None:
    strength = 1.0 if counts(found) else _LEFT_OUT
    low = -scale.margin if found.measure.side == "both" else _FIRST - 0.1
    axes.barh(line, scale.margin - low, left=low, height=0.5, color=BAND, alpha=0.35 * strength, gid=NOISE, zorder=0)
    _mark(axes, line, scale.trained, ("o", 13, "none", INK), "doing-nothing", strength)
    whisker = [scale.share - scale.reach, scale.share + scale.reach]
    colour, shape = _looks(found)
    axes.plot(whisker, [line, line], color=colour, linewidth=1.6, alpha=strength, gid="interval", zorder=2)
    _mark(axes, line, scale.share, (shape, 9, colour, "white"), "model", strength)
    text = f"{found.measure.shown(found.value)}  ({margin_text(found)})"
    axes.annotate(text, (1.02, line), xycoords=("axes fraction", "data")).set(
        va="center", fontsize=10, color=RED if found.outcome == "outside" else INK if counts(found) else FAINT
    )


def _looks(found: Finding) -> tuple[str, str]:
    """Colour and mark: colour is not the only difference."""
    return {"within": (GREEN, "o"), "open": (AMBER, "D"), "outside": (RED, "X")}[found.outcome]


def _mark(axes: Axes, line: int, at: float, look: tuple[str, int, str, str], name: str, strength: float) -> None:
    shape, size, face, edge = look
    zorder = 4 if name == "doing-nothing" else 3  # the ring stays whole around the mark
    if not _FIRST <= at <= _LAST:
        at, shape = (_LAST + 0.05, ">") if at > 0 else (_FIRST - 0.05, "<")
    axes.plot(
        at,
        line,
        shape,
        markersize=size,
        markerfacecolor=face,
        markeredgecolor=edge,
        alpha=strength,
        gid=name,
        zorder=zorder,
    )


def _legend(shown: Sequence[tuple[Finding, Left]]) -> list[Line2D | Patch]:
    def mark(shape: str, face: str, edge: str, size: int, label: str) -> Line2D:
        return Line2D([], [], marker=shape, mfc=face, mec=edge, linestyle="", markersize=size, label=label)

    marks = {
        "within": mark("o", GREEN, "white", 9, "this model, within the margin"),
        "open": mark("D", AMBER, "white", 8, "this model, not shown to be within"),
        "outside": mark("X", RED, "white", 9, "this model, outside the margin"),
    }
    seen = {found.outcome for found, _ in shown}
    return [
        Patch(color=BAND, alpha=0.35, label="margin around retrained models"),
        *(own for outcome, own in marks.items() if outcome in seen),
        mark("o", "none", INK, 12, "doing nothing"),
    ]
