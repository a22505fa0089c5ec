"""The result in plain words, computed from the data: what was reached, what was not, what it cost."""

from dataclasses import dataclass
from typing import Literal

from expunge.bench.results import Results
from expunge.report.columns import measure
from expunge.report.layout import NO_METHODS, RECOVERY, method_name
from expunge.report.measures import judge, judge_value, mean_outside, outside, own_range, retrained_range, write_value

Verdict = Literal["gone", "partly", "remains", "unknown"]
_PREFERRED = ("retrace", "retrace-krylov", "hf-kcu", "hf-kcu-paper")
_MOST_SENTENCES = 4
_EVIDENCE = ("asr", "forget_accuracy", "kl_forget")
_TITLES = {
    "gone": "The client is gone, as far as these measures can tell",
    "partly": "The client is partly gone",
    "remains": "The client is still in the model",
    "unknown": "These numbers cannot show whether the client is gone",
}


@dataclass(frozen=True)
class Headline:
    """A verdict, what was reached in sentences, and what does not work in sentences."""

    verdict: Verdict
    title: str
    reached: list[str]
    missed: list[str]


def headline(results: Results) -> Headline:
    """Say what the results show of the method at hand (the default, else the trajectory, else another).

    Example:
        >>> headline(Results("demo", {}, {}, [], {})).verdict
        'unknown'
    """
    method = chosen_method(results)
    if method is None:
        return Headline("unknown", _TITLES["unknown"], ["No unlearning method was run."], [])
    verdict = _verdict(results, method)
    title = _TITLES[verdict]
    if verdict == "gone" and not all(_every_run_near(results, method, key) for key in _EVIDENCE):
        title = "The client is gone on average, but not in every run"
    elif verdict == "gone" and judge(results, method, "test_accuracy") in ("between", "far"):
        title += ", but accuracy on new data was lost"
    reached = [*_change(results, method), *_cost(results, method)]
    if verdict == "unknown":
        missed = ["No measure here tells the trained model from a retrained one, so nothing can be shown by them."]
    else:
        missed = _shortfalls(results, method)
    return Headline(verdict, title, reached, [*missed, *_others(results, method)])


def chosen_method(results: Results) -> str | None:
    """The method the headline speaks of, or None where nothing but training and retraining was run.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("hf-kcu", 0), Row("retrace-krylov", 0)]
        >>> chosen_method(Results("demo", {}, {}, rows, {}))
        'retrace-krylov'
    """
    present = [method for method in results.methods() if method not in NO_METHODS]
    wanted = [name for base in _PREFERRED for name in (base, base + RECOVERY)]
    return next((name for name in [*wanted, *present] if name in present), None)


def _verdict(results: Results, method: str) -> Verdict:
    """Only measures in which doing nothing is visibly not retrained can show that something was forgotten."""
    telling = [key for key in _EVIDENCE if judge(results, "trained", key) in ("between", "far")]
    judged = {key: judge(results, method, key) for key in telling}
    judged = {key: judgement for key, judgement in judged.items() if judgement is not None}
    if not judged:
        return "unknown"
    if all(judgement == "near" for judgement in judged.values()):
        return "gone"
    return "partly" if _way_gone(results, method, next(iter(judged))) >= 0.5 else "remains"


def _way_gone(results: Results, method: str, key: str) -> float:
    """The share of the way from the trained model to the retrained range that a method has gone, at most 1."""
    way, rest = (mean_outside(results, name, key, "both") for name in ("trained", method))
    return 1 - rest / way if way and rest is not None else 0.0


def _change(results: Results, method: str) -> list[str]:
    """Before, after and retrained, for the backdoor where there is one, else for the forgotten data."""
    subjects = {
        "asr": "of triggered images went to the attacker's class",
        "forget_accuracy": "of the client's data got the client's label",
    }
    for key, subject in subjects.items():
        before, after = _percent(results, "trained", key), _percent(results, method, key)
        if before and after:
            retrained = _percent(results, "retrain", key) or "not measured"
            name = method_name(method)
            return [f"Before: {before} {subject}.", f"After {name}: {after}; retraining from scratch: {retrained}."]
    return []


