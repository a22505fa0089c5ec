"""Products with the Hessian and the generalised Gauss-Newton matrix (GGN) of a mean loss, matrix-free.

For a mean loss ``F(theta) = 1/n sum_j l(z_j(theta), y_j) + l2/2 ||theta||^2``, n the samples or what they count

    Hessian  H v = grad (grad F . v)                          (Pearlmutter 1994; reverse over reverse)
    GGN      G v = 1/n sum_j J_j' B_j J_j v + l2 v            (J_j: outputs by parameters, B_j: loss by outputs)

G is positive semi-definite, H is not. The data is cut into chunks; each chunk's differentiated graph is
built once and kept, as long as the byte budget lasts, and rebuilt at each product beyond it. That, and
convolutions that compute no term nobody asked for, is what makes a GGN product cost about one gradient
(`benchmarks/curvature.py` measures it).

Where it fails: models with batch norm or dropout in training mode have no well-defined per-sample loss and
are refused; piecewise linear networks have H = G + a term that a kink makes useless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, aligned, run
from expunge.core.convolution import lean_convolutions
from expunge.core.losses import Loss, amount
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError, RequestError

Kind = Literal["ggn", "hessian"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Reduction = Literal["mean", "sum"]
Product = Callable[[Tensor], Tensor]
_Chunk = tuple[Batch, Tensor | None]

_STATEFUL_WHILE_TRAINING = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU)


def require_evaluation_mode(model: nn.Module) -> None:
    """Refuse a model whose outputs depend on the batch or on chance: batch norm or dropout in training mode.

    Example:
        >>> require_evaluation_mode(nn.Dropout().eval())
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ModelError(f"Layer {name or 'model'!r} has no running statistics: its outputs depend on the batch.")
        drops = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        if module.training and (drops or isinstance(module, _STATEFUL_WHILE_TRAINING)):
            raise ModelError(
                f"Layer {name or 'model'!r} ({type(module).__name__}) is in training mode: call model.eval() first."
            )


