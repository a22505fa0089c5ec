"""One exam for all models: the samples that they are asked about, and what their answers say of each alone.

Trained, forgotten and retrained models answer for the same samples: those to forget, unseen ones, and, where there are
some, retained ones and unseen ones with a trigger. Benchmark federations and somebody's own models sit the same exam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expunge.auditing.backdoor import attack_success_rate
from expunge.auditing.comparison import Scores
from expunge.auditing.functional import accuracy, mean_loss
from expunge.auditing.measures import Observed
from expunge.auditing.membership import loss_threshold_attack, matched_weights
from expunge.auditing.signals import membership_scores
from expunge.auditing.verdict import Judgement, judge
from expunge.core.vectors import Snapshot

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""

Answers = Callable[[Tensor], Tensor]
"""A model as the exam sees it: logits for inputs."""


@dataclass(frozen=True, eq=False)
class Trigger:
    """A backdoor: what is done to inputs, and the class that they are then taken for."""

    stamp: Callable[[Tensor], Tensor]
    target: int


@dataclass(frozen=True, eq=False)
class Measured:
    """One model: its outputs on the sets that matter, and what they say of it alone.

    Attributes:
        model: its weights.
        test_logits: for the unseen samples.
        forget_logits: for the samples to forget.
        other_logits: for the non-members that a membership attack compares these with.
        retained_logits: for the retained samples, or None.
        retained_auc: membership AUC of the retained samples, or None.
        alone: by the names of results; what outputs that are not finite cannot say is None.
    """

    model: Snapshot
    test_logits: Tensor
    forget_logits: Tensor
    other_logits: Tensor
    retained_logits: Tensor | None
    retained_auc: float | None
    alone: dict[str, Any]

    @property
    def is_finite(self) -> bool:
        """Whether all outputs are numbers."""
        known = (self.forget_logits, self.other_logits, self.retained_logits)
        return all(bool(torch.isfinite(logits).all()) for logits in known if logits is not None)


@dataclass(frozen=True, eq=False)
class Exam:
    """The samples that models are asked about.

    Non-members for the membership attack are the unseen samples, and for each trigger the same samples with it: matched
    to the forgotten samples by label and trigger.

    Attributes:
        forgotten: the samples to forget, with the labels that their owners gave them.
        unseen: samples that nobody trained on.
        retained: samples that stay, for their own membership; or None.
        triggers: the backdoors of those who leave.
        triggered: for each forgotten sample the number of its trigger, from 1 on; 0 is none. None: no sample has one.

    Example:
        >>> images, labels = torch.eye(2).repeat(30, 1), torch.tensor([0, 1]).repeat(30)
        >>> exam = Exam((images[:20], labels[:20]), (images[20:], labels[20:]))
        >>> exam.measure(lambda inputs: 3 * inputs, Snapshot(torch.zeros(1), {})).alone["test_accuracy"]
        1.0
    """

    forgotten: Samples
    unseen: Samples
    retained: Samples | None = None
    triggers: Sequence[Trigger] = ()
    triggered: Tensor | None = None

    def measure(self, answers: Answers, model: Snapshot) -> Measured:
        """A model alone: what it answers, with which weights."""
        (inputs, labels), (forget_inputs, forget_labels) = self.unseen, self.forgotten
        test_logits, forget_logits = answers(inputs), answers(forget_inputs)
        stamped = [answers(trigger.stamp(inputs)) for trigger in self.triggers]
        rates = [
            attack_success_rate(logits, labels, trigger.target)
            for logits, trigger in zip(stamped, self.triggers, strict=True)
        ]
        poisoned = [logits[usable] for logits, usable in zip(stamped, self._usable, strict=True)]
        found = Measured(
            model,
            test_logits,
            forget_logits,
            torch.cat([test_logits, *poisoned]),
            answers(self.retained[0]) if self.retained is not None else None,
            None,
            {
                "test_accuracy": accuracy(test_logits, labels),
                "forget_accuracy": accuracy(forget_logits, forget_labels),
                "asr": fmean(rates) if rates else None,
            },
        )
        return self._with_losses(found)

    def observed(self, measured: Measured) -> Observed:
        """The model as the verdict looks at it."""
        return Observed(
            measured.test_logits,
            self.unseen[1],
            measured.forget_logits,
            self.forgotten[1],
            asr=measured.alone["asr"],
            forget_auc=measured.alone["mia_auc"],
            retained_auc=measured.retained_auc,
        )

    def judgement(
        self, measured: Measured, trained: Measured, retrained: Sequence[Measured], same_init: Sequence[Measured] = ()
    ) -> Judgement:
        """The verdict on a model, beside retrained ones; one of these is judged by the others."""
        return judge(
            retrained=[self.observed(other) for other in retrained if other is not measured],
            trained=self.observed(trained),
            candidate=self.observed(measured),
            same_init=[self.observed(other) for other in same_init if other is not measured],
        )

    def scores(self, measured: Measured, signal: str) -> Scores:
        """The model's membership signal of the forgotten samples and of non-members, large for members."""
        return Scores(
            membership_scores(measured.forget_logits.cpu(), self.forgotten[1].cpu(), signal),
            membership_scores(measured.other_logits.cpu(), self.other_labels.cpu(), signal),
        )

    @cached_property
    def weights(self) -> Tensor:
        """Of the non-members: they get the forgotten samples' labels and triggers."""
        return matched_weights(self._forget_groups.cpu(), self._other_groups.cpu())

    @cached_property
    def other_labels(self) -> Tensor:
        """Labels of the non-members; a triggered one has its trigger's target."""
        labels = self.unseen[1]
        return torch.cat([labels, *(self._targets(number) for number in range(len(self.triggers)))])

    @cached_property
    def _usable(self) -> list[Tensor]:
        """For each trigger, the unseen samples that are not of its target anyway."""
        return [self.unseen[1] != trigger.target for trigger in self.triggers]

    def _targets(self, number: int) -> Tensor:
        return torch.full_like(self.unseen[1][self._usable[number]], self.triggers[number].target)

    @cached_property
    def _classes(self) -> int:
        return 1 + max(int(labels.max()) for labels in (self.forgotten[1], self.other_labels))

    @cached_property
    def _forget_groups(self) -> Tensor:
        """Label and trigger as one number."""
        labels = self.forgotten[1]
        return labels if self.triggered is None else labels + self._classes * self.triggered

    @cached_property
    def _other_groups(self) -> Tensor:
        marked = [self._targets(number) + (number + 1) * self._classes for number in range(len(self.triggers))]
        return torch.cat([self.unseen[1], *marked])

    def _with_losses(self, found: Measured) -> Measured:
        """With what is said by losses; outputs that are not finite say nothing."""
        alone: dict[str, Any] = {"forget_loss": None, "mia_auc": None, "mia_success": None}
        retained_auc = None
        if found.is_finite:
            labels = self.forgotten[1]
            attack = loss_threshold_attack(
                _losses(found.forget_logits, labels),
                self._forget_groups.cpu(),
                _losses(found.other_logits, self.other_labels),
                self._other_groups.cpu(),
            )
            loss = mean_loss(found.forget_logits, labels)
            alone = {"forget_loss": loss, "mia_auc": attack.auc, "mia_success": attack.success_rate}
            retained_auc = self._retained_auc(found)
        return replace(found, alone=found.alone | alone, retained_auc=retained_auc)

    def _retained_auc(self, found: Measured) -> float | None:
        """AUC of the retained samples beside unseen ones of the same labels."""
        if self.retained is None or found.retained_logits is None:
            return None
        own, labels = self.retained[1], self.unseen[1]
        losses = _losses(found.retained_logits, own), _losses(found.test_logits, labels)
        return loss_threshold_attack(losses[0], own.cpu(), losses[1], labels.cpu()).auc


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none").cpu()
