"""What becomes of gradients between backward and the optimiser's step: clipped ones move a model less than rates say.

To first order those who stay answer a displaced model as slowly as their gradients are cut, so the rate that counts is
the optimiser's times the factor c by which gradients came out on the mean,

    c = <taken, made> / <made, made>          what the optimiser took, what backward had made

and the part of what was taken that this factor does not explain says how far it is from the truth: noise, clipping
value by value or tensor by tensor, sparsification, signs. Gradients that backward did not make, or that hooks of a
parameter changed on its way, are not explained at all.

A sum that is made a mean (one over a whole number) and a loss scale that is taken back are no clipping: where the
largest factor is such a one, the others count beside it.

Where it fails: a constant factor that is meant is taken for a mean; and of a sum that is made a mean and then cut in
every step nobody knows which part was which, so that what is cut to less than a fiftieth in every step is not explained
either. Steps are sampled: the first ones, then every fourth.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

EVERY = 4
"""The first so many steps are looked at, then one in so many: looking takes a copy of the gradients."""

LARGEST_SUM = 256
"""Over more samples or batches than this no sum is expected to be made a mean by hand."""

EXACTLY = 2e-5
"""The relative error up to which a factor is one over a whole number."""

LEAST = 0.02
"""Clipping that cuts every step to less than this is not believed."""


class Gradients:
    """Looks at the gradients of parameters as backward makes them, and as the optimiser takes them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> gradients = Gradients()
        >>> gradients.follow([weight])
        >>> for size in (1.0, 3.0):
        ...     weight.grad = None
        ...     (size * weight).sum().backward()
        ...     _ = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        ...     gradients.taken([weight])
        >>> kept, unlike = gradients.factor({weight})
        >>> f"{kept:.2f} {unlike:.2f}"
        '0.47 0.00'
    """

    def __init__(self) -> None:
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._made: dict[Tensor, Tensor] = {}
        self._steps: list[dict[Tensor, Tensor]] = []  # of each step and parameter: <taken, made>, |made|^2, |taken|^2
        self._scales: list[float] = []
        self._count, self._strange = 0, False

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Look at these from now on."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooks:
                hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._keep)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

    def leave(self) -> None:
        """Look at nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._made.clear()

    def taken(self, parameters: Iterable[Tensor]) -> None:
        """An optimiser is about to take these gradients."""
        found, strange = {}, False
        for parameter in parameters:
            made = self._made.pop(parameter, None)
            if made is not None and parameter.grad is not None:
                found[parameter] = _products(parameter.grad.detach(), made)
                strange = strange or bool(parameter._backward_hooks)
            elif parameter.grad is not None and self._looks and parameter in self._hooks:
                strange = strange or bool(parameter.grad.any())  # backward did not make it
        if found:
            self._steps.append(found)
            self._scales.append(_loss_scale())
        self._strange = self._strange or strange
        self._count += 1

    def factor(self, parameters: Collection[Tensor]) -> tuple[float, float]:
        """The mean factor of these parameters' gradients, and the part of what was taken that it does not explain."""
        factors, unexplained = list[float](), list[float]()
        for step, scale in zip(self._steps, self._scales, strict=True):
            own = [numbers for parameter, numbers in step.items() if parameter in parameters]
            if not own:
                continue
            both, made, taken = torch.stack([numbers.to(own[0].device) for numbers in own]).sum(dim=0).tolist()
            if not (0 < made < math.inf and 0 < taken < math.inf):
                continue  # nothing was learnt, or the loss scale was too large
            factors.append(scale * both / made)
            unexplained.append(max(1 - both * both / made / taken, 0.0))
        if not factors:
            return 1.0, 1.0 if self._strange else 0.0
        largest, unlike = max(factors), 1.0 if self._strange else sum(unexplained) / len(unexplained)
        if _is_a_mean(largest):
            factors = [factor / largest for factor in factors]
        kept = sum(factors) / len(factors)
        if not kept > 0 or max(factors) < LEAST:
            return 1.0, 1.0
        return kept, unlike

    @property
    def _looks(self) -> bool:
        """Whether gradients of this step are looked at."""
        return self._count < EVERY or self._count % EVERY == 0

    def _keep(self, parameter: Tensor) -> None:
        if parameter.grad is not None and self._looks:
            self._made[parameter] = parameter.grad.detach().clone()


def _products(taken: Tensor, made: Tensor) -> Tensor:
    """``<taken, made>``, ``|made|^2`` and ``|taken|^2``; nobody waits for them."""
    if taken.is_sparse:
        taken, made = (gradient.coalesce().values() for gradient in (taken, made))
    wide = torch.promote_types(taken.dtype, torch.float32)
    one, other = taken.flatten().to(wide), made.flatten().to(wide)
    return torch.stack([(one * other).sum(), other.square().sum(), one.square().sum()]).double()


def _loss_scale() -> float:
    """The factor of the loss where a GradScaler makes this step: gradients that backward made have it, too."""
    frame = sys._getframe(1)
    for _ in range(16):  # it calls the optimiser, which calls the hook
        caller = frame.f_back
        if caller is None:
            break
        frame, owner = caller, caller.f_locals.get("self")
        if isinstance(owner, torch.amp.GradScaler):
            return float(owner.get_scale())
    return 1.0


def _is_a_mean(factor: float) -> bool:
    """Whether it makes a mean of a sum, or takes a loss scale back.

    Example:
        >>> [_is_a_mean(factor) for factor in (1.0, 1 / 32, 1 / 65536, 0.7, 1 / 2.5, 2.0)]
        [True, True, True, False, False, False]
    """
    if not 0 < factor <= 1 + EXACTLY:
        return False
    inverse = 1 / factor
    power = math.log2(inverse)
    whole = abs(inverse - round(inverse)) <= EXACTLY * inverse and round(inverse) <= LARGEST_SUM
    return whole or abs(power - round(power)) <= EXACTLY
