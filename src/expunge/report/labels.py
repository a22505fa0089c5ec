"""Names beside the points of a scatter plot, placed so that none covers another name or a point."""

from collections.abc import Iterator
from math import hypot
from operator import itemgetter

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from expunge.report.palette import FAINT, INK

MARKER_RADIUS = 6.0
_NEAR = 15
"""Points from its mark within which a label needs no line to it."""
_Place = tuple[float, float, str]
"""Offsets in points, and how the text is aligned there."""
_COVERING, _CROSSING, _OUTSIDE = 1000.0, 100.0, 1e6


def place_labels(axes: Axes, labels: dict[str, tuple[float, float]], fixed: list[Artist]) -> list[Annotation]:
    """Write each label near its point (data coordinates), trying places further away until one is free.

    The axes' limits must be final. `fixed` is what is drawn already and must stay free. Where no place is free, the
    least bad one is taken.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> len(place_labels(axes, {"one": (0.5, 0.5), "two": (0.5, 0.5)}, []))
        2
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    radius = MARKER_RADIUS * figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    # A line has no height of its own: a little is added, or nothing would ever cover it.
    taken = [artist.get_window_extent(renderer).padded(1) for artist in fixed]
    for x, y in axes.transData.transform(list(labels.values())) if labels else ():
        taken.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    leaders: list[Path] = []
    placed = []
    for name, point in labels.items():
        x, y = axes.transData.transform(point)
        # The label's own mark, and any right on top of it, cannot be in the leader's way.
        obstacles = [other for other in taken if not other.contains(x, y)]
        tried = []
        for place in _places():
            box = _extent(axes, name, point, place, renderer)
            leader = Path([(x, y), ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)]) if _is_away(place) else None
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            cost = _cost(box, leader, taken, obstacles, leaders) + (0 if inside else _OUTSIDE)
            tried.append((cost, place, box, leader))
            if cost == 0:
                break
        _, place, box, leader = min(tried, key=itemgetter(0))
        placed.append(_label(axes, name, point, place))
        taken.append(box)
        leaders += [leader] if leader else []
    return placed


def _extent(axes: Axes, name: str, point: tuple[float, float], place: _Place, renderer: RendererBase) -> Bbox:
    """Where on the screen a label would be."""
    label = _label(axes, name, point, place)
    label.update_positions(renderer)
    box = Text.get_window_extent(label, renderer)
    label.remove()
    return box


def _is_away(place: _Place) -> bool:
    """Whether a label stands so far from its mark that a line must lead to it."""
    return hypot(place[0], place[1]) > _NEAR


def _cost(box: Bbox, leader: Path | None, taken: list[Bbox], obstacles: list[Bbox], leaders: list[Path]) -> float:
    """How bad a place is: covering something counts most, then crossing."""
    parts = (Bbox.intersection(box, other) for other in taken)
    covering = sum(_COVERING + part.width * part.height for part in parts if part is not None)
    crossing = sum(line.intersects_bbox(box) for line in leaders)
    if leader is not None:
        crossing += sum(leader.intersects_bbox(other) for other in obstacles)
        crossing += sum(leader.intersects_path(line) for line in leaders)
    return covering + _CROSSING * crossing


def _places() -> Iterator[_Place]:
    """Offsets in points from near to far: right, left, above, below, then in widening steps."""
    yield from ((10, 0, "left"), (-10, 0, "right"), (0, 14, "center"), (0, -14, "center"))
    for step in range(1, 14):
        for sign in (1, -1):
            if step > 1:
                yield (0, sign * 15 * step, "center")
            for aside in (12, 60, 120, 180):
                yield from ((aside, sign * 15 * step, "left"), (-aside, sign * 15 * step, "right"))


def _label(axes: Axes, name: str, point: tuple[float, float], place: _Place) -> Annotation:
    line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkB": 5}
    return axes.annotate(
        name,
        point,
        xytext=place[:2],
        textcoords="offset points",
        ha=place[2],
        va="center",
        fontsize=10.5,
        color=INK,
        arrowprops=line if _is_away(place) else None,
        path_effects=[withStroke(linewidth=3, foreground="white", alpha=0.85)],
        zorder=5,  # above the lines that show ranges
    )
