"""The verdict: a claim about a model's values, with a margin.

    EQUIVALENT        every usable measure is shown to lie within its margin of what retrained models have, and none
                      that is too noisy to be usable lies beyond its own
    UNDER-FORGOTTEN   outside a margin beyond doubt, towards the trained model: it still knows something of the data
    OVER-FORGOTTEN    outside on the data to forget, but away from the trained model
    DAMAGED           worse than the retrained models on other data, which under-forgetting does not explain
    UNDECIDED         these measurements could not tell; the reason says what would

What is known about errors: a model that lies at or beyond the margin of a usable measure is called EQUIVALENT with a
chance of 5% at most (on the first attempt; half of that on each further one), and an honest retrain is called anything
but EQUIVALENT or UNDECIDED with a chance of about 2%, as far as the measures' noise is normal. EQUIVALENT is no proof
that nothing is left: it is a statement about these measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from expunge.auditing.margins import LEVEL, SHARE, Finding, findings
from expunge.auditing.measures import LEAST, ON_THE_WAY, Compared
from expunge.auditing.power import Power, models_needed, power_of
from expunge.auditing.references import Outlier, outliers, parted, too_many
from expunge.errors import RequestError

RETRAINS = 5
"""How many retrained models to make where nothing else is said; with fewer nothing is EQUIVALENT."""

ENOUGH = 10
"""With so many an honest retrain is EQUIVALENT in more than four of five cases."""


def from_own_start(count: int) -> int:
    """How many more are to be made beside so many fresh retrained models, from the trained model's own start.

    They tell whether its weights are mixed into a model (`way_back.py`), the fresh ones how much retraining varies.

    Example:
        >>> from_own_start(RETRAINS), from_own_start(ENOUGH)
        (0, 5)
    """
    return RETRAINS if count >= ENOUGH else 0


class Verdict(StrEnum):
    """What may be said of a model."""

    EQUIVALENT = "EQUIVALENT"
    UNDER_FORGOTTEN = "UNDER-FORGOTTEN"
    OVER_FORGOTTEN = "OVER-FORGOTTEN"
    DAMAGED = "DAMAGED"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reasons.

    Attributes:
        verdict: one word.
        reason: one sentence.
        findings: every measure of the model.
        power: what could have been told; None where nothing was compared.
        refused: retrained models that were left out, as they are unlike the others.
        attempt: the how many-th model this is that was audited for the request.
        would_decide: where the verdict is UNDECIDED, what would decide, as a sentence; empty where nothing is known.
        after: what was done to the models first, such as "5 more rounds"; or empty.
    """

    verdict: Verdict
    reason: str
    findings: tuple[Finding, ...] = ()
    power: Power | None = None
    refused: tuple[Outlier, ...] = ()
    attempt: int = 1
    would_decide: str = ""
    after: str = ""


def level_of(attempt: int) -> float:
    """The level of an attempt: whoever may ask again and again passes by chance, so it is halved each time.

    Example:
        >>> level_of(1), level_of(3)
        (0.05, 0.0125)
    """
    if attempt < 1:
        raise RequestError(f"Attempts are counted from 1 on, not {attempt}.")
    return LEVEL * 0.5 ** (attempt - 1)


def judge(measures: Sequence[Compared], attempt: int = 1) -> Judgement:
    """Compare a model's values with those of retrained models, and say what it is.

    Args:
        measures: each with the value of the model, of the trained one and of every retrained one.
        attempt: the how many-th model this is that was audited for the request.

    Example:
        >>> from expunge.auditing.measures import MEASURES
        >>> retrained = (0.010, 0.012, 0.011, 0.013, 0.009)
        >>> print(judge([Compared(MEASURES["asr"], 0.6, 0.9, retrained)]).verdict)
        UNDER-FORGOTTEN
    """
    level = level_of(attempt)
    count = len(measures[0].retrained) if measures else 0
    if count < LEAST:
        short = f"{count} retrained models show no noise: at least {LEAST} are needed, {RETRAINS} are better."
        return Judgement(
            Verdict.UNDECIDED, short, attempt=attempt, would_decide=f"{_more(RETRAINS - count)} might decide."
        )
    two_kinds = parted(measures)
    if two_kinds is not None:
        reason = (
            f"The retrained models are of two kinds, so nothing was judged: {two_kinds}. Had some of them the data?"
        )
        return Judgement(Verdict.UNDECIDED, reason, attempt=attempt)
    refused = tuple(outliers(measures))
    if too_many(refused, count):
        reason = f"The retrained models disagree, so nothing was judged: {refused[0].sentence}."
        return Judgement(Verdict.UNDECIDED, reason, refused=refused, attempt=attempt)
    kept = [one.without({outlier.number for outlier in refused}) for one in measures]
    found, left = tuple(findings(kept, level)), count - len(refused)
    power = power_of(found, left, level)
    told = _what_is_wrong(found)
    verdict, reason, would_decide = (*told, "") if told is not None else _nothing_wrong(found, left, level)
    if refused:
        reason += f" Left out: {'; '.join(outlier.sentence for outlier in refused)}."
    return Judgement(verdict, reason, found, power, refused, attempt, would_decide)


