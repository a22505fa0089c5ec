"""What makes a step of retrace doubtful, in sentences for the person who asked."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.vectors import Snapshot
from expunge.errors import listed
from expunge.unlearning.answers import Answer
from expunge.unlearning.estimate import MANY
from expunge.unlearning.pulls import Pull
from expunge.unlearning.trust_region import Taken

FAR = 0.25
"""A step longer than this share of the model's own length is warned of: one of first order is not trusted there."""

WORN = 0.3
"""Of a network's pull less than this part is seldom left (a half to two thirds of digits' and Fashion-MNIST's). Where
clients of few labels trained for long apart it was told to be, and up to four fifths of a backdoor stayed."""

ALONE = (
    "Layers over tokens curve together, which their factors leave out, and coupled=False does not look at it: the step "
    "may go too far, or not far enough, so leave that option out, or audit the model."
)

ADAPTERS = (
    "Adapters that know their data by heart kept a part of it where that was measured: audit the model, or train its "
    "adapters again."
)

BEYOND = (
    "Those who stay answered a displaced model far otherwise than the training's response tells, so how much of the "
    "pull is left is a guess: audit the model, or retrain."
)


DIAGONAL = (
    "Of {names} a diagonal is all that is known of the curvature, and products were not used, so that less may be "
    "forgotten than by retraining: audit the model, or retrain."
)


RATES = (
    "Adam's rates differ from weight to weight, and one for all is known: in a model of one layer with squared errors "
    "half of the way to retraining was left where that was measured. Audit the model, or retrain, which is quick here."
)

FLAT = (
    "The loss has no curvature where the model is, as a hinge or absolute errors have none, so what those who stay "
    "made of the pull is not known. All of it was taken for left, which can end worse than doing nothing: audit the "
    "model, or retrain."
)


def doubts(
    model: Snapshot,
    curvature: KroneckerCurvature,
    answer: Answer | None,
    *,
    by_products: bool = False,
    adaptive: bool = False,
) -> tuple[str, ...]:
    """Of the model and of how those who stay answer.

    Args:
        model: before the step.
        curvature: of those who stay.
        answer: how many times that they have, as they were asked or as an exact product says; None if neither.
        by_products: whether the step is one by exact curvature half way.
        adaptive: whether it is a model of one layer that was trained by Adam.
    """
    told = {
        DIAGONAL.format(names=listed(curvature.unfactored)): curvature.without_factors > MANY and not by_products,
        ALONE: curvature.over_tokens and answer is None,
        ADAPTERS: model.layout is not None and model.layout.has_adapters,
        BEYOND: answer is not None and answer.beyond,
        RATES: adaptive and not by_products,
    }
    return tuple(sentence for sentence, holds in told.items() if holds)


def worn(pull: Pull, left: Tensor) -> tuple[str, ...]:
    """That hardly anything of the pull is told to be left, given that."""
    whole = float(torch.linalg.vector_norm(pull.total))
    part = float(torch.linalg.vector_norm(left)) / whole if whole > 0 else 1.0
    if part >= WORN:
        return ()
    return (
        f"Those who stay are told to have worn down {1 - part:.0%} of the pull, which a step of first order overstates "
        "where clients train for long apart from each other, as with few labels each: most of it may be left, so audit "
        "the model, or retrain.",
    )


def far(model: Snapshot, taken: Taken) -> tuple[str, ...]:
    """That the step led far from the model."""
    assert taken.length is not None
    share = taken.length * float(taken.record["norm"] or 0.0) / float(torch.linalg.vector_norm(model.parameters))
    if share <= FAR:
        return ()
    return (
        f"The step is {share:.0%} as long as the model itself, where a step of first order may leave some of the data: "
        "audit it, or retrain.",
    )
