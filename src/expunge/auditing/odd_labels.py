"""Labels that a model must have been taught: models of short trainings without them do not think of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.auditing.exam import Samples
from expunge.auditing.placebo import mean_raised

WRONG = 2
"""A label is odd where no model that never saw it has it among its so many best."""
UNKNOWN = 0.2
"""A class of which so many unseen samples are odd is one that short trainings do not reach: its labels say nothing."""


@dataclass(frozen=True, eq=False)
class OddLabels:
    """Samples, once for every short model, which measures them; the other ones choose which of them are odd.

    Attributes:
        labels: of the samples, once.
        beside: the measuring models' ranks, samples x classes, a block a model.
        chosen: whether a label is odd to all models but the measuring one.
        shown: what these others see in the sample.

    Example:
        >>> sure = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])  # two models that see class 0, then class 1
        >>> OddLabels.of((torch.zeros(1), torch.tensor([3])), [sure, sure]).chosen.tolist()
        [True, True]
        >>> OddLabels.of((torch.zeros(1), torch.tensor([1])), [sure, sure]).chosen.tolist()
        [False, False]
    """

    labels: Tensor
    beside: Tensor
    chosen: Tensor
    shown: Tensor

    @classmethod
    def of(cls, samples: Samples, answers: Sequence[Tensor]) -> OddLabels:
        """From the short models' ranks on the samples."""
        labels, best = samples[1], answers[0].shape[1] - WRONG
        chosen, shown = [], []
        for number in range(len(answers)):
            others = torch.stack([*answers[:number], *answers[number + 1 :]])
            known = others.gather(2, labels.expand(len(others), -1)[:, :, None]).squeeze(2)
            chosen.append((known < best).all(dim=0))
            shown.append(others.mean(dim=0).argmax(dim=1))
        return cls(labels, torch.cat(list(answers)), torch.cat(chosen), torch.cat(shown))

    def known_classes(self) -> Tensor:
        """For each class, whether its samples, which nobody was taught, are seldom odd; one without samples is not."""
        labels, classes = self.labels.repeat(len(self.chosen) // len(self.labels)), self.beside.shape[1]
        odd = torch.bincount(labels[self.chosen], minlength=classes)
        return odd < UNKNOWN * torch.bincount(labels, minlength=classes)

    def only(self, classes: Tensor) -> OddLabels:
        """Labels of other classes are not odd."""
        times = len(self.chosen) // len(self.labels)
        return replace(self, chosen=self.chosen & classes[self.labels].repeat(times))

    def means(self, own: Tensor, weights: Tensor) -> Tensor:
        """How far a model's own ranks raise the labels and their placebos above the measuring models'."""
        times = len(self.chosen) // len(self.labels)
        raised = own.repeat(times, 1) - self.beside
        return mean_raised(raised, self.labels.repeat(times), self.shown, weights)
