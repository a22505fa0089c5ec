"""Cross-entropy of classes, of tokens and of pixels: with class weights, label smoothing, and labels that do not count.

A sample is a row of the batch: an image, a sequence. Of its positions (tokens, pixels) the losses are summed, and the
mean over samples divides by what all of them count, not by their number:

    mean = sum over positions of w_y l(z, y) / sum over positions of w_y

which is torch's own mean of every batch, class weights and ``ignore_index`` included. A long sequence counts for more
than a short one, as it did in the training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expunge.core.constants import brief, constant, frozen
from expunge.errors import RequestError

LABELS = torch.int64, torch.uint8
"""The types of labels that torch's cross-entropy takes."""

AT_ONCE = 1 << 24
"""So many class probabilities are held in double precision while targets are drawn."""


@dataclass(frozen=True, repr=False)
class CrossEntropy:
    """``-log softmax(z)_y``; its Hessian in z is ``diag(p) - p p'``, times the weight of the label.

    Attributes:
        l2: factor of the term l2/2 ||theta||^2.
        weight: one for each class.
        label_smoothing: this share of every target is spread over all classes.
        ignore_index: tokens and pixels with this label do not count.
        class_dimension: of the outputs, where the shape of the targets leaves it open: 1 or -1.

    Example:
        >>> CrossEntropy().per_sample(torch.zeros(1, 2), torch.tensor([1]))
        tensor([0.6931])
        >>> tokens = torch.tensor([[0, 1, -100]])
        >>> CrossEntropy().per_sample(torch.zeros(1, 3, 2), tokens), CrossEntropy().mass(tokens)
        (tensor([1.3863]), tensor([2.], dtype=torch.float64))
    """

    l2: float = 0.0
    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100
    class_dimension: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", frozen(self.weight))
        if not 0 <= self.label_smoothing < 1:
            raise RequestError(f"Label smoothing lies between 0 and 1, not at {self.label_smoothing:g}.")
        if self.class_dimension not in (None, 1, -1):
            raise RequestError(f"The class dimension is 1 or -1, not {self.class_dimension}.")
        if self.weight is not None and not (min(self.weight) >= 0 and max(self.weight) > 0):
            raise RequestError("Class weights must not be negative, and not all zero.")

    __repr__ = brief

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, summed over their positions, without the L2 term."""
        scores, labels = self._rows(outputs, targets)
        losses = F.cross_entropy(
            scores,
            labels,
            constant(self.weight, scores),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        return losses if outputs.dim() == 2 else losses.reshape(len(outputs), -1).sum(dim=1)

    def mass(self, targets: Tensor) -> Tensor | None:
        """What each sample counts in the mean: its positions, each by the weight of its label."""
        if targets.is_floating_point():
            positions = 1 if targets.dim() == 2 else targets[0].numel() // targets.shape[self._probable_dimension()]
            return None if positions == 1 else torch.full((len(targets),), float(positions), dtype=torch.float64)
        if targets.dim() == 1 and self.weight is None:
            return None
        counts = targets != self.ignore_index
        weight = constant(self.weight, torch.empty(0, dtype=torch.float64, device=targets.device))
        by_position = counts.double() if weight is None else weight[targets.where(counts, 0)] * counts
        return by_position.reshape(len(targets), -1).sum(dim=1)

    def output_hessian_product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """``p * (v - p'v)`` position by position, times what the label weighs."""
        dimension = self._dimension(outputs, targets)
        p = outputs.softmax(dim=dimension)
        product = p * (vectors - (p * vectors).sum(dim=dimension, keepdim=True))
        if self._is_plain(outputs, targets):
            return product
        scores, labels = self._rows(outputs, targets)
        scale = self._scale(scores, labels).reshape(outputs.movedim(dimension, -1).shape[:-1])
        return product * scale.unsqueeze(dimension)

    def sampled_gradients(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """``p - e_c`` of a class drawn at each position by ``q_c ~ p_c ||e_c - p||^2``, times the root of p/q.

        Drawn by p itself, a confident model would nearly always draw the class whose gradient vanishes; by q, every
        draw counts the same. Positions have signs of their own, so that no product of two of them is left in the mean.
        The generator is a CPU's, so that a GPU draws the same.
        """
        dimension = self._dimension(outputs, targets)
        scores, labels = self._rows(outputs, targets)
        chance = torch.rand(len(scores), 1, generator=generator, dtype=torch.float64).to(scores.device)
        rows = max(1, AT_ONCE // scores.shape[1])
        drawn = torch.cat(
            [_drawn(*part) for part in zip(torch.split(scores, rows), torch.split(chance, rows), strict=True)]
        )
        if not self._is_plain(outputs, targets):
            drawn = drawn * self._scale(scores, labels).sqrt()[:, None]
        if outputs.dim() > 2:
            signs = 2.0 * torch.randint(2, (len(scores), 1), generator=generator) - 1
            drawn = drawn * signs.to(drawn)
        return drawn.reshape(outputs.movedim(dimension, -1).shape).movedim(-1, dimension)

    def problem(self, outputs: Tensor, targets: Any) -> str | None:
        """Why these do not go together; None where they do."""
        if not isinstance(targets, Tensor):
            return f"targets of type {type(targets).__name__} where cross-entropy needs a tensor of class labels."
        if targets.is_floating_point() and targets.shape != outputs.shape:
            return (
                "numbers where cross-entropy needs class labels: "
                "use loss='squared_error' for regression, or labels.long()."
            )
        if not targets.is_floating_point() and targets.shape == outputs.shape:
            return "whole numbers for every class, as one-hot labels: give labels.argmax(dim=1), or labels.float()."
        if not targets.is_floating_point() and targets.dtype not in LABELS:
            return f"labels of type {targets.dtype}, where cross-entropy needs {LABELS[0]}: give labels.long()."
        try:
            classes = outputs.shape[self._dimension(outputs, targets)]
        except RequestError as problem:
            return f"targets that do not fit: {problem}"
        if classes < 2:
            return "a model with one output, where cross-entropy tells classes apart: use nn.BCEWithLogitsLoss()."
        if self.weight is not None and len(self.weight) != classes:
            return f"a model that tells {classes} classes apart, but there are {len(self.weight)} class weights."
        if targets.is_floating_point():
            return None
        labels = targets if targets.dim() == 1 else targets[targets != self.ignore_index]
        if not len(labels):
            return f"no label but {self.ignore_index}, which does not count: leave such samples out."
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            return f"labels {low} to {high}, but the model tells {classes} classes apart."
        return None

    def _is_plain(self, outputs: Tensor, targets: Tensor) -> bool:
        """Whether every position counts once."""
        return outputs.dim() == 2 and self.weight is None and not targets.is_floating_point()

    def _scale(self, scores: Tensor, labels: Tensor) -> Tensor:
        """By how much each position's Hessian is that of a plain label: what its smoothed target weighs."""
        weight, spread = constant(self.weight, scores), self.label_smoothing
        if labels.is_floating_point():
            target = (1 - spread) * labels.to(scores) + spread / scores.shape[1]
            return (target if weight is None else target * weight).sum(dim=1)
        counts = labels != self.ignore_index
        if weight is None:
            return counts.to(scores)
        return ((1 - spread) * weight[labels.where(counts, 0)] + spread * weight.mean()) * counts

    def _rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One row of class scores a position, and its label or its probabilities."""
        dimension = self._dimension(outputs, targets)
        if outputs.dim() == 2:
            return outputs, targets
        scores = outputs.movedim(dimension, -1).flatten(0, -2)
        return scores, targets.movedim(dimension, -1).flatten(
            0, -2
        ) if targets.is_floating_point() else targets.flatten()

    def _probable_dimension(self) -> int:
        if self.class_dimension is None:
            raise RequestError("Of class probabilities one must say where the classes are: class_dimension=1 or -1.")
        return self.class_dimension

    def _dimension(self, outputs: Tensor, targets: Tensor) -> int:
        """Where the classes are: the dimension of the outputs that the targets do not have."""
        if outputs.dim() < 2:
            raise RequestError(f"Cross-entropy needs one row of class scores a sample, not {tuple(outputs.shape)}.")
        if outputs.dim() == 2 and targets.shape in (outputs.shape, outputs.shape[:1]):
            return 1
        if targets.shape == outputs.shape:
            return self._probable_dimension()
        fitting = {
            -1: targets.shape == outputs.shape[:-1],
            1: targets.shape == outputs.shape[:1] + outputs.shape[2:],
        }
        if self.class_dimension is not None and fitting[self.class_dimension]:
            return self.class_dimension
        if all(fitting.values()):
            raise RequestError(
                f"Where outputs of shape {tuple(outputs.shape)} have their classes is open: say "
                "CrossEntropy(class_dimension=-1), as of tokens, or class_dimension=1, as of torch's images."
            )
        if self.class_dimension is None and any(fitting.values()):
            return 1 if fitting[1] else -1
        raise RequestError(
            f"Cross-entropy needs one row of class scores for each label, not outputs of shape {tuple(outputs.shape)} "
            f"for targets of shape {tuple(targets.shape)}."
        )


def _drawn(scores: Tensor, chance: Tensor) -> Tensor:
    """The gradients of drawn classes, each times the root of its weight."""
    p = scores.double().softmax(dim=1)
    q = p * (1 - 2 * p + p.square().sum(dim=1, keepdim=True)).clamp(min=1e-30)
    q = q / q.sum(dim=1, keepdim=True)
    drawn = (q.cumsum(dim=1) < chance).sum(dim=1, keepdim=True).clamp(max=scores.shape[1] - 1)
    weights = (p / q).gather(1, drawn)
    return ((p - torch.zeros_like(p).scatter_(1, drawn, 1.0)) * weights.sqrt()).to(scores)
