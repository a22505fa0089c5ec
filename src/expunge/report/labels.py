"""Names beside the points of a scatter plot, placed so that none covers another name or a point."""

from collections.abc import Iterator

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from expunge.report.palette import FAINT, INK

_MARKER_RADIUS = 6.0


def place_labels(axes: Axes, labels: dict[str, tuple[float, float]], fixed: list[Artist]) -> list[Annotation]:
    """Write each label near its point (data coordinates), trying places further away until one is free.

    The axes' limits must be final. `fixed` is what is drawn already and must stay free.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> len(place_labels(axes, {"one": (0.5, 0.5), "two": (0.5, 0.5)}, []))
        2
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    pixels = figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    taken = [artist.get_window_extent(renderer) for artist in fixed]
    for x, y in axes.transData.transform(list(labels.values())) if labels else ():
        radius = _MARKER_RADIUS * pixels
        taken.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    placed = []
    for name, point in labels.items():
        for horizontal, vertical, alignment in _places():
            label = _label(axes, name, point, horizontal, vertical, alignment)
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            label.remove()
        else:
            label = _label(axes, name, point, 0, 14, "center")
        taken.append(box)
        placed.append(label)
    return placed


def _places() -> Iterator[tuple[float, float, str]]:
    """Offsets in points from near to far: right, left, above, below, then in widening steps."""
    yield from ((10, 0, "left"), (-10, 0, "right"), (0, 14, "center"), (0, -14, "center"))
    for step in range(1, 9):
        for sign in (1, -1):
            yield from ((12, sign * 16 * step, "left"), (-12, sign * 16 * step, "right"))


def _label(axes: Axes, name: str, point: tuple[float, float], x: float, y: float, alignment: str) -> Annotation:
    away = abs(y) > 15
    return axes.annotate(
        name,
        point,
        xytext=(x, y),
        textcoords="offset points",
        ha=alignment,
        va="center",
        fontsize=10.5,
        color=INK,
        arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkB": 5} if away else None,
    )
