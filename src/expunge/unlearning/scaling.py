"""Adaptive scaling: how long a step may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.federation.engine import Engine, ask_mean
from expunge.federation.tasks import Losses
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.influence import spread
from expunge.unlearning.request import Parties

LENGTHS = tuple(2.0 ** (-j / 2) for j in range(12))
"""Step lengths that the trust region tries, all in one message."""


def adaptive_scale(raw: Tensor, parameters: Tensor, beta: float) -> float:
    """Line 17 of Algorithm 1: ``min(1, beta ||theta|| / ||raw||)``.

    Example:
        >>> adaptive_scale(torch.tensor([4.0]), torch.tensor([10.0]), beta=0.1)
        0.25
    """
    norm = float(torch.linalg.vector_norm(raw))
    return min(1.0, beta * float(torch.linalg.vector_norm(parameters)) / norm) if norm else 1.0


def trust_region(
    engine: Engine, model: Snapshot, step: Tensor, parties: Parties, options: HfKcuOptions
) -> tuple[float | None, dict[str, float]]:
    """The largest t with ``L_r(theta - t step) <= L_r(theta) + tau``; None where no length is safe.

    The loss is taken on retained samples other than those that made the curvature, as far as there are others.
    """
    losses = retained_losses(engine, model, step, (0.0, *LENGTHS), parties, options)
    before, after = losses[0], dict(zip(LENGTHS, losses[1:], strict=True))
    safe = [length for length in LENGTHS if after[length] <= before + options.tau]
    length = safe[0] if safe and math.isfinite(before) else None
    return length, {"retained_loss_before": before, "retained_loss_after": after[length] if length else before}


def retained_losses(
    engine: Engine, model: Snapshot, step: Tensor, lengths: tuple[float, ...], parties: Parties, options: HfKcuOptions
) -> list[float]:
    """Mean loss of the retained clients at ``theta - t step`` for several t, in one message."""
    draws = spread(options.samples, parties.retained, parties.counts, options.seed, from_back=True)
    tasks = {name: Losses(model, step, lengths, draws[name], left_out) for name, left_out in parties.retained.items()}
    return [float(loss) for loss in ask_mean(engine, tasks)]
