"""How values are written, and how much retraining itself varies."""

from expunge.bench.results import Results, Summary
from expunge.report.columns import measure

MISSING = "–"
FEWEST_RETRAINS = 3
"""Fewer retrained models than these have no range worth the name."""


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
