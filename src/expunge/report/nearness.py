"""How far the default method is from retraining, in numbers; whether that is near is said by the verdicts alone.

Every seed has its own leaver, trained model and retrained models. So a model is compared with the retrained models of
its own seed, and the differences are averaged. How much they scatter stands beside, so that a model too high in one
seed and too low in another is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from expunge.bench.results import Results
from expunge.report.layout import parts
from expunge.report.measures import FEWEST_RETRAINS
from expunge.report.verdicts import verdicts_on

METHODS = ("retrace", "retrace+recovery")
MEASURES = ("test_accuracy", "forget_accuracy", "forget_loss", "asr", "kl_forget", "mia_auc")
WORK = "speedup_in_gradients"
_DISTANCES = ("kl_forget",)
"""Measures that are distances to the retrained models already."""


@dataclass(frozen=True)
class Distance:
    """How far from retrained models: the mean difference over seeds, and its standard deviation.

    For a measure that is a distance itself it is the mean distance.
    """

    mean: float
    spread: float


@dataclass(frozen=True)
class Gap:
    """One measure: the method's distance, the trained model's, and for a distance the retrained models' own range."""

    own: Distance
    trained: Distance
    retrained: tuple[float, float] | None = None


@dataclass(frozen=True)
class Nearness:
    """One method on one variant."""

    variant: str
    method: str
    seeds: int
    gaps: dict[str, Gap]
    work: float | None
    verdicts: dict[str, int]


def nearness(results: Results) -> list[Nearness]:
    """The default method with and without recovery, a variant after another, where they were run.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", 10, test_accuracy=value) for value in (0.60, 0.61, 0.62)]
        >>> rows += [Row("trained", 10, test_accuracy=0.63), Row("retrace", 10, test_accuracy=0.60)]
        >>> found = nearness(Results("main", {}, {}, rows, {}))[0]
        >>> round(found.gaps["test_accuracy"].own.mean, 3), round(found.gaps["test_accuracy"].trained.mean, 3)
        (-0.01, 0.02)
    """
    return [
        _nearness(label, part, method)
        for label, part in parts(results).items()
        for method in METHODS
        if method in part.methods()
    ]


def _nearness(label: str, part: Results, method: str) -> Nearness:
    found = {measure: _gap(part, method, measure) for measure in MEASURES}
    gaps = {measure: gap for measure, gap in found.items() if gap is not None}
    work = part.summary(method, WORK)
    seeds = len({row.seed for row in part.rows if row.method == method})
    return Nearness(label, method, seeds, gaps, work.mean if work else None, dict(verdicts_on(part, method)))


def _gap(part: Results, method: str, measure: str) -> Gap | None:
    """None unless the method, the trained and some retrained models were measured for one seed at least."""
    own, trained, retrained = (_by_seed(part, name, measure) for name in (method, "trained", "retrain"))
    is_distance = measure in _DISTANCES
    seeds = [seed for seed in own if seed in trained and (seed in retrained or is_distance)]
    if not seeds:
        return None
    references = [retrained.get(seed, []) for seed in seeds]
    after, before = (
        _distance([fmean(of[seed]) for seed in seeds], None if is_distance else references) for of in (own, trained)
    )
    return Gap(after, before, _mean_range(references) if is_distance else None)


def _by_seed(part: Results, method: str, measure: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in part.rows:
        value = getattr(row, measure)
        if row.method == method and value is not None:
            found.setdefault(row.seed, []).append(float(value))
    return found


def _distance(values: Sequence[float], references: Sequence[Sequence[float]] | None) -> Distance:
    """Of the values themselves, or from the mean of each seed's references."""
    if references is not None:
        values = [value - fmean(others) for value, others in zip(values, references, strict=True)]
    return Distance(fmean(values), stdev(values) if len(values) > 1 else 0.0)


def _mean_range(references: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The smallest and the largest of each seed, averaged; None where a seed has too few of them."""
    if any(len(values) < FEWEST_RETRAINS for values in references):
        return None
    return fmean(map(min, references)), fmean(map(max, references))
