"""Curves of the study of the verdict, out of its rows; and its level, on measures that are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from expunge.auditing.measures import MEASURES, Compared
from expunge.auditing.verdict import Verdict, judge
from expunge.bench.hearings import BESIDE, HONEST, MIXED
from expunge.bench.measuring import SAME_INIT
from expunge.bench.results import Row, Series

CALLED, TOLD = "share called EQUIVALENT", "share told from retrained models"
MIXTURES = {"fresh start": ("", HONEST), "same start": ("-same-start", SAME_INIT)}
"""Two curves of mixtures: how their rows' names end, and what a mixture of nothing is called."""

SIMULATED = "simulated measures"
COUNTS = (3, 5, 8, 10)
DEVIATIONS = (15.0, 40.0)
"""Of the trained model, in standard deviations of the retrained ones: the margin is three of these, or a tenth."""


@dataclass(frozen=True)
class Point:
    """Of so many runs, how many were called EQUIVALENT, and how many were told from retrained models."""

    x: float
    runs: int
    called: int
    told: int


def power_points(rows: Sequence[Row], retrains: int) -> list[Point]:
    """What honest retrains are called, by the number of models that they are judged beside; ``retrains`` are all.

    Example:
        >>> rows = [Row("retrain-beside-5", 0, verdict="UNDECIDED"), Row("retrain", 0, verdict="EQUIVALENT")]
        >>> power_points(rows, retrains=10)
        [Point(x=5.0, runs=1, called=0, told=0), Point(x=10.0, runs=1, called=1, told=0)]
    """
    fewer = {f"{BESIDE}{count}": float(count) for count in range(retrains)}
    return _points(rows, fewer | {HONEST: float(retrains)})


def mixing_points(rows: Sequence[Row], start: str) -> list[Point]:
    """What mixtures are called, by the percent of the trained weights; none are an honest retrain.

    Example:
        >>> rows = [Row("weights-20", seed, verdict=called) for seed, called in enumerate(["EQUIVALENT", "DAMAGED"])]
        >>> mixing_points(rows, "fresh start"), mixing_points(rows[:0], "fresh start")
        ([Point(x=20.0, runs=2, called=1, told=1)], [])
    """
    end, honest = MIXTURES[start]
    names = {f"weights-{percent}{end}": float(percent) for percent in MIXED}
    mixed = {row.seed for row in rows if row.method in names}
    return _points([row for row in rows if row.seed in mixed], names | {honest: 0.0})


def study_curves(rows: Sequence[Row], variant: str, retrains: int) -> list[Series]:
    """Power and mixtures of one variant, as shares of its runs."""
    own = [row for row in rows if row.variant == variant]
    drawn = [("honest retrains", HONEST, "retrained models", power_points(own, retrains))]
    drawn += [("mixtures", start, "percent of trained weights", mixing_points(own, start)) for start in MIXTURES]
    return [
        Series(name, variant, x_name, f"{what}: {part}", [point.x for point in points], shares)
        for what, name, x_name, points in drawn
        if points
        for part, shares in (
            (CALLED, [point.called / point.runs for point in points]),
            (TOLD, [point.told / point.runs for point in points]),
        )
    ]


def relearning_curves(series: Sequence[Series], most: int) -> list[Series]:
    """The share of runs in which so many epochs brought the trained model's accuracy on the forgotten data back."""
    epochs: dict[tuple[str, str, str], list[float]] = {}
    for curve in series:
        epochs.setdefault((curve.method, curve.variant, curve.y_name), []).extend(curve.y)
    x = [float(number) for number in range(most + 1)]
    return [
        Series(name, label, what, "share of the runs", x, [_share(e <= n for e in own) for n in x])
        for (name, label, what), own in epochs.items()
    ]


def level_curves(draws: int, seed: int = 0) -> list[Series]:
    """How often a model at the edge of the stated margin, or a tenth beyond it, is called EQUIVALENT.

    One measure, its retrained values normal, the trained one so many standard deviations off. The model lies as far
    from their true mean as the verdict states its margin.
    """
    if not draws:
        return []
    chance, found = np.random.default_rng(seed), []
    for deviation in DEVIATIONS:
        for where, factor in (("at the margin", 1.0), ("a tenth beyond", 1.1)):
            shares = [_share(_passes(chance, count, deviation, factor) for _ in range(draws)) for count in COUNTS]
            name = f"{where}, trained {deviation:g} standard deviations off"
            x = [float(count) for count in COUNTS]
            found.append(Series(name, SIMULATED, "retrained models", f"simulated: {CALLED}", x, shares))
    return found


def _passes(chance: np.random.Generator, count: int, deviation: float, factor: float) -> bool:
    """Whether one model beyond its margin is called EQUIVALENT all the same."""
    measure, retrained = MEASURES["trigger_pull"], tuple(chance.normal(size=count).tolist())
    stated = judge([Compared(measure, 0.0, deviation, retrained)])
    if not stated.findings:
        return False
    value = factor * stated.findings[0].margin * (1 if chance.random() < 0.5 else -1)
    return judge([Compared(measure, value, deviation, retrained)]).verdict == Verdict.EQUIVALENT


def _points(rows: Sequence[Row], names: dict[str, float]) -> list[Point]:
    """The rows of these names, counted at the places that the names stand for."""
    verdicts: dict[float, list[str | None]] = {}
    for row in rows:
        if row.method in names:
            verdicts.setdefault(names[row.method], []).append(row.verdict)
    return [
        Point(x, len(own), called := own.count(Verdict.EQUIVALENT), len(own) - called - own.count(Verdict.UNDECIDED))
        for x, own in sorted(verdicts.items())
    ]


def _share(found: Iterable[bool]) -> float:
    answers = list(found)
    return sum(answers) / len(answers)
