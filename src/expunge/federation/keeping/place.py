"""Where recorded rounds lead: from the starting weights to one place, and to no other model.

So a memory tells when it does not belong to a model: rounds missing or recorded twice, flipped signs, another server
rule, another model, or a memory from before an earlier forget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.vectors import length
from expunge.errors import RequestError
from expunge.federation.training.recipe import AdaptiveServer, FedAvgM, Recipe

ALIKE = 0.5
"""Two directions with a cosine above this tell the same story."""

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

    Example:
        >>> place = Place.at(torch.zeros(2)).moved(Recipe(), torch.ones(2))
        >>> place.require(torch.ones(2), Recipe(), [], dict)
        >>> place.require(-torch.ones(2), Recipe(), [], dict)
        Traceback (most recent call last):
        expunge.errors.RequestError: The recorded rounds do not lead to this model: it went the other way, ...
    """

    start: Tensor
    now: Tensor
    momentum: Tensor | None = None
    first: int = 0
    travelled: float = 0.0

    @classmethod
    def at(cls, parameters: Tensor, first: int = 0, momentum: Tensor | None = None) -> Place:
        """Nothing was recorded since these weights."""
        own = parameters.detach().to(torch.promote_types(parameters.dtype, torch.float32), copy=True)
        return cls(own, own, momentum, first)

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

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Place:
        """The same with a function of each of its vectors."""
        momentum = function(self.momentum) if self.momentum is not None else None
        return replace(self, start=function(self.start), now=function(self.now), momentum=momentum)

    def require(
        self, model: Tensor, recipe: Recipe, marks: Sequence[Mark | None], vectors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Refuse a model that the rounds do not lead to, and say what is wrong as far as it can be told.

        Args:
            model: the weights to forget in.
            recipe: as it was stated.
            marks: of the rounds since the start.
            vectors: gives those of all clients, and is called only where the model is refused.
        """
        eps = torch.finfo(model.dtype).eps
        model = model.to(self.now)
        apart = model - self.now
        bound = 5 * (1 + len(marks)) * eps * (float(length(self.now)) + self.travelled)
        if not float(length(apart)) <= bound:
            raise RequestError(
                f"The recorded rounds do not lead to this model: {self._reason(model, bound, recipe, marks, vectors())}"
            )

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
        forgotten, likeness = max(
            ((name, _cosine(apart, -vector)) for name, vector in vectors.items()),
            key=lambda pair: pair[1],
            default=("", 0.0),
        )
        if likeness > max(ALIKE / 2, _cosine(apart, recorded)) and float(length(apart)) < float(length(moved)):
            return (
                f"it looks as if {forgotten!r} had been taken out of it already; "
                "use the memory that the earlier forget gave back (outcome.memory)."
            )
        factor = float(length(moved) / length(recorded)) if along > 0 else 0.0
        if factor and float(length(moved - factor * recorded)) <= max(factor, 1.0) * bound:
            return (
                f"the server took {factor:.3g} times the step of {recipe.server.name} as it is stated; "
                "state the server's learning rate, as in FedAvg(learning_rate=...)."
            )
        if along > ALIKE:
            return (
                f"rounds are missing, or the server's rule is not {recipe.server.name} as stated; "
                "record every round, and state the rule: Memory(model, Recipe(server=FedAvgM(...)))."
            )
        return "it is another one; take the model that was trained while this memory was recorded."


def _cosine(one: Tensor, other: Tensor) -> float:
    both = float(length(one)) * float(length(other))
    return float(torch.dot(one.double(), other.double())) / both if both > 0 else 0.0
