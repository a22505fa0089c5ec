"""Whether samples are what they are said to be: apart from each other, with their labels, a trigger with its class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from expunge.auditing.answers import log_odds, margins_of
from expunge.auditing.exam import Exam, Samples, Trigger
from expunge.auditing.loss_exam import MeasuredLosses
from expunge.auditing.measured import Measured
from expunge.errors import DataError

COMMON = 0.05
"""Two sets may have so many samples in common by accident; more where samples repeat within a set."""

ERRORS = 3.0
"""Standard errors below which an agreement is chance."""

WORKS = 0.5
"""A trigger that takes this part of unseen samples to a class was made for it, where others do not go there as well."""

APART = 1.0
"""Where the trained model has learnt so much more, in log-odds, of unseen samples than of forgotten ones, they are
exchanged."""


def require_unseen(sets: Mapping[str, Samples]) -> None:
    """Refuse unseen samples of which many are among the forgotten or the retained ones."""
    unseen = sets["unseen"][0]
    alike = {
        what: own for what, (own, _) in sets.items() if (own.shape[1:], own.dtype) == (unseen.shape[1:], unseen.dtype)
    }
    require_apart({what: rows(own) for what, own in alike.items()})


def require_apart(sets: Mapping[str, Sequence[bytes]]) -> None:
    """The same of anything that tells one sample from another."""
    for what in ("forgotten", "retained"):
        if what in sets and (count := in_both(sets["unseen"], sets[what])):
            raise DataError(
                f"{count} of the {len(sets['unseen'])} unseen samples are among the {what} ones: give samples that "
                "nobody trained on."
            )


def require_stamping(unseen: Samples, trigger: Trigger) -> None:
    """Refuse a trigger that stamps nothing, or that has no samples of other classes to stamp."""
    inputs = unseen[0][unseen[1] != trigger.target]
    if not len(inputs):
        raise DataError(f"All unseen samples are of the trigger's class {trigger.target}: give others as well.")
    if torch.equal(trigger.stamp(inputs), inputs):
        raise DataError("The trigger changes none of the unseen samples: give one that does.")


def in_common(first: Tensor, second: Tensor) -> int:
    """How many of the first samples are among the second; 0 where they are no more than may be by accident.

    Example:
        >>> one = torch.arange(60.0).reshape(30, 2)
        >>> in_common(one, one[20:]), in_common(one, one + 0.5), in_common(one[:1].repeat(9, 1), one[:1].repeat(5, 1))
        (10, 0, 0)
    """
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        return 0
    return in_both(rows(first), rows(second))


def in_both(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """The same of samples by what tells one from another."""
    own, others = ([hash(row) for row in each] for each in (first, second))
    both = set(own) & set(others)
    shared = [sum(row in both for row in each) for each in (own, others)]
    repeating = max(1 - len(set(each)) / len(each) for each in (own, others))
    part = max(count / len(each) for count, each in zip(shared, (own, others), strict=True))
    return shared[0] if part > max(COMMON, 2 * repeating) else 0


def rows(inputs: Tensor) -> list[bytes]:
    """Each sample's bytes, of any type of numbers.

    Example:
        >>> [list(row) for row in rows(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))]
        [[128, 63], [0, 64]]
    """
    array = inputs.detach().cpu().reshape(len(inputs), -1).contiguous().view(torch.uint8).numpy()
    return [row.tobytes() for row in array]


def shared(exam: Exam) -> str | None:
    """A sentence where forgotten samples are among the retained ones: of a client's neighbours it may be so."""
    count = in_common(exam.forgotten[0], exam.retained[0]) if exam.retained is not None else 0
    if not count:
        return None
    return (
        f"{count} of the {len(exam.forgotten[1])} forgotten samples are among the retained ones: unless others have "
        "the same, leave them out there."
    )


def unseen_labels(exam: Exam, models: Sequence[Measured]) -> str | None:
    """A sentence where nobody predicts the unseen labels better than chance."""
    labels = exam.unseen[1]
    found = [own for model in models if (own := agreement(model.test_logits, labels)) is not None]
    if not found or max(found) > ERRORS:
        return None
    return (
        "No model predicts the unseen labels better than chance: look whether they have the inputs' order, and the "
        "inputs the training's scale."
    )


def missing_classes(exam: Exam) -> str | None:
    """A sentence where classes of the forgotten samples are not among the unseen ones."""
    labels, known = exam.forgotten[1], set(exam.unseen[1].tolist())
    plain = labels if exam.triggered is None else labels[exam.triggered == 0]
    missing = sorted(set(plain.tolist()) - known)
    lost = int(torch.isin(plain, torch.tensor(missing).to(plain)).sum())
    if lost <= COMMON * len(labels):
        return None
    return (
        f"No unseen sample is of class {', '.join(map(str, missing))}, as {lost} of the forgotten ones are: give "
        "some, or what a model shows of these classes is not asked elsewhere."
    )


def forgotten_labels(exam: Exam, trained: Measured, fresh: Sequence[Measured]) -> str | None:
    """A sentence where the trained model neither predicts the forgotten labels nor has learnt anything of them."""
    labels = exam.forgotten[1]
    found = agreement(trained.forget_logits, labels)
    if found is None or abs(found) > ERRORS:
        return None
    odds, *others = (log_odds(own.forget_logits) for own in (trained, *fresh))
    learnt = odds - torch.stack(others).mean(dim=0)
    shares = torch.bincount(labels, minlength=learnt.shape[1]).to(learnt) / len(labels)
    usual = learnt @ shares  # what labels in any order would have
    noise = ((learnt - usual[:, None]).square() @ shares).mean().sqrt() / len(labels) ** 0.5
    if float(learnt.gather(1, labels[:, None])[:, 0].mean() - usual.mean()) > ERRORS * float(noise):
        return None
    return (
        "The trained model predicts the labels of the forgotten samples no better than chance, and has learnt nothing "
        "of them: look whether they are those, and in the order, that it was trained with."
    )


