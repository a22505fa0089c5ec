"""The exam of models that are no classifiers: each is asked for its loss on every sample.

Language models, regressions, segmentations and heads with several labels have no class scores that could be compared,
and what they were trained by tells as much of what they know: the loss on a sample is lower where it was learnt. So the
same measures are taken of losses: their mean, how far each sample's is from the retrained models' mean, and how much of
the trained model's deviation is left, which looks at those samples most that were known best. On the way back models
are asked alike (``way_back.py``).

Where it fails: two models that lose the same on every sample are one to this exam, and no trigger is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from expunge.auditing.answers import repeated
from expunge.auditing.attacks import FEWEST_SHADOWS, by_lira
from expunge.auditing.comparison import Scores
from expunge.auditing.judging import Judging
from expunge.auditing.margins import SPREADS, robust_spread
from expunge.auditing.measured import shares_start
from expunge.auditing.measures import LEAST, ON_THE_WAY, Compared, Measure
from expunge.auditing.membership import loss_threshold_attack
from expunge.auditing.probes import drawn_samples
from expunge.auditing.signals import Floats
from expunge.auditing.way_back import NEAR, Back
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local_data import LocalData

USE = 0.05
"""How much larger than retrained models' the loss on unseen samples may be, as a part of theirs."""


@dataclass(frozen=True, eq=False)
class Losses:
    """What a model loses on samples.

    Attributes:
        each: of every sample, the mean over what counts in it.
        mass: how much counts in each: tokens, pixels, or 1.

    Example:
        >>> Losses(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0])).mean
        1.75
    """

    each: Tensor
    mass: Tensor

    @property
    def mean(self) -> float:
        """Over all that counts."""
        return float((self.each * self.mass).sum() / self.mass.sum())


Asked = Callable[[LocalData, Tensor], Losses]
"""A model as it is asked: for its losses on some of these samples."""


