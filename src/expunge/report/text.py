"""What is left of a client in a language model: its secrets and its text, or its answers; and what the others lost."""

from collections.abc import Mapping

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expunge.bench.results import Results
from expunge.report.layout import method_name, reading_order
from expunge.report.measures import retrained_range
from expunge.report.palette import BAND, FONT, INK, NOISE, colours, marker

PANELS = {
    "text": {
        "secrets_likely": "secrets still likely",
        "secret_loss": "loss of a secret",
        "forget_loss": "loss on the leaver's text",
        "test_loss": "loss on others' new text",
    },
    "tofu": {
        "forget_probability": "probability, leaver's answers",
        "forget_rouge": "ROUGE-L, leaver's questions",
        "forget_truth_ratio": "truth ratio, leaver's questions",
        "others_probability": "probability, others' answers",
    },
}
"""What is drawn of each experiment, by measure, and what stands above it."""


def text_figures(results: Results) -> dict[str, Figure]:
    """The picture, where something was measured."""
    every = PANELS[results.experiment].items()
    panels = {key: title for key, title in every if any(results.values(own, key) for own in results.methods())}
    return {results.experiment: text_plot(results, panels)} if panels else {}


def text_plot(results: Results, panels: Mapping[str, str]) -> Figure:
    """A panel a measure, a line a method, the retrained range as a band; small points are single runs."""
    methods = reading_order(results)
    with rc_context(FONT):
        figure = Figure(figsize=(2.7 + 2.5 * len(panels), 1.4 + 0.52 * len(methods)), layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (key, title) in zip(grid, panels.items(), strict=True):
            _panel(axes, results, key, methods)
            axes.set_title(title, fontsize=11, loc="left")
        grid[0].set_yticks(range(len(methods)), [method_name(method) for method in methods])
        grid[0].set_ylim(len(methods) - 0.5, -0.6)
        figure.supxlabel("blue band: models retrained without the leaver  ·  large mark: mean", fontsize=10)
    return figure


def _panel(axes: Axes, results: Results, key: str, methods: list[str]) -> None:
    limits, shades = retrained_range(results, key), colours(methods)
    if limits is not None:
        axes.axvspan(*limits, facecolor=BAND, edgecolor=BAND, alpha=0.35, linewidth=2, gid=NOISE, zorder=0)
    for line, method in enumerate(methods):
        values = results.values(method, key)
        if not values:
            continue
        mean = sum(values) / len(values)
        axes.plot(values, [line] * len(values), "o", color=shades[method], markersize=4, alpha=0.45, zorder=2)
        axes.plot(mean, line, marker(method), color=shades[method], markersize=9, markeredgecolor="white", zorder=3)
        place = axes.annotate(f"{mean:.3g}", (mean, line), xytext=(0, 8), textcoords="offset points")
        place.set(ha="center", fontsize=9.5, color=INK)
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