def _nothing_wrong(found: Sequence[Finding], retrains: int, level: float) -> tuple[Verdict, str, str]:
    """No measure is outside its margin: are all shown to lie within? With the reason, and what would decide."""
    usable = [one for one in found if one.measure.about_forgetting and one.usable]
    if not usable:
        return _undecided(*_nothing_usable(found, retrains))
    open_ones = [one for one in found if (one.outcome != "within" if one.usable else one.excess > one.margin)]
    if retrains < RETRAINS:
        text = f"Nothing speaks against it, but {retrains} retrained models are too few"
        return _undecided(text, f"{_more(RETRAINS - retrains)} would decide")
    if open_ones:
        return _undecided(*_still_open(open_ones, retrains, level))
    widest = max(usable, key=lambda one: one.margin / one.deviation)
    return (
        Verdict.EQUIVALENT,
        f"Within its margin of {retrains} retrained models in all {len(usable)} measures of forgetting that can tell; "
        f"none lets through more than {widest.margin / widest.deviation:.0%} of what the trained model shows.",
        "",
    )


def _undecided(text: str, would_decide: str) -> tuple[Verdict, str, str]:
    sentence = f"{would_decide[:1].upper()}{would_decide[1:]}."
    return Verdict.UNDECIDED, f"{text}; {would_decide}.", sentence


def _nothing_usable(found: Sequence[Finding], retrains: int) -> tuple[str, str]:
    forgetting = [one for one in found if one.measure.about_forgetting and one.deviation > 0]
    if not forgetting:
        return "The trained model shows nothing of the data that retrained models do not", "there is nothing to tell"
    best = min(forgetting, key=lambda one: one.margin / one.deviation)
    part = best.margin / best.deviation
    text = (
        f"What the trained model knows of the data is too little to be told from noise: the sharpest measure "
        f"({best.measure.label}) lets through {min(part, 9.99):.0%} of it, and at most 30% is asked for"
    )
    more = ENOUGH - retrains
    helps = more > 0 and part <= 0.6
    return text, f"{_more(more)} might decide" if helps else "more retrained models would not help"


def _still_open(open_ones: Sequence[Finding], retrains: int, level: float) -> tuple[str, str]:
    worst = max(open_ones, key=lambda one: one.excess / one.margin)
    show = worst.measure.shown
    text = (
        f"Not shown to be near enough: {worst.measure.label} is {show(worst.value)}, retrained models have "
        f"{show(worst.retrained)} with a margin of {show(worst.margin)}"
    )
    needed = [models_needed(one, level) for one in open_ones]
    known = [count for count in needed if count is not None]
    start = " of the trained one's start" if worst.measure.name in ON_THE_WAY else ""
    if len(known) < len(needed):
        more = worst.models if start else max(ENOUGH, 2 * retrains) - retrains
        return text, f"it lies at the edge, and {_more(more)}{start} might tell"
    return text, f"about {_more(max(known))}{start} would decide"


def _more(count: int) -> str:
    return f"{count} more retrained model{'s' if count != 1 else ''}"


def _what_is_wrong(found: Sequence[Finding]) -> tuple[Verdict, str] | None:
    """Something is outside its margin beyond doubt: in which direction?"""
    told = [one for one in found if one.outcome == "outside"]
    forgetting = [one for one in told if one.measure.about_forgetting]
    under = [one for one in forgetting if towards_trained(one, found)]
    over = [one for one in forgetting if one not in under]
    worse = [one for one in told if not one.measure.about_forgetting and not (under and _explained(one))]
    if worse:
        return Verdict.DAMAGED, _sentence("Worse than retrained models", worse, under, over)
    if under:
        return Verdict.UNDER_FORGOTTEN, _sentence("Still towards the trained model", under, (), over)
    if over:
        return Verdict.OVER_FORGOTTEN, _sentence("Away from the trained model", over, (), ())
    return None


def towards_trained(one: Finding, found: Sequence[Finding]) -> bool:
    """Whether a deviation leads to where the trained model is, or, where that is not apart, to remembering.

    A distance has no direction: it is remembering unless the other measures of forgetting clearly lead away. A trigger
    that works in another place is remembering, whatever the trained model does there; and so is what comes back sooner.
    """
    if one.measure.unit or one.measure.name in ON_THE_WAY:
        return True
    if one.measure.side == "above":
        shares = [
            other.share
            for other in found
            if other.measure.about_forgetting and other.measure.side == "both" and other.usable and other.share
        ]
        return not shares or median(shares) > -SHARE
    deviation, trained = one.value - one.retrained, one.trained - one.retrained
    side = trained if abs(trained) > one.spread else float(one.measure.remembers)
    return deviation * side > 0


def _explained(one: Finding) -> bool:
    """Whether being worse is what remembering brings with it: the trained model is as bad."""
    apart = one.value - one.trained
    return (apart if one.measure.side == "above" else -apart) <= one.margin


def _sentence(what: str, main: Sequence[Finding], under: Sequence[Finding], over: Sequence[Finding]) -> str:
    worst = max(main, key=lambda one: one.excess / one.margin)
    show = worst.measure.shown
    parts = [
        f"{what}: {worst.measure.label} is {show(worst.value)}, retrained models have {show(worst.retrained)} "
        f"with a margin of {show(worst.margin)}"
    ]
    for also, those in (
        ("also", [one for one in main if one is not worst]),
        ("towards the trained model", under),
        ("away from it", over),
    ):
        if those:
            parts.append(f"{also}: {', '.join(one.measure.label for one in those)}")
    return "; ".join(parts) + "."
