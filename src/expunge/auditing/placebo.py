"""How strongly a model ties labels to inputs, beside placebos: other labels, which nobody tied to them.

A model that was trained on a trigger, or on wrong labels, ranks the label that it learnt above where a model without
that data ranks it. How far above noise, the model itself tells: its labels are moved on by one, two, ... classes, and
the same is measured for each. Nobody taught the model these, so they show what chance, the classes and the training do
to such a mean; in a model that never saw the data the true labels are one more draw of the same kind. Placebo tests
are common in the study of interventions: Abadie, Diamond and Hainmueller, "Synthetic Control Methods for Comparative
Case Studies" (JASA 2010), section 3.4.

Ranks rather than log-odds: they do not depend on the scale of the logits, which grows with training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.auditing.student import value_beyond
from expunge.errors import DataError

FEWEST = 3
"""Placebos below which their spread says nothing."""


@dataclass(frozen=True)
class Hold:
    """How far a model raises the labels in question, in ranks, and how far it raises placebo labels.

    Attributes:
        own: the mean over the samples, for their labels.
        placebos: the same for labels that nobody taught, one mean a placebo.

    Example:
        >>> Hold(5.0, (0.0, 1.0, 2.0)).excess
        4.0
    """

    own: float
    placebos: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.placebos) < FEWEST:
            raise DataError(f"{len(self.placebos)} placebos have no spread to speak of: at least {FEWEST} are needed.")
        if not all(math.isfinite(value) for value in (self.own, *self.placebos)):
            raise DataError("A rank is not finite: check the models' outputs.")

    @property
    def excess(self) -> float:
        """What the labels are raised more than placebos are."""
        return self.own - sum(self.placebos) / len(self.placebos)

    def reach(self, level: float) -> float:
        """How far one more placebo stays from their mean, on one side: a prediction bound (Student t)."""
        count = len(self.placebos)
        spread = torch.tensor(self.placebos, dtype=torch.float64).std().item()
        return value_beyond(level, count - 1) * spread * math.sqrt(1 + 1 / count)


@dataclass(frozen=True)
class Kept:
    """The share of a trained model's hold that another model kept, with its bounds.

    Attributes:
        value: 1 for the trained model itself, about 0 for one that never saw the data.
        low: below which it does not lie, at the level that was asked for.
        high: above which it does not lie.
        visible: whether the trained model's own hold lies beyond what placebos reach; where not, nothing can be said.
    """

    value: float
    low: float
    high: float
    visible: bool


def kept_share(before: Hold, after: Hold, level: float = 0.05) -> Kept:
    """``excess(after) / excess(before)``, give or take what one more placebo of ``after`` may reach.

    Args:
        before: the trained model's hold.
        after: the judged model's.
        level: of each bound, one-sided.

    Example:
        >>> kept_share(Hold(8.0, (-1.0, 0.0, 1.0)), Hold(0.5, (-0.5, 0.0, 0.5))).value
        0.0625
    """
    visible = before.excess > before.reach(level)
    if not visible:
        return Kept(math.nan, -math.inf, math.inf, visible)
    reach = after.reach(level)
    value, low, high = ((after.excess + by) / before.excess for by in (0.0, -reach, reach))
    return Kept(value, low, high, visible)


def ranks(logits: Tensor) -> Tensor:
    """How many classes each class's score beats, for every sample; a tie is half a victory.

    Example:
        >>> ranks(torch.tensor([[0.1, 3.0, 0.1]]))
        tensor([[0.5000, 2.0000, 0.5000]], dtype=torch.float64)
    """
    own, other = logits[:, :, None], logits[:, None, :]
    return (own > other).double().sum(dim=2) + ((own == other).double().sum(dim=2) - 1) / 2


def mean_raised(raised: Tensor, labels: Tensor, shown: Tensor, weights: Tensor | None = None) -> Tensor:
    """How far labels are raised in the mean over samples, and placebos: the labels moved on by 1, 2, ... classes.

    Args:
        raised: samples x classes, how far the model raises each class.
        labels: those in question.
        shown: what the samples show; a sample is left out of the placebo that would say just that, and a placebo that
            would say it of all samples is NaN.
        weights: of the samples; all count alike by default.

    Example:
        >>> raised = torch.tensor([[0.0, 5.0, 1.0, 2.0, 9.0]])
        >>> mean_raised(raised, labels=torch.tensor([1]), shown=torch.tensor([4]))
        tensor([5., 1., 2., nan, 0.])
    """
    classes, weights = raised.shape[1], torch.ones(len(labels)).to(raised) if weights is None else weights
    means = []
    for move in range(classes):
        moved = (labels + move) % classes
        fair = weights * (moved != shown if move else torch.ones_like(weights))
        means.append((fair * raised.gather(1, moved[:, None]).squeeze(1)).sum() / fair.sum())
    return torch.stack(means)


def as_hold(means: Tensor) -> Hold:
    """The first is about the labels, the others about placebos; those that say nothing are dropped.

    Example:
        >>> as_hold(torch.tensor([5.0, 1.0, math.nan, 2.0, 0.0]))
        Hold(own=5.0, placebos=(1.0, 2.0, 0.0))
    """
    own, *placebos = means.tolist()
    return Hold(own, tuple(value for value in placebos if not math.isnan(value)))
