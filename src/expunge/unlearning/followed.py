"""The pull, followed over the rounds: at every point of the way those who stay are asked for their gradient there.

The response (training/response.py) is a recursion. Let D be how far the trained model lies from the one without the
leaver; in a round those who stay wear it down, then the round's own pull is added. On a quadratic they wear it down by
its curvature. Where the loss is none, they do so by the difference of two gradients,

    F(D) = grad(theta) - grad(theta - D),        G D on a quadratic,

which has the curvature between the two models in it wherever D has come to, and layers together as they are. So the
recursion is run with F in the place of G. K-FAC takes the stiff part, exactly, and only what it misses is held over a
round (an exponential integrator, Hochbruck & Ostermann 2010):

    D <- c(K) D  +  (c(0) - c(K)) / K  (K D - F(D))  +  the round's pull

with c(e) what the round leaves of a displacement along curvature e. A gradient a round is all that it takes; the few
rounds of a short training are parted.

Those who stay answer less than their gradients at the end of the training tell: they train apart from each other, away
from the mean model, and came there by a way that was flatter. All curvature is taken `STIFFNESS` times as large. It was
chosen on client 0 of four small networks, which retrained models from the same start then matched in every measure.

Where it fails: stiff trainings. Where a round wears down more than K-FAC knows of, the recursion runs away. That is
seen at once, by where F and K D point, and by a D that is longer than all pulls, and nothing is followed then. Shorter
stretches do not mend that: networks on digits were not followed with eight times as many. Longer ones lose what they
hold: of the hospitals' networks, which trained for twenty rounds, those that were followed came out further from
retraining. So it is for small networks and short trainings of few steps a round, under SGD and FedAvg. Batch norm has
statistics that belong to no point of the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from expunge.core.kronecker import Filter, KroneckerCurvature
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError, SiteError
from expunge.federation.messages.tasks import PRODUCT_COST
from expunge.federation.training.response import Response
from expunge.federation.training.works import Round
from expunge.unlearning.estimate import STRETCHES
from expunge.unlearning.filters import Answered
from expunge.unlearning.half_way import samples
from expunge.unlearning.pulls import Pull
from expunge.unlearning.retained import Retained

STIFFNESS = 0.8
"""How many times as large as told curvature is taken."""

SOON = 0.5
"""A step is followed from this part of what makes it a long one on (`long_step_ratio`)."""

SHRUNK = 0.03
"""How far curvature is shrunk towards the factors, for directions that no sample of a draw has (half_way.py)."""

AGREES = 0.5
"""The cosine of what is told and what K-FAC tells, below which the recursion is running away. In trainings that were
followed to their end it was never below 0.68, in those that ran away 0.5 at first and then about 0."""

LONGER = 1.05
"""Nobody who stays makes D longer than all pulls together, but by rounding."""

SMALL = 1e-6
"""A curvature, times how far a stretch goes, along which a stretch leaves nearly all."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """One round of the training, or a part of it.

    Attributes:
        response: of the whole training.
        number: of the round.
        spread: how much of the pull came in it.
        part: of how many equal parts of the round this is.
        is_last: whether it is the last of them: the pull is added at its end.
    """

    response: Response
    number: int
    spread: float
    part: int = 1
    is_last: bool = True

    def left(self, curvature: Tensor) -> Tensor:
        """What it leaves of a displacement that it began with."""
        rows = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        whole = Answered(self._own, rows)(curvature, ())[0]
        return whole if self.part == 1 else whole.clamp(min=0.0) ** (1.0 / self.part)

    @property
    def pulled(self) -> float:
        """What the pull has become at its end, as the server adds it up."""
        rows = torch.tensor([[0.0, self.spread]], dtype=torch.float64)
        return float(Answered(self._own, rows)(torch.zeros(1, dtype=torch.float64), ())[0])

    def held(self, curvature: Tensor) -> Tensor:
        """What comes of a force of one that is held all the while; nothing where nobody who stays trained."""
        works = self.response.rounds[self.number].works
        if not any(work.share * work.learning_rate * work.steps > 0 for work in works):
            return torch.zeros_like(curvature)
        slope, flat = self._travel, self.left(curvature.new_zeros(1))
        tiny = SMALL / slope
        return torch.where(
            curvature > tiny, (flat - self.left(curvature)) / curvature.clamp(min=tiny), slope * flat.to(curvature)
        )

    @cached_property
    def _own(self) -> Response:
        """Of this round alone, after one in which nobody trained: it brings the displacement that was there."""
        return replace(self.response, rounds=(Round((), plain=True), self.response.rounds[self.number]))

    @cached_property
    def _travel(self) -> float:
        return self._own.travel() / self.part


def gradient_samples(most: int | None, trained: float) -> int | None:
    """How many samples each gradient looks at, for as much work as products half way would take.

    Example:
        >>> gradient_samples(1500, 3.6e6), gradient_samples(1500, 1e5), gradient_samples(None, 1e5)
        (1200, 600, None)
    """
    looked = samples(most, trained, 1)
    return None if looked is None or most is None else min(most, int(PRODUCT_COST * looked))


def followed(
    stay: Retained, model: Snapshot, pull: Pull, curvature: KroneckerCurvature, stretches: int = STRETCHES
) -> Tensor | None:
    """The step to the model without the leaver, or None where it cannot be followed: a message a stretch.

    Args:
        stay: those who stay, with the samples that they look at.
        model: theta.
        pull: of those who leave, under SGD and FedAvg.
        curvature: the factors at theta.
        stretches: so many at most.
    """
    together = pull.together
    assert together.response is not None
    assert together.spreads is not None
    told = curvature.stiffer(STIFFNESS)
    vector, way, bound = together.vectors[0], torch.zeros_like(model.parameters), 0.0
    here = None
    for stretch in _stretches(together.response, together.spreads[0].double(), stretches):
        if bound > 0:
            if here is None:
                here = stay.gradient(model, drawn=True)
            missed = _missed(stay, model, here, told, way)
            if missed is None:
                return None
            way = told.apply(_of(stretch.left), way) + told.apply(_of(stretch.held), missed)
        if stretch.is_last:
            way = way + stretch.pulled * vector
            bound += abs(stretch.pulled) * float(vector.norm())
        if not float(way.norm()) <= LONGER * bound:
            return None
    return way


def _missed(stay: Retained, model: Snapshot, here: Tensor, told: KroneckerCurvature, way: Tensor) -> Tensor | None:
    """What K-FAC does not know of how those who stay feel this displacement; None where the two do not agree."""
    try:
        there = stay.gradient(model.moved(model.parameters - way), drawn=True)
    except (NumericalError, SiteError):  # it has run away; who cannot answer at all is told by the next message
        return None
    known, felt = told.apply(lambda values, _: values, way), STIFFNESS * (here - there)
    if not float(known @ felt) >= AGREES * float(known.norm()) * float(felt.norm()):
        return None
    return (1 - SHRUNK) * (known - felt)


def _of(function: Callable[[Tensor], Tensor]) -> Filter:
    """A function of curvature alone, for all layers."""
    return lambda values, _: function(values)


def _stretches(response: Response, spread: Tensor, most: int) -> list[Stretch]:
    """A stretch for each round; where there are few, for as many equal parts of each as there may be.

    Example:
        >>> from expunge.federation.training.recipe import Recipe
        >>> from expunge.federation.training.works import Work
        >>> few = Response(Recipe(), (Round((Work(1.0, 0.1, 4),)),) * 3)
        >>> [(own.number, own.part, own.is_last) for own in _stretches(few, torch.ones(3) / 3, 6)][:2]
        [(0, 2, False), (0, 2, True)]
    """
    count = len(response.rounds)
    parts = max(1, most // count)
    return [
        Stretch(response, number, float(spread[number]), parts, part == parts - 1)
        for number in range(count)
        for part in range(parts)
    ]
