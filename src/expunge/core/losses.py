"""The losses whose curvature is known exactly: cross-entropy and squared error, each with an L2 term.

A loss here is the mean over samples of ``l(z, y) + l2/2 ||theta||^2``: the L2 term belongs to every
sample, so that removing samples and clients keeps the objective's form and sums over clients are plain
sums over samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expunge.errors import RequestError


class Loss(Protocol):
    """What the rest of expunge needs to know about a loss."""

    @property
    def l2(self) -> float:
        """Factor of the term l2/2 ||theta||^2."""

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, without the L2 term."""

    def output_hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """For each sample, the loss's Hessian with respect to the outputs times a vector."""

    def sampled_targets(self, outputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One target a sample, and its weight: the mean of weight x gradient x gradient' is the Gauss-Newton matrix."""


@dataclass(frozen=True)
class CrossEntropy:
    """``-log softmax(z)_y``; its Hessian in z is ``diag(p) - p p'``.

    Example:
        >>> CrossEntropy().per_sample(torch.zeros(1, 2), torch.tensor([1]))
        tensor([0.6931])
    """

    l2: float = 0.0

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, without the L2 term."""
        _require_rows(outputs)
        return F.cross_entropy(outputs, targets, reduction="none")

    def output_hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """``p * (v - p'v)`` sample by sample."""
        p = outputs.softmax(dim=1)
        return p * (vectors - (p * vectors).sum(dim=1, keepdim=True))

    def sampled_targets(self, outputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Classes drawn by ``q_c ~ p_c ||e_c - p||^2``, with weights p/q.

        The gradient in the outputs is ``p - e_c``. Drawn by p itself, a confident model would nearly always draw the
        class whose gradient vanishes; by q, every draw counts the same. The generator is a CPU's, so that a GPU draws
        the same.
        """
        _require_rows(outputs)
        p = outputs.double().softmax(dim=1)
        q = p * (1 - 2 * p + p.square().sum(dim=1, keepdim=True)).clamp(min=1e-30)
        q = q / q.sum(dim=1, keepdim=True)
        chance = torch.rand(len(outputs), 1, generator=generator, dtype=torch.float64).to(p.device)
        drawn = (q.cumsum(dim=1) < chance).sum(dim=1).clamp(max=outputs.shape[1] - 1)
        weights = (p / q).gather(1, drawn[:, None]).squeeze(1)
        return drawn, weights.to(outputs)


def _require_rows(outputs: Tensor) -> None:
    if outputs.dim() != 2:
        raise RequestError(f"Cross-entropy needs one row of class scores a sample, not {tuple(outputs.shape)}.")


@dataclass(frozen=True)
class SquaredError:
    """``1/2 ||z - y||^2``; its Hessian in z is the identity.

    Example:
        >>> SquaredError().per_sample(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([1.])
    """

    l2: float = 0.0

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of the samples, without the L2 term."""
        if outputs.shape != targets.shape:
            raise RequestError(
                f"Squared error needs targets of shape {tuple(outputs.shape)}, as the outputs, "
                f"not {tuple(targets.shape)}."
            )
        return 0.5 * (outputs - targets).square().reshape(len(outputs), -1).sum(dim=1)

    def output_hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """The vectors themselves."""
        del outputs
        return vectors

    def sampled_targets(self, outputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The outputs plus or minus 1: variance 1, and of a single output the square is exact in every draw.

        The generator is a CPU's, so that a GPU draws the same.
        """
        signs = 2 * torch.randint(2, outputs.shape, generator=generator) - 1
        return outputs + signs.to(outputs), torch.ones_like(outputs.reshape(len(outputs), -1)[:, 0])


LOSSES: dict[str, type[CrossEntropy] | type[SquaredError]] = {
    "cross_entropy": CrossEntropy,
    "squared_error": SquaredError,
}


def as_loss(loss: object, l2: float = 0.0) -> Loss:
    """One of the losses above, by object, by name, or from torch's plain cross-entropy.

    Example:
        >>> as_loss("cross_entropy", l2=0.1)
        CrossEntropy(l2=0.1)
        >>> as_loss(nn.CrossEntropyLoss())
        CrossEntropy(l2=0.0)
    """
    if isinstance(loss, CrossEntropy | SquaredError):
        if l2:
            raise RequestError("Give l2 inside the loss object or beside a loss's name, not both.")
        return loss
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss](l2)
    if loss is F.cross_entropy or (
        isinstance(loss, nn.CrossEntropyLoss)
        and loss.weight is None
        and loss.label_smoothing == 0
        and loss.reduction == "mean"
        and loss.ignore_index == -100
    ):
        return CrossEntropy(l2)
    raise RequestError(
        f"The loss {loss!r} is not known: use 'cross_entropy', 'squared_error' or a plain nn.CrossEntropyLoss()."
    )


def objective(loss: Loss, outputs: Tensor, targets: Tensor, parameters: Tensor) -> Tensor:
    """The mean loss over a batch with its L2 term.

    Example:
        >>> round(objective(CrossEntropy(l2=2.0), torch.zeros(1, 2), torch.tensor([0]), torch.ones(3)).item(), 4)
        3.6931
    """
    mean = loss.per_sample(outputs, targets).mean()
    return mean + 0.5 * loss.l2 * torch.dot(parameters, parameters) if loss.l2 else mean
