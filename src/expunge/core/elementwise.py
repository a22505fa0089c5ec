"""Losses of each output on its own: squared errors, and binary cross-entropy of labels that do not exclude another.

Their Hessian in the outputs is a diagonal, so random signs times its root have it as their mean square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expunge.core.constants import brief, constant, frozen
from expunge.errors import RequestError


class _Elementwise:
    """What they have in common."""

    def mass(self, targets: Tensor) -> None:
        """Every sample counts once."""
        del targets

    def output_hessian_product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """The diagonal times the vectors."""
        return vectors * self._diagonal(outputs, targets)

    def sampled_gradients(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """The root of the diagonal with random signs: of a single output the square is exact in every draw.

        The generator is a CPU's, so that a GPU draws the same.
        """
        signs = 2 * torch.randint(2, outputs.shape, generator=generator) - 1
        return signs.to(outputs) * self._diagonal(outputs, targets) ** 0.5

    def problem(self, outputs: Tensor, targets: Any) -> str | None:
        """Why these do not go together; None where they do."""
        try:
            self._require_alike(outputs, targets)
        except RequestError as problem:
            return f"targets that do not fit: {problem}"
        return None

    def _require_alike(self, outputs: Tensor, targets: Any) -> None:
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        if shape != tuple(outputs.shape):
            name = type(self).__name__
            words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
            raise RequestError(
                f"{words.capitalize()} needs targets of shape {tuple(outputs.shape)}, as the outputs, not {shape}."
            )

    def _diagonal(self, outputs: Tensor, targets: Tensor) -> float | Tensor:
        raise NotImplementedError


def _by_sample(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


@dataclass(frozen=True, repr=False)
class SquaredError(_Elementwise):
    """``1/2 ||z - y||^2``; its Hessian in z is the identity.

    Example:
        >>> SquaredError().per_sample(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([1.])
    """

    l2: float = 0.0

    __repr__ = brief

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, without the L2 term."""
        self._require_alike(outputs, targets)
        return 0.5 * _by_sample((outputs - targets).square()).sum(dim=1)

    def _diagonal(self, *_: Tensor) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class MeanSquaredError(_Elementwise):
    """``||z - y||^2`` divided by the number of outputs, as ``nn.MSELoss`` has it.

    Example:
        >>> MeanSquaredError().per_sample(torch.zeros(1, 2), torch.full((1, 2), 2.0))
        tensor([4.])
    """

    l2: float = 0.0

    __repr__ = brief

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, without the L2 term."""
        self._require_alike(outputs, targets)
        return _by_sample((outputs - targets).square()).mean(dim=1)

    def _diagonal(self, outputs: Tensor, *_: Tensor) -> float:
        return 2.0 * len(outputs) / outputs.numel()


@dataclass(frozen=True, repr=False)
class BinaryCrossEntropy(_Elementwise):
    """Of each output z and its label y, ``-p y log s(z) - (1 - y) log(1 - s(z))``; the mean over a sample's outputs.

    Attributes:
        l2: factor of the term l2/2 ||theta||^2.
        weight: of the outputs, in a shape that fits one sample's.
        pos_weight: p, what a positive label counts for, likewise.

    Example:
        >>> BinaryCrossEntropy().per_sample(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        tensor([0.6931])
    """

    l2: float = 0.0
    weight: Any = None
    pos_weight: Any = None

    __repr__ = brief

    def __post_init__(self) -> None:
        for name in ("weight", "pos_weight"):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, without the L2 term."""
        self._require_alike(outputs, targets)
        weight, positive = constant(self.weight, outputs), constant(self.pos_weight, outputs)
        losses = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs), weight, pos_weight=positive, reduction="none"
        )
        return _by_sample(losses).mean(dim=1)

    def problem(self, outputs: Tensor, targets: Any) -> str | None:
        """Why these do not go together; None where they do."""
        if found := super().problem(outputs, targets):
            return found
        for name in ("weight", "pos_weight"):
            own = constant(getattr(self, name), outputs)
            if own is not None and own.dim() >= outputs.dim():
                return f"a {name} of shape {tuple(own.shape)}, as of samples: weights belong to outputs."
        if float(targets.min()) < 0 or float(targets.max()) > 1:
            return "targets outside 0 to 1, where binary cross-entropy needs yes or no for each output."
        return None

    def _diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p, y = outputs.sigmoid(), targets.to(outputs)
        weight, positive = constant(self.weight, outputs), constant(self.pos_weight, outputs)
        counts = 1.0 if positive is None else positive * y + (1 - y)
        return p * (1 - p) * counts * (1.0 if weight is None else weight) * (len(outputs) / outputs.numel())
