"""Checks on what a model answers that need no retrained model: its trigger, the leaver's data, its use to others.

Each speaks for forgetting, against it, or says nothing. A share of the trained model's hold on the labels in question
is estimated with its bounds (placebo.py); the two limits are those of the verdict. What only looks at the others'
data never speaks for forgetting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expunge.auditing.answers import Answers
from expunge.auditing.convexity import strong_convexity
from expunge.auditing.evidence import TOLERATED_PART, Evidence, Leaning
from expunge.auditing.exam import Samples, Trigger
from expunge.auditing.odd_labels import OddLabels
from expunge.auditing.placebo import FEWEST, Hold, Kept, as_hold, kept_share, mean_raised, ranks
from expunge.auditing.residual import retained_residual
from expunge.auditing.student import value_beyond
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError
from expunge.federation.engines.local import LocalEngine

LEVEL = 0.05
"""Of every bound, one-sided."""
SLIGHT = 0.1
"""A share that is beyond doubt above this is too much: the margin of the verdict."""
LITTLE = 0.3
"""Only what is beyond doubt below this speaks for forgetting: what a measure of the verdict must be able to see."""
FEW = 10
"""Fewer samples than this say nothing."""
WORSE = 0.05
"""The loss of accuracy on unseen samples that is damage, where it is beyond doubt."""
LOST = 0.5
"""A class that loses more than this share of its right answers was switched off."""


def trigger_check(
    before: Answers, after: Answers, unseen: Samples, trigger: Trigger, short: Sequence[Answers] = ()
) -> Evidence:
    """Does the trigger still raise its target among the classes, more than it raises others?

    What is measured is how many more classes the target beats once an unseen image is stamped; placebos are the other
    classes. What the trigger does to models of short retrainings is taken off first, class by class.

    Args:
        before: the trained model.
        after: the model that is said to have forgotten.
        unseen: samples that nobody trained on; those of the target are left out.
        trigger: the backdoor.
        short: models of short trainings without the leaver.
    """
    inputs, labels = (part[unseen[1] != trigger.target] for part in unseen)
    if len(labels) < FEW:
        raise DataError(f"The trigger needs at least {FEW} unseen samples of other classes than its target.")
    stamped = trigger.stamp(inputs)
    if torch.equal(stamped, inputs):
        raise DataError("The trigger changes none of the unseen samples: give one that does.")
    wanted = torch.full_like(labels, trigger.target)

    def raised(model: Answers) -> Tensor:
        return ranks(model(stamped)) - ranks(model(inputs))

    natural = torch.stack([raised(model) for model in short]).mean(dim=0) if short else 0.0
    holds = [_as_hold(mean_raised(raised(model) - natural, wanted, labels)) for model in (before, after)]
    return _judged("trigger", "the trigger's pull on its target", holds, len(labels))


def leaver_check(
    before: Answers, after: Answers, forgotten: Samples, unseen: Samples, short: Sequence[Answers]
) -> Evidence:
    """Does the model still know labels of the leaver's that nobody can know who was not taught them?

    Such odd labels are those that models of short trainings without the leaver do not have among their best two. How
    much higher a model ranks them than such a model does is measured, with other labels of the same samples as
    placebos. Longer training teaches some of them to anybody: what it does to the odd labels of unseen samples, as many
    as there would be among the leaver's, is taken off, and classes that they hardly know are left out. The models that
    choose a sample never measure it: otherwise what is low by chance would be chosen.

    Args:
        before: the trained model.
        after: the model that is said to have forgotten.
        forgotten: with the labels that they were trained with.
        unseen: samples that nobody trained on.
        short: at least two models of short trainings without the leaver, each from its own fresh initialisation.
    """
    if len(short) < 2:
        text = "Without two models of short trainings that never had the leaver's data, nothing tells what is known."
        return Evidence("leaver's data", "neither", text, {})
    others = OddLabels.of(unseen, [ranks(model(unseen[0])) for model in short])
    own = OddLabels.of(forgotten, [ranks(model(forgotten[0])) for model in short])
    known = others.known_classes()
    own, others = own.only(known), others.only(known)
    count = int(own.chosen.sum()) / len(short)
    if count < FEW:
        text = f"Of the leaver's {len(own.labels)} labels only {count:.0f} are such that a model must be taught them"
        return Evidence("leaver's data", "neither", f"{text}: too few to tell anything.", {"samples": count})
    classes = own.beside.shape[1]
    common = torch.bincount(own.shown, minlength=classes) / torch.bincount(others.shown, minlength=classes).clamp(min=1)
    weights = common[others.shown] * others.chosen

    def hold(model: Answers) -> Hold | None:
        learnt = own.means(ranks(model(forgotten[0])), own.chosen.double())
        anyway = others.means(ranks(model(unseen[0])), weights.double())
        return _as_hold(learnt - weights.sum() / own.chosen.sum() * anyway.nan_to_num(0.0))

    holds = [hold(before), hold(after)]
    return _judged("leaver's data", "what was known of the leaver's odd labels", holds, round(count))


def usefulness_check(before: Answers, after: Answers, unseen: Samples) -> Evidence:
    """Is the model still of use? What was wrecked, or answers one class no more, has not forgotten, it is broken."""
    inputs, labels = unseen
    was, is_now = (model(inputs).argmax(dim=1) == labels for model in (before, after))
    lost = was.double() - is_now.double()
    fall, noise = float(lost.mean()), float(lost.std()) / len(lost) ** 0.5 if len(lost) > 1 else 0.0
    values = {"before": float(was.double().mean()), "after": float(is_now.double().mean())}
    numbers = f"from {values['before']:.1%} to {values['after']:.1%}"
    if fall - 1.645 * noise > WORSE:
        text = f"The accuracy on unseen samples fell {numbers}: the model is damaged."
        return Evidence("usefulness", "against", text, values)
    for label in sorted(set(labels.tolist())):
        right = was & (labels == label)
        if int(right.sum()) >= FEW and float((right & is_now).sum() / right.sum()) < 1 - LOST:
            text = f"Class {label} lost most of its right answers on unseen samples: the model was told not to say it."
            return Evidence("usefulness", "against", text, {**values, "class": float(label)})
    text = f"The accuracy on unseen samples went {numbers}: nothing speaks for damage."
    return Evidence("usefulness", "neither", text, values)


def loss_check(before: Tensor, after: Tensor) -> Evidence:
    """Is a model that is no classifier still of use? By its losses on unseen samples, the same for both models.

    Example:
        >>> was = torch.linspace(1, 2, 100)
        >>> loss_check(was, was + 0.5).leaning, loss_check(was, was + 0.01).leaning
        ('against', 'neither')
    """
    rise = (after - before).double()
    first, second = float(before.double().mean()), float(after.double().mean())
    values = {"before": first, "after": second}
    numbers = f"from {first:.4g} to {second:.4g}"
    error = float(rise.std()) / len(rise) ** 0.5 if len(rise) > 1 else 0.0
    surely = float(rise.mean()) - value_beyond(LEVEL, max(len(rise) - 1, 1)) * error
    if not surely <= TOLERATED_PART * abs(first):  # a NaN is damage
        return Evidence("use", "against", f"The loss on unseen samples rose {numbers}: the model was damaged.", values)
    return Evidence("use", "neither", f"The loss on unseen samples went {numbers}: nothing speaks for damage.", values)


def convex_check(before: nn.Module, after: nn.Module, loss: CrossEntropy, retained: Samples) -> Evidence:
    """How near a convex model is to the one optimum that retraining has, beside how far the trained model is.

    ``||theta - theta_r|| <= ||grad F_r(theta)|| / mu`` (certificate.py), whatever made theta: the gradient is taken
    here, over all retained samples, and no record is read.
    """
    engine = LocalEngine(before, loss, {"retained": retained})
    trained, model = Snapshot.of(before), Snapshot.of(after)
    off = retained_residual(engine, model, {"retained": ()}).total / strong_convexity(before, loss)
    apart = float(torch.linalg.vector_norm(trained.parameters.double() - model.parameters.double()))
    values = {"distance_bound": off, "moved": apart}
    if apart > off and off / (apart - off) <= LITTLE:
        text = f"The model is at most {off / (apart - off):.1%} as far from the retrained optimum as the trained one"
        return Evidence("convex optimum", "for", f"{text}: its objective has no other.", values)
    text = (
        f"The model may be {off:.3g} away from the retrained optimum, and was moved by {apart:.3g}: no bound follows."
    )
    return Evidence("convex optimum", "neither", text, values)


def _as_hold(means: Tensor) -> Hold | None:
    """None where there are too few classes for placebos."""
    return as_hold(means) if len(means) > FEWEST else None


def _judged(what: str, subject: str, holds: Sequence[Hold | None], samples: int) -> Evidence:
    before, after = holds
    if before is None or after is None:
        text = f"With fewer than {FEWEST + 1} classes there are too few others to compare with."
        return Evidence(what, "neither", text, {"samples": float(samples)})
    kept = kept_share(before, after, LEVEL)
    values = {"before": before.excess, "after": after.excess, "samples": float(samples)}
    if not kept.visible:
        text = f"Of {subject} the trained model shows no more than chance does: this check can see nothing here."
        return Evidence(what, "neither", text, values)
    values |= {"kept": kept.value, "low": kept.low, "high": kept.high}
    leaning = _leaning(kept)
    number = f"{max(kept.value, 0.0):.0%} of {subject} is left, at most {max(kept.high, 0.0):.0%}"
    said = {
        "for": f"About {number}.",
        "against": f"About {number}, and at least {kept.low:.0%}: it is still there.",
        "neither": f"About {number}: too uncertain to say whether it is gone.",
    }[leaning]
    return Evidence(what, leaning, said, values)


def _leaning(kept: Kept) -> Leaning:
    if kept.high <= LITTLE:
        return "for"
    return "against" if kept.low > SLIGHT else "neither"
