"""Convex federations of a chosen condition number, their retrained optimum known in float64."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from expunge.auditing.budget import Budget
from expunge.auditing.certificate import Certificate, certify
from expunge.auditing.residual import newton_reference
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.unlearning.request import Request
from unlearning.convex import ConvexFederation
from unlearning.presets import CORRECTED, forgotten

LEAVER = "client-0"
NEWTON = dataclasses.replace(
    CORRECTED, curvature_samples=None, damping=0.0, iterations=200, tolerance=1e-12, tau=None, gradient_of="retained"
)
WIDE = Budget(sigma=1e9, epsilon=1.0, delta=1e-5)


def conditioned(kind: str, seed: int, kappa: float, features: int = 6) -> ConvexFederation:
    """Retained curvature between mu = l2 = 1/kappa and at most L = 1, both of which ``ridge`` reaches.

    The client that leaves is anything at all: it is not in the retained objective.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    l2, count, outputs = 1 / kappa, 60, 3
    # Eigenvalues of X'X/n: the two ends, and any between, evenly in the logarithm.
    between = torch.rand(features - 2, generator=generator, dtype=torch.float64)
    curvature = torch.cat([torch.tensor([1.0, kappa], dtype=torch.float64), kappa**between])
    left, right = torch.linalg.qr(normal(count, features)).Q, torch.linalg.qr(normal(features, features)).Q
    inputs = left @ torch.diag(((curvature - 1) * l2 * count).sqrt()) @ right.T
    own = normal(10, features) * inputs.norm() / (count * features) ** 0.5
    if kind == "softmax":  # the Hessian of cross-entropy in the outputs is at most 1/2
        inputs, own = inputs * 2**0.5, own * 2**0.5
        labels = (inputs @ normal(features, outputs) + normal(count, outputs)).argmax(dim=1)
        targets, own_targets = labels, torch.randint(outputs, (10,), generator=generator)
    else:
        targets = inputs @ normal(features, outputs) + normal(count, outputs)
        own_targets = own @ normal(features, outputs) + normal(10, outputs)
    cuts = (0, 11, 30, count)
    datasets = {LEAVER: (own, own_targets)}
    for number, (start, end) in enumerate(itertools.pairwise(cuts), start=1):
        datasets[f"client-{number}"] = (inputs[start:end], targets[start:end])
    loss = CrossEntropy(l2) if kind == "softmax" else SquaredError(l2)
    return ConvexFederation(loss, datasets, outputs)


def retrained(federation: ConvexFederation, leave_out: dict[str, list[int] | None] | None = None) -> Tensor:
    """The optimum without the leaver, by Newton's method with halved steps where a full one does not help."""
    inputs, targets = federation.pooled({LEAVER: None} if leave_out is None else leave_out)
    theta = torch.zeros(inputs.shape[1] * federation.outputs, dtype=torch.float64)

    def value(at: Tensor) -> Tensor:
        return federation.value(at, inputs, targets)

    for _ in range(200):
        gradient = torch.func.grad(value)(theta)
        step = torch.linalg.solve(torch.autograd.functional.hessian(value, theta), gradient)
        length = 1.0
        while value(theta - length * step) > value(theta) + 1e-14 and length > 1e-6:
            length /= 2
        theta = theta - length * step
        if step.norm() < 1e-13 * theta.norm():
            break
    return theta


def unlearned(federation: ConvexFederation, start: Tensor, **options: object) -> Tensor:
    """By HF-KCU's Newton steps, as many as asked for."""
    changed = dataclasses.replace(NEWTON, **options)  # type: ignore[arg-type]
    outcome = forgotten(federation.engine(), federation.state(start), Request.of(LEAVER), changed)
    return outcome.state.model.parameters


def certified(
    federation: ConvexFederation, parameters: Tensor, budget: Budget = WIDE, *, sharp: bool = False
) -> Certificate:
    """The certificate of a model, with a reference a Newton step further where it is to be sharp."""
    engine, model = federation.engine(), Snapshot(parameters, {})
    retained = Request.of(LEAVER).parties(engine.clients()).retained
    reference = newton_reference(engine, model, retained) if sharp else None
    return certify(engine, federation.model, federation.loss, model, retained, budget, reference=reference)
