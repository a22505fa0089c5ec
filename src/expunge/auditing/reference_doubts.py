"""Whether retrained models are what they are said to be: trained apart, without the data, and as long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median, quantiles

import torch
from torch import Tensor, nn

from expunge.auditing.answers import Answers, variation
from expunge.auditing.checks import trigger_check
from expunge.auditing.exam import Exam
from expunge.auditing.functional import mean_loss
from expunge.auditing.measured import Measured
from expunge.auditing.measures import LEAST
from expunge.auditing.references import MOST_LEFT_OUT

LONGER = 1.05
"""Weights grow with training: those of honest models were 0.97 to 1.01 times as long as the trained one's."""

AKIN = 0.5
"""The cosine of two models' matrices beyond which they have one origin: of different starts it is hardly above 0."""

COPY = 0.05
"""A copy, rounded or not, is nearer than this part of what is usual among fresh ones; of one start they may come out as
near as a fifth of it."""

LEAST_APART = 1e-4
"""Retrained models whose answers are all nearer than this are one answer, as those of a convex model may be."""

TIMES, NATS = 2.0, 0.05
"""A retained loss that is so many times as large, and so much larger, belongs to another stage of training."""


def kinship(before: nn.Module, retrained: Mapping[str, nn.Module]) -> tuple[str | None, str | None]:
    """Sentences: that some fresh retrained models were made from others; that some have the trained model's origin.

    Only directions of matrices count: norms and biases begin alike everywhere. A model of one matrix ends where its
    data lead it, whatever it began with, and tells nothing.
    """
    trained = _matrices(before, before)
    vectors = {name: own for name, module in retrained.items() if (own := _matrices(module, before)) is not None}
    if trained is None:
        return None, None
    akin = {name: cosine for name, own in vectors.items() if (cosine := _cosine(own, trained)) > AKIN}
    others = [name for name in vectors if name not in akin]
    made = [pair for pair in combinations(others, 2) if _cosine(*(vectors[name] for name in pair)) > AKIN]
    return _made_from(made), _from_trained(akin)


def _made_from(pairs: Sequence[tuple[str, str]]) -> str | None:
    if not pairs:
        return None
    more = f", and {len(pairs) - 1} more pairs are alike" if len(pairs) > 1 else ""
    return (
        f"The weights of {pairs[0][0]} and {pairs[0][1]} have one origin, which the trained model's do not have{more}: "
        "models that were made from one another, or from one start, do not show how much retraining varies. Train each "
        "from a fresh initialisation with a seed of its own."
    )


def _from_trained(akin: Mapping[str, float]) -> str | None:
    if not akin:
        return None
    return (
        f"The weights of {_listed(list(akin))} have the same origin as the trained model's (a cosine of "
        f"{median(akin.values()):.2f}; fresh starts have about 0). If they were trained on from it, they know the data "
        "and nothing that is said here holds; if they began where it began, give them as same_start; where every "
        "training begins with the same pretrained weights, it must be so."
    )


def repeated(models: Mapping[str, Measured], trained: Measured) -> str | None:
    """A sentence where a model repeats another one's answers to unseen samples: no draw of its own, it hides noise."""
    fresh = _upper(_apart({name: model for name, model in models.items() if not model.same_start}))
    for same_start in (False, True):
        chosen = {name: model for name, model in models.items() if model.same_start is same_start}
        own = _apart(chosen)
        # Fresh ones of another stage may be far apart; those of the trained model's start are as far from it, at most.
        beside = [value for pair, value in _apart({**chosen, "": trained}).items() if "" in pair]
        usual = max(_upper(own), min(fresh, median(beside or [0.0])) if same_start else 0.0)
        found = [pair for pair, value in own.items() if value < COPY * usual]
        if usual < LEAST_APART or not found:
            continue
        one, other = found[0]
        more = f", and {len(found) - 1} more pairs are as near" if len(found) > 1 else ""
        return (
            f"{other} repeats the answers of {one}{more}: a copy is no retraining. Train each with a seed of its own."
        )
    return None


def _apart(models: Mapping[str, Measured]) -> dict[tuple[str, str], float]:
    """How far the answers of each two are apart, on unseen samples: those who had the data agree on it too well."""
    chances = {name: own.test_logits.double().softmax(dim=1) for name, own in models.items()}
    return {(one, other): variation(chances[one], chances[other]) for one, other in combinations(chances, 2)}


def _upper(apart: Mapping[tuple[str, str], float]) -> float:
    """What is usual: of a few starts with many copies of each, more than half of the pairs may be copies."""
    return quantiles(apart.values(), n=4)[2] if len(apart) > 1 else 0.0


def knowing(exam: Exam, before: Answers, retrained: Mapping[str, Answers]) -> str | None:
    """A sentence where many retrained models answer to the trigger as to nothing else: they had the data."""
    found = [
        name
        for name, answers in retrained.items()
        if trigger_check(before, answers, exam.unseen, exam.triggers[0]).leaning == "against"
    ]
    if len(found) <= MOST_LEFT_OUT * len(retrained):
        return None
    return (
        f"The trigger works in {_listed(found)} as nothing works that nobody taught: these models had the data that was"
        " to be forgotten, or were made from one that had it. Retrain without it."
    )


def stage(
    exam: Exam, before: nn.Module, retrained: Mapping[str, nn.Module], trained: Measured, fresh: Sequence[Measured]
) -> str | None:
    """A sentence where the retrained models look trained much less than the trained one, or longer."""
    usual, was = _fit(exam, trained, fresh)
    if usual > TIMES * was and usual - was > NATS:
        return (
            f"The retrained models fit {'unseen' if exam.retained is None else 'the retained'} samples worse than the "
            f"trained one (a loss of {usual:.3f}, {was:.3f} there): were they trained as long, and on all who stay?"
        )
    whole = _matrices(before, before)
    others = [own for module in retrained.values() if (own := _matrices(module, before)) is not None]
    if whole is None or len(others) < LEAST:
        return None
    longer = median(float(own.norm()) for own in others) / max(float(whole.norm()), 1e-12)
    if longer < LONGER or usual > was:
        return None
    return (
        f"The retrained models' weights have grown larger than the trained one's ({longer:.2f} times), and they fit "
        "closer: were they trained longer?"
    )


def _fit(exam: Exam, trained: Measured, fresh: Sequence[Measured]) -> tuple[float, float]:
    """The usual loss of the retrained models, and the trained one's, on what all were trained on, where it is known."""

    def of(own: Measured) -> float:
        if exam.retained is None or own.retained_logits is None:
            return mean_loss(own.test_logits, exam.unseen[1])
        return mean_loss(own.retained_logits, exam.retained[1])

    return median(map(of, fresh)), of(trained)


def _matrices(module: nn.Module, before: nn.Module) -> Tensor | None:
    """What is trained of a model's matrices, as one vector; None of another architecture, or where there is one."""
    trained = {name: own for name, own in before.named_parameters() if own.requires_grad} or dict(
        before.named_parameters()
    )
    wanted = [name for name, own in trained.items() if own.dim() > 1]
    own = dict(module.named_parameters())
    if len(wanted) < 2 or any(name not in own or own[name].shape != trained[name].shape for name in wanted):
        return None
    return torch.cat([own[name].detach().reshape(-1).double().cpu() for name in wanted])


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= LEAST else f"{names[0]} and {len(names) - 1} more"
