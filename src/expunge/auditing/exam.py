"""One exam for all classifiers: the samples that they are asked about, and what their answers say of each alone.

Trained, forgotten and retrained models answer for the same samples: those to forget, unseen ones, and, where there are
some, retained ones and unseen ones with a trigger, in its place and elsewhere. Benchmark federations and somebody's own
models sit the same exam. An audit draws its questions when the model is fixed (``Exam.drawn``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expunge.auditing.answers import Answers, copied, directions, margins_of
from expunge.auditing.attacks import attack_scores
from expunge.auditing.comparison import Scores
from expunge.auditing.evidence import Evidence, Outputs, held_out_evidence
from expunge.auditing.functional import accuracy, mean_loss
from expunge.auditing.judging import LEAST_FORGOTTEN, Judging
from expunge.auditing.measured import Measured, beside
from expunge.auditing.measures import Measure
from expunge.auditing.membership import loss_threshold_attack, matched_weights
from expunge.auditing.probes import Nearby, drawn_samples, nearby_triggers
from expunge.auditing.signals import Floats, membership_scores, scaled_confidence
from expunge.auditing.triggers import TriggerAsked, mean_hold
from expunge.auditing.way_back import FAR, NEAR, Back, OnTheWay
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""

ENOUGH = 1000
"""So many samples are looked at to see whether they are different ones."""


@dataclass(frozen=True, eq=False)
class Trigger:
    """A backdoor: what is done to inputs, and the class that they are then taken for."""

    stamp: Callable[[Tensor], Tensor]
    target: int


@dataclass(frozen=True, eq=False)
class Exam(Judging[Measured]):
    """The samples that models are asked about.

    Non-members for the membership attack are the unseen samples, and for each trigger the same samples with it: matched
    to the forgotten samples by label and trigger.

    Attributes:
        forgotten: the samples to forget, with the labels that their owners gave them.
        unseen: samples that nobody trained on.
        retained: samples that stay, for the shadow attack; or None.
        triggers: the backdoors of those who leave.
        triggered: for each forgotten sample the number of its trigger, from 1 on; 0 is none. None: no sample has one.
        seed: of the places where else the triggers are tried.

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
    seed: int = 0

    def drawn(self, seed: int) -> Exam:
        """The same exam with questions that nobody knew before: unseen samples and trigger places by this seed."""
        inputs, labels = self.unseen
        chosen = drawn_samples(len(labels), seed).to(labels.device)
        return replace(self, unseen=(inputs[chosen], labels[chosen]), seed=seed)

    def measure(
        self, answers: Answers, model: Snapshot, on_the_way: OnTheWay | None = None, *, same_start: bool = False
    ) -> Measured:
        """A model alone: what it answers, with which weights; and how it would, on the way back to the trained one."""
        labels, forget_labels = self.unseen[1], self.forgotten[1]
        test_logits, forget_logits = answers(self.unseen[0]), answers(self.forgotten[0])
        asked = self._asked(answers, test_logits)
        alone = {
            "test_accuracy": accuracy(test_logits, labels),
            "test_loss": None,
            "forget_accuracy": accuracy(forget_logits, forget_labels),
            **mean_hold(asked),
        }
        classes = test_logits.shape[1]

        def nearby() -> Tensor:
            return torch.cat([own.nearby_pulls for own in asked]) if asked else torch.zeros(0, classes)

        found = Measured(
            model,
            test_logits,
            forget_logits,
            torch.cat([test_logits, *(own.stamped for own in asked)]),
            answers(self.retained[0]) if self.retained is not None else None,
            torch.cat([own.turns for own in asked]) if asked else torch.zeros(0, classes).to(test_logits.double()),
            self._parts(margins_of(forget_logits, forget_labels)),
            nearby,
            alone,
            partial(self._back, on_the_way) if on_the_way is not None else None,
            (lambda: accuracy(on_the_way(0.5)(self.unseen[0]), labels)) if on_the_way is not None else None,
            same_start,
        )
        return self._with_losses(found)

    def _asked(self, answers: Answers, test_logits: Tensor) -> list[TriggerAsked]:
        """A model about each trigger; its answers to the unseen samples are known."""
        inputs, labels = self.unseen
        return [
            TriggerAsked(
                answers, trigger.target, nearby, (inputs[usable], labels[usable]), test_logits[usable], trigger.stamp
            )
            for trigger, usable, nearby in zip(self.triggers, self._usable, self._nearby, strict=True)
        ]

    def _back(self, on_the_way: OnTheWay) -> Back:
        """A model where it is moved towards the trained one."""
        near, far = on_the_way(NEAR), on_the_way(FAR)
        turned = [own.turns for own in self._asked(near, near(self.unseen[0]))] if self.triggers else []
        pulled = self._asked(far, far(self.unseen[0])) if self.triggers else []
        return Back(torch.cat([directions(near(self.forgotten[0])), *turned]), mean_hold(pulled)["trigger_pull"])

    @cached_property
    def counts(self) -> dict[str, tuple[int, int]]:
        """How many different samples there are, and how many in all: one that is given often tells no more."""
        sets = {"forgotten": self.forgotten, "unseen": self.unseen}
        return {what: (different(inputs), len(labels)) for what, (inputs, labels) in sets.items()}

    def beside(self, model: Measured, others: Sequence[Measured]) -> dict[str, float | None]:
        """What a model shows beside others that were trained apart."""
        return beside(model, others)

    def copied(self, measured: Measured, others: Sequence[Measured]) -> int | None:
        """The number of the model whose answers these repeat."""
        return copied(measured.logits, [other.logits for other in others])

    def attacks(self, model: Measured, retrained: Sequence[Measured]) -> dict[str, Scores]:
        """By the attack's name, scores of the forgotten samples and of non-members, large for members."""
        return attack_scores(self, model, retrained)

    def confidence(self, model: Measured) -> Floats:
        """How well each forgotten sample is known, for KLoM."""
        return scaled_confidence(model.forget_logits.cpu(), self.forgotten[1].cpu())

    def held_out(self, before: Measured, after: Measured) -> list[Evidence]:
        """Whether the forgotten samples are told from held-out ones with their labels."""
        known, now = (Outputs(own.forget_logits.cpu(), own.test_logits.cpu()) for own in (before, after))
        return [held_out_evidence(known, now, self.forgotten[1].cpu(), self.unseen[1].cpu())]

    def step(self, measure: Measure) -> float:
        """What one sample is worth in a rate."""
        usable = [int(own.sum()) for own in self._usable]
        counts = {"test_accuracy": len(self.unseen[1]), "asr": min(usable, default=1)}
        return 1 / counts.get(measure.name, len(self.forgotten[1])) if measure.rate else 0.0

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

    def _parts(self, margins: Tensor) -> tuple[Tensor, Tensor]:
        """Of the forgotten samples without and with a trigger; a part of too few is left out, or all are one."""
        if self.triggered is None:
            return margins, margins[:0]
        parts = margins[self.triggered == 0], margins[self.triggered > 0]
        plain, triggered = (part if len(part) >= LEAST_FORGOTTEN else part[:0] for part in parts)
        return (plain, triggered) if len(plain) or len(triggered) else (margins, margins[:0])

    @cached_property
    def _nearby(self) -> list[list[Nearby]]:
        """For each trigger, others like it."""
        seeds = [derived_seed(self.seed, "nearby", number) for number in range(len(self.triggers))]
        return [
            nearby_triggers(trigger.stamp, self.unseen[0], own)
            for trigger, own in zip(self.triggers, seeds, strict=True)
        ]

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
        if found.is_finite:
            labels = self.forgotten[1]
            attack = loss_threshold_attack(
                _losses(found.forget_logits, labels),
                self._forget_groups.cpu(),
                _losses(found.other_logits, self.other_labels),
                self._other_groups.cpu(),
            )
            alone = {
                "test_loss": mean_loss(found.test_logits, self.unseen[1]),
                "forget_loss": mean_loss(found.forget_logits, labels),
                "mia_auc": attack.auc,
                "mia_success": attack.success_rate,
            }
        return replace(found, alone=found.alone | alone)


def different(inputs: Tensor) -> int:
    """How many of the samples are different, of a thousand at most: more than that are enough for anything.

    Example:
        >>> different(torch.eye(2).repeat(30, 1))
        2
    """
    return len(torch.unique(inputs[:ENOUGH].flatten(1) if inputs.dim() > 1 else inputs[:ENOUGH], dim=0))


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none").cpu()
