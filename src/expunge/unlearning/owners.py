"""Those who own the data to forget: their gradients, and how several of them combine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.messages.tasks import Gradient, Sum
from expunge.unlearning.request import Parties


def owners_gradients(engine: Engine, model: Snapshot, parties: Parties) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Line 4 of Algorithm 1: each owner's mean gradient on its data to forget, and its norm."""
    tasks = {name: Gradient(model, only=indices) for name, indices in parties.owners.items()}
    gradients = {name: reply.total / reply.count for name, reply in ask_each(engine, tasks, Sum).items()}
    return gradients, {name: float(torch.linalg.vector_norm(gradient)) for name, gradient in gradients.items()}


def causal_weights(kind: str, parties: Parties, gradient_norms: Mapping[str, float]) -> dict[str, float]:
    """alpha_i of Eq. (causal weight) for every reachable client; exactly zero for those without data to forget.

    ``gradient-norm`` is the printed equation; ``share`` is ``|D_u in D_i| / |D_u|``, which makes the sum of weighted
    gradients the mean gradient over D_u; ``uniform`` is 1/N for everybody.
    """
    if kind == "uniform":
        return dict.fromkeys(parties.counts, 1.0 / len(parties.counts))
    parts: Mapping[str, float] = gradient_norms if kind == "gradient-norm" else parties.forgotten_counts
    total = sum(parts.values())
    return {name: parts[name] / total if total and name in parts else 0.0 for name in parties.counts}
