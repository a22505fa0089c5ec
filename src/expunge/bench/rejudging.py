"""Results that were judged by another rule, judged again by what is stored: values, for the models are gone.

A row holds a model's numbers, and its file those of the trained and of every retrained model of the same variant and
seed: the verdict needs no more. What was not measured then cannot be judged now, and ``Results.judged`` says what that
is. Nor is it stored how many samples a rate was counted on, so a rate's noise has no lower bound here.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from expunge.auditing.measures import MEASURES, ON_THE_WAY, compared
from expunge.auditing.verdict import Judgement, Verdict, judge
from expunge.bench.measuring import FAILED
from expunge.bench.results import Judged, Results, Row
from expunge.errors import RequestError

RULE, SOURCE = "margins", "stored values"
REFERENCE = "retrain"
"""The rows of retrained models: all others are compared with these."""
SINCE_MARGINS = "distance"
"""A measure that only results have whose models were judged by margins."""
OF_A_TRIGGER = ("asr", "trigger_distance", "trigger_pull", "trigger_rank", "trigger_moves", "nearby_pull")
"""Measures that only a client with a trigger has."""


Verdicts = dict[str, dict[str, dict[str, str]]]
"""By variant, method and seed."""


def judged_again(results: Results) -> Results:
    """The same measurements with verdicts by the rule of today; doing it twice changes nothing.

    Retrained models are the yardstick and lose their verdict; where a method gave up, that stays. Results without
    verdicts, and those whose models were judged by margins, are returned as they are: models tell more than values.

    Raises:
        RequestError: a row has a verdict, and no trained or retrained model of its variant and seed is stored.

    Example:
        >>> rows = [Row("retrain", 0, asr=rate) for rate in (0.010, 0.012, 0.011, 0.013, 0.009)]
        >>> rows += [Row("trained", 0, asr=0.9), Row("retrace", 0, asr=0.4, verdict="EQUIVALENT")]
        >>> again = judged_again(Results("demo", {}, {}, rows, {}))
        >>> again.rows[-1].verdict, again.judged.source
        ('UNDER-FORGOTTEN', 'stored values')
    """
    missing = not_stored(results)
    on_models = results.judged is None and SINCE_MARGINS not in missing
    if on_models or all(row.verdict is None for row in results.rows):
        return results
    rows = [replace(row, verdict=_verdict(row, results)) for row in results.rows]
    return replace(results, rows=rows, judged=Judged(RULE, SOURCE, missing))


def not_stored(results: Results) -> list[str]:
    """The measures of a verdict that no row has; those of a trigger only where there was one.

    Example:
        >>> not_stored(Results("demo", {}, {}, [Row("trained", 0, forget_loss=1.0, kl_forget=0.1)], {}))
        ['forget_accuracy', 'mia_auc', 'distance', 'unseen_distance', 'kept_share', 'test_accuracy', 'test_loss']
    """
    stored = [name for name in MEASURES if name not in ON_THE_WAY]  # what is asked on the way back never is
    missing = [name for name in stored if all(getattr(row, name) is None for row in results.rows)]
    return [name for name in missing if "asr" not in missing or name not in OF_A_TRIGGER]


def verdicts_of(results: Results) -> Verdicts:
    """The verdicts by variant, method and seed, but for retrained models: to be kept before results are judged again.

    Example:
        >>> rows = [Row("retrain", 10, verdict="EQUIVALENT"), Row("sisa", 10, verdict="DAMAGED"), Row("sisa", 11)]
        >>> verdicts_of(Results("demo", {}, {}, rows, {}))
        {'': {'sisa': {'10': 'DAMAGED'}}}
    """
    found: Verdicts = {}
    for row in results.rows:
        if row.verdict is not None and row.method != REFERENCE:
            found.setdefault(row.variant or "", {}).setdefault(row.method, {})[str(row.seed)] = row.verdict
    return found


def judgement_of(row: Row, results: Results) -> Judgement:
    """A row's values beside those of the trained and the retrained models of its variant and seed.

    Raises:
        RequestError: these are not stored.

    Example:
        >>> rows = [Row("retrain", 0, asr=rate) for rate in (0.010, 0.012, 0.011, 0.013, 0.009)]
        >>> rows += [Row("trained", 0, asr=0.9), Row("retrace", 0, asr=0.4)]
        >>> judgement_of(rows[-1], Results("demo", {}, {}, rows, {})).findings[0].outcome
        'outside'
    """
    same = [other for other in results.rows if (other.variant, other.seed) == (row.variant, row.seed)]
    trained = [other for other in same if other.method == "trained"]
    retrained = [other for other in same if other.method == REFERENCE]
    if not trained or not retrained:
        where = f"{results.experiment}, {row.variant or 'its only variant'}, seed {row.seed}"
        raise RequestError(f"{where} has no trained or no retrained models, so {row.method} cannot be judged again.")
    if row.forget_loss is None and trained[0].forget_loss is not None:  # an exam leaves the loss out for this alone
        return Judgement(Verdict.DAMAGED, "The model's outputs are not finite.")
    own, before, *others = map(asdict, (row, trained[0], *retrained))
    return judge(compared(own, before, others))


def _verdict(row: Row, results: Results) -> str | None:
    if row.verdict is None or row.verdict == FAILED:
        return row.verdict
    return None if row.method == REFERENCE else judgement_of(row, results).verdict.value