def _cost(results: Results, method: str) -> list[str]:
    work, clock = (results.summary(method, key) for key in ("speedup_in_gradients", "speedup"))
    parts = []
    if work is not None:
        parts.append(_ratio(work.mean, "fewer", "more") + " sample-gradients than retraining")
    if clock is not None:
        parts.append(_ratio(clock.mean, "faster", "slower") + " by the clock")
    return [f"Cost: {', '.join(parts)}."] if parts else []


def _ratio(factor: float, better: str, worse: str) -> str:
    if factor >= 1:
        return f"{write_value(factor, 'times')} times {better}"
    return f"{write_value(1 / factor, 'times')} times {worse}" if factor > 0 else f"without end {worse}"


def _shortfalls(results: Results, method: str) -> list[str]:
    """Where the chosen method misses the retrained range, and what its worst run looks like."""
    name = method_name(method)
    found = []
    for key in ("asr", "forget_accuracy", "test_accuracy", "kl_forget"):
        column, limits, summary = measure(key), retrained_range(results, key), results.summary(method, key)
        if summary is None or limits is None:
            continue
        plain = column.header.removesuffix(" (%)")
        if judge(results, method, key) != "near":
            inside = not outside(summary.mean, column.side, limits)
            against = _against(summary.mean, limits, key) + ", and seed by seed outside" * inside
            found.append(f"{name} misses retraining in {plain}: {against}.")
        elif not _every_run_near(results, method, key):
            worst = max(_runs(results, method, key), key=lambda run: outside(run[0], column.side, run[1]))
            found.append(
                f"{name} is near retraining in {plain} on average, but not in its worst run: {_against(*worst, key)}."
            )
    return found


def _against(value: float, limits: tuple[float, float], key: str) -> str:
    form = measure(key).form
    unit = "%" if form == "percent" else ""
    low, high = (write_value(limit, form, scale=limits[1]) for limit in limits)
    return f"{write_value(value, form)}{unit} against {low} to {high}{unit}"


def _runs(results: Results, method: str, key: str) -> list[tuple[float, tuple[float, float]]]:
    """Each run's value, and the range that it is compared with."""
    measured = ((row, getattr(row, key)) for row in results.rows if row.method == method)
    ranges = [(value, own_range(results, key, row.seed)) for row, value in measured if value is not None]
    return [(float(value), limits) for value, limits in ranges if limits is not None]


def _every_run_near(results: Results, method: str, key: str) -> bool:
    runs = _runs(results, method, key)
    return all(judge_value(value, measure(key), limits) in ("near", None) for value, limits in runs)


def _others(results: Results, method: str) -> list[str]:
    """What the other methods leave behind, on the first measure that tells trained from retrained."""
    telling = next((key for key in _EVIDENCE if judge(results, "trained", key) in ("between", "far")), None)
    if telling is None:
        return []
    column = measure(telling)
    unit = "%" if column.form == "percent" else ""
    plain = column.header.removesuffix(" (%)")
    before = results.summary("trained", telling)
    hardly: list[tuple[str, str]] = []
    partly: list[tuple[str, str]] = []
    for other in results.methods():
        after = results.summary(other, telling)
        if other in (*NO_METHODS, method) or before is None or after is None:
            continue
        if judge(results, other, telling) == "near":
            continue
        group = hardly if abs(_way_gone(results, other, telling)) < 0.1 else partly
        group.append((method_name(other), write_value(after.mean, column.form) + unit))
    if before is None:
        return []
    old = write_value(before.mean, column.form) + unit
    return [
        *_said(hardly, "hardly changes anything", "hardly change anything", plain, old),
        *_said(partly, "does not remove the client", "do not remove the client", plain, old),
    ]


def _said(group: list[tuple[str, str]], one: str, many: str, plain: str, old: str) -> list[str]:
    """A sentence each, or one for all where there are many of them."""
    if len(group) <= _MOST_SENTENCES:
        return [f"{name} {one}: {plain} {old} before, {new} after." for name, new in group]
    return [f"These {many} ({plain} {old} before): {', '.join(f'{name} ({new})' for name, new in group)}."]


def _percent(results: Results, method: str, key: str) -> str | None:
    summary = results.summary(method, key)
    return None if summary is None else f"{write_value(summary.mean, 'percent')}%"
