"""On the way back: what a model shows where its weights are moved a part of the way to the trained model's.

Weights of the trained model that are mixed into an honest one hide in its answers: these are not linear in weights, and
a fifth of the weights shows a twentieth of what there was to forget. But of two models the one that has a part of the
way behind it already gets there sooner. So each is moved towards the trained model and asked again:

    theta + s (theta_trained - theta)       the share of the trained model's answers at s = 1/4
                                            the pull of the trigger at s = 3/4, nearly linear there

What an honest model shows there is known from retrained models that share the trained one's start: no other ones lie
on a way to it along which models answer well at all, and they show less. So values above those of these models count,
and no others. Both places were chosen on client 0: digits, ten seeds, and Fashion-MNIST, one.

Where it fails: whoever puts the units of a layer into another order, or scales them and their outgoing weights against
each other, changes no answer and leads the way elsewhere. And a single layer of the trained model shows too little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from expunge.auditing.answers import Answers

NEAR, FAR = 0.25, 0.75
"""How far back the share of answers and the pull of triggers are asked for."""

OnTheWay = Callable[[float], Answers]
"""The answers of a model that was moved so much of the way to the trained one."""


@dataclass(frozen=True, eq=False)
class Back:
    """What a model shows on its way back.

    Attributes:
        directions: where its answers point at ``NEAR``, as those of the model itself.
        pull: of the triggers at ``FAR``; None without one, or where an output is not finite.
    """

    directions: Tensor
    pull: float | None
