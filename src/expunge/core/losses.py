"""What expunge needs to know of a loss, the losses whose curvature it knows, and torch's own, read.

A loss here is a mean over samples plus ``l2/2 ||theta||^2``: the L2 term belongs to every sample, so that removing
samples and clients keeps the objective's form and sums over clients are plain sums over samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from expunge.core.constants import brief
from expunge.core.cross_entropy import CrossEntropy
from expunge.core.elementwise import BinaryCrossEntropy, MeanSquaredError, SquaredError
from expunge.core.torch_losses import from_torch
from expunge.errors import RequestError

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Loss",
    "MeanSquaredError",
    "PerSample",
    "SquaredError",
    "amount",
    "as_loss",
    "mean_loss",
    "objective",
]


@runtime_checkable
class Loss(Protocol):
    """What the rest of expunge needs to know about a loss; write one of your own where ``PerSample`` is too little."""

    @property
    def l2(self) -> float:
        """Factor of the term l2/2 ||theta||^2."""

    def per_sample(self, outputs: Tensor, targets: Any) -> Tensor:
        """Losses of the samples, without the L2 term; their sum over a batch's mass is its mean."""

    def mass(self, targets: Any) -> Tensor | None:
        """What each sample counts in the mean: positions (tokens, pixels) by their weights; None where all count 1."""

    def output_hessian_product(self, outputs: Tensor, targets: Any, vectors: Tensor) -> Tensor:
        """For each sample, the Hessian of ``per_sample`` with respect to the outputs times a vector."""

    def sampled_gradients(self, outputs: Tensor, targets: Any, generator: torch.Generator) -> Tensor:
        """One random gradient in the outputs a sample: the mean of gradient x gradient' is that Hessian."""

    def problem(self, outputs: Tensor, targets: Any) -> str | None:
        """What a client has that does not go together, to stand behind "Client 'ada' has"; None where all is well."""


