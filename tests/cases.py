"""The small float64 problems that everything is compared on, and the dense algebra to compare with.

A case's dense matrices come from torch.func (forward over reverse, and Jacobians), on a flat vector that is cut up
here: they share no code with expunge.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from expunge.core.batch import Batch
from expunge.core.curvature import Curvature
from expunge.core.losses import CrossEntropy, Loss, SquaredError
from expunge.core.vectors import Snapshot
from expunge.models import CNN, DigitsNet, ResNet18, SoftmaxRegression, ViTLite

with warnings.catch_warnings():
    # torch's own forward mode loads this at its first use, and scripts it, which torch itself deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp


class Tied(nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(inputs)))


class Unused(nn.Module):
    """One parameter that no output depends on, and one on which the outputs depend linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


class FusedAttention(nn.Module):
    """F.scaled_dot_product_attention, whose fused kernels cannot be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.classifier = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.project(inputs).chunk(3, dim=-1)
        return self.classifier(F.scaled_dot_product_attention(query, key, value).mean(dim=1))


class MultiheadAttention(nn.Module):
    """torch's own attention module, which takes the fused path too; its dropout is off in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.classifier = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(self.attention(inputs, inputs, inputs, need_weights=False)[0].mean(dim=1))


def resnet() -> nn.Module:
    """Narrow, with batch-norm statistics and scales that are not 0 and 1."""
    model = ResNet18(channels=1, classes=3, size=8, width=1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, 0.1, 0.9)
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def frozen(model: nn.Module, *trainable: str) -> nn.Module:
    """Freeze all but the named parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@dataclass(frozen=True)
class Case:
    """One problem: a model, data, a loss, and a chunk size that does not divide the sample count."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Loss
    count: int = 7
    chunk_size: int = 3

    @cached_property
    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.build().double().eval()

    @cached_property
    def snapshot(self) -> Snapshot:
        """The model's weights, moved a little: who reads the model instead of the snapshot gets it wrong."""
        own = Snapshot.of(self.model)
        noise = torch.randn(own.parameters.shape, generator=self._generator(1), dtype=torch.float64)
        return own.moved(own.parameters + 0.1 * noise)

    @cached_property
    def inputs(self) -> Tensor:
        return torch.randn(self.count, *self.shape, generator=self._generator(2), dtype=torch.float64)

    @cached_property
    def targets(self) -> Tensor:
        outputs = self.outputs(self.snapshot.parameters)
        if isinstance(self.loss, SquaredError):
            return torch.randn(outputs.shape, generator=self._generator(3), dtype=torch.float64)
        return torch.randint(outputs.shape[1], (self.count,), generator=self._generator(3))

    @property
    def theta(self) -> Tensor:
        _ = self.targets  # drawn now: nothing may be drawn inside torch.func's transforms
        return self.snapshot.parameters

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def curvature(self, kind: str, **options: object) -> Curvature:
        """The operator under test."""
        options = {"chunk_size": self.chunk_size, **options}
        return Curvature(
            self.model, self.snapshot, Batch.of(self.inputs, self.targets), self.loss, kind=kind, **options
        )

    def vectors(self, count: int) -> Tensor:
        return torch.randn(count, self.size, generator=self._generator(4), dtype=torch.float64)

    def outputs(self, theta: Tensor) -> Tensor:
        tensors, offset = dict(self.snapshot.buffers), 0
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                tensors[name] = theta[offset : offset + parameter.numel()].reshape(parameter.shape)
                offset += parameter.numel()
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(self.model, tensors, (self.inputs,))

    def output_loss(self, outputs: Tensor) -> Tensor:
        """The mean loss over samples as a function of all outputs, from torch's own losses."""
        if isinstance(self.loss, SquaredError):
            return 0.5 * F.mse_loss(outputs, self.targets, reduction="sum") / self.count
        return F.cross_entropy(outputs, self.targets)

    def objective(self, theta: Tensor) -> Tensor:
        return self.output_loss(self.outputs(theta)) + 0.5 * self.loss.l2 * theta.square().sum()

    def dense(self, kind: str) -> Tensor:
        """The matrix itself, for the mean loss."""
        return self.dense_hessian if kind == "hessian" else self.dense_ggn

    @cached_property
    def dense_hessian(self) -> Tensor:
        # Not torch.func.hessian: its vmap over a layer norm's gradient is wrong by percents in torch 2.13.
        assert self.size == len(self.theta)
        identity = torch.eye(self.size, dtype=torch.float64)
        return vmap(lambda vector: self.exact_product("hessian", vector), chunk_size=256)(identity)

    @cached_property
    def dense_ggn(self) -> Tensor:
        theta = self.theta
        jacobian = jacrev(self.outputs)(theta).reshape(-1, self.size)
        outputs = self.outputs(theta)
        of_outputs = hessian(self.output_loss)(outputs).reshape(outputs.numel(), outputs.numel())
        return jacobian.T @ of_outputs @ jacobian + self.loss.l2 * torch.eye(self.size, dtype=torch.float64)

    def exact_product(self, kind: str, vector: Tensor) -> Tensor:
        """One product without the matrix, for models whose matrix does not fit: forward mode where ours has reverse."""
        theta = self.theta
        if kind == "hessian":
            return jvp(grad(self.objective), (theta,), (vector,))[1]
        outputs, pushed = jvp(self.outputs, (theta,), (vector,))
        curved = jvp(grad(self.output_loss), (outputs,), (pushed,))[1]
        return vjp(self.outputs, theta)[1](curved)[0] + self.loss.l2 * vector

    @staticmethod
    def _generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


