"""Recursions of optimisers on a quadratic: many run side by side, and are read off at several numbers of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def run(
    step: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]], start: Tensor, steps: Sequence[float]
) -> Iterator[Tensor]:
    """After each of these numbers of steps; part of a step is that part of the way to the next."""
    x, second, made = start, torch.zeros_like(start), 0
    for wanted in steps:
        for number in range(made + 1, math.floor(wanted) + 1):
            x, second = step(x, second, number)
        made = math.floor(wanted)
        part = wanted - made
        yield torch.lerp(x, step(x, second, made + 1)[0], part) if part else x


def powers(shrunk: Tensor, steps: Sequence[float]) -> Iterator[Tensor]:
    """``(1 - z)^s``; part of a step is that part of the way to the next. Where steps blow up, nothing is left."""
    base, blown = 1 - shrunk, shrunk > 2
    for wanted in steps:
        whole = math.floor(wanted)
        kept = base**whole
        if wanted != whole:
            kept = kept * (1 - (wanted - whole) * shrunk)
        yield torch.where(blown, 0.0, kept)


def pulled_back(gradient: Tensor, x: Tensor, proximal_mu: float) -> Tensor:
    """The gradient with FedProx's pull to the round's beginning, which lies at 1."""
    return gradient + proximal_mu * (x - 1) if proximal_mu else gradient


def stable(kept: Tensor) -> Tensor:
    """Where steps would blow up, the curvature is not the training's: those who stay correct at once."""
    return torch.where((kept.abs() <= 1.5) & torch.isfinite(kept), kept, 0.0)
