"""What follows a step: a correction, a short round or a round of recovery, all with one signature.

    repair(stay, moved) -> Repaired

A shortened step leaves something of the client, while most of what a whole one costs those who stay can be repaired. So
steps are tried whole first, and judged by what is left of their cost in the end (trust_region.py).

`Correction` is one damped Newton step of those who stay, from where the step ended,

    theta'' = theta' - s (G + m)^-1 grad L_r(theta'),        m = 10 / (eta x local steps), a tenth of a round,

(under Adam layer by layer, by its second moments),

stripped of its component back towards the model that remembers. Both are sums over samples: two messages, no update of
any single client. How far: FedAvg does not rest where the retained loss is lowest (clients drift apart in their local
steps), so nor should this. It takes the shortest s after which going on would win those who stay no more than half of
tau (and no more than tau is left of what the step has cost them): nothing at all where the step was right already.

A step of first order is trusted near where it begins. After a long one the correction, of first order too, is not
enough: a `ShortRound` of local training comes before it, and what that leaves is corrected. Both leave the model less
sure of itself than training does, so a `Calibration` is the last: the outputs are scaled until it is as sure of the
labels of those who stay as it was before, but no further than lowers their loss; under Adam half of the way to there.

Where it fails: the loss cannot see whether what comes back is the leaver's or theirs, but along one direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.vectors import Snapshot
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Draw, Sum, Trained
from expunge.federation.training.fedavg import aggregate
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, Recipe
from expunge.federation.training.response import Response
from expunge.federation.training.works import ROUNDING
from expunge.unlearning.filters import Newton
from expunge.unlearning.lengths import combined, lowest, shortest
from expunge.unlearning.recovery import RECOVERY_LENGTHS, strip_return, without_return
from expunge.unlearning.retained import BATCH_SIZE, Retained

CORRECTION_LENGTHS = (0.0, *(2.0**-j for j in range(6, -1, -1)))
"""How far a correction may be taken: layers that move together feel more curvature than each on its own."""

PART_OF_A_ROUND = 0.1
"""The damping lets a direction move as far as plain gradient descent would in this part of a round."""

SMALLER = 4
"""A short round's batches are so many times smaller than the training's."""

WORK, AFTERWARDS = 52, 5
"""A request takes no more than one in so many of the samples that the training went through: what is left of them is a
short round's. So many times the samples that are looked at go into what follows it."""

LARGEST_PART = 2 / 3
"""A short round takes at most this part of the samples: it needs others to look for its length on."""

LEAST_PART, LEAST, FEW = 0.08, 2000, 1 / 3
"""But it takes the first part of the samples, and so many of them or the last part."""

ENOUGH = 1000
"""Its length is looked for on so many others."""

SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
"""What a calibration may scale outputs by, as they are first."""

ADAPTIVE_PART = 0.5
"""The part of a calibration's way that is gone under Adam."""

SLIGHT = 0.02
"""Outputs scaled by so little, and by as much the other way, tell how sure the model is of the labels."""


@dataclass(frozen=True, eq=False)
class Moved:
    """Where a step has led.

    Attributes:
        remembers: the model before it.
        model: the model after it.
        memory: the vectors of those who stay, where vectors are kept; a repair that trains adds to them.
        risen: what the step has cost those who stay.
    """

    remembers: Snapshot
    model: Snapshot
    memory: Memory | None
    risen: float = 0.0


@dataclass(frozen=True, eq=False)
class Repaired:
    """The model after a repair, and the record of it: its length, the retained loss before and after, the rise."""

    model: Snapshot
    record: dict[str, float]


class Repair(Protocol):
    """Something that follows a step."""

    def __call__(self, stay: Retained, moved: Moved) -> Repaired:
        """Ask those who stay; a length of 0 in the record says that it did not help."""


@dataclass(frozen=True)
class RecoveryRound:
    """One whole FedAvg round of those who stay, each update stripped of its way back.

    Attributes:
        plan: how they train.
        lengths: how far it may be taken, 0 first.
    """

    plan: TrainingPlan
    lengths: tuple[float, ...] = RECOVERY_LENGTHS

    def __call__(self, stay: Retained, moved: Moved) -> Repaired:
        """The round, as far as it lowers their loss."""
        replies = without_return(stay.train(moved.model, self.plan), moved.remembers, moved.model)
        return _as_far_as_it_helps(stay, moved, replies, self.plan.learning_rate, self.lengths)


