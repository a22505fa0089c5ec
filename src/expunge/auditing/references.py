"""The retrained models are looked at first: one that is no draw like the others is named and left out.

A spoiled reference would widen the spread and hide what others tell. Each one is compared with what the rest foretell
(Student's t, one measure of forgetting at a time; distances to the others would say it twice), and counts as spoiled
only where it also lies off by more than the smallest margin that is ever asked for. Many that fall out are no accident:
then nothing is judged. Several that are spoiled alike hide each other, since each finds the others among the rest: so
it is also asked whether all fall into two groups, with nothing in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from expunge.auditing.margins import SHARE
from expunge.auditing.measures import Compared
from expunge.auditing.student import chance_beyond

FALSE_ALARMS = 0.02
"""The chance that an honest retrained model is named, at most, over all of them and all measures."""

MOST_LEFT_OUT = 0.2
"""Where a larger part of the retrained models falls out, they are no draws of one thing."""

FEWEST_TO_LOOK = 4
"""With fewer, the rest have hardly a spread to compare one with."""

BETWEEN = 15.0
"""Two groups are so many of their own standard deviations apart: one measure of five honest models is in 4 of 1000
cases, of eight in 1 of 10,000 (simulated, normal values)."""

HALF = 0.5
"""And a part of what there was to forget that tells who had the data from who had it not."""


@dataclass(frozen=True)
class Outlier:
    """A retrained model that is unlike the others.

    Attributes:
        number: its place in the list, from 0 on.
        sentence: by which measure, for a reader.
    """

    number: int
    sentence: str


def outliers(measures: Sequence[Compared]) -> list[Outlier]:
    """The retrained models that are unlike the rest, the worst first, each looked at without those before it.

    Example:
        >>> from expunge.auditing.measures import MEASURES
        >>> values = (0.010, 0.012, 0.011, 0.013, 0.009, 0.010, 0.4)
        >>> print(outliers([Compared(MEASURES["asr"], 0.02, 0.9, values)])[0].sentence)
        retrained[6] is unlike the others: attack success is 40.0%, theirs 0.9% to 1.3%
    """
    found: list[Outlier] = []
    while measures:
        gone = {one.number for one in found}
        worst = _worst([one.without(gone) for one in measures])
        if worst is None:
            break
        place, name = worst
        left = [number for number in range(len(measures[0].retrained)) if number not in gone]
        one = next(one for one in measures if one.measure.name == name)
        found.append(Outlier(left[place], _sentence(one, left, left[place])))
    return found


def too_many(found: Sequence[Outlier], count: int) -> bool:
    """Whether so many of the retrained models fell out that the rest cannot be trusted either."""
    return len(found) > MOST_LEFT_OUT * count


def parted(measures: Sequence[Compared]) -> str | None:
    """A sentence where the retrained models are of two kinds, at least two of each, by a measure of forgetting.

    Example:
        >>> from expunge.auditing.measures import MEASURES
        >>> values = (0.010, 0.012, 0.96, 0.011, 0.013, 0.97)
        >>> print(parted([Compared(MEASURES["asr"], 0.02, 0.98, values)]))
        attack success is 1.0% to 1.3% in retrained[0], [1], [3], [4], and 96.0% to 97.0% in [2], [5]
    """
    for one in measures:
        if not one.measure.about_forgetting or one.measure.side != "both":
            continue
        order = sorted(range(len(one.retrained)), key=lambda number: one.retrained[number])
        for place in range(2, len(order) - 1):
            groups = order[:place], order[place:]
            if _are_apart(one, *([one.retrained[number] for number in group] for group in groups)):
                return _two_kinds(one, *groups)
    return None


def _are_apart(one: Compared, low: Sequence[float], high: Sequence[float]) -> bool:
    """Both in order."""
    squares = sum((value - fmean(group)) ** 2 for group in (low, high) for value in group)
    own = max(math.sqrt(squares / (len(low) + len(high) - 2)), one.step)
    gap, most = high[0] - low[-1], max(abs(one.trained - low[0]), abs(one.trained - high[-1]))
    return gap > max(BETWEEN * own, HALF * most)


def _two_kinds(one: Compared, low: Sequence[int], high: Sequence[int]) -> str:
    show = one.measure.shown

    def told(group: Sequence[int]) -> str:
        return f"{show(one.retrained[group[0]])} to {show(one.retrained[group[-1]])}"

    names = [", ".join(f"[{number}]" for number in sorted(group)) for group in (low, high)]
    return f"{one.measure.label} is {told(low)} in retrained{names[0]}, and {told(high)} in {names[1]}"


def _worst(measures: Sequence[Compared]) -> tuple[int, str] | None:
    """The place and the measure of the most surprising retrained model, where it is surprising enough."""
    count = len(measures[0].retrained)
    if count < FEWEST_TO_LOOK:
        return None
    looked_at = [one for one in measures if one.measure.about_forgetting and one.measure.side == "both"]
    surprises = [(_surprise(one, place), place, one.measure.name) for one in looked_at for place in range(count)]
    most, place, name = max(surprises, default=(0.0, 0, ""))
    chance = 2 * chance_beyond(most, count - 2)
    return (place, name) if chance < FALSE_ALARMS / (count * len(measures)) else None


def _surprise(one: Compared, place: int) -> float:
    """How far off a retrained model is, in standard errors of a further one; 0 where it is too near to matter."""
    own, others = one.retrained[place], [value for number, value in enumerate(one.retrained) if number != place]
    mean = fmean(others)
    if abs(own - mean) <= max(SHARE * abs(one.trained - mean), one.step):
        return 0.0
    spread = max(stdev(others), one.step) * math.sqrt(1 + 1 / len(others))
    return abs(own - mean) / spread if spread else math.inf


def _sentence(one: Compared, left: Sequence[int], number: int) -> str:
    show = one.measure.shown
    others = [one.retrained[other] for other in left if other != number]
    return (
        f"retrained[{number}] is unlike the others: {one.measure.label} is {show(one.retrained[number])}, "
        f"theirs {show(min(others))} to {show(max(others))}"
    )
