"""What looks as if an audit had been given the wrong thing: told by name, and mostly nothing is judged then.

Retrained models and samples are taken as given, and a verdict is as good as they are. Mistakes are common all the same:
retrained models that were made from the trained one, or from each other, or that had the data; sets that are exchanged;
labels in another order. Each leaves a trace that honest material does not have. A doubt that forbids takes every
verdict away, an accusation too; one that does not may be true of honest material as well, and stands in the reason.

Where it fails: retrained models that had a few of the samples, or another stage of training where no retained samples
are given; and all that somebody does on purpose who knows this page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from expunge.auditing.exam import Exam
from expunge.auditing.given import answers_of
from expunge.auditing.loss_exam import MeasuredLosses
from expunge.auditing.measured import Measured
from expunge.auditing.measures import LEAST
from expunge.auditing.reference_doubts import kinship, knowing, repeated, stage
from expunge.auditing.sample_doubts import (
    exchanged,
    exchanged_losses,
    forgotten_labels,
    idle_trigger,
    marks,
    missing_classes,
    shared,
    trigger,
    unseen_labels,
)
from expunge.auditing.verdict import Judgement, Verdict


@dataclass(frozen=True)
class Doubt:
    """One thing that looks wrong.

    Attributes:
        sentence: what it is, by name, and what to look at.
        forbids: whether nothing can be judged.
    """

    sentence: str
    forbids: bool = True


NONCE_IS_KNOWN = Doubt(
    "Another model was asked with this nonce before: whoever made this one may have known it from that audit's report. "
    "Leave nonce out, or draw a new one.",
    forbids=False,
)


def doubts(exam: Exam, modules: Mapping[str, nn.Module], trained: Measured, others: Sequence[Measured]) -> list[Doubt]:
    """All that looks wrong with what was given; nothing where too few retrained models are there for a verdict.

    Args:
        exam: with the samples that are asked about.
        modules: by name the trained model, the judged one, and the others in their order.
        trained: the trained model.
        others: the retrained ones, those of its own start last.
    """
    fresh = [other for other in others if not other.same_start]
    if len(fresh) < LEAST:
        return []
    before, _, *rest = modules.values()
    names = list(modules)[2:]
    named = dict(zip(names, others, strict=True))
    retrained = dict(zip(names, rest, strict=True))
    first = {name: module for name, module in retrained.items() if not named[name].same_start}
    one_source, akin = kinship(before, first)
    found = [
        _doubt(one_source),
        _doubt(akin, forbids=False),
        _doubt(repeated(named, trained)),
        _doubt(unseen_labels(exam, [trained, *fresh])),
        _doubt(exchanged(exam, trained, fresh)),
        _doubt(trigger(exam, trained, fresh)),
        _doubt(stage(exam, before, first, trained, fresh), forbids=False),
        _doubt(forgotten_labels(exam, trained, fresh), forbids=False),
        _doubt(idle_trigger(exam, trained, fresh), forbids=False),
        _doubt(marks(exam), forbids=False),
        _doubt(missing_classes(exam), forbids=False),
        _doubt(shared(exam), forbids=False),
    ]
    if len(exam.triggers) == 1:
        answers = {name: partial(answers_of, module) for name, module in retrained.items()}
        found.append(_doubt(knowing(exam, partial(answers_of, before), answers)))
    return [own for own in found if own is not None]


def loss_doubts(
    modules: Mapping[str, nn.Module], trained: MeasuredLosses, others: Sequence[MeasuredLosses]
) -> list[Doubt]:
    """The same of models that are no classifiers, as far as weights and losses tell."""
    fresh = [other for other in others if not other.same_start]
    if len(fresh) < LEAST:
        return []
    named = dict(zip(list(modules)[2:], others, strict=True))
    first = {name: module for name, module in modules.items() if name in named and not named[name].same_start}
    one_source, akin = kinship(modules["before"], first)
    found = [_doubt(one_source), _doubt(akin, forbids=False), _doubt(exchanged_losses(trained, fresh))]
    return [own for own in found if own is not None]


def doubted(judgement: Judgement, found: Iterable[Doubt]) -> Judgement:
    """The judgement with what looks wrong in its reason; UNDECIDED where a doubt forbids any other.

    Example:
        >>> given = Judgement(Verdict.EQUIVALENT, "Within its margins.")
        >>> told = doubted(given, [Doubt("retrained[1] repeats retrained[0].")])
        >>> print(told.verdict, told.reason)
        UNDECIDED Nothing was judged: retrained[1] repeats retrained[0].
        >>> doubted(given, [Doubt("The marks look inverted.", forbids=False)]).reason
        'Within its margins. But look first: The marks look inverted.'
    """
    forbidding, others = ([own.sentence for own in found if own.forbids is one] for one in (True, False))
    if forbidding:
        text = f"Nothing was judged: {' '.join([*forbidding, *others])}"
        return replace(judgement, verdict=Verdict.UNDECIDED, reason=text, would_decide="")
    if others:
        return replace(judgement, reason=f"{judgement.reason} But look first: {' '.join(others)}")
    return judgement


def _doubt(sentence: str | None, *, forbids: bool = True) -> Doubt | None:
    return None if sentence is None else Doubt(sentence, forbids)
