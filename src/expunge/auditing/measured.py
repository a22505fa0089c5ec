"""One model that was asked, and what it shows beside others that were trained apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any, Protocol

import torch
from torch import Tensor

from expunge.auditing.answers import directions, margin_distance, mean_variation
from expunge.auditing.measures import BACK_PULL, BACK_SHARE, ON_THE_WAY
from expunge.auditing.way_back import Back
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, RequestError

NEARER = 0.9
"""Weights of different starts are about equally far apart: what shares one is nearer than this part of it."""

WORSE = 0.04
"""Accuracy that is lost half way between two models of different starts, at least."""

BESIDE = ("distance", "trigger_distance", "unseen_distance", "nearby_pull")
"""The measures of a model beside others, by name."""


class Shown(Protocol):
    """What one model shows, whatever it was asked: class scores, or its loss on every sample."""

    @property
    def model(self) -> Snapshot:
        """Its weights."""

    @property
    def alone(self) -> dict[str, Any]:
        """What it shows by itself, by the names of results."""

    @property
    def same_start(self) -> bool:
        """Whether it was retrained from the trained model's own start."""

    @property
    def is_finite(self) -> bool:
        """Whether all that it answers are numbers."""

    @property
    def logits(self) -> Tensor:
        """All its answers for samples as they are, a row a sample."""

    @property
    def directions(self) -> Tensor:
        """What it answers on all that is to be forgotten."""

    @property
    def back(self) -> Back | None:
        """What it shows on the way back to the trained model."""

    @property
    def use(self) -> float:
        """Of what use it is on unseen samples: more is better."""

    @property
    def slack(self) -> float:
        """How much less use is no accident."""

    @property
    def ask_half_way(self) -> Callable[[], float] | None:
        """Asks of what use it is half way to the trained model; None where there is no such way."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One model: its outputs on the sets that matter, and what they say of it alone.

    Attributes:
        model: its weights.
        test_logits: for the unseen samples.
        forget_logits: for the samples to forget.
        other_logits: for the non-members that a membership attack compares these with.
        retained_logits: for the retained samples, or None.
        turns: where triggers turn its answers, a row a stamped sample; none without a trigger.
        margins: log-odds of the forgotten samples' own labels: of those without a trigger, and of those with one.
        ask_nearby: asks about moved and noisy triggers.
        alone: by the names of results; what outputs that are not finite cannot say is None.
        ask_back: asks on the way back to the trained model; None where there is none, or nobody wants to know.
        ask_half_way: what share of the unseen samples it gets right half way; None likewise.
        same_start: whether it was retrained from the trained model's own start.
    """

    model: Snapshot
    test_logits: Tensor
    forget_logits: Tensor
    other_logits: Tensor
    retained_logits: Tensor | None
    turns: Tensor
    margins: tuple[Tensor, Tensor]
    ask_nearby: Callable[[], Tensor]
    alone: dict[str, Any]
    ask_back: Callable[[], Back] | None = None
    ask_half_way: Callable[[], float] | None = None
    same_start: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether all outputs are numbers."""
        known = (self.forget_logits, self.other_logits, self.retained_logits)
        return all(bool(torch.isfinite(logits).all()) for logits in known if logits is not None)

    @cached_property
    def nearby_pulls(self) -> Tensor:
        """Of moved and noisy triggers, towards every class; empty without a trigger. Asked only where it is needed."""
        return self.ask_nearby()

    @cached_property
    def back(self) -> Back | None:
        """What it shows on the way back to the trained model."""
        return self.ask_back() if self.ask_back is not None else None

    @property
    def logits(self) -> Tensor:
        """All its answers for samples as they are."""
        return torch.cat([self.forget_logits, self.test_logits])

    @property
    def use(self) -> float:
        """Its accuracy on unseen samples."""
        return float(self.alone["test_accuracy"])

    @property
    def slack(self) -> float:
        """How much less accuracy is no accident."""
        return WORSE

    @cached_property
    def directions(self) -> Tensor:
        """All that is to be forgotten: where answers for the samples point, and where triggers turn other answers."""
        return torch.cat([directions(self.forget_logits), self.turns])


def beside(model: Measured, others: Sequence[Measured], *, nearby: bool = True) -> dict[str, float | None]:
    """What a model shows beside others that were trained apart: distances, and where nearby triggers pull it more."""
    if not model.is_finite or not others:
        return dict.fromkeys(BESIDE)
    pulls = None
    if nearby and len(model.nearby_pulls):
        mean = torch.stack([other.nearby_pulls for other in others]).mean(dim=0)
        pulls = float((model.nearby_pulls - mean).max())
    distances = [
        margin_distance(own, [other.margins[part] for other in others]) if len(own) else None
        for part, own in enumerate(model.margins)
    ]
    unseen = mean_variation(model.test_logits, [other.test_logits for other in others])
    return dict(zip(BESIDE, (*distances, unseen, pulls), strict=True))


def kept_share(model: Shown, trained: Shown, others: Sequence[Shown]) -> float | None:
    """How much of the trained model's deviation from the others' mean answers is left in a model's own.

    The coefficient of a regression of one deviation on the other, over all classes and all samples of what is to be
    forgotten: 1 for the trained model, about 0 for one that never saw the data. It averages so many numbers that
    retraining varies it little, and looks at where answers point, which no scaling of the outputs changes.
    """
    return _share(model.directions, trained, others) if model.is_finite and others else None


def on_the_way(model: Shown, trained: Shown, others: Sequence[Shown]) -> dict[str, float | None]:
    """The measures of the way back, by name; for the trained model, which is there, what it shows itself."""
    if not model.is_finite or not others:
        return dict.fromkeys(ON_THE_WAY)
    if model.model is trained.model:
        return {BACK_SHARE: kept_share(trained, trained, others), BACK_PULL: trained.alone.get("trigger_pull")}
    back = model.back
    if back is None or not bool(torch.isfinite(back.directions).all()):
        return dict.fromkeys(ON_THE_WAY)
    return {BACK_SHARE: _share(back.directions, trained, others), BACK_PULL: back.pull}


def _share(directions: Tensor, trained: Shown, others: Sequence[Shown]) -> float:
    mean = _mean(others)
    apart = trained.directions - mean
    return float(((directions - mean) * apart).sum() / apart.square().sum()) if bool(apart.any()) else 0.0


def chance_share(trained: Shown, retrained: Sequence[Shown]) -> float:
    """How much of the trained model's deviation is what any training has: the retrained ones', squared, beside its own.

    A model that shares its start with the trained one may share as much with it and know nothing of the data, so no
    smaller share is told. Where nothing was learnt from the data it is about 1, and nothing can be told.
    """
    if len(retrained) < 2:
        return 1.0
    rest = [[other for other in retrained if other is not model] for model in retrained]
    drawn = fmean(_apart(model, others) for model, others in zip(retrained, rest, strict=True))
    return min(1.0, drawn / max(_apart(trained, retrained), 1e-12))


def require_comparable(measured: Shown, trained: Shown, retrained: Sequence[Shown]) -> None:
    """Refuse what cannot be compared, with one line."""
    for model in (measured, *retrained):
        if model.logits.shape != trained.logits.shape:
            raise ModelError("The models give outputs of different shapes: compare models of one task.")
    if not trained.is_finite or not all(model.is_finite for model in retrained):
        raise ModelError("The trained or a retrained model has outputs that are not finite: load sound checkpoints.")
    for name, other in (("trained model", trained), ("judged model", measured)):
        if any(torch.equal(model.logits, other.logits) for model in retrained):
            raise RequestError(f"The {name} is one of the retrained models: it cannot be compared with itself.")


def strangers(trained: Shown, retrained: Sequence[Shown]) -> dict[int, Shown]:
    """By their numbers, retrained models that are said to share the trained one's start, and do not look like it.

    They lie no nearer to it than fresh ones do, and half way between the two models answer worse than at either end: a
    wild training leads as far away as another start would, and neither tells what is to be expected on the way back.
    """
    fresh = [other.model for other in retrained if not other.same_start]
    found = {}
    for number, own in enumerate(other for other in retrained if other.same_start):
        if own.ask_half_way is None or shares_start(trained.model, [own.model], fresh):
            continue
        if own.ask_half_way() < min(one.use for one in (own, trained)) - trained.slack:
            found[number] = own
    return found


def shares_start(trained: Snapshot, own: Sequence[Snapshot], fresh: Sequence[Snapshot]) -> bool:
    """Whether those of the trained model's own start lie nearer to it than fresh ones do, as far as there are any.

    Example:
        >>> zero, one, two = (Snapshot(torch.full((1,), value), {}) for value in (0.0, 1.0, 2.0))
        >>> shares_start(zero, [one], [two]), shares_start(zero, [two], [one]), shares_start(zero, [two], [])
        (True, False, True)
    """

    def apart(model: Snapshot) -> float:
        if model.parameters.shape != trained.parameters.shape:
            return math.inf
        return float(torch.linalg.vector_norm(model.parameters - trained.parameters))

    furthest = max(map(apart, own), default=0.0)
    return not fresh or furthest < NEARER * median(map(apart, fresh))  # of the median: one of them may be spoiled


def _mean(models: Sequence[Shown]) -> Tensor:
    return torch.stack([model.directions for model in models]).mean(dim=0)


def _apart(model: Shown, others: Sequence[Shown]) -> float:
    return float((model.directions - _mean(others)).square().sum())
