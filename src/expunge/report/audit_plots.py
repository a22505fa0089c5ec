"""Pictures of membership attacks in an audit. Drawn on Figure objects, without pyplot's state."""

from __future__ import annotations

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from expunge.auditing.comparison import Scores
from expunge.auditing.intervals import placements
from expunge.auditing.signals import Floats
from expunge.bench.auditing import Audit
from expunge.report.audit_text import NO_RETRAINS
from expunge.report.audit_verdict import verdict_plot
from expunge.report.layout import file_label, method_name
from expunge.report.palette import FAINT, FONT, INK, colours, line_style, plain_log_scale, write_instead

_BINS = 48
_ROW = 1.25
"""From one model's row to the next, where the highest column of a row is 1."""
_MIDDLE = 0.3
"""How high above its row a label stands."""
_BEYOND = 0.02
"""A share of samples outside the picture that is worth a word."""
_LOWEST_RATE = 1e-3


def audit_figures(audit: Audit) -> dict[str, Figure]:
    """Every picture of an audit by the name of its file; none of what was not compared."""
    drawn = {"audit-scores": scores_plot(audit), "audit-roc": roc_plot(audit)} if audit.scores else {}
    for method, own in audit.methods.items():
        if own.judgement.findings:
            drawn[f"audit-verdict-{file_label(method)}"] = verdict_plot(method, own.judgement)
    return drawn


def scores_plot(audit: Audit) -> Figure:
    """The strongest attack's scores, a row a model on one axis: forgotten samples filled, non-members as a line.

    The axis is framed by the trained and the retrained model; what lies outside is counted in the outermost columns.

    Example:
        >>> from expunge.bench.results import Results
        >>> figure = scores_plot(Audit(Results("demo", {}, {}, [], {}), {}, None, {}, np.ones(1), ""))
        >>> figure.axes[0].texts[0].get_text().startswith("No retrained models")
        True
    """
    models = _in_rows(audit.scores)
    with rc_context(FONT):
        figure = Figure(figsize=(10.4, 1.5 + 0.85 * max(len(models), 1)), layout="constrained")
        axes = figure.subplots()
        if not models:
            write_instead(axes, NO_RETRAINS)
            return figure
        edges = np.linspace(*_frame(audit.scores), _BINS + 1)
        shades = _shades(models)
        for row, (model, scores) in enumerate(models.items()):
            auc = _auc(scores, audit.weights)
            text = axes.annotate(f"AUC {auc:.3f}", (1.01, _MIDDLE - _ROW * row), xycoords=("axes fraction", "data"))
            text.set(va="center", color=INK)
            _row(axes, scores, audit.weights, edges, -_ROW * row, shades[model])
        axes.set_yticks([_MIDDLE - _ROW * row for row in range(len(models))], [_label(model) for model in models])
        axes.set_ylim(-_ROW * (len(models) - 1) - 0.08, 1.12)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_xlabel(f"{audit.attack or 'score'}: further right looks more like training data")
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title("filled: forgotten samples  ·  line: samples that nobody trained on", fontsize=11, loc="left")
    return figure


def _row(axes: Axes, scores: Scores, weights: Floats, edges: Floats, base: float, colour: str) -> None:
    members, others = np.asarray(scores.members), np.asarray(scores.others)
    inside = _columns(members, np.full(len(members), 1 / len(members)), edges)
    outside = _columns(others, weights / weights.sum(), edges)
    tallest = max(inside.max(), outside.max())
    axes.axhline(base, color="#d5d5d5", linewidth=0.8, zorder=1)
    axes.stairs(base + inside / tallest, edges, baseline=base, fill=True, color=colour, alpha=0.5, zorder=2)
    axes.stairs(base + outside / tallest, edges, baseline=base, color=INK, linewidth=1.3, zorder=3)
    shares = float(np.mean(members < edges[0])), float(np.mean(members > edges[-1]))
    for share, at, side, arrow in zip(shares, (0.005, 0.995), ("left", "right"), ("← {}", "{} →"), strict=True):
        if share > _BEYOND:
            text = arrow.format(f"{share:.0%} of the filled beyond")
            note = axes.annotate(text, (at, base + 0.85), xycoords=("axes fraction", "data"))
            note.set(ha=side, fontsize=9, color=FAINT)


def _columns(values: Floats, weights: Floats, edges: Floats) -> Floats:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges, weights=weights)
    return np.asarray(counts, dtype=np.float64)


