"""Series made ready to draw: the runs of a method put together, the panels they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from expunge.bench.results import Series

_RATES = ("accuracy", "asr", "success", "agreement", "share")


@dataclass(frozen=True)
class Curve:
    """What a method's runs have in common: at each x the mean, the lowest and the highest value."""

    method: str
    variant: str
    y_name: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def is_rate(self) -> bool:
        """Whether the values are written in percent."""
        return any(word in self.y_name.lower() for word in _RATES) and max(self.high, default=0) <= 1


def panels(series: Sequence[Series]) -> list[str]:
    """The names of what was measured, each a panel, in order of first appearance.

    Example:
        >>> panels([Series("bound", "", "step", "error", [1], [0.5]), Series("own", "", "step", "error", [1], [0.1])])
        ['error']
    """
    return list(dict.fromkeys(curve.y_name for curve in series))


def curves(series: Sequence[Series]) -> list[Curve]:
    """One curve a method, variant and panel, over all series of that name; a run need not have every x.

    Example:
        >>> runs = [Series("own", "", "step", "error", [1, 2], y) for y in ([0.1, 0.3], [0.3, 0.5])]
        >>> [round(y, 2) for y in curves(runs)[0].mean]
        [0.2, 0.4]
    """
    values: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    for run in series:
        found = values.setdefault((run.method, run.variant, run.y_name), {})
        for x, y in zip(run.x, run.y, strict=True):
            found.setdefault(x, []).append(y)
    drawn = []
    for name, found in values.items():
        points = [found[x] for x in sorted(found)]
        mean, low, high = ([of(several) for several in points] for of in (fmean, min, max))
        drawn.append(Curve(*name, sorted(found), mean, low, high))
    return drawn
