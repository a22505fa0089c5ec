"""The verdicts that rows carry, counted and marked: what is near retraining is said here, and nowhere judged again."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from expunge.auditing.intervals import clopper_pearson
from expunge.auditing.statement import Word
from expunge.auditing.verdict import Verdict
from expunge.bench.measuring import FAILED
from expunge.bench.results import Results

Mark = Literal["near", "open", "far"]
MEANINGS: dict[str, str] = {
    FAILED: "the method gave up, and the model is as it was",
    Verdict.UNDER_FORGOTTEN.value: "outside a margin towards the trained model: it still knows something of the data",
    Verdict.DAMAGED.value: "worse than retrained models on other data, and remembering does not explain it",
    Verdict.OVER_FORGOTTEN.value: "outside a margin on the data to forget, but away from the trained model",
    Verdict.UNDECIDED.value: "these measurements could not tell; the reason says what would",
    Verdict.EQUIVALENT.value: "shown to lie within its margin of retrained models in every measure that can tell",
}
"""What each verdict says, the worst first."""
_RANKS = {verdict: rank for rank, verdict in enumerate(MEANINGS)}
_MARKS: dict[str, Mark] = {Verdict.EQUIVALENT.value: "near", Verdict.UNDECIDED.value: "open"}


def verdicts_on(results: Results, method: str) -> Counter[str]:
    """How many runs of a method got which verdict; empty where none was reached.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("sisa", seed, verdict=verdict) for seed, verdict in enumerate(("EQUIVALENT", "DAMAGED", None))]
        >>> dict(verdicts_on(Results("demo", {}, {}, rows, {}), "sisa"))
        {'EQUIVALENT': 1, 'DAMAGED': 1}
    """
    return Counter(row.verdict for row in results.rows if row.method == method and row.verdict is not None)


def worst(counts: Mapping[str, int]) -> str:
    """The verdict that counts where runs differ; one that is not known here is worse than all.

    Example:
        >>> worst({"EQUIVALENT": 2, "UNDECIDED": 1}), worst({"EQUIVALENT": 9, "UNDER-FORGOTTEN": 1, "DAMAGED": 2})
        ('UNDECIDED', 'UNDER-FORGOTTEN')
    """
    return min(counts, key=lambda verdict: _RANKS.get(verdict, -1))


def mark_of(verdict: str) -> Mark:
    """Near is EQUIVALENT alone, open is UNDECIDED, and everything else is far.

    Example:
        >>> mark_of("EQUIVALENT"), mark_of("UNDECIDED"), mark_of("DAMAGED")
        ('near', 'open', 'far')
    """
    return _MARKS.get(verdict, "far")


def counted(counts: Mapping[str, int]) -> str:
    """The verdicts for a table, the most frequent first; a number each where they differ.

    Example:
        >>> counted({"UNDER-FORGOTTEN": 1, "EQUIVALENT": 2}), counted({"EQUIVALENT": 3})
        ('equivalent 2, under-forgotten 1', 'equivalent')
    """
    if len(counts) == 1:
        return next(iter(counts)).lower()
    return ", ".join(f"{verdict.lower()} {count}" for verdict, count in Counter(counts).most_common())


def equivalent_of(counts: Mapping[str, int]) -> str:
    """In how many runs a model was called EQUIVALENT, with the exact interval (Clopper-Pearson, 95%), and the others.

    Example:
        >>> equivalent_of({"EQUIVALENT": 1, "UNDER-FORGOTTEN": 57, "UNDECIDED": 2})
        'equivalent 1 of 60 (0.0–8.9%), under-forgotten 57, undecided 2'
    """
    return _counted_out(counts, Verdict.EQUIVALENT.value)


def supported_of(counts: Mapping[str, int]) -> str:
    """In how many runs evidence without retrained models SUPPORTED a model, with the exact interval, and the others.

    Example:
        >>> supported_of({"NOT SUPPORTED": 97, "NO EVIDENCE": 3})
        'supported 0 of 100 (0.0–3.6%), not supported 97, no evidence 3'
    """
    return _counted_out(counts, Word.SUPPORTED.value)


def evidence_on(results: Results, method: str) -> Counter[str]:
    """How many runs of a method got which word of the evidence."""
    return Counter(row.evidence for row in results.rows if row.method == method and row.evidence is not None)


def supported_where_equivalent(results: Results) -> str:
    """Of the models that are EQUIVALENT beside retrained ones, how many the evidence without these SUPPORTED.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("retrain", seed, verdict="EQUIVALENT", evidence="SUPPORTED") for seed in range(3)]
        >>> supported_where_equivalent(Results("evidence", {}, {}, [*rows, Row("sisa", 0, evidence="SUPPORTED")], {}))
        '3 of 3 (29.2–100.0%)'
    """
    words = [row.evidence for row in results.rows if row.verdict == Verdict.EQUIVALENT.value]
    return _share(words.count(Word.SUPPORTED.value), len(words)) if words else "0 of 0"


def _counted_out(counts: Mapping[str, int], word: str) -> str:
    others = Counter({other: count for other, count in counts.items() if other != word})
    first = f"{word.lower()} {_share(counts.get(word, 0), sum(counts.values()))}"
    return ", ".join([first, *(f"{other.lower()} {count}" for other, count in others.most_common())])


def _share(called: int, runs: int) -> str:
    limits = clopper_pearson(called, runs)
    return f"{called} of {runs} ({100 * limits.low:.1f}–{100 * limits.high:.1f}%)"


def in_words(counts: Mapping[str, int]) -> str:
    """The verdicts for a sentence, the worst first, and in how many runs.

    Example:
        >>> in_words({"EQUIVALENT": 2, "UNDER-FORGOTTEN": 1}), in_words({"EQUIVALENT": 3}), in_words({"DAMAGED": 1})
        ('UNDER-FORGOTTEN in 1 of 3 runs, EQUIVALENT in 2', 'EQUIVALENT in all 3 runs', 'DAMAGED')
    """
    runs, first = sum(counts.values()), worst(counts)
    if len(counts) == 1:
        return first if runs == 1 else f"{first} in all {runs} runs"
    others = sorted((verdict for verdict in counts if verdict != first), key=lambda verdict: _RANKS.get(verdict, -1))
    said = [f"{first} in {counts[first]} of {runs} runs", *(f"{verdict} in {counts[verdict]}" for verdict in others)]
    return ", ".join(said)
