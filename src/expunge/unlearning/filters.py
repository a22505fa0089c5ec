"""Filters: how much of a client's pull is left at the end of training along a direction of curvature e.

    answered   the training itself, run on a quadratic of curvature e with the pull as it came (training/response.py)
    damped     lambda / (e + lambda)                       what a damped Newton step leaves

A gentler one takes those who stay for faster at correcting: ``answered`` of a curvature several times as large.

They are functions of the curvature alone: core/kronecker.py and core/krylov.py apply any of them to a vector. Under
plain SGD, plain averaging and a pull that comes evenly, `answered` is ``(1 - c^T) / (T (1 - c))``, ``c = (1 - eta
e)^steps``, close to the one-segment form of SOURCE (Bae et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from expunge.core.kronecker import Filter
from expunge.errors import RequestError
from expunge.federation.training.response import Response


def damped(damping: float | None, response: Response | None = None) -> Filter:
    """``lambda / (e + lambda)``; where no lambda is given, it is the response's cut-off, layer by layer under Adam.

    Example:
        >>> import torch
        >>> damped(0.5)(torch.tensor([0.0, 0.5]), ())
        tensor([1.0000, 0.5000])
    """
    if damping is None and response is None:
        raise RequestError("Give a damping, or the training's learning rate, local steps and rounds to derive it from.")
    if damping == 0:
        raise RequestError("Without damping there is no filter: give a damping above 0.")

    def left(curvature: Tensor, names: Sequence[str]) -> Tensor:
        own = damping if damping is not None else 1.0 / response.travel(names)  # type: ignore[union-attr]
        return own / (curvature + own)

    return left


def answered(response: Response, spread: Tensor, stiffer: float = 1.0) -> Filter:
    """What is left in the model of a pull that came over the rounds like this, where curvature is so much larger."""
    return lambda curvature, names: response.left(stiffer * curvature, spread[None], names)[0][0]


def held(response: Response, spread: Tensor) -> Filter:
    """What is left of it in the server's momentum."""
    return lambda curvature, names: response.left(curvature, spread[None], names)[1][0]
