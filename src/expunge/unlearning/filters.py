"""Filters: how much of a client's pull is left at the end of training along a direction of curvature e.

    damped   lambda / (e + lambda)                       what a damped Newton step leaves
    rounds   (1 - c^T) / (T (1 - c)),  c = (1 - eta e)^steps   T rounds of gradient descent, a pull in each of them
    blend    the mean of `rounds` and of `damped` with 5 lambda

They are functions of the curvature alone: core/kronecker.py and core/krylov.py apply any of them to a vector. `rounds`
is the unrolled training on a quadratic, close to the one-segment form of SOURCE (Bae et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from expunge.errors import RequestError
from expunge.federation.training.plan import Schedule

Filter = Callable[[Tensor], Tensor]


def damped(damping: float | None) -> Filter:
    """``lambda / (e + lambda)``.

    Example:
        >>> import torch
        >>> damped(0.5)(torch.tensor([0.0, 0.5]))
        tensor([1.0000, 0.5000])
    """
    if not damping:
        raise RequestError("Without damping there is no filter: give a damping above 0.")
    return lambda curvature: damping / (curvature + damping)


def filter_named(kind: str, damping: float | None, schedule: Schedule | None) -> Filter:
    """The filter of that name: ``damped``, ``rounds`` (which has no damping) or ``blend``."""
    if kind == "damped":
        return damped(damping)
    if schedule is None:
        raise RequestError("The filter of the rounds needs the training's learning rate, local steps and rounds.")
    survival = schedule.survival
    if kind == "rounds":
        return survival
    gentler = damped(5.0 * (damping or 0.0))
    return lambda curvature: (survival(curvature) + gentler(curvature)) / 2
