"""The verdict: is a model one that might have come out of retraining?

    EQUIVALENT        in no measure told from a retrained model, while a model that kept half of it would be told
    UNDER-FORGOTTEN   deviates towards the trained model: it still knows something of the data
    OVER-FORGOTTEN    deviates on the data to forget, but away from the trained model
    DAMAGED           worse than the retrained models elsewhere, which under-forgetting does not explain
    UNDECIDED         these measurements could not tell, whatever the model did

The error rate is known for one thing: a further honestly retrained model is called anything but EQUIVALENT or UNDECIDED
with a chance of at most ``level``, as far as the measures' noise is normal. EQUIVALENT is not a proof of forgetting: it
means that no deviation larger than those listed was seen in these measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from expunge.auditing.equivalence import LEVEL, Finding, findings, retrained_noise
from expunge.auditing.measures import Observed, require_comparable
from expunge.auditing.power import KEPT_SHARE, Power, power_of
from expunge.auditing.prediction import LEAST
from expunge.errors import RequestError

RETRAINS = 5
"""How many retrained models to make where nothing else is said."""

LEAST_FORGOTTEN, LEAST_TEST = 20, 50
"""Below so many samples one of them is worth 5 or 2 points: more than is to be told."""


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
        findings: every measure of the candidate.
        doing_nothing: every measure of the trained model.
        power: what could have been told; None where nothing was compared.
    """

    verdict: Verdict
    reason: str
    findings: tuple[Finding, ...] = ()
    doing_nothing: tuple[Finding, ...] = ()
    power: Power | None = None


def judge(
    *,
    retrained: Sequence[Observed],
    trained: Observed,
    candidate: Observed,
    level: float = LEVEL,
    same_init: Sequence[Observed] = (),
) -> Judgement:
    """Compare a model with retrained ones, and say what it is.

    Args:
        retrained: models retrained without the forgotten data, from fresh initialisations; five or more are better.
        trained: the model before forgetting: doing nothing.
        candidate: the model to be judged.
        level: the chance of finding a deviation in an honest retrain.
        same_init: models retrained from the training's own initialisation; their noise is only shown.

    Raises:
        DataError: labels do not match, or there is no sample.
        ModelError: outputs of different shapes, or a reference that is not finite.
        RequestError: the candidate or the trained model is one of the retrained.
    """
    if not 0 < level < 1:
        raise RequestError(f"The level must lie between 0 and 1, not {level}.")
    require_comparable(retrained, trained, candidate)
    if short := _too_few(retrained, trained):
        return Judgement(Verdict.UNDECIDED, short)
    if not candidate.is_finite:
        return Judgement(Verdict.DAMAGED, "The model's outputs are not finite.")
    noise = retrained_noise(retrained)
    own = tuple(findings(noise, candidate, retrained, level, same_init))
    nothing = tuple(findings(noise, trained, retrained, level))
    power = power_of(noise, nothing, level)
    if any(finding.deviates for finding in own):
        verdict, reason = _what_is_wrong(own, nothing, retrained, trained, candidate)
    else:
        verdict, reason = _nothing_found(nothing, power)
    return Judgement(verdict, reason, own, nothing, power)


def _too_few(retrained: Sequence[Observed], trained: Observed) -> str:
    if len(retrained) < LEAST:
        return f"{len(retrained)} retrained models show no noise: at least {LEAST} are needed, {RETRAINS} are better."
    for what, least, labels in (
        ("forgotten", LEAST_FORGOTTEN, trained.forget_labels),
        ("test", LEAST_TEST, trained.test_labels),
    ):
        if len(labels) < least:
            return f"{len(labels)} {what} samples are too few for a verdict: at least {least} are needed."
    return ""


def _nothing_found(nothing: Sequence[Finding], power: Power) -> tuple[Verdict, str]:
    """No measure deviates: is that because the model is like a retrained one, or because nothing can be seen?"""
    more = (
        f"about {power.needed} retrained models would tell"
        if power.needed is not None and power.needed > power.retrains
        else "more retrained models would not help"
    )
    if not any(finding.deviates for finding in nothing if finding.measure.about_forgetting):
        return Verdict.UNDECIDED, f"Not distinguishable from doing nothing: the trained model passes, too; {more}."
    if power.share_told > KEPT_SHARE:
        return (
            Verdict.UNDECIDED,
            f"A model that kept {KEPT_SHARE:.0%} of the trained model's deviation would pass, too; {more}.",
        )
    return (
        Verdict.EQUIVALENT,
        f"In no measure told from a retrained model; one that kept {power.share_told:.0%} of the trained model's "
        f"deviation would be ({power.sharpest}).",
    )


