"""A model of one layer, as logistic regression or a head on a frozen trunk: the pull, filtered by exact curvature.

What a sample weighs in the curvature of such a model depends on where it lies: one that is told surely weighs nothing.
Factors take that weight and the inputs for independent of each other (``E[S (x) xx'] ~ E[S] (x) E[xx']``), which left a
third to four fifths of the way to retraining in federations of logistic regression. With one layer nothing else stands
between, so the products of those who stay are what counts, at the middle of the way (half_way.py), to which the step
itself leads here: first that of the factors, then, where it led much further, the one by products.

It serves all trainings whose response is known. Under a squared error the curvature is the same everywhere and factors
are right: two products tell, and the factors are taken.

Where it fails: Adam's rates differ from weight to weight, and one is taken for all; and where a training was so long
that the model became far surer on the way, the curvature of earlier rounds was another one.
"""

from __future__ import annotations

from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.vectors import Snapshot
from expunge.unlearning.half_way import ByProducts, Enough, by_products, require_believable, samples
from expunge.unlearning.pulls import Pull
from expunge.unlearning.retained import Retained

CHECKED = 2
"""Products that tell whether the loss is a squared error."""

PASSES = 2
"""How often the middle is looked for, at most."""

FURTHER = 0.1
"""It is looked for again where the step ended so much of the model's own length from where the one before it did."""

SHRUNK = 0.1
"""How far curvature is shrunk towards the factors, at most: with fewer samples than parameters."""

SETTLED = 0.02
"""Lanczos stops where one product more changes what is left of the pull by this part of it, or less."""

WORK = 20
"""All products of a pass together take no more than one in so many samples of the training (half_way.py)."""

SAME = 1e-4
"""Where a product at two models differs by no more than this part of it, the loss is a squared error."""


def by_exact_curvature(
    stay: Retained, model: Snapshot, pull: Pull, curvature: KroneckerCurvature, first: Tensor, trained: float
) -> Tensor | None:
    """The step by products of those who stay; None where the factors are right.

    Args: as those of ``half_way``, which says what is raised, too.
    """
    pull = pull.together  # stretch by stretch was no nearer, for so many times the products
    looking = stay.looking_at(samples(stay.samples, trained, 1, WORK))
    told = [looking.product(model.moved(model.parameters - part * first))(pull.vectors) for part in (0.0, 1.0)]
    if float((told[0] - told[1]).norm()) <= SAME * float(told[0].norm()):
        return None
    count = sum(looking.left.values()) if looking.samples is None else looking.samples
    shrunk = SHRUNK * min(1.0, len(first) / count)
    step = first
    for _ in range(PASSES):
        middle = model.moved(model.parameters - step / 2)
        found = by_products(looking, middle, pull, curvature, shrunk, _settles(pull))
        require_believable(found, pull, first)
        before, step = step, pull.left(found.apply)
        if float((step - before).norm()) <= FURTHER * float(model.parameters.norm()):
            break
    return step


def _settles(pull: Pull) -> Enough:
    """Whether one step of Lanczos more has hardly changed what is left of the pull."""
    seen: list[Tensor] = []

    def enough(found: ByProducts) -> bool:
        seen.append(pull.left(found.apply))
        return len(seen) > 1 and float((seen[-1] - seen[-2]).norm()) <= SETTLED * float(seen[-1].norm())

    return enough
