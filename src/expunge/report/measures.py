"""How values are written, and when one is close to retraining."""

from statistics import fmean
from typing import Literal

from expunge.bench.results import RATES, Results, Summary
from expunge.report.columns import Measure, Side, measure

Judgement = Literal["near", "between", "far"]
MISSING = "–"
_ALONE = RATES - {"agreement"}
"""Rates of one model alone, whose range over a seed's retrained models the rows have."""
FEWEST_RETRAINS = 3
"""Fewer retrained models than these have no range worth the name, so nothing is judged by them."""


def write_value(value: float, form: str, scale: float | None = None) -> str:
    """A value as text, with decimals that fit `scale` (by default the value itself).

    Example:
        >>> write_value(0.957, "percent"), write_value(0.1312, "number"), write_value(28.4, "times")
        ('95.7', '0.131', '28')
    """
    size = abs(value if scale is None else scale)
    if form == "percent":
        return f"{100 * value:.1f}"
    if value == 0 and form in ("count", "megabytes"):
        return "0"
    if form == "count":
        return f"{value:,.0f}" if size >= 10 or value == int(value) else f"{value:.1f}"
    if form == "megabytes":
        value, size = value / 1e6, size / 1e6
    if form == "times":
        return f"{value:.0f}" if size >= 10 else f"{value:.1f}"
    if form in ("seconds", "megabytes") and size >= 100:
        return f"{value:,.0f}"
    if form in ("seconds", "megabytes") and 0.1 <= size < 1:
        return f"{value:.2f}"
    decimals = 1 if size >= 10 else 2 if size >= 1 else 4 if 0 < size < 0.01 else 3
    return f"{value:.{decimals}f}"


def write_printed(value: float, form: str) -> str:
    """A value of the paper with the digits that it prints.

    Example:
        >>> write_printed(0.7176, "percent"), write_printed(47.75, "times"), write_printed(1867.89, "seconds")
        ('71.76', '47.75×', '1867.89')
    """
    return f"{100 * value:.6g}" if form == "percent" else f"{value:.6g}{'×' if form == 'times' else ''}"


def write_summary(summary: Summary | None, form: str) -> str:
    """Mean ± spread as text, the mean alone for a single run, a dash where nothing was measured.

    Example:
        >>> write_summary(Summary(0.957, 0.012, 0.94, 0.97, 3), "percent")
        '95.7 ± 1.2'
    """
    if summary is None:
        return MISSING
    text = write_value(summary.mean, form) + ("×" if form == "times" else "")
    if summary.count > 1 and (summary.spread > 0 or form not in ("times", "count", "megabytes")):
        text += f" ± {write_value(summary.spread, form, scale=summary.mean)}"
    return text


def retrained_range(results: Results, key: str) -> tuple[float, float] | None:
    """How much retraining itself varies: the recorded noise, else, for rates, the range of the retrained rows.

    None with fewer than three retrained models.

    Example:
        >>> retrained_range(Results("demo", {}, {}, [], {"asr": {"low": 0.0, "high": 0.01, "mean": 0.0}}), "asr")
        (0.0, 0.01)
    """
    if 0 < len(results.values("retrain", "test_accuracy")) < FEWEST_RETRAINS:
        return None
    if key in results.noise:
        return results.noise[key]["low"], results.noise[key]["high"]
    retrained = results.summary("retrain", key)
    if retrained is None or measure(key).form != "percent":
        return None
    return retrained.low, retrained.high


def own_range(results: Results, key: str, seed: int) -> tuple[float, float] | None:
    """What a run of this seed is compared with: for a rate the retrained models of its seed, else `retrained_range`.

    Seeds have other splits and often another leaver, so that rates of one seed's retrained models say little about
    another's. Distances between retrained models are recorded for all seeds together.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", seed, asr=seed / 1000 + n / 1000) for seed in (10, 20) for n in range(3)]
        >>> own_range(Results("demo", {}, {}, rows, {}), "asr", 20)
        (0.02, 0.022)
    """
    found = (getattr(row, key) for row in results.rows if row.method == "retrain" and row.seed == seed)
    own = [float(value) for value in found if value is not None] if key in _ALONE else []
    return (min(own), max(own)) if len(own) >= FEWEST_RETRAINS else retrained_range(results, key)


def outside(value: float, side: Side, limits: tuple[float, float]) -> float:
    """How far a value lies outside of a range on the side that counts.

    Example:
        >>> outside(0.5, "above", (0.1, 0.25)), outside(0.0, "above", (0.1, 0.25)), outside(0.0, "both", (0.1, 0.25))
        (0.25, 0.0, 0.1)
    """
    below = limits[0] - value if side in ("both", "below") else 0.0
    above = value - limits[1] if side in ("both", "above") else 0.0
    return max(below, above, 0.0)


def mean_outside(results: Results, method: str, key: str, side: Side) -> float | None:
    """The mean over runs of how far each lies outside of its own seed's range; for distances, that of their mean.

    None where there is nothing to compare with.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", seed, asr=seed / 100) for seed in (10, 30) for _ in range(3)]
        >>> rows += [Row("trained", 10, asr=0.3), Row("trained", 30, asr=0.1)]
        >>> round(mean_outside(Results("demo", {}, {}, rows, {}), "trained", "asr", "both"), 3)
        0.2
    """
    summary, limits = results.summary(method, key), retrained_range(results, key)
    if summary is None or limits is None:
        return None
    runs = [row for row in results.rows if row.method == method and getattr(row, key) is not None]
    own = {row.seed: own_range(results, key, row.seed) for row in runs}
    if key not in _ALONE or all(ends == limits for ends in own.values()):
        return outside(summary.mean, side, limits)
    return fmean(outside(getattr(row, key), side, own[row.seed] or limits) for row in runs)


def judge_value(value: float, column: Measure, limits: tuple[float, float] | None) -> Judgement | None:
    """Whether a value is near the retrained range, far from it or between; None where there is nothing to compare.

    Example:
        >>> judge_value(0.96, measure("asr"), (0.0, 0.01)), judge_value(0.02, measure("asr"), (0.0, 0.01))
        ('far', 'near')
    """
    if column.side == "none" or limits is None:
        return None
    return _judged(outside(value, column.side, limits), column, limits)


def judge(results: Results, method: str, key: str) -> Judgement | None:
    """The judgement of a method over its runs, each beside the retrained models of its own seed (`mean_outside`).

    Example:
        >>> from expunge.bench.results import Row
        >>> noise = {"asr": {"low": 0.0, "high": 0.01, "mean": 0.0}}
        >>> judge(Results("demo", {}, {}, [Row("trained", 0, asr=0.9)], noise), "trained", "asr")
        'far'
    """
    column, limits = measure(key), retrained_range(results, key)
    far_out = None if column.side == "none" else mean_outside(results, method, key, column.side)
    return None if far_out is None or limits is None else _judged(far_out, column, limits)


def _judged(far_out: float, column: Measure, limits: tuple[float, float]) -> Judgement:
    unit = limits[1] if column.relative else 1.0
    if far_out <= column.near * unit + 1e-9:
        return "near"
    return "far" if far_out > column.far * unit else "between"
