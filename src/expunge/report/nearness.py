"""How near the default method comes to retraining, and which of the goals (goals.py) are met.

Every seed has its own leaver, trained model and retrained models. So a model is compared with the retrained models of
its own seed, and the differences are averaged. Their mean is what the goals are about, as retraining itself is only
known on average; how much they scatter stands beside it, so that a model too high in one seed and too low in another is
seen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from expunge.bench.results import Results
from expunge.report.goals import GOALS, WORK, Attack, Goal
from expunge.report.layout import parts
from expunge.report.measures import FEWEST_RETRAINS

Status = Literal["missed", "cannot tell", "met"]
METHODS = ("retrace", "retrace+recovery")
MEASURES = ("test_accuracy", "forget_accuracy", "asr", "kl_forget", "mia_auc")
_DISTANCES = ("kl_forget",)
"""Measures that are distances to the retrained models already."""
_NO_EVIDENCE = ("test_accuracy", WORK)
"""Measures that do not show forgetting: a loss is a loss also where doing nothing looks like retraining."""
_SLACK = 1e-9


@dataclass(frozen=True)
class Distance:
    """How far from retrained models: the mean difference over seeds, and its standard deviation.

    For a measure that is a distance itself it is the mean distance. `inside` says whether most seeds lie in the range
    of their retrained models; None where there are too few of these.
    """

    mean: float
    spread: float
    inside: bool | None

    @property
    def size(self) -> float:
        """Without its sign."""
        return abs(self.mean)


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
    attack: Attack
    seeds: int
    gaps: dict[str, Gap]
    work: float | None
    verdicts: dict[str, int]
    statuses: dict[str, Status]

    def measures(self, status: Status) -> list[str]:
        """The measures whose goal has this status."""
        return [measure for measure, own in self.statuses.items() if own == status]


def nearness(results: Results) -> list[Nearness]:
    """The default method with and without recovery, a variant after another, where they were run.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", 10, test_accuracy=value) for value in (0.60, 0.61, 0.62)]
        >>> rows += [Row("trained", 10, test_accuracy=0.63), Row("retrace", 10, test_accuracy=0.60)]
        >>> found = nearness(Results("main", {"backdoors": {"client-3": {}}}, {}, rows, {}))[0]
        >>> round(found.gaps["test_accuracy"].own.size, 3), found.statuses["test_accuracy"]
        (0.01, 'met')
    """
    return [
        _nearness(label, part, method)
        for label, part in parts(results).items()
        for method in METHODS
        if method in part.methods()
    ]


def attack_of(results: Results) -> Attack:
    """What the clients of a part had done, by its scenario.

    Example:
        >>> attack_of(Results("backdoor", {"backdoors": {"client-3": {"size": 6, "boost": 4.0}}}, {}, [], {}))
        'strong'
    """
    backdoors = results.scenario.get("backdoors") or {}
    if not backdoors:
        return "clean"
    return "strong" if any(backdoor.get("boost", 1.0) > 1 for backdoor in backdoors.values()) else "weak"


def _nearness(label: str, part: Results, method: str) -> Nearness:
    attack = attack_of(part)
    found = {measure: _gap(part, method, measure) for measure in MEASURES}
    gaps = {measure: gap for measure, gap in found.items() if gap is not None}
    work = part.summary(method, WORK)
    verdicts = Counter(row.verdict for row in part.rows if row.method == method and row.verdict is not None)
    statuses = {}
    for goal in GOALS[attack]:
        if goal.measure == WORK:
            statuses[WORK] = _reached(goal, work.mean if work else None)
        elif goal.measure in gaps:
            statuses[goal.measure] = _status(goal, gaps[goal.measure])
    seeds = len({row.seed for row in part.rows if row.method == method})
    return Nearness(label, method, attack, seeds, gaps, work.mean if work else None, dict(verdicts), statuses)


def _gap(part: Results, method: str, measure: str) -> Gap | None:
    """None unless the method, the trained and some retrained models were measured for one seed at least."""
    own, trained, retrained = (_by_seed(part, name, measure) for name in (method, "trained", "retrain"))
    is_distance = measure in _DISTANCES
    seeds = [seed for seed in own if seed in trained and (seed in retrained or is_distance)]
    if not seeds:
        return None
    references = [retrained.get(seed, []) for seed in seeds]
    ranges = [(min(values), max(values)) for values in references if len(values) >= FEWEST_RETRAINS]
    enough = len(ranges) == len(seeds)
    before, after = (
        _distance([fmean(of[seed]) for seed in seeds], references, is_distance, ranges if enough else None)
        for of in (trained, own)
    )
    limits = (fmean(low for low, _ in ranges), fmean(high for _, high in ranges)) if enough and is_distance else None
    return Gap(after, before, limits)


def _by_seed(part: Results, method: str, measure: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in part.rows:
        value = getattr(row, measure)
        if row.method == method and value is not None:
            found.setdefault(row.seed, []).append(float(value))
    return found


def _distance(
    values: Sequence[float],
    references: Sequence[Sequence[float]],
    is_distance: bool,
    ranges: Sequence[tuple[float, float]] | None,
) -> Distance:
    inside = None
    if ranges is not None:
        # Nearer to retrained models than they are to each other is no fault.
        lowest = [(0.0, high) for _, high in ranges] if is_distance else ranges
        pairs = zip(values, lowest, strict=True)
        inside = 2 * sum(low - _SLACK <= value <= high + _SLACK for value, (low, high) in pairs) > len(values)
    if not is_distance:
        values = [value - fmean(others) for value, others in zip(values, references, strict=True)]
    return Distance(fmean(values), stdev(values) if len(values) > 1 else 0.0, inside)


def _status(goal: Goal, gap: Gap) -> Status:
    """Whether a goal is met, and whether that can be told.

    Where doing nothing lies in the range of retrained models, meeting the goal shows nothing, and neither does missing
    it inside that range; leaving the range and missing it is a miss.
    """
    own, trained = gap.own.size, gap.trained.size
    passed = (
        (goal.within is not None and own <= goal.within + _SLACK)
        or (goal.share is not None and own <= goal.share * trained + _SLACK)
        or (goal.nearer and own < trained)
        or (goal.in_range and gap.retrained is not None and own <= gap.retrained[1] + _SLACK)
    )
    if goal.measure not in _NO_EVIDENCE:
        if gap.trained.inside is None:
            return "cannot tell"
        if gap.trained.inside and (passed or gap.own.inside):
            return "cannot tell"
    return "met" if passed else "missed"


def _reached(goal: Goal, value: float | None) -> Status:
    return "met" if value is not None and goal.least is not None and value >= goal.least - _SLACK else "missed"