CASES = [
    Case("softmax", lambda: SoftmaxRegression(4, 3), (4,), CrossEntropy()),
    Case("softmax-l2", lambda: SoftmaxRegression(4, 3, bias=False), (4,), CrossEntropy(l2=0.3)),
    Case("linear-squared", lambda: nn.Linear(4, 2), (4,), SquaredError(l2=0.2)),
    Case("mlp", mlp, (4,), CrossEntropy(l2=0.1)),
    Case("mlp-squared", mlp, (4,), SquaredError()),
    Case("mlp-one-output", lambda: nn.Sequential(mlp(), nn.Linear(3, 1), nn.Flatten(0)), (4,), SquaredError()),
    Case("mlp-one-chunk", mlp, (4,), CrossEntropy(), chunk_size=100),
    Case("mlp-one-sample", mlp, (4,), CrossEntropy(), count=1),
    Case("mlp-frozen", lambda: frozen(mlp(), "0.bias", "2.weight"), (4,), CrossEntropy(l2=0.1)),
    Case("tied", Tied, (4,), CrossEntropy(l2=0.1)),
    Case("tied-squared", Tied, (4,), SquaredError()),
    Case("unused", Unused, (4,), SquaredError(l2=0.1)),
    Case("fused-attention", FusedAttention, (5, 4), CrossEntropy()),
    Case("multihead-attention", MultiheadAttention, (5, 4), CrossEntropy(l2=0.1)),
    Case("cnn", lambda: CNN(1, 3, size=8, width=2, hidden=4), (1, 8, 8), CrossEntropy(l2=0.01)),
    Case(
        "digits-net-ends",
        lambda: frozen(DigitsNet(), "features.0.weight", "classifier.2.bias"),
        (1, 8, 8),
        CrossEntropy(),
    ),
    Case("vit-lite", lambda: ViTLite(1, 3, size=8, width=4, depth=2, heads=2), (1, 8, 8), CrossEntropy()),
    Case("resnet18", resnet, (1, 8, 8), CrossEntropy(), count=3, chunk_size=2),
]

LARGE_CASES = [
    Case("digits-net", DigitsNet, (1, 8, 8), CrossEntropy(l2=0.01)),
    Case("cnn-squared", lambda: CNN(1, 3, size=8, width=8, hidden=16), (1, 8, 8), SquaredError()),
]
"""Cases whose matrix does not fit; compare with `exact_product`."""


def case(name: str) -> Case:
    return next(case for case in [*CASES, *LARGE_CASES] if case.name == name)


SPECTRA: dict[str, Callable[[int, float, torch.Generator], Tensor]] = {
    "geometric": lambda n, kappa, _: torch.logspace(0, 1, n, base=kappa, dtype=torch.float64),
    "clustered": lambda n, kappa, g: _with_ends(
        torch.tensor([1.0, kappa**0.5, kappa])[torch.randint(3, (n,), generator=g)], kappa, 1 + 1e-3 * _uniform(n, g)
    ),
    "uniform": lambda n, kappa, g: _with_ends(1 + (kappa - 1) * _uniform(n, g), kappa),
}
"""Spectra from exactly 1 to exactly kappa."""


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, dtype=torch.float64)


def _with_ends(values: Tensor, kappa: float, jitter: Tensor | float = 1.0) -> Tensor:
    values = (values.double() * jitter).clamp(1.0, kappa)
    values[0], values[-1] = 1.0, kappa
    return values


@dataclass(frozen=True)
class System:
    """A symmetric matrix with known eigenvalues, and a right side."""

    matrix: Tensor
    eigenvalues: Tensor
    right_side: Tensor

    def product(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector

    def solution(self, damping: float = 0.0) -> Tensor:
        return torch.linalg.solve(self.matrix + damping * torch.eye(len(self.matrix)).double(), self.right_side)


def system(eigenvalues: Tensor, seed: int) -> System:
    """A matrix with these eigenvalues and random eigenvectors."""
    n, generator = len(eigenvalues), torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    matrix = (basis * eigenvalues.double()) @ basis.T
    right_side = torch.randn(n, generator=generator, dtype=torch.float64)
    return System((matrix + matrix.T) / 2, eigenvalues.double(), right_side)


def random_system(seed: int) -> System:
    """Positive definite, 2 to 60 unknowns, condition number 1 to 10,000, one of the spectra in turn."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 61, (), generator=generator))
    kappa = 10 ** (4 * float(_uniform(1, generator)))
    scale = 10 ** (4 * float(_uniform(1, generator)) - 2)
    spectrum = list(SPECTRA.values())[seed % len(SPECTRA)]
    return system(scale * spectrum(n, kappa, generator), seed)
