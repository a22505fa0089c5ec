"""Single measured values for a sentence: what a document asks for, as text."""

from expunge.auditing.statement import Word
from expunge.auditing.verdict import Verdict
from expunge.bench.results import Results
from expunge.errors import RequestError
from expunge.report.columns import measure
from expunge.report.measures import retrained_range, write_value

NOISE = "noise"
"""In place of a method: how far retrained models differ among themselves."""
_UNITS = {"percent": "%", "times": "×", "seconds": " s", "megabytes": " MB"}
_WORDS = {"verdict": [verdict.value for verdict in Verdict], "evidence": [word.value for word in Word]}
_STATISTICS = ("mean", "spread", "low", "high", "range")


def inline_value(results: Results, asked: str) -> str:
    """The value that `METHOD; MEASURE; STATISTIC` asks of one variant's results, with its unit.

    The statistic is mean (also where none is named), spread (the standard deviation), low, high or range.
    `METHOD / METHOD` asks for the ratio of two means, `noise` as the method for what retrained models span, and
    the measure `verdict` or `evidence` with one of its words in the statistic's place for how many runs got it.

    Raises:
        RequestError: there is no such value.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("trained", 0, asr=0.90), Row("trained", 1, asr=0.95), Row("retrain", 0, asr=0.05)]
        >>> results = Results("demo", {}, {}, rows, {})
        >>> inline_value(results, "trained; asr"), inline_value(results, "trained; asr; range")
        ('92.5%', '90.0–95.0%')
        >>> inline_value(results, "trained / retrain; asr")
        '18×'
    """
    method, key, statistic = _words(asked)
    if key in _WORDS:
        return _called(results, method, key, statistic)
    form = _form(key)
    if statistic not in _STATISTICS:
        raise RequestError(f"There is no statistic {statistic!r}; choose one of {', '.join(_STATISTICS)}.")
    if "/" in method:
        return _ratio(results, method, key, statistic)
    known = _summary(results, method, key)
    if statistic == "range":
        ends = (write_value(known[end], form, scale=known["high"]) for end in ("low", "high"))
        return "–".join(ends) + _UNITS.get(form, "")
    if statistic not in known:
        raise RequestError(f"Of {method} there is no {statistic}; choose one of {', '.join(known)}, range.")
    return write_value(known[statistic], form, scale=known.get("mean")) + _UNITS.get(form, "")


def _words(asked: str) -> tuple[str, str, str]:
    words = [word.strip() for word in asked.split(";")]
    if len(words) not in (2, 3):
        raise RequestError(f"A value is asked for as METHOD; MEASURE; STATISTIC, not as {asked!r}.")
    return words[0], words[1], words[2] if len(words) == 3 else "mean"


def _form(key: str) -> str:
    try:
        return measure(key).form
    except KeyError:
        raise RequestError(f"No column of the tables is called {key!r} (report/columns.py has their keys).") from None


def _summary(results: Results, method: str, key: str) -> dict[str, float]:
    if method == NOISE:
        if not (limits := retrained_range(results, key)):
            raise RequestError(f"There are too few retrained models for a range of {key}.")
        return {"low": limits[0], "high": limits[1]}
    if not (summary := results.summary(method, key)):
        raise RequestError(f"{key} was not measured for {method!r}; there are {', '.join(results.methods())}.")
    return {"mean": summary.mean, "spread": summary.spread, "low": summary.low, "high": summary.high}


def _ratio(results: Results, methods: str, key: str, statistic: str) -> str:
    above, below = (_summary(results, method.strip(), key) for method in methods.split("/", 1))
    if statistic != "mean" or not below.get("mean") or "mean" not in above:
        raise RequestError(f"{methods} can be asked for the ratio of two means only, the lower one not zero.")
    return write_value(above["mean"] / below["mean"], "times") + "×"


def _called(results: Results, method: str, key: str, word: str) -> str:
    words = [found for row in results.rows if row.method == method and (found := getattr(row, key)) is not None]
    if not words:
        raise RequestError(f"There is no {key} on {method!r}; there are {', '.join(results.methods())}.")
    if word.upper() not in _WORDS[key]:
        raise RequestError(f"There is no {key} {word!r}; choose one of {', '.join(_WORDS[key])}.")
    return f"{words.count(word.upper())} of {len(words)}"
