"""The Gauss-Newton matrix as Kronecker products, layer by layer: what a single pass over the data can tell of it.

A layer's weights act as ``z = W a``, with 1 appended to the inputs a where there is a bias, so the gradient of one
sample is ``sum over positions of g a'``, with g the gradient in z. Where inputs and gradients are about independent,
the layer's block of the matrix is (Martens & Grosse 2015; Grosse & Martens 2016 for convolutions)

    G ~ (sum of a a' over positions) x (mean of g g' over positions),

an outer product of two small matrices, whose eigenvectors diagonalise it: any function of G is then applied exactly,
with no solve. The gradients g are those of targets drawn from the model's own predictions, not of the labels: their
mean square is the Gauss-Newton matrix. What is left out: the curvature between layers.

That also takes positions for independent. Of a convolution's it is true enough, of a transformer's it is not: tokens
and their gradients are much alike. With the means over its P positions taken out, a sample's gradient is, exactly,

    sum of g a'  =  P mean(g) mean(a)'  +  sum of (g - mean(g)) (a - mean(a))',

so a linear layer over tokens gets two such products (one alone saw down to a tenth of what there is). What is left
out: the curvature between the two, and of the second, which has P - 1 directions, one part in P. Their sum is taken
by its diagonal in the eigenvectors of the summed factors.

Parameters of other layers (norms, embeddings, grouped convolutions) get the diagonal: with random signs, the gradient
of a few samples together has, in expectation, the sum of their squares as its square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, aligned, run
from expunge.core.curvature import require_evaluation_mode
from expunge.core.losses import Loss, amount
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, NumericalError

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]

Filter = Callable[[Tensor, Sequence[str]], Tensor]
"""A function of eigenvalues, given with the names of the parameters that they belong to; none are named for all."""

CHUNK = 250
PARTS = 40
"""At least so many groups of samples estimate a diagonal."""
PROBES = (1, 3)
"""So many samples a pass to find out along which dimension a layer sees samples."""


@dataclass(frozen=True)
class Block:
    """A layer whose curvature is a Kronecker product, or a sum of them: its name, and the sides of the two factors.

    ``inputs`` counts the appended 1 where ``bias`` is True; ``terms`` is 2 for a linear layer over tokens.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    terms: int = 1

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        prefix = f"{self.name}." if self.name else ""
        return (f"{prefix}weight", f"{prefix}bias") if self.bias else (f"{prefix}weight",)

    @property
    def numbers(self) -> int:
        """How many numbers its symmetric factors take."""
        return self.terms * (_triangle(self.inputs) + _triangle(self.outputs))


@dataclass(frozen=True, eq=False)
class Factors:
    """Means over samples, as one flat vector: of each block its factors' triangles, then the diagonal, then l2."""

    values: Tensor
    blocks: tuple[Block, ...]


