"""The second picture: how close to retrained, and what it cost. Drawn on a Figure object, without pyplot's state."""

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from expunge.bench.results import Results
from expunge.report.labels import MARKER_RADIUS, place_labels
from expunge.report.layout import method_name
from expunge.report.palette import BAND, FONT, NOISE, colours, marker, plain_log_scale, write_instead

_FAR = 10
"""A distance so many times that of doing nothing is drawn at the edge."""


def cost_plot(results: Results) -> Figure:
    """How close to retrained against how much cheaper than retraining, both on logarithmic scales.

    Example:
        >>> from expunge.bench.results import Row
        >>> row = Row("retrace-krylov", 0, kl_forget=0.1, speedup_in_gradients=28)
        >>> cost_plot(Results("demo", {}, {}, [row], {})).axes[0].get_xscale()
        'log'
    """
    points = _cost_points(results)
    with rc_context(FONT):
        figure = Figure(figsize=(8.6, 5.2) if len(points) < 10 else (9.2, 6.6))
        figure.subplots_adjust(left=0.1, right=0.97, bottom=0.13, top=0.96)
        axes = figure.subplots()
        if not points:
            write_instead(axes, "Neither distance to retrained nor cost was measured.")
            return figure
        fixed = _cost_frame(axes, results, points)
        shades, top = colours(results.methods()), axes.get_ylim()[1]
        names = {}
        for method, (x, y) in points.items():
            if y > top:  # so far off that showing it would squeeze all the others together
                y = top / 1.15
                axes.plot(x, y, marker(method), color=shades[method], markersize=10, markeredgecolor="white")
                names[f"{method_name(method)}, far above: {points[method][1]:,.0f}"] = (x, y)
                continue
            names[method_name(method)] = (x, y)
            summary = results.summary(method, "kl_forget")
            if summary is not None:
                axes.plot(
                    [x, x], [max(summary.low, y / 1e3), summary.high], color=shades[method], linewidth=1.2, alpha=0.6
                )
            axes.plot(x, y, marker(method), color=shades[method], markersize=10, markeredgecolor="white")
        place_labels(axes, names, fixed)
    return figure


def _cost_points(results: Results) -> dict[str, tuple[float, float]]:
    points = {}
    for method in results.methods():
        distance, cost = (results.summary(method, key) for key in ("kl_forget", "speedup_in_gradients"))
        y = (
            distance.mean
            if distance
            else results.noise.get("kl_forget", {}).get("mean")
            if method == "retrain"
            else None
        )
        x = 1.0 if method == "retrain" else cost.mean if cost else None
        if method not in ("trained", "do-nothing") and x is not None and y is not None and x > 0 and y > 0:
            points[method] = (x, y)
    return points


def _band_note(axes: Axes, low: float, high: float, points: list[tuple[float, float]]) -> Text:
    """What the band is, in its lower right corner; under or above it where that would cover a mark."""
    note = axes.text(0.985, low * 1.05, "how far apart retrained models are", transform=axes.get_yaxis_transform())
    note.set(ha="right", va="bottom", fontsize=10)
    marks = axes.transData.transform(points)
    for y, side in ((low * 1.05, "bottom"), (low / 1.05, "top"), (high * 1.05, "bottom"), (low * 1.05, "bottom")):
        note.set(y=y, va=side)
        if not note.get_window_extent().padded(MARKER_RADIUS * axes.figure.dpi / 72).count_contains(marks):
            break
    return note


def _cost_frame(axes: Axes, results: Results, points: dict[str, tuple[float, float]]) -> list[Artist]:
    """Scales, limits, the band of retrain noise and the line of doing nothing; returns what labels must avoid."""
    axes.set(xscale="log", yscale="log")
    nothing = results.summary("trained", "kl_forget")
    limits = results.noise.get("kl_forget")
    heights = [y for _, y in points.values()] + ([nothing.mean] if nothing and nothing.mean > 0 else [])
    heights += [limit for limit in (limits["low"], limits["high"]) if limit > 0] if limits else []
    axes.set_xlim(
        min(0.7, min(x for x, _ in points.values()) / 2),
        max(10.0, (3 if len(points) < 10 else 5) * max(x for x, _ in points.values())),
    )
    sane = [height for height in heights if not nothing or height <= _FAR * nothing.mean] or heights
    axes.set_ylim(min(heights) / 2, max(sane) * 2)
    drawn: list[Artist] = []
    edge = axes.get_yaxis_transform()
    if nothing and nothing.mean > 0:
        drawn.append(axes.axhline(nothing.mean, color="#555555", linestyle="--", linewidth=1.4, gid="do-nothing"))
        # On the left there is room, unless something is dearer than retraining.
        x, side = (0.985, "right") if min(x for x, _ in points.values()) < 0.7 else (0.015, "left")
        text = "do nothing (trained)"
        drawn.append(axes.text(x, nothing.mean * 1.06, text, transform=edge, ha=side, va="bottom"))
    if limits:
        axes.axhspan(limits["low"], limits["high"], facecolor=BAND, edgecolor=BAND, alpha=0.3, gid=NOISE, zorder=0)
        drawn.append(_band_note(axes, limits["low"], limits["high"], list(points.values())))
    plain_log_scale(axes, "x")
    plain_log_scale(axes, "y")
    axes.set_xlabel("times less work than retraining, in sample-gradients (right is cheaper)")
    axes.set_ylabel("distance to retrained, KL (lower is closer)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#ececec", linewidth=0.8)
    return drawn
