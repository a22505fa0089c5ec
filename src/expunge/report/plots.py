"""Both pictures, and writing them to files."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.cost import cost_plot
from expunge.report.forgetting import forgetting_plot
from expunge.report.palette import FONT

__all__ = ["cost_plot", "forgetting_plot", "save_figure", "save_plots"]
_FORMATS: dict[str, dict[str, Any]] = {".png": {"dpi": 150}, ".svg": {"metadata": {"Date": None}}}


def save_plots(results: Results, folder: str | Path) -> list[Path]:
    """Write both pictures as PNG and SVG; the same results give the same bytes.

    Raises:
        RequestError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in save_plots(Results("demo", {}, {}, [], {}), folder)]
        ['forgetting.png', 'forgetting.svg', 'cost.png', 'cost.svg']
    """
    figures = {"forgetting": forgetting_plot(results), "cost": cost_plot(results)}
    written = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            for suffix, options in _FORMATS.items():
                written.append(Path(folder) / f"{name}{suffix}")
                save_figure(figure, written[-1], **options)
    except OSError as error:
        raise RequestError(f"Cannot write plots to {folder}: {error.strerror or error}.") from error
    return written


def save_figure(figure: Figure, target: Any, **options: Any) -> None:
    """Save a figure with our fonts and reproducible SVG identifiers."""
    with rc_context(FONT):
        figure.savefig(target, facecolor="white", **options)
