"""The pictures of an experiment, and writing them to files."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.cost import cost_plot
from expunge.report.fingerprint import KEY, fingerprint
from expunge.report.forgetting import forgetting_plot
from expunge.report.layout import file_label, parts
from expunge.report.lines import series_plot, variants_plot
from expunge.report.palette import FONT
from expunge.report.pareto import pareto_plot, seconds_plot
from expunge.report.persistence import persistence_figures
from expunge.report.response import response_figures
from expunge.report.scaling import scaling_figures
from expunge.report.text import text_figures
from expunge.report.verdict_plots import verdict_figures

OF_PARTS = ("forgetting", "cost", "pareto", "seconds")
"""The pictures that every variant has of its own."""
_IN_ORDER = ("damping", "heterogeneity", "clients", "several")
"""Experiments whose variants are steps of one quantity, so that lines between them mean something."""

_OWN: dict[str, Callable[[Results], dict[str, Figure]]] = {
    "verdict": verdict_figures,
    "response": response_figures,
    "scaling": scaling_figures,
    "persistence": persistence_figures,
    "text": text_figures,
    "tofu": text_figures,
}
"""Experiments that are drawn in their own way."""


def figures(results: Results, wanted: Collection[str] | None = None) -> dict[str, Figure]:
    """Every picture of an experiment by the name of its file, the parts' own before those of the whole.

    Args:
        results: what is drawn.
        wanted: names; variants of which none is wanted are not drawn.

    Example:
        >>> from expunge.bench.results import Row
        >>> row = Row("retrain", 10, test_accuracy=0.7, seconds=90.0, speedup_in_gradients=1.0)
        >>> list(figures(Results("main", {}, {}, [row], {})))
        ['forgetting', 'cost', 'pareto', 'seconds']
    """
    drawn: dict[str, Figure] = {}
    for label, part in parts(results).items():
        end = f"-{file_label(label)}" if len(results.variants) > 1 else ""
        if wanted is None or any(name.endswith(end) for name in wanted):
            drawn |= {f"{name}{end}": figure for name, figure in part_figures(part).items()}
    return drawn | whole_figures(results)


def part_figures(results: Results) -> dict[str, Figure]:
    """The pictures of one variant; none where no model was measured.

    Example:
        >>> part_figures(Results("convergence", {}, {}, [], {}))
        {}
    """
    if not any(row.test_accuracy is not None or row.forget_accuracy is not None for row in results.rows):
        return {}
    drawn = {"forgetting": forgetting_plot(results)}
    if any(row.speedup_in_gradients is not None for row in results.rows):
        drawn["cost"] = cost_plot(results)
    return drawn | (
        {"pareto": pareto_plot(results), "seconds": seconds_plot(results)} if results.experiment == "main" else {}
    )


def whole_figures(results: Results) -> dict[str, Figure]:
    """The pictures that put all variants together, and the curves.

    Example:
        >>> whole_figures(Results("demo", {}, {}, [], {}))
        {}
    """
    if results.experiment in _OWN:
        return _OWN[results.experiment](results)
    drawn = {"series": series_plot(results)} if results.series else {}
    if results.experiment in _IN_ORDER and len(results.variants) > 1:
        drawn["variants"] = variants_plot(results)
    return drawn


def save_plots(results: Results, folder: str | Path) -> list[Path]:
    """Write every picture as PNG and SVG; the same results give the same bytes, and a PNG names them (`fingerprint`).

    Raises:
        RequestError: the folder cannot be written.

    Example:
        >>> save_plots(Results("convergence", {}, {}, [], {}), "nowhere")
        []
    """
    return save_figures(figures(results), results, folder)


def save_figures(
    drawn: dict[str, Figure], results: Results, folder: str | Path, suffixes: Sequence[str] = (".png", ".svg")
) -> list[Path]:
    """Write some of the pictures, each as files with these suffixes; see `save_plots`."""
    source = fingerprint(results) if drawn else ""
    formats: dict[str, dict[str, Any]] = {
        ".png": {"dpi": 150, "metadata": {KEY: source}},
        ".svg": {"metadata": {"Date": None}},
    }
    written = []
    try:
        for name, figure in drawn.items():
            Path(folder).mkdir(parents=True, exist_ok=True)
            for suffix in suffixes:
                written.append(Path(folder) / f"{name}{suffix}")
                save_figure(figure, written[-1], **formats[suffix])
    except OSError as error:
        raise RequestError(f"Cannot write plots to {folder}: {error.strerror or error}.") from error
    return written


def save_figure(figure: Figure, target: Any, *, transparent: bool = False, **options: Any) -> None:
    """Save a figure with our fonts and reproducible SVG identifiers, on white or on nothing."""
    with rc_context(FONT):
        figure.savefig(target, facecolor="none" if transparent else "white", transparent=transparent, **options)
    figure.set_layout_engine("none")  # it is laid out now, and finding the places takes as long as drawing