class Curvature:
    """The curvature of a mean loss over a dataset at one point, as an operator: ``curvature @ vector``.

    Args:
        model: any module in evaluation mode; its own weights are neither read nor changed.
        snapshot: the point theta (and the buffers) at which the curvature is taken.
        batch: all samples.
        loss: the mean loss, with L2.
        kind: ``ggn`` or ``hessian``.
        reduction: ``mean``, or ``sum``, which is n times the mean, L2 term included (it belongs to every sample).
        weights: what each sample's loss is multiplied with in the place of 1/n.
        chunk_size: samples differentiated together; the last chunk may be smaller, each counts by its size.
        budget_bytes: how much may be kept between products; chunks beyond it are rebuilt at each product.
        forward: how the model is run, where calling it is not enough.

    Example:
        >>> from expunge.core.losses import SquaredError
        >>> model = nn.Linear(2, 1, bias=False)
        >>> batch = Batch.of(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1))
        >>> curvature = Curvature(model, Snapshot.of(model), batch, SquaredError())
        >>> curvature @ torch.ones(2)
        tensor([0.5000, 2.0000])
    """

    def __init__(
        self,
        model: nn.Module,
        snapshot: Snapshot,
        batch: Batch,
        loss: Loss,
        *,
        kind: Kind = "ggn",
        reduction: Reduction = "mean",
        weights: Tensor | None = None,
        chunk_size: int = 128,
        budget_bytes: int = 2 << 30,
        forward: Forward | None = None,
    ) -> None:
        if kind not in KINDS:
            raise RequestError(f"The curvature {kind!r} is not known: use one of {', '.join(KINDS)}.")
        if len(batch) == 0:
            raise DataError("Curvature needs at least one sample.")
        if reduction not in ("mean", "sum"):
            raise RequestError(f"The reduction {reduction!r} is not known: use 'mean' or 'sum'.")
        if chunk_size < 1:
            raise RequestError(f"The chunk size must be at least 1, not {chunk_size}.")
        require_evaluation_mode(model)
        batch = aligned(model, batch, forward)
        self.count = len(batch)
        self._amount = amount(loss, batch.targets, len(batch)) if weights is None else 1.0
        if not self._amount > 0:
            raise DataError("Curvature needs at least one label that counts.")
        self._scale = 1.0 if reduction == "mean" else float(self.count)
        self.size = snapshot.parameters.numel()
        self._model, self._snapshot, self._loss, self._forward = model, snapshot, loss, forward
        self._layout = Layout.of(model)
        self._kind = kind
        self._linearise = self._linearise_ggn if kind == "ggn" else self._linearise_hessian
        chunks = batch.split(chunk_size)
        own = [None] * len(chunks) if weights is None else torch.split(weights.to(snapshot.parameters), chunk_size)
        self._chunks: list[_Chunk] = list(zip(chunks, own, strict=True))
        self._kept: list[Product] = []
        self._keep_within(budget_bytes)

    def __matmul__(self, vector: Tensor) -> Tensor:
        """The product with one flat vector."""
        if vector.shape != (self.size,):
            raise RequestError(f"The curvature takes vectors of length {self.size}, not {tuple(vector.shape)}.")
        total = torch.zeros_like(vector)
        for number, chunk in enumerate(self._chunks):
            product = self._kept[number] if number < len(self._kept) else self._linearise(*chunk)
            total += product(vector)
        return self._scale * (total / self._amount + self._loss.l2 * vector)

    @property
    def kept_chunks(self) -> int:
        """How many chunks' graphs are kept between products."""
        return len(self._kept)

    def _keep_within(self, budget_bytes: int) -> None:
        """Keep as many chunks' graphs as the budget holds, by the measured size of the first and largest."""
        held = (*self._chunks[0][0].tensors(), self._snapshot.parameters, *self._snapshot.buffers.values())
        meter = SavedBytes((*held, *self._model.parameters()))
        with meter:
            first = self._linearise(*self._chunks[0])
        # Beside what autograd saves, each chunk's product keeps a first derivative of the parameters' size.
        derivative = self._snapshot.parameters.numel() * self._snapshot.parameters.element_size()
        affordable = budget_bytes // (meter.total + derivative)
        if affordable >= 1:
            self._kept = [first, *(self._linearise(*chunk) for chunk in self._chunks[1:affordable])]

    def _outputs(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs at the snapshot and the leaf tensors with respect to which they can be differentiated."""
        leaves = {
            name: part.detach().requires_grad_()
            for name, part in self._layout.unflatten(self._snapshot.parameters).items()
        }
        with lean_convolutions(at_fixed_point=self._kind == "ggn"):
            tensors = {**leaves, **self._snapshot.buffers}
            outputs = run(self._model, batch, self._forward, tensors=tensors, twice=True)
        return outputs, tuple(leaves.values())

    def _linearise_hessian(self, batch: Batch, weights: Tensor | None) -> Product:
        outputs, leaves = self._outputs(batch)
        losses = self._loss.per_sample(outputs, batch.targets)
        summed = losses.sum() if weights is None else torch.dot(losses, weights.to(losses))
        gradient = torch.autograd.grad(summed, leaves, create_graph=True, materialize_grads=True)

        def product(vector: Tensor) -> Tensor:
            parts = tuple(self._layout.unflatten(vector).values())
            # A loss that is linear in every parameter has a gradient without history: its Hessian is zero.
            known = [(g, part) for g, part in zip(gradient, parts, strict=True) if g.requires_grad]
            if not known:
                return torch.zeros_like(vector)
            second = torch.autograd.grad(
                [g for g, _ in known],
                leaves,
                [part for _, part in known],
                retain_graph=True,
                materialize_grads=True,
            )
            return torch.cat([s.reshape(-1) for s in second])

        return product

    def _linearise_ggn(self, batch: Batch, weights: Tensor | None) -> Product:
        outputs, leaves = self._outputs(batch)
        # J'u is linear in u, so differentiating it once more, in u, gives J v: forward mode out of two reverses.
        probe = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, leaves, probe, create_graph=True, materialize_grads=True)
        at_outputs = outputs.detach()

        def product(vector: Tensor) -> Tensor:
            parts = tuple(self._layout.unflatten(vector).values())
            used = [(p, part) for p, part in zip(pulled, parts, strict=True) if p.requires_grad]
            (pushed,) = torch.autograd.grad([p for p, _ in used], probe, [part for _, part in used], retain_graph=True)
            curved = self._loss.output_hessian_product(at_outputs, batch.targets, pushed)
            if weights is not None:
                curved = curved * weights.to(curved).view(-1, *[1] * (curved.dim() - 1))
            back = torch.autograd.grad(outputs, leaves, curved, retain_graph=True, materialize_grads=True)
            return torch.cat([b.reshape(-1) for b in back])

        return product


class SavedBytes:
    """Counts the bytes that autograd saves while it is open; a storage saved twice counts once.

    Storages that are held anyway (the data, the parameters) do not count: a chunk is a view of all the data.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        self.total = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive in a cycle

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
