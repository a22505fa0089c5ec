"""Dense float64 matrices that Kronecker factors are checked against."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from expunge.core.batch import Batch
from expunge.core.factors import kronecker_factors
from expunge.core.kronecker import KroneckerCurvature
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Layout, Snapshot

DOUBLE = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labelled(inputs: Tensor) -> Batch:
    """Of the labels nothing is looked at."""
    return Batch.of(inputs, torch.zeros(len(inputs), dtype=torch.int64))


def curvature_of(model: nn.Module, inputs: Tensor, loss, seed: int = 0) -> KroneckerCurvature:
    return KroneckerCurvature(
        kronecker_factors(model, Snapshot.of(model), labelled(inputs), loss, seed=seed), Layout.of(model)
    )


def dense(curvature: KroneckerCurvature, size: int, function=lambda e, _: e) -> Tensor:
    return torch.stack([curvature.apply(function, row) for row in torch.eye(size, dtype=DOUBLE)])


def gauss_newton(model: nn.Module, inputs: Tensor, loss) -> Tensor:
    """The dense matrix by Jacobians, sharing no code with expunge."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in named.values()]
    flat = torch.cat([p.flatten() for p in named.values()])

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        parts = {n: part.view_as(p) for (n, p), part in zip(named.items(), theta.split(sizes), strict=True)}
        return functional_call(model, {**parts, **dict(model.named_buffers())}, (x[None],))[0]

    jacobians = vmap(jacrev(outputs), (None, 0))(flat, inputs)
    with torch.no_grad():
        p = model(inputs).softmax(dim=1)
    inner = (
        torch.diag_embed(p) - p[:, :, None] * p[:, None]
        if isinstance(loss, CrossEntropy)
        else torch.eye(p.shape[1], dtype=DOUBLE).expand(len(p), -1, -1)
    )
    found = torch.einsum("nop,noq,nqr->pr", jacobians, inner, jacobians) / len(inputs)
    return found + loss.l2 * torch.eye(len(flat), dtype=DOUBLE)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))
