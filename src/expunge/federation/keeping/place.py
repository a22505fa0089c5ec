"""Where recorded rounds lead: from the starting weights to one place, and to no other model.

So a memory tells when it does not belong to a model: rounds missing or recorded twice, flipped signs, another server
rule, another model, or a memory from before an earlier forget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.vectors import length
from expunge.errors import RequestError
from expunge.federation.training.recipe import AdaptiveServer, FedAvgM, Recipe

ALIKE = 0.5
"""Two directions with a cosine above this tell the same story."""

HALF = 0.5
"""Where a model lies further off than this part of the recorded way, much of what was recorded is not in it."""

COARSE = 0.01
"""Where rounding may hide more than this part of the way that was recorded, what it would hide is looked for."""

SURE = 8.0
"""A rounding's cosine with anything is about one over the root of the number of weights; so many times that is sure."""

Mark = tuple[float, float]
"""Length and sum of a round's mean update, by which the same round is known again."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where the recorded rounds lead.

    Attributes:
        start: the weights that the record began with, or those after the last forget.
        now: the weights that the rounds since then lead to.
        momentum: the server's, where its rule has one.
        first: the number of the first round since then.
        travelled: the summed length of the steps since then.
        origin: the weights that the record began with, where these are not the start, and nobody has left since.

    Example:
        >>> place = Place.at(torch.zeros(2)).moved(Recipe(), torch.ones(2))
        >>> place.require(torch.ones(2), Recipe(), [], 1, dict)
        >>> place.require(-torch.ones(2), Recipe(), [], 1, dict)
        Traceback (most recent call last):
        expunge.errors.RequestError: The recorded rounds do not lead to this model: it went the other way, ...
    """

    start: Tensor
    now: Tensor
    momentum: Tensor | None = None
    first: int = 0
    travelled: float = 0.0
    origin: Tensor | None = None

    @classmethod
    def at(
        cls, parameters: Tensor, first: int = 0, momentum: Tensor | None = None, origin: Tensor | None = None
    ) -> Place:
        """Nothing was recorded since these weights."""
        own = parameters.detach().to(torch.promote_types(parameters.dtype, torch.float32), copy=True)
        return cls(own, own, momentum, first, origin=origin)

    @property
    def beginning(self) -> Tensor | None:
        """The weights that the first round began with, where they are known."""
        return self.origin if self.first else self.start

    def moved(self, recipe: Recipe, mean: Tensor, *, plain: bool = False) -> Place | None:
        """After a round with this mean update; None where the server's rule cannot be followed."""
        rule = recipe.server
        if isinstance(rule, AdaptiveServer):
            return None
        momentum = self.momentum if self.momentum is not None else torch.zeros_like(self.now)
        mean = mean.to(self.now)
        now, momentum = (self.now + mean, momentum) if plain else rule.apply(self.now, momentum, mean)
        step = float(length(now - self.now))
        own = momentum if isinstance(rule, FedAvgM) else None
        return replace(self, now=now, momentum=own, travelled=self.travelled + step)

    def require(
        self,
        model: Tensor,
        recipe: Recipe,
        marks: Sequence[Mark | None],
        updates: int,
        vectors: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Refuse a model that the rounds do not lead to, and say what is wrong as far as it can be told.

        Half-precision weights are rounded by so much in every round that a whole forget could hide in it. There the
        model is refused, too, where it lies in the direction of a client's pull, or half as far off as it went.

        Args:
            model: the weights to forget in.
            recipe: as it was stated.
            marks: of the rounds since the start.
            updates: how many were averaged in them.
            vectors: gives those of all clients, and is called only where the model is refused or numbers are coarse.
        """
        eps, apart = torch.finfo(model.dtype).eps, model.to(self.now) - self.now
        off, way = float(length(apart)), float(length(self.now - self.start))
        largest = float(length(self.start)) + float(length(self.now)) + self.travelled
        bound = 5 * (1 + len(marks)) * eps * (float(length(self.now)) + self.travelled)
        usual = rounding(model.dtype, updates, largest / 2)
        if off <= bound:
            if not off or bound <= COARSE * max(way, COARSE * largest):
                return
            if off <= max(usual, HALF * way) and not self._is_along_a_pull(apart, vectors()):
                return
        reason = self._reason(model.to(self.now), min(bound, max(usual, COARSE * way)), recipe, marks, vectors())
        far = f" It lies {off / way:.0%} of their way from where they end." if way else ""
        raise RequestError(f"The recorded rounds do not lead to this model: {reason}{far}")

    def lost(self, model: Tensor) -> float:
        """How far off a model is, beside the way that was recorded; 0 where nobody moved."""
        way = float(length(self.now - self.start))
        return float(length(model.to(self.now) - self.now)) / way if way else 0.0

    def _is_along_a_pull(self, apart: Tensor, vectors: Mapping[str, Tensor]) -> bool:
        """Whether it lies where a model would without some client, far more than rounding could."""
        _, likeness = _likest(apart, vectors)
        along = abs(_cosine(apart, self.now - self.start))
        return -likeness > max(ALIKE, along, SURE / math.sqrt(apart.numel()))

    def _reason(
        self, model: Tensor, bound: float, recipe: Recipe, marks: Sequence[Mark | None], vectors: Mapping[str, Tensor]
    ) -> str:
        moved, recorded, apart = model - self.start, self.now - self.start, model - self.now
        along = _cosine(moved, recorded)
        if along < -ALIKE:
            return "it went the other way, so the updates' signs are flipped; record what was sent minus received."
        known = [mark for mark in marks if mark is not None and mark[0] > 0]
        if len(known) > len(set(known)):
            number = next(at for at, mark in enumerate(marks) if mark is not None and mark in marks[:at]) + 1
            return f"round {number} was recorded twice; record every round once."
        factor = float(length(moved) / length(recorded)) if along > 0 else 0.0
        if factor and float(length(moved - factor * recorded)) <= max(factor, 1.0) * bound:
            return (
                f"the server took {factor:.3g} times the step of {recipe.server.name} as it is stated; "
                "state the server's learning rate, as in FedAvg(learning_rate=...)."
            )
        name, likeness = _likest(apart, vectors)
        if abs(likeness) > max(ALIKE, abs(_cosine(apart, recorded))) and float(length(apart)) < float(length(moved)):
            gone = (
                f"Either {name!r} had been taken out of it already: use the memory that the earlier forget gave back "
                "(outcome.memory). Or the"
            )
            return (
                f"there is {'more' if likeness > 0 else 'less'} of {name!r} in it than was recorded. "
                f"{'The' if likeness > 0 else gone} weights are not those that the server averages by, its rule is "
                f"not {recipe.server.name} as stated (Memory(model, Recipe(server=FedAvgM(...)))), or it takes no "
                "weighted mean (but a median, say, or a trimmed mean): record its weights, state its rule, and train "
                "by a mean, whose parts can be told apart."
            )
        if along > ALIKE:
            return (
                f"rounds are missing, or the server's rule is not {recipe.server.name} as stated; "
                "record every round, and state the rule: Memory(model, Recipe(server=FedAvgM(...))). Else it was "
                "trained on after the last recorded round, or the server takes no mean by the recorded weights (but a "
                "median, say, or it clips, or adds noise)."
            )
        return "it is another one; take the model that was trained while this memory was recorded."


def rounding(dtype: torch.dtype, updates: int, largest: float) -> float:
    """How far off a model is, about, that was rounded in rounds with so many updates together, and as long as this."""
    return torch.finfo(dtype).eps * math.sqrt(1 + updates) * largest


def leads_there(start: Tensor, end: Tensor, marks: Sequence[Mark], updates: int) -> bool:
    """Whether rounds with these mean updates may lead from one model to another: by their lengths, and by their sum.

    Args:
        start: where they begin.
        end: where they end, in the training's own precision.
        marks: length and sum of what each of them added to the model.
        updates: how many were averaged in them.

    Example:
        >>> leads_there(torch.zeros(2), torch.tensor([1.0, 1.0]), [(1.0, 1.0), (1.0, 1.0)], 4)
        True
        >>> leads_there(torch.zeros(2), torch.tensor([1.0, 1.0]), [(1.0, 1.0)], 2)
        False
    """
    totals = [float(each.sum(dtype=torch.float64)) for each in (start, end)]
    travelled = sum(far for far, _ in marks)
    largest = (float(length(start)) + float(length(end)) + travelled) / 2
    usual = 5 * rounding(end.dtype, updates, largest)
    steady = torch.finfo(end.dtype).eps * (1 + len(marks)) * max(map(abs, totals))  # shares may add up to a little less
    if abs(totals[1] - totals[0] - sum(total for _, total in marks)) > usual + steady:
        return False
    return float(length(end - start.to(end))) <= travelled + usual


def _likest(apart: Tensor, vectors: Mapping[str, Tensor]) -> tuple[str, float]:
    """The client along whose pull something lies most, and the cosine."""
    likeness = ((name, _cosine(apart, vector.to(apart))) for name, vector in vectors.items())
    return max(likeness, key=lambda pair: abs(pair[1]), default=("", 0.0))


def _cosine(one: Tensor, other: Tensor) -> float:
    both = float(length(one)) * float(length(other))
    return float(torch.dot(one.double(), other.double())) / both if both > 0 else 0.0