def kronecker_factors(
    model: nn.Module, snapshot: Snapshot, batch: Batch, loss: Loss, *, seed: int = 0, forward: Forward | None = None
) -> Factors:
    """The factors of the mean loss's curvature over these samples: one forward and one backward pass.

    Args:
        model: the architecture, in evaluation mode.
        snapshot: parameters and buffers.
        batch: the samples; of their labels only what they count is looked at.
        loss: says what the model's predictions mean.
        seed: of the drawn targets.
        forward: how the model is run, where calling it is not enough.

    Example:
        >>> from expunge.core.losses import SquaredError
        >>> model = nn.Linear(2, 1, bias=False).eval()
        >>> batch = Batch.of(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))
        >>> found = kronecker_factors(model, Snapshot.of(model), batch, SquaredError())
        >>> found.blocks, found.values[:3]  # the triangle of a a'
        ((Block(name='', inputs=2, outputs=1, bias=False, terms=1),), tensor([1., 2., 4.]))
    """
    require_evaluation_mode(model)
    batch, count = aligned(model, batch, forward), len(batch)
    counted = amount(loss, batch.targets, count)
    if not counted > 0:
        raise DataError("Curvature needs at least one sample, and one label that counts.")
    layout = Layout.of(model)
    pass_ = _Pass(model, snapshot, layout, batch.take(torch.zeros(1, dtype=torch.int64)), forward)
    generator = torch.Generator().manual_seed(seed)
    size = min(CHUNK, -(-count // PARTS)) if pass_.others else CHUNK
    for part in batch.split(size):
        pass_.add(part, loss, generator, scale=(count / counted) ** 0.5)
    values = torch.cat([*pass_.totals(), snapshot.parameters.new_tensor([loss.l2 * count])]) / count
    if not bool(torch.isfinite(values).all()):
        raise NumericalError("A curvature factor is NaN or infinite: check the model and the data.")
    return Factors(values, pass_.blocks)


class KroneckerCurvature:
    """The curvature ``G`` whose factors are known, diagonalised.

    Args:
        factors: means over all samples.
        layout: where each parameter lies in the flat vector.
    """

    def __init__(self, factors: Factors, layout: Layout) -> None:
        sizes = {name: shape.numel() for name, shape in layout.shapes}
        covered = {name: block for block in factors.blocks for name in block.parameters}
        rest = [(name, size) for name, size in sizes.items() if name not in covered]
        expected = sum(block.numbers for block in factors.blocks) + sum(size for _, size in rest) + 1
        fits = factors.values.shape == (expected,) and all(
            block.terms > 0 and block.inputs * block.outputs == sum(sizes.get(name, 0) for name in block.parameters)
            for block in factors.blocks
        )
        if not fits:
            raise DataError("The curvature factors do not fit the model: they are of another architecture.")
        self._layout = layout
        self._l2 = max(float(factors.values[-1]), 0.0)  # as below: what is negative was not made by honest samples
        self._bases: list[tuple[Block, Tensor, Tensor, Tensor]] = []
        at = 0
        for block in factors.blocks:
            matrices: tuple[list[Tensor], list[Tensor]] = ([], [])
            for _ in range(block.terms):
                for side, found in zip((block.inputs, block.outputs), matrices, strict=True):
                    triangle = factors.values[at : at + _triangle(side)]
                    at += _triangle(side)
                    found.append(_symmetric(triangle.double(), side))
            (of_inputs, left), (of_outputs, right) = (_diagonalised(each) for each in matrices)
            left, right = left.to(factors.values), right.to(factors.values)
            self._bases.append((block, left, right, of_outputs.T @ of_inputs))
        self._diagonal = {}
        for name, size in rest:
            self._diagonal[name] = factors.values[at : at + size].double().clamp(min=0.0)
            at += size

    def apply(self, function: Filter, vector: Tensor) -> Tensor:
        """``f(G) v`` for a function of eigenvalues (a tensor of any shape) and of the parameters that they belong to.

        Example:
            >>> factors = Factors(torch.tensor([4.0, 0.0, 1.0, 2.0, 0.0]), (Block("", 2, 1, False),))
            >>> layout = Layout.of(nn.Linear(2, 1, bias=False))
            >>> KroneckerCurvature(factors, layout).apply(lambda e, names: e, torch.tensor([1.0, 1.0]))
            tensor([8., 2.])
        """
        parts = self._layout.unflatten(vector)
        found: dict[str, Tensor] = {}
        for block, left, right, eigenvalues in self._bases:
            names = block.parameters
            matrix = parts[names[0]].flatten(1)
            if block.bias:
                matrix = torch.cat([matrix, parts[names[1]][:, None]], dim=1)
            factor = function(eigenvalues + self._l2, names).to(matrix)
            matrix = right @ ((right.T @ matrix @ left) * factor) @ left.T
            found[names[0]] = (matrix[:, :-1] if block.bias else matrix).reshape(parts[names[0]].shape)
            if block.bias:
                found[names[1]] = matrix[:, -1]
        for name, diagonal in self._diagonal.items():
            found[name] = parts[name] * function(diagonal + self._l2, (name,)).to(vector).view_as(parts[name])
        return self._layout.flatten(found)

    @property
    def layers(self) -> int:
        """How many layers have factors of their own."""
        return len(self._bases)

    def quadratic(self, vector: Tensor) -> float:
        """``v' G v``."""
        return float(vector @ self.apply(lambda values, _: values, vector))


class _Pass:
    """Adds up factors over parts of the data, with hooks on the layers."""

    def __init__(
        self, model: nn.Module, snapshot: Snapshot, layout: Layout, sample: Batch, forward: Forward | None
    ) -> None:
        self._model, self._snapshot, self._run = model, snapshot, forward
        self._own = {name: part.detach() for name, part in layout.unflatten(snapshot.parameters).items()}
        products = self._layers_of(model, layout)
        terms = self._terms(products, sample)
        self._layers = {name: layer for name, layer in products.items() if name in terms}
        self.blocks = tuple(_block(name, layer, terms[name]) for name, layer in self._layers.items())
        covered = {name for block in self.blocks for name in block.parameters}
        self.others = [name for name, _ in layout.shapes if name not in covered]
        zero = snapshot.parameters.new_zeros
        self._inputs = {block.name: zero(block.terms, block.inputs, block.inputs) for block in self.blocks}
        self._outputs = {block.name: zero(block.terms, block.outputs, block.outputs) for block in self.blocks}
        self._squares = {name: torch.zeros_like(self._own[name]) for name in self.others}
        self._samples = 0

    @staticmethod
    def _layers_of(model: nn.Module, layout: Layout) -> dict[str, nn.Linear | nn.Conv2d]:
        """Layers whose every use is ``W a``, and whose weight is trained and nobody else's."""
        trained = {name for name, _ in layout.shapes}
        owners: dict[int, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        found: dict[str, nn.Linear | nn.Conv2d] = {}
        for name, module in model.named_modules():
            if not _is_product(module):
                continue
            prefix = f"{name}." if name else ""
            bias_is_trained = module.bias is None or f"{prefix}bias" in trained
            alone = all(owners.get(id(p)) == 1 for p in (module.weight, module.bias) if p is not None)
            if f"{prefix}weight" in trained and bias_is_trained and alone:
                found[name] = module
        return found

    def _terms(self, layers: dict[str, nn.Linear | nn.Conv2d], sample: Batch) -> dict[str, int]:
        """How many terms each layer has that the forward pass calls; torch's attention has one that it never calls.

        Two where it is called once, with samples along the first dimension and tokens of theirs along others. A first
        dimension of another meaning is of the right size for one number of samples at most, so two are tried.
        """
        seen: dict[str, list[bool]] = {}

        def noting(name: str, count: int) -> Hook:
            def hook(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
                over_tokens = isinstance(layer, nn.Linear) and inputs[0].dim() > 2 and len(inputs[0]) == count
                seen.setdefault(name, []).append(over_tokens)

            return hook

        for count in PROBES:
            several = sample.take(torch.zeros(count, dtype=torch.int64))
            self._forward(several, [(layer, noting(name, count)) for name, layer in layers.items()])
        return {name: 2 if calls == [True] * len(PROBES) else 1 for name, calls in seen.items()}

    def _forward(
        self, batch: Batch, hooks: list[tuple[nn.Linear | nn.Conv2d, Hook]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs, with hooks on layers while they are made, and the tensors that they can be differentiated in."""
        tensors = {name: part.clone().requires_grad_() for name, part in self._own.items()}
        handles = [layer.register_forward_hook(hook) for layer, hook in hooks]
        try:
            own = {**tensors, **self._snapshot.buffers}
            outputs = run(self._model, batch, self._run, tensors=own, twice=True)
        finally:
            for handle in handles:
                handle.remove()
        return outputs, tensors

    def add(self, batch: Batch, loss: Loss, generator: torch.Generator, *, scale: float) -> None:
        """One more part of the data; gradients are taken times ``scale``."""
        self._samples = len(batch)
        outputs, tensors = self._forward(batch, [(layer, self._watch(name)) for name, layer in self._layers.items()])
        drawn = loss.sampled_gradients(outputs.detach(), batch.targets, generator)
        signs = scale * (2.0 * torch.randint(2, (len(batch),), generator=generator).to(drawn) - 1)
        drawn = drawn * signs.view(-1, *[1] * (drawn.dim() - 1))
        # All parameters are asked for, so that the backward pass comes by every layer's hook.
        gradients = torch.autograd.grad(outputs, list(tensors.values()), drawn, allow_unused=True)
        for name, gradient in zip(self._own, gradients, strict=True):
            if name in self._squares and gradient is not None:
                self._squares[name] += gradient.square()

    def _watch(self, name: str) -> Hook:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            rows = _positions(layer, inputs[0].detach())
            for total, part in zip(self._inputs[name], self._apart(name, rows), strict=True):
                total += part.T @ part

            def backward(gradient: Tensor) -> None:
                columns = gradient.movedim(1, -1) if isinstance(layer, nn.Conv2d) else gradient
                columns = columns.reshape(len(rows), -1)
                for total, part in zip(self._outputs[name], self._apart(name, columns), strict=True):
                    total += part.T @ part / (len(part) / self._samples)

            # A tensor's own hook sees the gradient of this value even where a later layer works in place.
            outputs.register_hook(backward)  # type: ignore[no-untyped-call]

        return hook

    def _apart(self, name: str, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of all positions; of two terms, each sample's mean times the root of P, and the rows without it."""
        if len(self._inputs[name]) == 1:
            return (rows,)
        rows = rows.reshape(self._samples, -1, rows.shape[1])
        mean = rows.mean(dim=1, keepdim=True)
        return mean.squeeze(1) * rows.shape[1] ** 0.5, (rows - mean).flatten(0, 1)

    def totals(self) -> list[Tensor]:
        """Sums over all samples so far, in the order of the flat vector."""
        found = []
        for block in self.blocks:
            for term in zip(self._inputs[block.name], self._outputs[block.name], strict=True):
                for matrix in term:
                    rows, columns = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
                    found.append(matrix[rows, columns])
        return [*found, *(self._squares[name].flatten() for name in self.others)]


def _is_product(module: nn.Module) -> bool:
    """Whether the layer is exactly ``W a + b``: torch's own, not a subclass that does something else."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return (
        isinstance(module, nn.Conv2d)
        and type(module).forward is nn.Conv2d.forward
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _block(name: str, layer: nn.Linear | nn.Conv2d, terms: int) -> Block:
    bias = layer.bias is not None
    return Block(name, layer.weight[0].numel() + bias, len(layer.weight), bias, terms)


def _positions(layer: nn.Module, inputs: Tensor) -> Tensor:
    """One row for each sample and position: what the weights are multiplied with, 1 appended where there is a bias."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        rows = patches.transpose(1, 2).reshape(-1, patches.shape[1])
    else:
        rows = inputs.reshape(-1, inputs.shape[-1])
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1) if layer.bias is not None else rows


def _diagonalised(matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each one's diagonal in the eigenvectors of their sum, as rows, and those; of a single one, its eigenvalues."""
    values, vectors = _eigenvectors(torch.stack(matrices).sum(dim=0))
    rows = [(vectors * (each @ vectors)).sum(dim=0) for each in matrices] if len(matrices) > 1 else [values]
    return torch.stack(rows).clamp(min=0.0), vectors


def _eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix without negative ones.

    Where divide and conquer does not converge, as with many equal eigenvalues, the singular vectors are the same.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        vectors, values, _ = torch.linalg.svd(matrix)
    return values, vectors


def _triangle(side: int) -> int:
    return side * (side + 1) // 2


def _symmetric(triangle: Tensor, side: int) -> Tensor:
    matrix = triangle.new_zeros(side, side)
    rows, columns = torch.triu_indices(side, side, device=triangle.device)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix
