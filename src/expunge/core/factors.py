"""The factors of the Gauss-Newton matrix, layer by layer (`kronecker.py`): one forward and one backward pass.

The gradients are those of targets drawn from the model's own predictions, not of the labels: their mean square is the
Gauss-Newton matrix.

Parameters of other layers get the diagonal. Of a norm's scale and shift, and of a bias alone, a sample's gradient is a
sum over its positions of what the hooks see anyway. What is added to every sample, as places and class tokens are, is
given to each as a row of its own, whose gradient is the sample's. Of the rest (recurrent layers, grouped convolutions,
other parameters outside all layers) it is estimated: with random signs, the gradient of a few samples together has, in
expectation, the sum of their squares as its square.

An embedding whose weight is also that of the output layer has the products of both; what is left out is the curvature
between the two uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, aligned, alike, joined
from expunge.core.curvature import require_evaluation_mode
from expunge.core.factored import CHUNK, Factored, Hook, joined_name
from expunge.core.kronecker import Block, Factors
from expunge.core.layers import (
    columns_of,
    counts_of,
    is_table,
    rows_of,
    scale_gradients,
    scaled_by,
)
from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, Loss, amount
from expunge.core.moments import second_moments
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, NumericalError

PARTS = 40
"""At least so many groups of samples estimate a diagonal, where no hook can tell it."""


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
        >>> found.blocks[0].name, found.values[:3]  # the triangle of a a'
        ('', tensor([1., 2., 4.]))
    """
    require_evaluation_mode(model)
    return summed_factors(model, snapshot, [Share(aligned(model, batch, forward), seed)], loss, forward=forward)


@dataclass(frozen=True, eq=False)
class Share:
    """Samples whose targets are drawn with a seed of their own, and whose mean counts so many times in a sum."""

    batch: Batch
    seed: int
    times: float = 1.0


def summed_factors(
    model: nn.Module, snapshot: Snapshot, shares: Sequence[Share], loss: Loss, *, forward: Forward | None = None
) -> Factors:
    """The sum of the factors of several shares, whose samples go through the model together where they can.

    Args: as those of ``kronecker_factors``, with targets that are for what the model predicts (``aligned``).

    Example:
        >>> from expunge.core.losses import SquaredError
        >>> model = nn.Linear(1, 1, bias=False).eval()
        >>> shares = [Share(Batch.of(torch.tensor([[own]]), torch.zeros(1, 1)), 0, times=2.0) for own in (1.0, 3.0)]
        >>> summed_factors(model, Snapshot.of(model), shares, SquaredError()).values[0]
        tensor(20.)
    """
    require_evaluation_mode(model)
    first, counted = shares[0], [amount(loss, share.batch.targets, len(share.batch)) for share in shares]
    if not min(counted) > 0:
        raise DataError("Curvature needs at least one sample, and one label that counts.")
    pass_ = _Pass(model, snapshot, first.batch.take(torch.zeros(1, dtype=torch.int64)), forward)
    for parts in _passes(shares, counted, pass_):
        pass_.add(parts, loss)
    unit = first.times / len(first.batch)
    l2 = snapshot.parameters.new_tensor([loss.l2 * sum(share.times for share in shares) / unit])
    values = torch.cat([*pass_.totals(), l2]) * unit
    if not bool(torch.isfinite(values).all()):
        raise NumericalError("A curvature factor is NaN or infinite: check the model and the data.")
    sure = isinstance(loss, CrossEntropy | BinaryCrossEntropy)  # of other losses no scale of the outputs is confidence
    return Factors(values, tuple(replace(block, last=block.last and sure) for block in pass_.blocks))


class _Part(NamedTuple):
    """Samples of one share in a pass, beside the first share's: what gradients and inputs are multiplied with."""

    batch: Batch
    generator: torch.Generator
    of_gradients: float
    of_inputs: float


