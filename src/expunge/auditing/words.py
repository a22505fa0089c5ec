"""What an audit says first, for somebody who never heard of an AUC: one sentence, one number, a picture, the limits.

The terminal, the page and the text of an audit share these words. What is left of the data is told as a share: nothing
is where retrained models are, all of it where the trained model is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from expunge.auditing.margins import SHARE, Finding
from expunge.auditing.verdict import Judgement, Verdict, level_of

LIMITS = (
    "A secret channel: a trigger unlike all that were tried, or weights that hide bits. A mixture: no margin is below"
    f" {SHARE:.0%}, so a model with up to about {SHARE:.0%} of the trained weights in it may pass; with more where its"
    " honest part has the training's own start, if fewer than three of the retrained models have it, or if its units"
    " were put into another order or scaled; and single layers of the trained model. A trigger that was trained away,"
    " at times. What others kept or saw during training."
    " And an audit takes as given: the retrained models, the samples, and that whoever made the model knew neither the"
    " nonce nor the unseen samples."
)
"""What every audit has to say of itself."""

LEGEND = (
    "● this model, │ retrained models, ○ doing nothing, ◉ both this model and doing nothing, [ ] the margin; right is"
    " towards the trained model."
)
"""Of the picture in letters."""

_SENTENCES = {
    Verdict.EQUIVALENT: ", and the model now answers like models that never saw it, as far as can be measured",
    Verdict.UNDER_FORGOTTEN: ", but the model still shows that it was trained on it",
    Verdict.OVER_FORGOTTEN: ", but the model went too far: it answers unlike models that never saw it, a trace as well",
    Verdict.DAMAGED: ", but the model has become worse on other data than models retrained without it",
    Verdict.UNDECIDED: "; whether it was cannot be told yet",
}
CELLS = 29
"""The width of the picture in letters."""

_FIRST, _LAST = -0.5, 1.25
"""The ends of the picture in letters, as shares; what lies further out is drawn there."""


@dataclass(frozen=True)
class Left:
    """How much of what the trained model showed is left, by one measure.

    Attributes:
        share: 0 where retrained models are, 1 where the trained model is; negative beyond retraining.
        reach: how much larger it may be, at the level.
        margin: the share that passes.
        trained: where doing nothing lies: 1, unless another measure's deviation counts.
    """

    share: float
    reach: float
    margin: float
    trained: float


def left(found: Finding) -> Left | None:
    """A measure of forgetting as shares; None for one of use, or where there was nothing to forget.

    Example:
        >>> from expunge.auditing.margins import findings
        >>> from expunge.auditing.measures import MEASURES, Compared
        >>> loss = Compared(MEASURES["forget_loss"], value=1.5, trained=0.0, retrained=(1.9, 2.0, 2.0, 2.1))
        >>> round(left(findings([loss])[0]).share, 2)
        0.25
    """
    if not found.measure.about_forgetting or found.deviation <= 0:
        return None
    towards = 1.0 if found.measure.side == "above" else math.copysign(1.0, found.trained - found.retrained)
    unit = towards / found.deviation
    return Left(
        unit * (found.value - found.retrained),
        found.reach / found.deviation,
        found.margin / found.deviation,
        unit * (found.trained - found.retrained),
    )


def sentence(verdict: Verdict, subject: str = "the data") -> str:
    """What was asked, and what was found.

    Example:
        >>> print(sentence(Verdict.UNDER_FORGOTTEN, "the data of client-3"))
        The data of client-3 was to be forgotten, but the model still shows that it was trained on it.
    """
    return f"{subject[:1].upper()}{subject[1:]} was to be forgotten{_SENTENCES[verdict]}."


def number(judgement: Judgement) -> str:
    """How much is still there at most; of a verdict that says otherwise, by how much; or what would decide.

    Example:
        >>> from expunge.auditing.measures import MEASURES, Compared
        >>> from expunge.auditing.verdict import judge
        >>> print(number(judge([Compared(MEASURES["asr"], 0.6, 0.9, (0.010, 0.012, 0.011, 0.013, 0.009))])))
        About 66% of what the trained model showed of it is still there (attack success; 10% would pass).
    """
    text = _number(judgement)
    return f"After {judgement.after}: {text}" if judgement.after and text != judgement.reason else text


def _number(judgement: Judgement) -> str:
    found, verdict = judgement.findings, judgement.verdict
    if verdict is Verdict.UNDECIDED:
        return judgement.would_decide or judgement.reason
    if verdict is Verdict.DAMAGED:
        return _worse(found) or judgement.reason
    shares = [(own, one) for one in found if one.usable and (own := left(one)) is not None]
    told = [pair for pair in shares if pair[1].outcome == "outside"]
    if verdict is Verdict.EQUIVALENT:
        own, one = max(shares, key=lambda pair: pair[0].share + pair[0].reach)
        at_most = max(own.share + own.reach, 0.0)
        return f"At most {at_most:.0%} of what the trained model showed of it is still there{_by(own, one)}"
    if verdict is Verdict.UNDER_FORGOTTEN and told:
        own, one = max(told, key=lambda pair: pair[0].share)
        how_much = f"About {own.share:.0%}" if own.share < 1 else "All"
        return f"{how_much} of what the trained model showed of it is still there{_by(own, one)}"
    if verdict is Verdict.OVER_FORGOTTEN and told:
        own, one = max(told, key=lambda pair: abs(pair[0].share))
        return f"It is off by {abs(own.share):.0%} of what the trained model showed, on the other side{_by(own, one)}"
    return judgement.reason


def _by(own: Left, one: Finding) -> str:
    return f" ({one.measure.label}; {own.margin:.0%} would pass)."


def _worse(found: Sequence[Finding]) -> str | None:
    """The measure of use that is furthest off, in its own numbers."""
    told = [one for one in found if not one.measure.about_forgetting and one.outcome == "outside"]
    if not told:
        return None
    worst = max(told, key=lambda one: one.excess / one.margin)
    label, show = worst.measure.label, worst.measure.shown
    edge = show(worst.low if worst.measure.side == "below" else worst.high)
    return (
        f"{label[:1].upper()}{label[1:]} is {show(worst.value)}; retrained models have {show(worst.retrained)}, and"
        f" {edge} would pass."
    )


def looks(now: Judgement, later: Mapping[str, Judgement]) -> list[str]:
    """What a model is called as it is, and after all models were trained on: a line each.

    Example:
        >>> now, then = Judgement(Verdict.EQUIVALENT, "Near."), Judgement(Verdict.UNDER_FORGOTTEN, "It is back.")
        >>> looks(now, {"5 more rounds": then})
        ['As it is: EQUIVALENT. Near.', 'After 5 more rounds: UNDER-FORGOTTEN. It is back.']
    """
    found = {"As it is": now} | {f"After {name}": own for name, own in later.items()}
    return [f"{when}: {own.verdict.value}. {own.reason}" for when, own in found.items()]


def attempt(judgement: Judgement, counted: bool) -> str:
    """How many models were audited for the request, and what that does to the level.

    Example:
        >>> print(attempt(Judgement(Verdict.UNDECIDED, "", attempt=3), counted=True))
        3rd model audited for this request: judged at a level of 1.25%.
    """
    level = f"{100 * level_of(judgement.attempt):g}%"
    if not counted:
        return f"Not counted: no record of audits was kept. Judged as the first of this request, at a level of {level}."
    return f"{_ordinal(judgement.attempt)} model audited for this request: judged at a level of {level}."


def _ordinal(count: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{count}{'th' if count % 100 in (11, 12, 13) else endings.get(count % 10, 'th')}"


def counts(found: Finding) -> bool:
    """Whether a measure has a say: it can carry a claim, or the model is beyond its margin all the same."""
    return found.usable or found.excess > found.margin


def outcome(found: Finding) -> str:
    """What came out for one measure, in a word or two.

    Example:
        >>> from expunge.auditing.margins import findings
        >>> from expunge.auditing.measures import MEASURES, Compared
        >>> outcome(findings([Compared(MEASURES["asr"], 0.0, 0.9, (0.0, 0.2, 0.4, 0.1))])[0])
        'left out: too noisy'
    """
    return found.outcome if counts(found) else "left out: too noisy"


def strip(found: Finding, cells: int = CELLS) -> str:
    """A measure of forgetting drawn with letters, from half of the deviation beyond retraining to past doing nothing.

    Example:
        >>> from expunge.auditing.margins import findings
        >>> from expunge.auditing.measures import MEASURES, Compared
        >>> asr = Compared(MEASURES["asr"], 0.45, 0.9, (0.01, 0.02, 0.0, 0.01))
        >>> strip(findings([asr])[0])
        '······[·│·]·····●·······○····'
    """
    own = left(found)
    if own is None:
        return ""

    def place(share: float) -> int:
        return round((min(max(share, _FIRST), _LAST) - _FIRST) / (_LAST - _FIRST) * (cells - 1))

    drawn = ["·"] * cells
    for share, letter in ((-own.margin, "["), (own.margin, "]")):
        if _FIRST < share < _LAST and not (letter == "[" and found.measure.side == "above"):
            drawn[place(share)] = letter
    drawn[place(0.0)] = "│"
    drawn[place(own.trained)] = "○"
    drawn[place(own.share)] = "◉" if place(own.share) == place(own.trained) else "●"
    return "".join(drawn)


def picture(found: Sequence[Finding]) -> list[str]:
    """A line for every measure: its name, its picture, the value beside the retrained models', and what came out."""
    names = max(len(one.measure.label) for one in found)
    return [
        f"  {one.measure.label:<{names}}  {strip(one) or ' ' * CELLS}  {one.measure.shown(one.value):>7},"
        f" retrained {one.measure.shown(one.retrained)}, before {one.measure.shown(one.trained)}: {outcome(one)}"
        for one in in_order(found)
    ]


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """What looks at the forgotten data first, each group in its own order."""
    return sorted(found, key=lambda one: not one.measure.about_forgetting)
