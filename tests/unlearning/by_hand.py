"""A federation that one can follow with pencil and paper: a linear model without bias, squared error, full batches.

A sample is (x, y); its loss is 1/2 (theta.x - y)^2, its gradient (theta.x - y) x.
"""

from __future__ import annotations

import torch
from torch import nn

from expunge.core.losses import SquaredError
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule

RATE = 0.1


def line(*weights: float) -> nn.Module:
    model = nn.Linear(len(weights), 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def engine_of(model, data):
    """Clients by name, each a list of samples (x, y)."""
    tensors = {
        name: (torch.tensor([x for x, _ in own]).double(), torch.tensor([[y] for _, y in own]).double())
        for name, own in data.items()
    }
    return LocalEngine(model, SquaredError(), tensors)


def trained(model, data):
    """The model as if a training had just ended in which nobody moved it: the memory's vectors are all zero."""
    snapshot, memory = Snapshot.of(model), Memory()
    memory.record(
        {name: torch.zeros_like(snapshot.parameters) for name in data}, {n: len(own) for n, own in data.items()}
    )
    return ServerState(snapshot, Schedule(RATE, local_steps=1, rounds=1, batch_size=100, epochs=1), memory)


def gradient(theta, own):
    """The mean gradient of some samples."""
    total = [0.0] * len(theta)
    for x, y in own:
        residual = sum(t * value for t, value in zip(theta, x, strict=True)) - y
        total = [part + residual * value for part, value in zip(total, x, strict=True)]
    return [part / len(own) for part in total]


def moved(theta, way, length=1.0):
    return [t + length * step for t, step in zip(theta, way, strict=True)]


def averaged(vectors, weights):
    """The weighted mean of some vectors."""
    total = sum(weights)
    parts = [[weight * value for value in vector] for vector, weight in zip(vectors, weights, strict=True)]
    return [sum(values) / total for values in zip(*parts, strict=True)]


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def assert_ends_at(outcome, theta):
    found = outcome.state.model.parameters
    torch.testing.assert_close(found, torch.tensor(theta, dtype=torch.float64), rtol=1e-12, atol=1e-12)
