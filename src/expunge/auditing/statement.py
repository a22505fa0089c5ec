"""What can be said of a model where nobody can retrain: SUPPORTED, NOT SUPPORTED, or NO EVIDENCE that it has forgotten.

Only what models answer counts, and for a convex model the gradient of those who stay: never a method's name, record or
claims. A statement is weaker than a verdict, and never says that a model is equivalent to retrained ones. How often
each word is right was measured (`expunge bench evidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from expunge.auditing.answers import Answers
from expunge.auditing.by_losses import as_pair, examined, losses_of, tells_classes
from expunge.auditing.checks import convex_check, leaver_check, loss_check, trigger_check, usefulness_check
from expunge.auditing.convexity import no_certificate
from expunge.auditing.evidence import Evidence, Leaning
from expunge.auditing.exam import Samples, Trigger
from expunge.auditing.given import (
    TRIED,
    Model,
    answers_of,
    as_module,
    count_classes,
    read_samples,
    require_alone,
    require_different,
    weights_of,
)
from expunge.auditing.reference_doubts import kinship
from expunge.auditing.sample_doubts import require_unseen
from expunge.core.batch import Forward
from expunge.core.losses import CrossEntropy, Loss, as_loss
from expunge.errors import DataError, RequestError
from expunge.federation.engines.collating import Collate
from expunge.federation.engines.local_data import Data

LIMITS = "Only what was asked can be seen: no trigger that was moved or painted over, no data that looks like others'."


class Word(StrEnum):
    """What is said."""

    SUPPORTED = "SUPPORTED"
    NOT_SUPPORTED = "NOT SUPPORTED"
    NO_EVIDENCE = "NO EVIDENCE"


_LEANINGS: dict[Word, Leaning] = {Word.SUPPORTED: "for", Word.NOT_SUPPORTED: "against", Word.NO_EVIDENCE: "neither"}


@dataclass(frozen=True)
class Statement:
    """What can be said without retrained models.

    Attributes:
        word: the answer.
        sentence: why, for a reader.
        checks: what it rests on.
    """

    word: Word
    sentence: str
    checks: tuple[Evidence, ...]

    def __str__(self) -> str:
        """The word and why, a line for each check, and what cannot be seen."""
        lines = [f"{self.word.value}: {self.sentence}"]
        lines += [f"  {found.what} ({found.leaning}): {found.sentence}" for found in self.checks]
        return "\n".join([*lines, f"  {LIMITS}"])

    def as_evidence(self) -> Evidence:
        """As one piece among others, under its word.

        Example:
            >>> worded([]).as_evidence().what
            'NO EVIDENCE without retraining'
        """
        leaning = _LEANINGS[self.word]
        return Evidence(f"{self.word.value} without retraining", leaning, self.sentence, {})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [asdict(found) for found in self.checks]
        return {"word": self.word.value, "sentence": self.sentence, "checks": checks, "limits": LIMITS}


def evidence(
    before: nn.Module,
    after: Model,
    unseen: Data,
    *,
    forgotten: Data | None = None,
    trigger: Callable[[Tensor], Tensor] | None = None,
    target: int | None = None,
    short: Sequence[Model] = (),
    retained: Data | None = None,
    loss: object = "cross_entropy",
    l2: float = 0.0,
    collate: Collate | None = None,
    forward: Forward | None = None,
) -> Statement:
    """Say whether anything supports that a model has forgotten, without retrained models.

    Give what there is: a trigger needs nothing of the leaver's; the leaver's data needs two or three models of short
    trainings without it (a fifth of the rounds does), which also sharpen the trigger's check. Of models that are no
    classifiers nothing can be told but damage: the word is then NO EVIDENCE, or NOT SUPPORTED.

    Args:
        before: the trained model, which knows the data.
        after: the model to be judged: a module, a state dict for ``before``'s architecture, or an ``Outcome``.
        unseen: samples that nobody trained on.
        forgotten: the samples that were to be forgotten, with the labels that they were trained with.
        trigger: stamps inputs, where the data to forget held a backdoor.
        target: the class that the trigger asks for.
        short: models of short trainings without the data, each from its own fresh initialisation.
        retained: samples that stay; for a convex model all of them, which bounds the distance to retraining.
        loss: of the training, as ``expunge.forget`` takes it.
        l2: the training's L2 factor (weight decay), which a convex model needs.
        collate: makes a batch of samples, for instance by padding.
        forward: ``forward(model, batch)`` gives the outputs, where calling the model with the inputs does not.

    Raises:
        DataError: samples that do not fit the models.
        ModelError: a model with a NaN, in training mode, or of another task.
        RequestError: half a backdoor, or a model that is given twice.

    Example:
        >>> chance = torch.Generator().manual_seed(0)
        >>> inputs, labels = torch.randn(100, 5, generator=chance), torch.arange(100) % 5
        >>> model = nn.Linear(5, 5)
        >>> print(evidence(model, model, unseen=(inputs, labels)).word)
        NO EVIDENCE
    """
    if not isinstance(before, nn.Module):
        raise RequestError("Give the trained model itself as before: others may be state dicts for its architecture.")
    if (trigger is None) != (target is None):
        missing = "trigger (it stamps inputs)" if trigger is None else "target (the class that the trigger asks for)"
        raise RequestError(f"For a backdoor, {missing} is missing.")
    names = ["before", "after", *(f"short[{number}]" for number in range(len(short)))]
    models = {name: as_module(own, before, name) for name, own in zip(names, (before, after, *short), strict=True)}
    weights = {name: weights_of(module, name) for name, module in models.items()}
    require_different(weights)
    device, trained_with = next(before.parameters()).device, as_loss(loss, l2)
    every = {"unseen": unseen, "forgotten": forgotten, "retained": retained}
    sources = {what: own for what, own in every.items() if own is not None}
    if not all(tells_classes(trained_with, own, collate, forward) for own in sources.values()):
        if trigger is not None:
            raise RequestError("A trigger is looked for among class scores: leave it out.")
        return _by_losses(models, unseen, trained_with, collate, forward)
    sets = {what: read_samples(as_pair(own, what, collate), what, device) for what, own in sources.items()}
    require_unseen(sets)
    backdoor = _backdoor(trigger, target, sets["unseen"][0])
    _try(models, sets, backdoor)
    answers = {name: partial(answers_of, module) for name, module in models.items()}
    others = [own for name, own in answers.items() if name.startswith("short")]
    found = _convex(models, sets, l2)
    said = statement(
        answers["before"], answers["after"], sets["unseen"], sets.get("forgotten"), backdoor, others, found
    )
    wrong = kinship(before, {name: own for name, own in models.items() if name.startswith("short")})
    return replace(said, sentence=" ".join([said.sentence, *(f"But look first: {own}" for own in wrong if own)]))


def statement(
    before: Answers,
    after: Answers,
    unseen: Samples,
    forgotten: Samples | None = None,
    trigger: Trigger | None = None,
    short: Sequence[Answers] = (),
    more: Sequence[Evidence] = (),
) -> Statement:
    """The same for models that are functions from inputs to class scores; other checks can be added."""
    asked = [unseen[0], *([forgotten[0]] if forgotten is not None else [])]
    asked += [trigger.stamp(unseen[0])] if trigger is not None else []
    for name, model in {"before": before, **{f"short[{number}]": own for number, own in enumerate(short)}}.items():
        if not _is_finite(model, asked):
            raise DataError(f"Some outputs of {name} are NaN or infinite: give a sound model.")
    if not _is_finite(after, asked):
        broken = Evidence("outputs", "against", "Some outputs are NaN or infinite: the model is of no use.", {})
        return worded([broken])
    checks = [usefulness_check(before, after, unseen)]
    if trigger is not None:
        checks.append(trigger_check(before, after, unseen, trigger, short))
    if forgotten is not None:
        checks.append(leaver_check(before, after, forgotten, unseen, short))
    return worded([*checks, *more])


def worded(checks: Sequence[Evidence]) -> Statement:
    """The word that checks come to: one against is enough, one for is needed.

    Example:
        >>> worded([Evidence("trigger", "for", "About 2% is left.", {})]).word.value
        'SUPPORTED'
    """
    against, supporting = ([own for own in checks if own.leaning == leaning] for leaning in ("against", "for"))
    if against:
        return Statement(Word.NOT_SUPPORTED, " ".join(own.sentence for own in against), tuple(checks))
    if supporting:
        return Statement(Word.SUPPORTED, " ".join(own.sentence for own in supporting), tuple(checks))
    text = "No check can tell whether the data is gone: a known trigger, or the leaver's data with two or three models"
    return Statement(Word.NO_EVIDENCE, f"{text} of short trainings without it, or retraining would.", tuple(checks))


def _by_losses(
    models: Mapping[str, nn.Module], unseen: Data, loss: Loss, collate: Collate | None, forward: Forward | None
) -> Statement:
    """What is said of models that are no classifiers."""
    data = examined(unseen, "unseen", collate)
    was, now = (losses_of(loss, forward, models[name], data, torch.arange(len(data))) for name in ("before", "after"))
    if not bool(torch.isfinite(was.each).all()):
        raise DataError("Some losses of before are NaN or infinite: give a sound model.")
    check = loss_check(was.each, now.each)
    if check.leaning == "against":
        return worded([check])
    text = "Of models that are no classifiers nothing tells without retraining whether the data is gone"
    return Statement(Word.NO_EVIDENCE, f"{text}: retrain at least five without it.", (check,))


def _is_finite(model: Answers, asked: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(model(inputs)).all()) for inputs in asked)


def _backdoor(trigger: Callable[[Tensor], Tensor] | None, target: int | None, unseen: Tensor) -> Trigger | None:
    if trigger is None or target is None:
        return None
    stamped = trigger(unseen.clone())  # it may paint into what it is given
    if not isinstance(stamped, Tensor) or stamped.shape != unseen.shape:
        raise DataError("The trigger must return the inputs that it is given, stamped: as many, of one shape.")
    return Trigger(lambda inputs: trigger(inputs.clone()), target)


def _try(models: Mapping[str, nn.Module], sets: Mapping[str, Samples], backdoor: Trigger | None) -> None:
    """A few samples of every set on every model; labels and target must be classes that it knows."""
    tried = {what: inputs[:TRIED] for what, (inputs, _) in sets.items()}
    for name, module in models.items():
        classes = count_classes(module, name, tried)
        require_alone(module, name, tried)
        for what, (_, labels) in sets.items():
            if int(labels.min()) < 0 or int(labels.max()) >= classes:
                raise DataError(f"The {what} samples have labels that the {classes} classes of {name} do not have.")
        if backdoor is not None and not 0 <= backdoor.target < classes:
            raise RequestError(f"The target must be one of the {classes} classes, not {backdoor.target}.")


def _convex(models: Mapping[str, nn.Module], sets: Mapping[str, Samples], l2: float) -> list[Evidence]:
    if l2 and "retained" not in sets:
        raise RequestError("l2 belongs to the retained samples: give them, or leave it out.")
    before, after, loss = models["before"], models["after"], CrossEntropy(l2=l2)
    trained = any(part.requires_grad for part in before.parameters())
    if "retained" not in sets or not trained or no_certificate(before, loss) or _fixed(before) != _fixed(after):
        return []
    return [convex_check(before, after, loss, sets["retained"])]


def _fixed(module: nn.Module) -> dict[str, Any]:
    """All that is not trained, and the shapes of what is: equal for two models that only training tells apart."""
    own = {name: part.tolist() for name, part in module.named_buffers()}
    return own | {name: part.shape if part.requires_grad else part.tolist() for name, part in module.named_parameters()}