def _passes(shares: Sequence[Share], counted: Sequence[float], pass_: _Pass) -> Iterator[list[_Part]]:
    """The parts that go through the model together: chunks of shares, which targets are drawn for one by one."""
    unit, parts = shares[0].times / len(shares[0].batch), list[_Part]()
    for share, counts in zip(shares, counted, strict=True):
        count = len(share.batch)
        generator, root = torch.Generator().manual_seed(share.seed), (share.times / count / unit) ** 0.5
        size = min(CHUNK, pass_.at_once)
        size = min(size, -(-count // PARTS)) if pass_.estimated else size
        for batch in share.batch.split(size):
            together = pass_.may_join and sum(len(part.batch) for part in parts) + len(batch) <= pass_.at_once
            if parts and not (together and alike(parts[0].batch, batch)):
                yield parts
                parts = []
            parts.append(_Part(batch, generator, root * (count / counts) ** 0.5, root))
    yield parts


class _Pass(Factored):
    """Adds up factors over parts of the data, with hooks on the layers."""

    def __init__(self, model: nn.Module, snapshot: Snapshot, sample: Batch, forward: Forward | None) -> None:
        super().__init__(model, snapshot, sample, forward)
        self._inputs = {block.name: self._zeros(block, 0) for block in self.blocks}
        self._outputs = {block.name: self._zeros(block, 1) for block in self.blocks}
        self._squares = {name: torch.zeros_like(self._own[name]) for name in self.others}
        self._of_samples: dict[str, Tensor] = {}
        self._samples, self._roots, self._alike = 0, torch.ones(0), True
        self._counts: list[int] = []
        self._leaves: list[Tensor] = []

    def _zeros(self, block: Block, side: int) -> Tensor:
        length, diagonal = block.sides[side]
        return self._snapshot.parameters.new_zeros(block.terms, length, *([] if diagonal else [length]))

    def add(self, parts: Sequence[_Part], loss: Loss) -> None:
        """One more pass."""
        batch = joined([part.batch for part in parts])
        self._samples, self._of_samples, self._leaves = len(batch), {}, []
        self._counts = [len(part.batch) for part in parts]
        roots = torch.tensor([part.of_inputs for part in parts], dtype=torch.float64)
        self._roots = roots.to(self._snapshot.parameters)
        self._alike = bool((roots == 1).all())
        hooks = [(layer, self._watch(block, layer)) for block in self.blocks for layer in self._layers[block.name]]
        hooks += [(layer, self._watch_scales(name)) for name, layer in self._scaling.items()]
        outputs, tensors = self._forward(batch, hooks, [*self._by_sample, *self.estimated])
        drawn = torch.cat(
            [
                _signed(loss.sampled_gradients(own, part.batch.targets, part.generator), part)
                for own, part in zip(torch.split(outputs.detach(), self._counts), parts, strict=True)
            ]
        )
        # In what the layers gave, not in their weights, whose gradients nobody looks at.
        # Not given as grad_outputs, for whose shapes torch would load sympy: nearly a second of a first request.
        asked = [*tensors.values(), *self._leaves]
        gradients = torch.autograd.grad((outputs * drawn).sum(), asked, allow_unused=True)
        for name, gradient in zip(tensors, gradients, strict=False):
            if gradient is not None:
                squares = gradient.square()
                self._squares[name] += squares.sum(dim=0, keepdim=True) if name in self._by_sample else squares
        for name, of_samples in self._of_samples.items():
            self._squares[name] += of_samples.square().sum(dim=0)

    def _opened(self, outputs: Tensor) -> Tensor:
        """What a layer gave, with a gradient: where nothing before it has one, the graph begins here.

        Inputs that ask for a gradient of their own do not count.
        """
        if outputs.requires_grad and (self._leaves or self._by_sample or self.estimated):
            return outputs
        leaf = outputs.detach().requires_grad_()
        self._leaves.append(leaf)
        return leaf.clone()  # a later layer may work in place

    def _weighted(self, rows: Tensor) -> Tensor:
        """Rows of all samples, each by its share."""
        if self._alike:
            return rows
        roots = self._roots.repeat_interleave(torch.tensor(self._counts, device=rows.device), output_size=self._samples)
        apart = rows.view(self._samples, -1, rows.shape[1])
        return (apart * roots.to(rows)[:, None, None]).flatten(0, 1)

    def _watch(self, block: Block, watched: Any) -> Hook:
        of_inputs, of_outputs = self._inputs[block.name], self._outputs[block.name]
        terms = block.terms
        if len(self._layers[block.name]) == 2:  # the last term is the table's, which has its rows where z is, W = W'
            of_inputs, of_outputs = (of_inputs[:-1], of_outputs[:-1])
            terms -= 1
            if is_table(watched):
                of_inputs, of_outputs = self._outputs[block.name][-1:], self._inputs[block.name][-1:]
                terms = 1

        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
            given, outputs = inputs[0].detach(), self._opened(outputs)
            if isinstance(layer, nn.Embedding):
                parts = torch.split(given, self._counts) if len(self._counts) > 1 else [given]
                counts = self._roots.square() @ torch.stack([counts_of(layer, part) for part in parts]).to(self._roots)
                (of_inputs[0] if of_inputs.dim() == 2 else of_inputs[0].diagonal()).add_(counts)
            else:
                self._add(of_inputs, self._apart(terms, self._weighted(rows_of(layer, given))))

            def backward(gradient: Tensor) -> None:
                parts = self._apart(terms, columns_of(layer, gradient, given))
                self._add(of_outputs, [part / (len(part) / self._samples) ** 0.5 for part in parts])

            # A tensor's own hook sees the gradient of this value even where a later layer works in place.
            outputs.register_hook(backward)  # type: ignore[no-untyped-call]
            return outputs

        return hook

    def _watch_scales(self, name: str) -> Hook:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
            normed = scaled_by(layer, inputs[0].detach())  # now: afterwards the layer has other statistics
            outputs = self._opened(outputs)

            def backward(gradient: Tensor) -> None:
                for own, found in scale_gradients(layer, gradient, normed).items():
                    key = joined_name(name, own)
                    if own in self._told[name]:
                        before = self._of_samples.get(key)
                        self._of_samples[key] = found if before is None else before + found

            outputs.register_hook(backward)  # type: ignore[no-untyped-call]
            return outputs

        return hook

    @staticmethod
    def _add(totals: Tensor, parts: list[Tensor]) -> None:
        for total, part in zip(totals, parts, strict=True):
            total += second_moments(part) if total.dim() == 2 else part.square().sum(dim=0)

    def _apart(self, terms: int, rows: Tensor) -> list[Tensor]:
        """The rows of all positions; of two terms, each sample's mean times the root of P, and the rows without it."""
        if terms == 1:
            return [rows]
        rows = rows.reshape(self._samples, -1, rows.shape[1])
        mean = rows.mean(dim=1, keepdim=True)
        return [mean.squeeze(1) * rows.shape[1] ** 0.5, (rows - mean).flatten(0, 1)]

    def totals(self) -> list[Tensor]:
        """Sums over all samples so far, in the order of the flat vector."""
        found = []
        for block in self.blocks:
            for term in zip(self._inputs[block.name], self._outputs[block.name], strict=True):
                for matrix in term:
                    if matrix.dim() == 1:
                        found.append(matrix)
                        continue
                    rows, columns = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
                    found.append(matrix[rows, columns])
        return [*found, *(self._squares[name].flatten() for name in self.others)]


def _signed(drawn: Tensor, part: _Part) -> Tensor:
    """Gradients of drawn targets with a random sign for each sample, times what the part's count."""
    signs = 2.0 * torch.randint(2, (len(drawn),), generator=part.generator).to(drawn) - 1
    return drawn * (part.of_gradients * signs).view(-1, *[1] * (drawn.dim() - 1))
