"""What a page says first: the verdict on one method in plain words, what it cost, and which methods fell short."""

from collections import Counter
from dataclasses import dataclass

from expunge.auditing.verdict import Verdict
from expunge.bench.measuring import FAILED
from expunge.bench.results import Results
from expunge.report.layout import NO_METHODS, RECOVERY, method_name
from expunge.report.measures import write_value
from expunge.report.verdicts import MEANINGS, Mark, in_words, mark_of, verdicts_on, worst

_PREFERRED = ("retrace", "retrace-krylov", "hf-kcu", "hf-kcu-paper")
_TITLES = {
    Verdict.EQUIVALENT.value: "The client is gone, as far as these measures can tell",
    Verdict.UNDECIDED.value: "These numbers cannot show whether the client is gone",
    Verdict.UNDER_FORGOTTEN.value: "The client is still in the model",
    Verdict.OVER_FORGOTTEN.value: "More was forgotten than retraining forgets",
    Verdict.DAMAGED.value: "The model was damaged",
    FAILED: "The method gave up, and the client is still in the model",
}
_NO_VERDICT = (
    "There is no verdict on it: that needs models retrained without the data to compare with. `expunge audit RUN` makes"
    " them for a run of your own."
)


@dataclass(frozen=True)
class Headline:
    """The mark of the worst verdict, a title, what was reached in sentences, and what does not work in sentences."""

    mark: Mark
    title: str
    reached: list[str]
    missed: list[str]


def headline(results: Results) -> Headline:
    """Say what the verdicts are on the method at hand (the default, else another); the worst run counts.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrace", 0, verdict="EQUIVALENT"), Row("retrace", 1, verdict="UNDER-FORGOTTEN")]
        >>> headline(Results("demo", {}, {}, rows, {})).title
        'The client is still in the model (1 of 2 runs)'
    """
    method = chosen_method(results)
    if method is None:
        return Headline("open", "Nothing was forgotten yet", ["No unlearning method was run."], [])
    facts = [*_change(results, method), *_cost(results, method)]
    counts = verdicts_on(results, method)
    if not counts:
        return Headline("open", "Whether the client is gone cannot be said yet", facts, [_NO_VERDICT])
    first = worst(counts)
    title = _TITLES.get(first, first) + (f" ({_share(counts, first)})" if len(counts) > 1 else "")
    verdict = f"{method_name(method)}: {in_words(counts)}. {_meaning(first)}"
    return Headline(mark_of(first), title, [verdict.strip(), *facts], _fell_short(results))


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


def _meaning(verdict: str) -> str:
    return f"{verdict} is: {MEANINGS[verdict]}." if verdict in MEANINGS else ""


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


def _percent(results: Results, method: str, key: str) -> str | None:
    summary = results.summary(method, key)
    return None if summary is None else f"{write_value(summary.mean, 'percent')}%"


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


def _fell_short(results: Results) -> list[str]:
    """The methods with another verdict than EQUIVALENT in some run: a sentence for each worst verdict."""
    found = {method: verdicts_on(results, method) for method in results.methods() if method not in NO_METHODS}
    groups: dict[str, list[str]] = {verdict: [] for verdict in MEANINGS}
    for method, counts in found.items():
        if counts and mark_of(first := worst(counts)) != "near":
            groups.setdefault(first, []).append(f"{method_name(method)} ({_share(counts, first)})")
    return [f"{verdict}: {', '.join(names)}." for verdict, names in groups.items() if names]


def _share(counts: Counter[str], verdict: str) -> str:
    return f"{counts[verdict]} of {sum(counts.values())} runs"
