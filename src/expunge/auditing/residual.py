"""The gradient of the retained objective at a model: zero at the retrained optimum, measurable without retraining."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.krylov import conjugate_gradient
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each, ask_mean
from expunge.federation.messages.tasks import CurvatureProduct, Gradient, Indices, Sum

PROBE_LENGTH = 0.01
"""How far along a random direction the curvature is felt, relative to the weights."""


@dataclass(frozen=True)
class Residual:
    """``||grad F_r||`` at a model, and an allowance for what rounding may have hidden of it."""

    norm: float
    rounding: float

    @property
    def total(self) -> float:
        """What a bound has to count."""
        return self.norm + self.rounding


def retained_residual(engine: Engine, model: Snapshot, retained: Mapping[str, Indices]) -> Residual:
    """The norm of the full retained gradient, no sample left out; two message rounds.

    The second round measures what rounding can hide. Weights theta times inputs x are wrong by ``eps |x| |theta|`` or
    so, which the gradient multiplies by x again: ``eps ||H||_F ||theta||`` in all, where ``||H||_F`` is estimated by
    ``sqrt(d) ||H s||`` for a random unit vector s, from the gradient a little way along s. Summing n samples adds
    ``eps sqrt(n)`` times what cancels between clients. Both with a factor of 4: an estimate, tested, and not a proof.

    Args:
        engine: reaches the clients.
        model: where.
        retained: the clients that stay, each with the samples it no longer uses.

    Example:
        >>> from torch import nn
        >>> from expunge.core.losses import SquaredError
        >>> from expunge.federation.engines.local import LocalEngine
        >>> layer, data = nn.Linear(1, 1, bias=False), {"ada": (torch.ones(4, 1), torch.ones(4, 1))}
        >>> engine = LocalEngine(layer, SquaredError(l2=1.0), data)
        >>> retained_residual(engine, Snapshot(torch.tensor([0.75]), {}), {"ada": ()}).norm
        0.5
    """
    theta, unit = model.parameters, torch.finfo(model.parameters.dtype).eps
    mean, cancelling = _mean_gradient(engine, model, retained)
    chance = torch.Generator().manual_seed(0)
    probe = torch.randn(theta.numel(), generator=chance, dtype=torch.float64).to(theta)
    way = probe * (PROBE_LENGTH * max(_norm(theta), 1.0) / _norm(probe))
    beside, _ = _mean_gradient(engine, model.moved(theta + way), retained)
    curvature = math.sqrt(theta.numel()) * _norm(beside - mean) / _norm(way)
    return Residual(_norm(mean), 4 * unit * (curvature * _norm(theta) + cancelling))


def newton_reference(
    engine: Engine, model: Snapshot, retained: Mapping[str, Indices], iterations: int = 10
) -> Snapshot:
    """A model nearer the retained optimum: one Newton step, by so many conjugate gradient iterations.

    Costs one gradient and one message round an iteration. It need not be right: where it is used, it is measured.
    """
    gradient, _ = _mean_gradient(engine, model, retained)

    def product(vector: Tensor) -> Tensor:
        tasks = {name: CurvatureProduct(model, vector[None], "ggn", None, out) for name, out in retained.items()}
        return ask_mean(engine, tasks)[0]

    solution = conjugate_gradient(product, gradient.to(model.parameters), iterations=iterations)
    return model.moved(model.parameters - solution.vector)


def _mean_gradient(engine: Engine, model: Snapshot, retained: Mapping[str, Indices]) -> tuple[Tensor, float]:
    """The retained gradient in float64, and ``sqrt(n)`` times the mean norm of the clients' own."""
    if not retained:
        raise RequestError("Nobody is retained, so there is no model to compare with: start a new one.")
    tasks = {name: Gradient(model, exclude=out) for name, out in retained.items()}
    replies = ask_each(engine, tasks, Sum).values()
    samples = sum(reply.count for reply in replies)
    mean = weighted_sum((reply.total.double() for reply in replies), (1.0 / samples for _ in replies))
    return mean, sum(_norm(reply.total) for reply in replies) / math.sqrt(samples)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector.double()))
