"""The words and numbers of an audit, the same in the page, the pictures and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from expunge.auditing.intervals import Interval
from expunge.auditing.margins import Finding
from expunge.auditing.membership import Attack
from expunge.bench.results import Results
from expunge.report.measures import MISSING

MOST_NAMES = 3
_SIGNED = ("trigger_pull",)
"""Measures with values below 0."""
NO_RETRAINS = "No retrained models: nothing was compared, and there are no attacks to show. See the evidence."


def subject_of(results: Results) -> str:
    """Whose data was to be forgotten, for a sentence.

    Example:
        >>> subject_of(Results("run", {"forgotten": ["client-3", "client-4"]}, {}, [], {}))
        'the data of client-3 and client-4'
    """
    names = [str(name) for name in results.scenario.get("forgotten", [])]
    if not names or len(names) > MOST_NAMES:
        return f"the data of {len(names)} clients" if names else "the data"
    return f"the data of {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}"


def margin_text(found: Finding) -> str:
    """What passes, as values; an edge that no value can pass is left out."""
    show = found.measure.shown
    low = found.low if found.low > 0 or found.measure.name in _SIGNED else -math.inf
    high = math.inf if found.measure.rate and found.high >= 1 else found.high
    if math.isfinite(low) and math.isfinite(high):
        return f"{show(low)} to {show(high)}"
    if math.isfinite(low):
        return f"at least {show(low)}"
    return f"at most {show(high)}" if math.isfinite(high) else "anything"


def range_text(interval: Interval, percent: bool = False, sign: bool = False) -> tuple[str, str]:
    """A value and its limits in brackets.

    Example:
        >>> range_text(Interval(0.62, 0.55, 0.68)), range_text(Interval(0.05, -0.01, 0.11), percent=True, sign=True)
        (('0.620', '[0.550, 0.680]'), ('+5.0%', '[-1.0%, +11.0%]'))
    """
    form = ("+" if sign else "") + (".1%" if percent else ".3f")
    value, low, high = (format(part, form) for part in interval)
    return value, f"[{low}, {high}]"


def mean_auc(attacks: Iterable[Attack]) -> float:
    """Of several models."""
    return fmean(attack.auc.value for attack in attacks)


def mean_tpr(attacks: Iterable[Attack]) -> str:
    """Of several models, as text; a dash where there are too few non-members."""
    rates = [attack.tpr_at_1_percent for attack in attacks]
    known = [rate.value for rate in rates if rate is not None]
    return f"{fmean(known):.1%}" if known else MISSING
