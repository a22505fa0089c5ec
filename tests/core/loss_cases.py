"""Small float64 problems, one for every loss and shape of outputs, with torch's own loss where it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, Loss, MeanSquaredError, PerSample, SquaredError

DOUBLE = torch.float64
WEIGHT = (0.5, 2.0, 1.0)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, eq=False)
class LossCase:
    """A loss, outputs of one shape and targets for them.

    Attributes:
        name: for the test's id.
        loss: ours.
        shape: of the outputs, the first dimension samples.
        targets: made by a generator.
        torchs: the same as torch has it, over a batch.
    """

    name: str
    loss: Loss
    shape: tuple[int, ...]
    targets: Callable[[torch.Generator], Tensor]
    torchs: Callable[[Tensor, Tensor], Tensor] | None = None

    def drawn(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        own = chance(seed)
        return torch.randn(self.shape, generator=own, dtype=DOUBLE), self.targets(own)


def labels(*shape: int, ignored: int | None = None) -> Callable[[torch.Generator], Tensor]:
    def made(own: torch.Generator) -> Tensor:
        found = torch.randint(3, shape, generator=own)
        if ignored is not None:
            found.view(-1)[1::3] = ignored
        return found

    return made


def numbers(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda own: torch.randn(shape, generator=own, dtype=DOUBLE)


def bits(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda own: torch.randint(2, shape, generator=own).double()


def shares(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda own: torch.rand(shape, generator=own, dtype=DOUBLE).softmax(dim=1)


def last(function: Callable[..., Tensor], **options: object) -> Callable[[Tensor, Tensor], Tensor]:
    """Torch's loss of classes in the last dimension."""
    return lambda z, y: function(z.movedim(-1, 1), y, **options)


def torchs(**options: object) -> Callable[[Tensor, Tensor], Tensor]:
    return nn.CrossEntropyLoss(**options).double()


weight = torch.tensor(WEIGHT, dtype=DOUBLE)
LOSSES = [
    LossCase("classes", CrossEntropy(), (4, 3), labels(4), torchs()),
    LossCase("weighted", CrossEntropy(weight=WEIGHT), (4, 3), labels(4), torchs(weight=weight)),
    LossCase("smoothed", CrossEntropy(label_smoothing=0.2), (4, 3), labels(4), torchs(label_smoothing=0.2)),
    LossCase(
        "weighted-smoothed",
        CrossEntropy(weight=WEIGHT, label_smoothing=0.2),
        (4, 3),
        labels(4),
        torchs(weight=weight, label_smoothing=0.2),
    ),
    LossCase("probabilities", CrossEntropy(), (4, 3), shares(4, 3), torchs()),
    LossCase("probabilities-weighted", CrossEntropy(weight=WEIGHT), (4, 3), shares(4, 3), torchs(weight=weight)),
    LossCase("tokens", CrossEntropy(), (4, 5, 3), labels(4, 5), last(F.cross_entropy)),
    LossCase(
        "tokens-all",
        CrossEntropy(weight=WEIGHT, label_smoothing=0.1, ignore_index=-1),
        (4, 5, 3),
        labels(4, 5, ignored=-1),
        last(F.cross_entropy, weight=weight, label_smoothing=0.1, ignore_index=-1),
    ),
    LossCase("tokens-ignored", CrossEntropy(), (4, 5, 3), labels(4, 5, ignored=-100), last(F.cross_entropy)),
    LossCase("pixels", CrossEntropy(), (4, 3, 2, 2), labels(4, 2, 2), torchs()),
    LossCase(
        "pixels-weighted",
        CrossEntropy(weight=WEIGHT, ignore_index=2),
        (4, 3, 2, 2),
        labels(4, 2, 2),
        torchs(weight=weight, ignore_index=2),
    ),
    LossCase("open", CrossEntropy(class_dimension=-1), (4, 3, 3), labels(4, 3), last(F.cross_entropy)),
    LossCase("yes-or-no", BinaryCrossEntropy(), (4, 3), bits(4, 3), nn.BCEWithLogitsLoss()),
    LossCase("one-yes-or-no", BinaryCrossEntropy(), (4,), bits(4), nn.BCEWithLogitsLoss()),
    LossCase(
        "yes-counts-more",
        BinaryCrossEntropy(weight=WEIGHT, pos_weight=(3.0, 1.0, 0.5)),
        (4, 3),
        bits(4, 3),
        nn.BCEWithLogitsLoss(weight, pos_weight=torch.tensor([3.0, 1.0, 0.5], dtype=DOUBLE)),
    ),
    LossCase(
        "masks",
        BinaryCrossEntropy(pos_weight=[[[2.0]], [[0.5]]]),
        (4, 2, 2, 2),
        bits(4, 2, 2, 2),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([[[2.0]], [[0.5]]], dtype=DOUBLE)),
    ),
    LossCase("half-squares", SquaredError(), (4, 3), numbers(4, 3)),
    LossCase("mean-squares", MeanSquaredError(), (4, 3), numbers(4, 3), nn.MSELoss()),
    LossCase("mean-squares-of-images", MeanSquaredError(), (4, 2, 2, 2), numbers(4, 2, 2, 2), nn.MSELoss()),
]

CALLABLE = LossCase(
    "callable",
    PerSample(lambda z, y: (z - y).cosh().log().sum(dim=1)),
    (4, 3),
    numbers(4, 3),
    lambda z, y: (z - y).cosh().log().sum() / len(z),
)