@dataclass(frozen=True, eq=False)
class MeasuredLosses:
    """One model: what it loses, and what that says of it alone.

    Attributes:
        model: its weights.
        forgotten: its loss on every sample to forget.
        unseen: on every unseen one that is asked about.
        alone: by the names of results.
        ask_back: asks for the losses on the samples to forget, on the way back to the trained model; or None.
        ask_half_way: asks of what use it is half way; or None.
        same_start: whether it was retrained from the trained model's own start.
    """

    model: Snapshot
    forgotten: Tensor
    unseen: Tensor
    alone: dict[str, Any]
    ask_back: Callable[[], Tensor] | None = None
    ask_half_way: Callable[[], float] | None = None
    same_start: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether all losses are numbers."""
        return bool(torch.isfinite(self.logits).all())

    @property
    def logits(self) -> Tensor:
        """All its losses: what stands for answers here."""
        return torch.cat([self.forgotten, self.unseen])

    @property
    def directions(self) -> Tensor:
        """What it loses on all that is to be forgotten."""
        return self.forgotten

    @property
    def back(self) -> Back | None:
        """What it loses on the way back to the trained model."""
        return Back(self.ask_back(), None) if self.ask_back is not None else None

    @property
    def use(self) -> float:
        """Minus the loss on unseen samples."""
        return -float(self.alone["test_loss"])

    @property
    def slack(self) -> float:
        """How much larger a loss is no accident."""
        return USE * abs(self.use)


@dataclass(frozen=True, eq=False)
class LossExam(Judging[MeasuredLosses]):
    """The samples that models are asked about.

    Attributes:
        forgotten: the samples to forget, with the targets that their owners gave them.
        unseen: samples that nobody trained on.
        different: how many different ones there are of each, by what they are.
        chosen: which of the unseen ones are asked about; None is all.
    """

    forgotten: LocalData
    unseen: LocalData
    different: Mapping[str, int] = field(default_factory=dict)
    chosen: Tensor | None = None

    def drawn(self, seed: int) -> LossExam:
        """The same exam about unseen samples that nobody could foresee."""
        return replace(self, chosen=drawn_samples(len(self.unseen), seed))

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """How many different samples there are, and how many in all, by what they are."""
        counts = {"forgotten": len(self.forgotten), "unseen": len(self._numbers)}
        return {what: (min(self.different.get(what, count), count), count) for what, count in counts.items()}

    @property
    def weights(self) -> Tensor:
        """Non-members count alike: no label tells which of them are like the forgotten samples."""
        count = len(self._numbers)
        return torch.full((count,), 1 / count, dtype=torch.float64)

    def measure(
        self,
        asked: Asked,
        model: Snapshot,
        on_the_way: Callable[[float], Asked] | None = None,
        *,
        same_start: bool = False,
    ) -> MeasuredLosses:
        """A model alone: what it loses, with which weights; and what it would lose on the way back."""
        forgotten, unseen = self._losses(asked)
        alone: dict[str, Any] = {"forget_loss": None, "test_loss": unseen.mean, "mia_auc": None, "mia_success": None}
        found = MeasuredLosses(
            model,
            forgotten.each,
            unseen.each,
            alone,
            (lambda: self._losses(on_the_way(NEAR))[0].each) if on_the_way is not None else None,
            (lambda: -self._losses(on_the_way(0.5))[1].mean) if on_the_way is not None else None,
            same_start,
        )
        if not found.is_finite:
            return found
        groups = (torch.zeros(len(own.each), dtype=torch.int64) for own in (forgotten, unseen))
        attack = loss_threshold_attack(forgotten.each, next(groups), unseen.each, next(groups))
        more = {"forget_loss": forgotten.mean, "mia_auc": attack.auc, "mia_success": attack.success_rate}
        return replace(found, alone=alone | more)

    def beside(self, model: MeasuredLosses, others: Sequence[MeasuredLosses]) -> dict[str, float | None]:
        """How far its losses are from those of models that were trained apart, sample by sample."""
        names = {"distance": "forgotten", "unseen_distance": "unseen"}
        if not model.is_finite or not others:
            return dict.fromkeys(names)
        return {
            name: _distance(getattr(model, part), [getattr(other, part) for other in others])
            for name, part in names.items()
        }

    def compared(
        self, measured: MeasuredLosses, trained: MeasuredLosses, retrained: Sequence[MeasuredLosses]
    ) -> list[Compared]:
        """Every measure of all models; what a rise of the loss on unseen samples may be follows from theirs.

        On the way back from a fresh start models answer hardly at all, and what nobody is sure of any more loses as if
        it were known. So only what lies nearer to the trained model than fresh ones do is asked there.
        """
        fresh = [other.model for other in retrained if not other.same_start]
        is_near = shares_start(trained.model, [measured.model], fresh)
        return [
            one if one.measure.margin is None else _with_margin(one)
            for one in super().compared(measured, trained, retrained)
            if is_near or one.measure.name not in ON_THE_WAY
        ]

    def copied(self, measured: MeasuredLosses, others: Sequence[MeasuredLosses]) -> int | None:
        """The number of the model whose losses these repeat."""
        return repeated(measured.logits, [other.logits for other in others])

    def step(self, measure: Measure) -> float:
        """There is no rate among losses."""
        del measure
        return 0.0

    def attacks(self, model: MeasuredLosses, retrained: Sequence[MeasuredLosses]) -> dict[str, Scores]:
        """By the loss; and beside retrained models' losses, where these are enough."""
        own = _scores(model)
        found = {"loss": own}
        if len(retrained) >= FEWEST_SHADOWS:
            found["LiRA"] = by_lira(own, [_scores(other) for other in retrained if other is not model])
        return found

    def confidence(self, model: MeasuredLosses) -> Floats:
        """Minus the loss of each forgotten sample."""
        return -model.forgotten.cpu().double().numpy()

    @property
    def _numbers(self) -> Tensor:
        return torch.arange(len(self.unseen)) if self.chosen is None else self.chosen

    def _losses(self, asked: Asked) -> tuple[Losses, Losses]:
        return asked(self.forgotten, torch.arange(len(self.forgotten))), asked(self.unseen, self._numbers)


def _distance(own: Tensor, others: Sequence[Tensor]) -> float:
    return float((own - torch.stack(list(others)).mean(dim=0)).abs().mean())


def _with_margin(one: Compared) -> Compared:
    """A measure of use, whose margin is a part of what retrained models lose."""
    spread = robust_spread(one.retrained) if len(one.retrained) >= LEAST else 0.0
    margin = max(USE * abs(fmean(one.retrained)), SPREADS * spread)
    return replace(one, measure=replace(one.measure, margin=margin))


def _scores(model: MeasuredLosses) -> Scores:
    return Scores(-model.forgotten.cpu().double(), -model.unseen.cpu().double())
