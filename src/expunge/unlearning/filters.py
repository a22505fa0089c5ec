"""Filters: how much of a client's pull is left at the end of training along a direction of curvature e.

    answered   the training itself, run on a quadratic of curvature e with the pull as it came (training/response.py)
    damped     lambda / (e + lambda)                       what a damped Newton step leaves

A gentler one takes those who stay for faster at correcting: ``answered`` of a curvature several times as large.

Where curvature differs between directions that its factors take for alike, more is left of a pull than their mean tells
(what is left is convex in the curvature): ``answered`` is then the mean over a gamma distribution of curvatures.

They are functions of the curvature alone: core/kronecker.py and core/krylov.py apply any of them to a vector. Under
plain SGD, plain averaging and a pull that comes evenly, `answered` is ``(1 - c^T) / (T (1 - c))``, ``c = (1 - eta
e)^steps``, close to the one-segment form of SOURCE (Bae et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.kronecker import Filter, Spectrum
from expunge.errors import RequestError
from expunge.federation.training.response import Response

NODES = 12
"""Of a quadrature over how stiff those who stay may be."""

SLIGHT = 1e-3
"""A spread that is none."""


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


@dataclass(frozen=True, eq=False)
class Answered:
    """What is left in the model of pulls that came over the rounds like this: a row for each row of ``spreads``.

    Attributes:
        response: of the training.
        spreads: how each pull came over the rounds.
        stiffer: curvature is taken for so many times larger, on average,
        spread: with this variance, over the square of that average.
    """

    response: Response
    spreads: Tensor
    stiffer: float = 1.0
    spread: float = 0.0

    def __call__(self, curvature: Tensor, names: Sequence[str]) -> Tensor:
        """For one layer."""
        return self.at_once([(curvature, names)])[0]

    def at_once(self, spectra: Sequence[Spectrum]) -> list[Tensor]:
        """For all layers, whose recursions run side by side."""
        found = list[Tensor]()
        for factor, weight in gamma_nodes(self.spread):
            stiffer = [(self.stiffer * factor * curvature, names) for curvature, names in spectra]
            lefts = [weight * left for left, _ in self.response.lefts(stiffer, self.spreads)]
            found = [one + other for one, other in zip(found, lefts, strict=True)] if found else lefts
        return found


def gamma_nodes(spread: float) -> list[tuple[float, float]]:
    """Numbers and weights that stand for a gamma distribution of mean 1 and this variance (Gauss-Laguerre).

    Example:
        >>> nodes = gamma_nodes(0.5)
        >>> [round(sum(weight * number**power for number, weight in nodes), 9) for power in range(4)]
        [1.0, 1.0, 1.5, 3.0]
    """
    if spread <= SLIGHT:
        return [(1.0, 1.0)]
    number, shape = torch.arange(NODES, dtype=torch.float64), 1.0 / spread
    beside = (number[1:] * (number[1:] + shape - 1.0)).sqrt()
    matrix = torch.diag(2.0 * number + shape) + torch.diag(beside, 1) + torch.diag(beside, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return list(zip((spread * values).tolist(), vectors[0].square().tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Held:
    """What is left of them in the server's momentum."""

    response: Response
    spreads: Tensor

    def __call__(self, curvature: Tensor, names: Sequence[str]) -> Tensor:
        """For one layer."""
        return self.at_once([(curvature, names)])[0]

    def at_once(self, spectra: Sequence[Spectrum]) -> list[Tensor]:
        """For all layers, whose recursions run side by side."""
        return [held for _, held in self.response.lefts(spectra, self.spreads)]


@dataclass(frozen=True, eq=False)
class Newton:
    """``1 / (e + m)``, a damped Newton step that goes as far as gradient descent in this part of a round."""

    response: Response
    part: float

    def __call__(self, curvature: Tensor, names: Sequence[str]) -> Tensor:
        """For one layer."""
        return self.at_once([(curvature, names)])[0]

    def at_once(self, spectra: Sequence[Spectrum]) -> list[Tensor]:
        """For all layers, by how far each travels in a round."""
        travels, rounds = self.response.travels([names for _, names in spectra]), len(self.response.rounds)
        pairs = zip(spectra, travels, strict=True)
        return [1.0 / (curvature + 1.0 / (self.part * travel / rounds)) for (curvature, _), travel in pairs]
