"""The correction: one step of those who stay, from where the filtered step ended.

The filtered step is first order. Where the leaver had moved the model far, its end is not quite where those who stay
would have led the model: their gradient there, times the curvature that the filter was made of, says what is missing,

    theta'' = theta' - s (G + m)^-1 grad L_r(theta'),        m = 10 / (eta x local steps), a tenth of a round,

stripped of its component back towards the model that remembers. Both are sums over samples: two messages, no update of
any single client.

How far: FedAvg does not rest where the retained loss is lowest (clients drift apart in their local steps), so nor
should this. It takes the shortest s after which going on would win those who stay no more than half of tau (and no more
than tau is left of what the filtered step has cost them): nothing at all where that step was right already.

Where it fails: the loss cannot see whether what comes back is the leaver's or theirs, but along one direction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Engine
from expunge.federation.training.plan import Schedule
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.influence import retained_gradient, spread
from expunge.unlearning.recovery import strip_return
from expunge.unlearning.request import Parties
from expunge.unlearning.scaling import RetainedLoss, retained_loss

LENGTHS = (0.0, *(2.0**-j for j in range(6, -1, -1)))
"""How far the correction may be taken: layers that move together feel more curvature than each on its own."""

PART_OF_A_ROUND = 0.1
"""The damping lets a direction move as far as plain gradient descent would in this part of a round."""


def corrected(
    engine: Engine,
    remembers: Snapshot,
    model: Snapshot,
    curvature: KroneckerCurvature,
    schedule: Schedule,
    parties: Parties,
    options: HfKcuOptions,
    risen: float = 0.0,
) -> tuple[Snapshot, dict[str, Any]]:
    """The model after the correction, and how far it went.

    Args:
        engine: reaches the clients.
        remembers: the model before the filtered step.
        model: the model after it.
        curvature: of those who stay, layer by layer.
        schedule: of the training, for the damping.
        parties: who stays.
        options: samples, seed and tau; the length is looked for on half as many other samples.
        risen: what the filtered step has cost those who stay; where no more than tau may be left of it, this goes on.
    """
    gradient = retained_gradient(engine, model, parties, spread(options, parties.retained, parties.counts)).right_side
    way = correction(curvature, gradient, remembers.parameters - model.parameters, schedule)
    assert options.samples != "auto", "hf_kcu decides before it draws"
    fewer = replace(options, samples=None if options.samples is None else max(1, options.samples // 2))
    loss = retained_loss(engine, model, way, LENGTHS, parties, fewer)
    length = shortest(loss, LENGTHS, min(options.tau / 2, options.tau - risen - min(loss.rises)))
    record = {"length": length, **loss.at(LENGTHS.index(length))}
    return (model.moved(model.parameters - length * way) if length else model), record


def correction(curvature: KroneckerCurvature, gradient: Tensor, towards: Tensor, schedule: Schedule) -> Tensor:
    """What is subtracted at s = 1: ``(G + m)^-1 g``, whose opposite does not lead ``towards`` what was."""
    damping = 1.0 / (PART_OF_A_ROUND * schedule.learning_rate * schedule.local_steps)
    return -strip_return(-curvature.apply(lambda values: 1.0 / (values + damping), gradient), towards)


def shortest(loss: RetainedLoss, lengths: tuple[float, ...], allowed: float) -> float:
    """The shortest length that leaves no more than ``allowed`` to be won by another; 0 where nothing can be won.

    Example:
        >>> loss = RetainedLoss((1.0, 0.9, 0.8, 0.85), (0.0, -0.1, -0.2, -0.15))
        >>> shortest(loss, (0.0, 0.25, 0.5, 1.0), allowed=0.12), shortest(loss, (0.0, 0.25, 0.5, 1.0), allowed=0.2)
        (0.25, 0.0)
    """
    lowest = min(loss.rises)
    if not lowest < 0:  # also where the loss is not a number
        return 0.0
    return next(length for length, rise in zip(lengths, loss.rises, strict=True) if rise <= lowest + max(allowed, 0.0))
