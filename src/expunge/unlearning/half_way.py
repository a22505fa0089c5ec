"""The pull, filtered by exact curvature half way: for long steps, where factors at their start do not tell enough.

In every round those who stay answer how far two models lie apart, the trained one and the one without the leaver, and
their answer is the mean of their curvature between the two. Neither end has it: a network with a backdoor feels
directions that one without it does not. So the middle stands for it (the midpoint rule),

    theta' = theta - f(G(theta_m)) A,        theta_m = theta - 3/4 f(K) A,

to which three quarters of the factors' own step lead: that one is shorter than the way (`PLACE`).

G comes through products here, since factors take layers one by one: those who stay restore what the network answers,
with all layers together, and not what each of them was. Lanczos from the pull, a message each.

A draw of samples feels no direction that none of them has, and f would take such a direction for free. So a little of
the factors' curvature is mixed in, ``(1 - a) G + a K``: shrinkage towards a structured target (Ledoit & Wolf 2004).

Where it fails: the middle of the way stands for all of it, and the end of the training for all rounds. Under Adam,
whose rates differ from weight to weight and are known by layer alone, it was no nearer than factors and those who stay
asked (answers.py), and under a server's momentum, where a draw is shared by several stretches, less near. So it is for
clients with one rate, and FedAvg; and under every training where most weights have no factors, whose diagonals know
less than any product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from expunge.core.kronecker import Filter, KroneckerCurvature
from expunge.core.krylov import Product, Tridiagonal, lanczos_of_rows
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.messages.tasks import PRODUCT_COST
from expunge.unlearning.pulls import Pull
from expunge.unlearning.retained import Retained

PLACE = 0.75
"""The part of the factors' step that leads half way: models retrained from the same start lie 1.3 to 1.9 times as far
away as that step is long, and of 0, 1/4, 1/2, 3/4 and 1 this part left least to be told (docs/method.md)."""

FARTHEST = 0.25
"""A step by factors that is longer than this share of the model's own length is left as it is: so far away the middle
does not stand for the way, and small networks that a client had taught wrong labels came out nearer by factors."""

PRODUCTS = 15
"""Lanczos steps."""

SHRUNK = 0.03
"""How far curvature is shrunk towards the factors."""

NEGATIVE = 0.01
"""The part of the largest eigenvalue by which rounding may make one negative."""

SHORTEST, SHORTER = 0.5, 0.8
"""A step of less than this part of the factors' own is not believed; of a network, of less than the second. Nearly all
were longer than the factors' own, but where clients of few labels trained for long apart: there they were shorter, and
left most of a backdoor."""

WORK, FEWEST, MOST = 200, 300, 1000
"""All products together take no more than one in so many samples of the training; but each looks at so many samples at
least, and at so many at most."""


@dataclass(frozen=True, eq=False)
class ByProducts:
    """What k products from each row of the pull know of the curvature.

    Attributes:
        seen: of each row; None of one without length, as of a stretch in which the leaver was away.
    """

    seen: Sequence[Tridiagonal | None]

    @classmethod
    def of(cls, product: Product, vectors: Tensor, iterations: int, enough: Enough | None = None) -> ByProducts:
        """Lanczos from each row side by side: as many messages as one takes, in single precision at least.

        ``enough`` is shown what is known after each of them, and says whether it will do.
        """
        exact = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        used = exact.norm(dim=1) > 0

        def wide(rows: Tensor) -> Tensor:
            return product(rows.to(vectors.dtype)).to(exact.dtype)

        def known(seen: Sequence[Tridiagonal]) -> ByProducts:
            each = iter(seen)
            return cls([next(each) if own else None for own in used.tolist()])

        will_do = None if enough is None else lambda seen: enough(known(seen))
        return known(lanczos_of_rows(wide, exact[used], iterations, will_do))

    def apply(self, function: Filter, vectors: Tensor) -> Tensor:
        """``f(G) v`` for each row of the pull, which these must be, with the function's own row for it."""
        found = torch.zeros_like(vectors)
        for row, own in enumerate(self.seen):
            if own is not None:
                found[row] = own.apply(partial(_of_row, function, row)).to(found.dtype)
        return found

    def require_curvature(self) -> None:
        """Refuse what no Gauss-Newton matrix has: eigenvalues below zero, beyond rounding."""
        for own in self.seen:
            values = torch.linalg.eigvalsh(own.matrix) if own is not None else torch.zeros(1)
            if float(values[0]) < -NEGATIVE * float(values[-1].abs()):
                raise NumericalError("Products tell of negative curvature: somebody replied something else than asked.")


Enough = Callable[[ByProducts], bool]


def half_way(
    stay: Retained, model: Snapshot, pull: Pull, curvature: KroneckerCurvature, first: Tensor, trained: float
) -> ByProducts:
    """Ask those who stay for the products: as many messages as there are Lanczos steps.

    Args:
        stay: those who stay.
        model: theta.
        pull: of those who leave.
        curvature: the factors at theta.
        first: the step by these factors.
        trained: how many samples the training went through.

    Raises:
        NumericalError: what was replied cannot be right, or tells that the pull is felt more than the factors say: the
            step would be clearly shorter than theirs, which a single client can claim.
    """
    looking = stay.looking_at(samples(stay.samples, trained, len(pull.vectors)))
    found = by_products(looking, model.moved(model.parameters - PLACE * first), pull, curvature, SHRUNK)
    require_believable(found, pull, first, SHORTER)
    return found


def by_products(
    stay: Retained,
    middle: Snapshot,
    pull: Pull,
    curvature: KroneckerCurvature,
    shrunk: float,
    enough: Enough | None = None,
) -> ByProducts:
    """Lanczos from the pull by the curvature of those who stay at this model, shrunk towards the factors."""
    product = stay.product(middle)
    factors = curvature.applying(lambda values, _: values, pull.vectors)

    def mixed(rows: Tensor) -> Tensor:
        return (1 - shrunk) * product(rows) + shrunk * factors(rows)

    return ByProducts.of(mixed, pull.vectors, PRODUCTS, enough)


def require_believable(found: ByProducts, pull: Pull, first: Tensor, least: float = SHORTEST) -> None:
    """Refuse products that cannot be right, given the step by factors."""
    found.require_curvature()
    if float(pull.left(found.apply).norm()) < least * float(first.norm()):
        raise NumericalError("Products tell that little of the pull is left, less than the factors say.")


def samples(most: int | None, trained: float, rows: int, work: float = WORK) -> int | None:
    """How many samples a product looks at, given how many may be looked at and the training went through.

    Example:
        >>> samples(2000, 3.6e6, 1), samples(2000, 1e5, 1), samples(2000, 4e7, 4), samples(100, 2e6, 1)
        (600, 300, 1000, 100)
    """
    if most is None:
        return None
    return min(most, max(FEWEST, int(min(MOST, trained / (work * PRODUCT_COST * PRODUCTS * rows)))))


def _of_row(function: Filter, row: int, values: Tensor) -> Tensor:
    """The function that belongs to this row, of eigenvalues that rounding may have made negative."""
    return function(values.clamp(min=0.0), ())[row]