@dataclass(frozen=True, repr=False)
class PerSample:
    """Any loss that can be told sample by sample; its Hessian in the outputs is taken by autograd.

    Nothing is known of what its outputs predict, so there are no Kronecker factors: Krylov products only.

    Attributes:
        function: of outputs and targets, gives one loss a sample.
        l2: factor of the term l2/2 ||theta||^2.

    Example:
        >>> fourth = PerSample(lambda outputs, targets: (outputs - targets).pow(4).sum(dim=1))
        >>> fourth.output_hessian_product(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[12.]])
    """

    function: Callable[[Tensor, Any], Tensor]
    l2: float = 0.0

    __repr__ = brief

    @property
    def name(self) -> str:
        """Of its function, for a sentence; of torch's loss module, where it was read from one."""
        return _name(self.function)

    def per_sample(self, outputs: Tensor, targets: Any) -> Tensor:
        """Losses of the samples, without the L2 term."""
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != outputs.shape[:1]:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise RequestError(
                f"The loss {_name(self.function)} must give one number a sample, shape ({len(outputs)},), not {shape}: "
                "leave out the mean over the batch (reduction='none')."
            )
        return found

    def mass(self, targets: Any) -> None:
        """Every sample counts once."""
        del targets

    def output_hessian_product(self, outputs: Tensor, targets: Any, vectors: Tensor) -> Tensor:
        """By differentiating twice; where the loss is piecewise linear it is zero."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.per_sample(leaf, targets).sum(), leaf, create_graph=True)
            if not gradient.requires_grad:
                return torch.zeros_like(vectors)
            try:
                (product,) = torch.autograd.grad(gradient, leaf, vectors, materialize_grads=True)
            except RuntimeError as problem:
                if "not implemented" not in str(problem):
                    raise
                raise RequestError(
                    f"The loss {self.name} cannot be differentiated twice in torch ({problem}): give a function that "
                    "tells one number a sample in other operations, such as a hinge by clamp(min=0)."
                ) from problem
        return product

    def sampled_gradients(self, outputs: Tensor, targets: Any, generator: torch.Generator) -> Tensor:
        """Refused: nothing is known that targets could be drawn from."""
        del outputs, targets, generator
        raise RequestError(
            f"The loss {_name(self.function)} has no Kronecker factors, since nothing says what its outputs predict: "
            "use method='retrace-krylov'."
        )

    def problem(self, outputs: Tensor, targets: Any) -> str | None:
        """Why these do not go together: a loss of one sample must not depend on the others."""
        try:
            whole = self.per_sample(outputs, targets)
            if len(outputs) > 1:
                middle = (len(outputs) + 1) // 2
                first, rest = slice(0, middle), slice(middle, None)
                halves = [self.per_sample(outputs[own], _cut(targets, own, len(outputs))) for own in (first, rest)]
                if not torch.allclose(whole, torch.cat(halves), rtol=1e-4, atol=1e-6):
                    return f"a loss {_name(self.function)} that is no sum over samples: it depends on the whole batch."
        except RequestError as problem:
            return f"a loss that cannot be used: {problem}"
        return None


def _name(function: Any) -> str:
    if isinstance(function, partial) and function.args:  # one of torch's modules, as torch_losses.py reads it
        function = function.args[0]
    return repr(getattr(function, "__name__", None) or type(function).__name__)


def _cut(targets: Any, own: slice, size: int) -> Any:
    if isinstance(targets, Tensor):
        return targets[own] if targets.dim() and len(targets) == size else targets
    if isinstance(targets, dict):
        return {name: _cut(value, own, size) for name, value in targets.items()}
    return tuple(_cut(value, own, size) for value in targets) if isinstance(targets, list | tuple) else targets


LOSSES: dict[str, Callable[[float], Loss]] = {
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "squared_error": SquaredError,
    "mean_squared_error": MeanSquaredError,
}


def as_loss(loss: object, l2: float = 0.0) -> Loss:
    """A loss: one of those above or of your own, by name, torch's, or a function that gives one number a sample.

    Example:
        >>> as_loss("cross_entropy", l2=0.1)
        CrossEntropy(l2=0.1)
        >>> as_loss(torch.nn.CrossEntropyLoss(label_smoothing=0.1))
        CrossEntropy(l2=0.0, label_smoothing=0.1)
    """
    if isinstance(loss, Loss):
        if l2:
            raise RequestError("Give l2 inside the loss object or beside a loss's name, not both.")
        return loss
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss](l2)
    if isinstance(loss, type):
        raise RequestError(f"The loss {loss.__name__} is a class: make one, {loss.__name__}().")
    known = from_torch(loss)
    if isinstance(known, CrossEntropy | BinaryCrossEntropy | MeanSquaredError):
        return replace(known, l2=l2)
    if callable(known):
        return PerSample(known, l2)
    raise RequestError(f"The loss {loss!r} is not known: use one of {', '.join(map(repr, LOSSES))}, or a torch loss.")


def mean_loss(loss: Loss, outputs: Tensor, targets: Any) -> Tensor:
    """The mean over a batch, without the L2 term: torch's own, with class weights and labels that do not count.

    Example:
        >>> mean_loss(CrossEntropy(), torch.zeros(2, 2), torch.tensor([0, 1]))
        tensor(0.6931)
    """
    losses, mass = loss.per_sample(outputs, targets), loss.mass(targets)
    if mass is None:
        return losses.mean()
    return losses.sum() / mass.sum().clamp(min=torch.finfo(losses.dtype).tiny).to(losses)


def amount(loss: Loss, targets: Any, size: int) -> float:
    """What so many samples count together: their number, or the sum of their masses.

    Example:
        >>> amount(CrossEntropy(), torch.tensor([[0, -100], [1, 1]]), 2)
        3.0
    """
    mass = loss.mass(targets)
    return float(size) if mass is None else float(mass.sum())


def objective(loss: Loss, outputs: Tensor, targets: Any, parameters: Tensor) -> Tensor:
    """The mean loss over a batch with its L2 term.

    Example:
        >>> round(objective(CrossEntropy(l2=2.0), torch.zeros(1, 2), torch.tensor([0]), torch.ones(3)).item(), 4)
        3.6931
    """
    mean = mean_loss(loss, outputs, targets)
    return mean + 0.5 * loss.l2 * torch.dot(parameters, parameters) if loss.l2 else mean