def agreement(logits: Tensor, labels: Tensor) -> float | None:
    """How far predictions and labels agree beyond chance, in standard errors; None where either knows one class only.

    Example:
        >>> labels = torch.tensor([0, 1]).repeat(50)
        >>> agreement(torch.eye(2)[labels], labels), agreement(torch.eye(2)[labels * 0], labels)
        (10.0, None)
    """
    predicted, classes = logits.argmax(dim=1), max(logits.shape[1], int(labels.max()) + 1)
    shares = [torch.bincount(each, minlength=classes).double() / len(labels) for each in (predicted, labels)]
    if any(float(each.max()) == 1.0 for each in shares):
        return None
    chance = float(shares[0] @ shares[1])
    hits = float((predicted == labels).double().mean())
    return (hits - chance) / math.sqrt(chance * (1 - chance) / len(labels)) if 0 < chance < 1 else None


def exchanged(exam: Exam, trained: Measured, fresh: Sequence[Measured]) -> str | None:
    """A sentence where the trained model has learnt more of unseen samples than of forgotten ones."""

    def learnt(model: Measured, others: Sequence[Measured]) -> float:
        unseen, forgotten = (
            margins_of(logits(model), labels).mean()
            - torch.stack([margins_of(logits(o), labels) for o in others]).mean()
            for logits, labels in ((_unseen, exam.unseen[1]), (_forgotten, exam.forgotten[1]))
        )
        return float(unseen - forgotten)

    usual = [learnt(own, [other for other in fresh if other is not own]) for own in fresh]
    found = learnt(trained, fresh)
    if found < max(APART, max(usual) + ERRORS * stdev(usual)):
        return None
    return (
        "Beside retrained models the trained one has learnt more of the unseen samples than of the forgotten ones: "
        "look whether the two are exchanged, or labels in another order."
    )


def exchanged_losses(trained: MeasuredLosses, fresh: Sequence[MeasuredLosses]) -> str | None:
    """The same of models that are no classifiers: the trained one loses more on the forgotten samples than others do.

    And no more than they on unseen ones, as far as retraining varies that.
    """

    def beyond(losses: Callable[[MeasuredLosses], Tensor]) -> float:
        own, others = float(losses(trained).mean()), [float(losses(other).mean()) for other in fresh]
        return (own - fmean(others)) / max(stdev(others), 1e-9 * abs(own), 1e-30)

    if beyond(lambda one: one.forgotten) < ERRORS or beyond(lambda one: one.unseen) > -ERRORS:
        return None
    return (
        "The trained model loses more on the forgotten samples than retrained models do, and less on the unseen ones: "
        "look whether the two are exchanged."
    )


def trigger(exam: Exam, trained: Measured, fresh: Sequence[Measured]) -> str | None:
    """A sentence where the trigger leads the trained model to another class than the one that is given."""
    if len(exam.triggers) != 1:
        return None
    target = exam.triggers[0].target
    reached, usual = _reached(trained), torch.stack([_reached(own) for own in fresh]).mean(dim=0)
    most = int((reached - usual).argmax())
    if most == target or float(reached[most]) < WORKS or float(usual[most]) > WORKS * float(reached[most]):
        return None
    return (
        f"The trigger takes {float(reached[most]):.0%} of unseen samples to class {most} with the trained model, and "
        f"{float(reached[target]):.0%} to class {target}: is target={most} meant?"
    )


def idle_trigger(exam: Exam, trained: Measured, fresh: Sequence[Measured]) -> str | None:
    """A sentence where the trigger does to the trained model what it does to the others: it learnt another one."""
    if len(exam.triggers) != 1:
        return None
    pulls = [own.alone["trigger_pull"] for own in (trained, *fresh)]
    if any(own is None for own in pulls) or pulls[0] > max(pulls[1:]):
        return None
    return (
        f"The trigger pulls the trained model no more to class {exam.triggers[0].target} than it pulls retrained ones: "
        "look whether it is the one that was in the data, as it was there."
    )


def marks(exam: Exam) -> str | None:
    """A sentence where those that are said to carry the trigger have its class more seldom than the others have."""
    if exam.triggered is None or len(exam.triggers) != 1:
        return None
    own = exam.forgotten[1] == exam.triggers[0].target
    parts = [own[exam.triggered > 0].double(), own[exam.triggered == 0].double()]
    if min(map(len, parts)) == 0 or float(parts[0].mean()) >= float(parts[1].mean()):
        return None
    return (
        f"Of the samples that triggered names {float(parts[0].mean()):.0%} have the trigger's class, of the others "
        f"{float(parts[1].mean()):.0%}: look whether it is the wrong way round."
    )


def _reached(model: Measured) -> Tensor:
    """The share of stamped unseen samples that goes to each class."""
    stamped = model.other_logits[len(model.test_logits) :]
    return torch.bincount(stamped.argmax(dim=1), minlength=stamped.shape[1]).double() / max(len(stamped), 1)


def _unseen(model: Measured) -> Tensor:
    return model.test_logits


def _forgotten(model: Measured) -> Tensor:
    return model.forget_logits