@dataclass(frozen=True)
class ShortRound:
    """A recovery round on part of the samples, in small batches, each client's later steps averaged.

    How far a round leads depends on its steps, not on how many samples make one; small batches are noisy, and the mean
    over steps and clients takes most of the noise out again.

    Attributes:
        plan: one epoch in small batches, with the training's optimiser.
        lengths: how far it may be taken, 0 first; looked for on other samples, `ENOUGH` of them.
        most: how many samples it may take in all, with what follows.
    """

    plan: TrainingPlan
    lengths: tuple[float, ...] = RECOVERY_LENGTHS
    most: float = math.inf

    @classmethod
    def of(
        cls, state: ServerState, response: Response, lengths: tuple[float, ...], spent: float = 0.0
    ) -> ShortRound | None:
        """With the training's mean rate; None where its optimiser is not one that clients can be asked for.

        ``spent`` is how many sample-gradients the request has taken so far.
        """
        rule, works = response.recipe.client, [work for each in response.rounds for work in each.works]
        if not isinstance(rule, SGD | Adam):
            return None
        steps = sum(work.share * work.steps for work in works)
        rate = sum(work.share * work.steps * work.learning_rate for work in works) / steps
        trained = state.schedule.batch_size if state.schedule is not None else BATCH_SIZE
        plan = TrainingPlan(1, 1, max(1, trained // SMALLER), rate, recipe=Recipe(rule))
        return cls(plan, lengths, response.steps * trained / WORK - spent)

    def __call__(self, stay: Retained, moved: Moved) -> Repaired:
        """The round, as far as it lowers their loss on samples that it was not trained on."""
        draws = self.draws(stay)
        others = max(1, sum(stay.left.values()) - sum(draw.size for draw in draws.values()))
        fewer = stay.looking_at(others if stay.samples is None else min(others, stay.samples, ENOUGH))
        updates = self.updates(stay, moved, draws)
        return _as_far_as_it_helps(fewer, moved, updates, self.plan.learning_rate, self.lengths)

    def draws(self, stay: Retained) -> dict[str, Draw]:
        """What it trains on: the front of each client's order, whose back is looked at for its length."""
        left = sum(stay.left.values())
        rest = self.most - AFTERWARDS * min(left, left if stay.samples is None else stay.samples)
        part = min(LARGEST_PART, max(LEAST_PART, min(LEAST / left, FEW), rest / left))
        return {name: Draw(math.ceil(count * part), stay.seed) for name, count in stay.left.items()}

    def updates(self, stay: Retained, moved: Moved, draws: Mapping[str, Draw]) -> dict[str, Trained]:
        """What the clients send, stripped of the way back."""
        replies = stay.train(moved.model, replace(self.plan, seed=stay.seed), draws=draws, averaged=True)
        return without_return(replies, moved.remembers, moved.model)


@dataclass(frozen=True, eq=False)
class Correction:
    """One damped Newton step of those who stay, with the factors that the filter was made of.

    Attributes:
        curvature: of those who stay, layer by layer.
        response: of the training, for the damping.
        tau: how much of the retained loss's rise may be left; half of it need not be won.
        lengths: how far it may be taken, 0 first; looked for on half as many other samples.
    """

    curvature: KroneckerCurvature
    response: Response
    tau: float
    lengths: tuple[float, ...] = CORRECTION_LENGTHS

    def __call__(self, stay: Retained, moved: Moved) -> Repaired:
        """The shortest step that leaves little to be won."""
        gradient = stay.gradient(moved.model, drawn=True)
        way = self.way(gradient, moved.remembers.parameters - moved.model.parameters)
        fewer = stay.looking_at(None if stay.samples is None else max(1, stay.samples // 2))
        loss = fewer.losses(moved.model, way, self.lengths)
        length = shortest(loss, self.lengths, min(self.tau / 2, self.tau - moved.risen - min(loss.rises)))
        record = {"length": length, **loss.at(self.lengths.index(length))}
        model = moved.model
        return Repaired(model.moved(model.parameters - length * way) if length else model, record)

    def way(self, gradient: Tensor, towards: Tensor) -> Tensor:
        """What is subtracted at s = 1: ``(G + m)^-1 g``, whose opposite does not lead ``towards`` what was."""
        inverse = Newton(self.response, PART_OF_A_ROUND)
        return -strip_return(-self.curvature.apply(inverse, gradient), towards)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The outputs, scaled by the last layer's weights until the model is as sure of the labels as it was before.

    How sure it is: the mean output of a sample's label above the mean of all outputs (of yes or no, half of it with the
    label's sign). It is the slope of the loss where outputs are scaled by 0, so losses of two slight scales tell it. In
    retrained models it is about what it is in the trained one, or a little less (docs/method.md), and a step and a
    short round lower it on all data alike. Under Adam much is lowered, and being as sure again without all of the
    reasons costs more in answers than it wins in the loss on forgotten data: a part of the way is taken there, by the
    ratio's logarithm. Nothing is ever scaled down, since where the leaver contradicted the others it was the less sure;
    nor beyond where the loss of those who stay is lowest. A boosted client takes a training that is far from its end
    further on, so that retrained models are the less sure; those that fit their data well want to be surer still.

    Attributes:
        curvature: knows the last layer.
        part: of the way that is gone.
        scales: that are tried, 1 first; on a quarter of the samples.
    """

    curvature: KroneckerCurvature
    part: float = 1.0
    scales: tuple[float, ...] = SCALES

    def __call__(self, stay: Retained, moved: Moved) -> Repaired:
        """The record's length is how much more than 1 the scale is."""
        fewer = stay.looking_at(None if stay.samples is None else max(1, stay.samples // 4))
        slight = (-SLIGHT, SLIGHT)
        before, after = (
            self._told(fewer, moved.remembers, slight),
            self._told(fewer, moved.model, (*self.scales, *slight)),
        )
        # Nobody's own word can make the model before look surer than the second surest, or the one after less sure.
        was, is_ = -combined(before).rises[1], combined(after, (-1, -2)).rises[1]
        wished = (was / is_) ** self.part if was > is_ > 0 else 1.0
        loss = combined(after, range(len(self.scales)))
        lowest = min(range(len(self.scales)), key=lambda tried: loss.rises[tried])
        number = min(range(lowest + 1), key=lambda tried: abs(self.scales[tried] - wished))
        length, record = self.scales[number] - 1.0, loss.at(number)
        moves = length * self._last(moved.model)
        model = moved.model.moved(moved.model.parameters + moves) if length else moved.model
        return Repaired(model, {"length": length, **record})

    def _told(self, stay: Retained, model: Snapshot, scales: Sequence[float]) -> list[Sum]:
        """Each one's losses at these scales."""
        return stay.told(model, -self._last(model), [scale - 1.0 for scale in scales])

    def _last(self, model: Snapshot) -> Tensor:
        last = self.curvature.last(model.parameters)
        assert last is not None
        return last


def repaired(stay: Retained, moved: Moved, repairs: Mapping[str, Repair]) -> tuple[Moved, dict[str, dict[str, float]]]:
    """Where one after another leads, and their records by name."""
    records: dict[str, dict[str, float]] = {}
    for name, repair in repairs.items():
        found = repair(stay, moved)
        records[name] = found.record
        moved = replace(moved, model=found.model, risen=moved.risen + found.record["retained_rise"])
    return moved, records


def _as_far_as_it_helps(
    stay: Retained, moved: Moved, updates: Mapping[str, Trained], rate: float, lengths: tuple[float, ...]
) -> Repaired:
    """The mean of these updates, taken as far as it lowers the retained loss: the safety belt holds here, too."""
    model = moved.model
    way = model.parameters - aggregate(model, updates).parameters
    # With the buffers as they are: the round's own ones (batch norm) can raise the loss before any step is taken.
    length, losses = lowest(stay.losses(model, way, lengths), lengths)
    record = {"length": length, **losses}
    if length == 0:
        return Repaired(model, record)
    if moved.memory is not None:
        moved.memory.record(
            {name: length * reply.update for name, reply in updates.items()},
            {name: reply.count for name, reply in updates.items()},
            learning_rate=rate,
            steps={name: max(length * reply.steps, ROUNDING) for name, reply in updates.items()},
            moments={name: reply.moments for name, reply in updates.items() if reply.moments},
            plain=True,
        )
    return Repaired(model.moved(model.parameters - length * way), record)
