"""How values are written, and when one is close to retraining."""

from typing import Literal

from expunge.bench.results import Results, Summary
from expunge.report.columns import Measure, measure

Judgement = Literal["near", "between", "far"]
MISSING = "–"
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


def judge_value(value: float, column: Measure, limits: tuple[float, float] | None) -> Judgement | None:
    """Whether a value is near the retrained range, far from it or between; None where there is nothing to compare.

    Example:
        >>> judge_value(0.96, measure("asr"), (0.0, 0.01)), judge_value(0.02, measure("asr"), (0.0, 0.01))
        ('far', 'near')
    """
    if column.side == "none" or limits is None:
        return None
    low, high = limits
    outside = 0.0
    if column.side in ("both", "below"):
        outside = max(outside, low - value)
    if column.side in ("both", "above"):
        outside = max(outside, value - high)
    unit = high if column.relative else 1.0
    if outside <= column.near * unit + 1e-9:
        return "near"
    return "far" if outside > column.far * unit else "between"


def judge(results: Results, method: str, key: str) -> Judgement | None:
    """The judgement of a method's mean.

    Example:
        >>> from expunge.bench.results import Row
        >>> noise = {"asr": {"low": 0.0, "high": 0.01, "mean": 0.0}}
        >>> judge(Results("demo", {}, {}, [Row("trained", 0, asr=0.9)], noise), "trained", "asr")
        'far'
    """
    summary = results.summary(method, key)
    return None if summary is None else judge_value(summary.mean, measure(key), retrained_range(results, key))