def _auc(scores: Scores, weights: Floats) -> float:
    return float(placements(np.asarray(scores.members), np.asarray(scores.others), weights)[0].mean())


def _frame(scores: dict[str, Scores]) -> tuple[float, float]:
    """Around the trained and the retrained model, with room beside, but not beyond what there is."""
    known = [_all(scores[model]) for model in ("trained", "retrained") if model in scores] or [
        _all(own) for own in scores.values()
    ]
    low = min(float(np.quantile(values, 0.01)) for values in known)
    high = max(float(np.quantile(values, 0.99)) for values in known)
    room = 0.3 * (high - low)
    everything = np.concatenate([_all(own) for own in scores.values()])
    low, high = max(low - room, float(everything.min())), min(high + room, float(everything.max()))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _all(scores: Scores) -> Floats:
    return np.concatenate([np.asarray(scores.members, dtype=np.float64), np.asarray(scores.others, dtype=np.float64)])


def roc_plot(audit: Audit) -> Figure:
    """What share of the forgotten samples the strongest attack finds, by the share of false alarms; both axes log.

    Example:
        >>> from expunge.bench.results import Results
        >>> scores = {"trained": Scores(members=[2.0, 3.0], others=[0.0, 1.0])}
        >>> axes = roc_plot(Audit(Results("demo", {}, {}, [], {}), {}, "loss", scores, np.ones(2), "")).axes[0]
        >>> axes.get_xscale(), axes.get_yscale()
        ('log', 'log')
    """
    models = _in_rows(audit.scores)
    with rc_context(FONT):
        figure = Figure(figsize=(7.6, 6.2), layout="constrained")
        axes = figure.subplots()
        if not models:
            write_instead(axes, NO_RETRAINS)
            return figure
        low = _lowest(next(iter(models.values())), audit.weights)
        axes.plot([low, 1], [low, 1], color=FAINT, linewidth=1, label="guessing", gid="diagonal")
        if low < 0.01:
            axes.axvline(0.01, color="#d5d5d5", linewidth=1, zorder=0, gid="one-percent")
        shades = _shades(models)
        for model, scores in models.items():
            false_alarms, found = _curve(scores, audit.weights)
            style = line_style("retrain" if model == "retrained" else model)
            # No rate is below the frame: what is 0 comes in through the edge.
            axes.step(
                np.maximum(false_alarms, low),
                np.maximum(found, low / 2),
                where="post",
                color=shades[model],
                linestyle=style,
                linewidth=2,
                label=_label(model),
                gid=model,
            )
        axes.set(xlim=(low, 1), ylim=(low, 1.08))
        for which, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            plain_log_scale(axes, "x" if which == "x" else "y")
            axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
        axes.set_xlabel("non-members taken for members (false positive rate)")
        axes.set_ylabel("forgotten samples found (true positive rate)")
        axes.set_title(f"{audit.attack or 'attack'} on each model", fontsize=11, loc="left")
        axes.grid(color="#eeeeee", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", fontsize=9.5, framealpha=0.9)
    return figure


def _lowest(scores: Scores, weights: Floats) -> float:
    """The smallest rate that so many samples can show, but not below 0.1%."""
    worth = float(weights.sum() ** 2 / np.square(weights).sum())
    return max(_LOWEST_RATE, min(1 / worth, 1 / len(scores.members), 0.1))


def _curve(scores: Scores, weights: Floats) -> tuple[Floats, Floats]:
    """The share of false alarms and of members found, at every threshold from above all scores down."""
    values, places = np.unique(_all(scores), return_inverse=True)
    count = len(scores.members)
    found = np.bincount(places[:count], minlength=len(values)) / count
    alarms = np.bincount(places[count:], weights / weights.sum(), minlength=len(values))
    false_alarms, all_found = (np.concatenate([[0.0], np.cumsum(each[::-1])]) for each in (alarms, found))
    return false_alarms, all_found


def _in_rows(scores: dict[str, Scores]) -> dict[str, Scores]:
    """The trained model first, the retrained one last."""
    place = {"trained": 0, "retrained": 2}
    return {model: scores[model] for model in sorted(scores, key=lambda model: place.get(model, 1))}


def _shades(models: dict[str, Scores]) -> dict[str, str]:
    found = colours(["retrain" if model == "retrained" else model for model in models])
    return {model: found["retrain" if model == "retrained" else model] for model in models}


def _label(model: str) -> str:
    return "a retrained model" if model == "retrained" else method_name(model)