def _what_is_wrong(
    own: Sequence[Finding],
    nothing: Sequence[Finding],
    retrained: Sequence[Observed],
    trained: Observed,
    candidate: Observed,
) -> tuple[Verdict, str]:
    """Some measure deviates: in which direction?"""
    before = {finding.measure.name: finding for finding in nothing}
    told = [finding for finding in own if finding.deviates]
    under: list[Finding] = []
    over: list[Finding] = []
    for finding in told:
        if finding.measure.about_forgetting:
            remembers = (
                nearer_to_trained(retrained, trained, candidate)
                if finding.measure.is_divergence
                else _towards(finding, before[finding.measure.name])
            )
            (under if remembers else over).append(finding)
    elsewhere = [finding for finding in told if not finding.measure.about_forgetting]
    worse = [finding for finding in elsewhere if not _explained(finding, before[finding.measure.name], bool(under))]
    accuracy = [finding for finding in worse if finding.measure.name == "test_accuracy"]
    if accuracy or (worse and not under):
        return Verdict.DAMAGED, _sentence("Worse than retrained models", accuracy or worse, under, over)
    if under or not over:  # whatever else deviates is explained by the trained model's own deviation
        return Verdict.UNDER_FORGOTTEN, _sentence("Deviates towards the trained model", under or elsewhere, (), over)
    return Verdict.OVER_FORGOTTEN, _sentence("Deviates away from the trained model", over, (), ())


def _towards(finding: Finding, before: Finding) -> bool:
    """Whether the deviation leads to where the trained model is, or, where that is not apart, to remembering."""
    deviation, trained = finding.value - finding.retrained, before.value - before.retrained
    side = trained if abs(trained) > finding.measure.margin else float(finding.measure.remembers)
    return deviation * side > 0


def _explained(finding: Finding, before: Finding, under: bool) -> bool:
    """Whether being worse is what the trained model's remembering brings with it.

    It is where the trained model is told from the retrained ones on the same side, and at least as far (up to the
    margin); and, for a model that still remembers, where it is not worse than the trained one beyond the noise.
    """
    side = 1.0 if finding.value > finding.retrained else -1.0
    further = side * (finding.value - before.value)
    reach = finding.high - finding.retrained if side > 0 else finding.retrained - finding.low
    return (before.deviates and further <= finding.measure.margin) or (under and further <= reach)


def nearer_to_trained(retrained: Sequence[Observed], trained: Observed, candidate: Observed) -> bool:
    """Whether the model answers for the forgotten data more like the trained one than any retrained model does.

    Measured by the total variation between their probabilities, which a few confident errors cannot dominate.
    """
    goal = _probabilities(trained)
    return _variation(candidate, goal) < min(_variation(model, goal) for model in retrained)


def _variation(model: Observed, goal: Tensor) -> float:
    return float((_probabilities(model) - goal).abs().sum(dim=1).mean()) / 2


def _probabilities(model: Observed) -> Tensor:
    return model.forget_logits.double().softmax(dim=1)


def _sentence(what: str, main: Sequence[Finding], under: Sequence[Finding], over: Sequence[Finding]) -> str:
    worst = min(main, key=lambda finding: finding.p_value)
    show = worst.measure.shown
    limit = f"about {show(worst.retrained)}"
    if worst.value < worst.low:
        limit = f"at least {show(worst.low)}"
    elif worst.value > worst.high:
        limit = f"at most {show(worst.high)}"
    parts = [f"{what}: {worst.measure.label} is {show(worst.value)}, a retrained model has {limit}"]
    for also, findings_ in (
        ("also", [finding for finding in main if finding is not worst]),
        ("towards the trained model", under),
        ("away from it", over),
    ):
        if findings_:
            parts.append(f"{also}: {', '.join(finding.measure.label for finding in findings_)}")
    return "; ".join(parts) + "."
