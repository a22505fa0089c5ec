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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, aligned, alike, joined, run
from expunge.core.curvature import SavedBytes, require_evaluation_mode
from expunge.core.kronecker import Block, Factors
from expunge.core.layers import (
    columns_of,
    counts_of,
    is_over_tokens,
    is_table,
    product_shape,
    rows_of,
    scale_gradients,
    scale_parameters,
    scaled_by,
)
from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, Loss, amount
from expunge.core.moments import second_moments
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, NumericalError

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]

CHUNK = 250
MANY = 2048
PART_OF_MEMORY = 8
"""Samples in one pass; on a GPU more of them, while what autograd saves takes no more than one part in so many of its
memory."""
ANSWERS = 1 << 26
"""At most so many outputs are made in one pass."""
PARTS = 40
"""At least so many groups of samples estimate a diagonal, where no hook can tell it."""
PROBES = (1, 3)
"""So many samples a pass to find out along which dimension a layer sees samples."""
WIDEST = 1 << 14
"""A longer side of a layer is a diagonal."""
NUMBERS = 1 << 29
"""At most so many numbers are kept for all layers together; the longest sides are diagonals until it is so."""


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


class _Pass:
    """Adds up factors over parts of the data, with hooks on the layers."""

    def __init__(self, model: nn.Module, snapshot: Snapshot, sample: Batch, forward: Forward | None) -> None:
        self._model, self._snapshot, self._run = model, snapshot, forward
        layout = Layout.of(model)
        self._own = {name: part.detach() for name, part in layout.unflatten(snapshot.parameters).items()}
        self._owners = _owners(model)
        self._alone = {own for own, count in self._owners.items() if count == 1}
        self.at_once, self._saved = CHUNK, 0
        self._last: Any = None
        self._by_sample: set[str] = set()
        products, scales = self._products(), self._scales()
        calls = self._known_calls([*chain.from_iterable(products.values()), *scales.values()], sample)
        self._layers = {name: own for name, own in products.items() if all(layer in calls for layer in own)}
        self.blocks = _affordable([_block(name, own, calls, self._last) for name, own in self._layers.items()])
        covered = {name for block in self.blocks for name in block.parameters}
        self._told = {
            name: [own for own in names if _joined(name, own) not in covered]
            for name, names in self._readable(scales, calls).items()
        }
        self._told = {name: names for name, names in self._told.items() if names}
        self._scaling = {name: scales[name] for name in self._told}
        told = {_joined(name, own) for name, names in self._told.items() for own in names}
        self.others = [name for name, _ in layout.shapes if name not in covered]
        untold = [name for name in self.others if name not in told]
        self._by_sample = {name for name in untold if self._is_added_to_samples(name, sample)}
        self.estimated = [name for name in untold if name not in self._by_sample]
        self._inputs = {block.name: self._zeros(block, 0) for block in self.blocks}
        self._outputs = {block.name: self._zeros(block, 1) for block in self.blocks}
        self._squares = {name: torch.zeros_like(self._own[name]) for name in self.others}
        self._of_samples: dict[str, Tensor] = {}
        self._samples, self._roots, self._alike = 0, torch.ones(0), True
        self._counts: list[int] = []
        self._leaves: list[Tensor] = []
        watched = [*chain.from_iterable(self._layers.values()), *self._scaling.values()]
        # Rows of samples can be told apart where all layers have them in front.
        by_sample = all(call.by_sample for layer in watched for call in calls[layer])
        self.may_join = by_sample and not self.estimated

    def _zeros(self, block: Block, side: int) -> Tensor:
        length, diagonal = block.sides[side]
        return self._snapshot.parameters.new_zeros(block.terms, length, *([] if diagonal else [length]))

    def _products(self) -> dict[str, list[Any]]:
        """Layers whose every use is ``W a``, and whose weight is trained and nobody else's.

        A table and the linear layer that share a weight, as where a language model starts and ends, are two in one.
        """
        found: dict[str, list[Any]] = {}
        tied: dict[int, list[Any]] = {}
        for name, module in self._model.named_modules():
            if product_shape(module) is None:
                continue
            own = dict(module.named_parameters(recurse=False))
            if all(_joined(name, each) in self._own and id(own[each]) in self._alone for each in own):
                found[name] = [module]
            elif list(own) == ["weight"]:
                tied.setdefault(id(module.weight), []).append(module)
        for name, module in self._model.named_modules():
            pair = tied.get(id(getattr(module, "weight", None)), [])
            if _joined(name, "weight") in self._own and _is_tied_pair(pair, self._owners):
                found[name] = sorted(pair, key=is_table)  # the linear layer first
        return found

    def _scales(self) -> dict[str, Any]:
        """Layers with scales, shifts or biases that are trained, and nobody else's."""
        found: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            names = [each for each in scale_parameters(module) if _joined(name, each) in self._own]
            if names and all(id(own[each]) in self._alone for each in names):
                found[name] = module
        return found

    def _known_calls(self, layers: list[Any], sample: Batch) -> dict[Any, list[_Call]]:
        """As probed before, where the same layers saw samples of the same form: clients that take turns are alike."""
        layers = list(dict.fromkeys(layers))
        form = tuple((own.shape, own.dtype) for own in sample.tensors()), self._run, *map(id, layers)
        known = _PROBED.get(self._model)
        if known is None or known.form != form:
            found = self._probed(layers, sample)
            last = layers.index(self._last) if self._last is not None else None
            known = _Probed(form, [found.get(layer) for layer in layers], self.at_once, self._saved, last, {})
            _PROBED[self._model] = known
        self.at_once, self._last = known.at_once, layers[known.last] if known.last is not None else None
        return {layer: own for layer, own in zip(layers, known.calls, strict=True) if own is not None}

    def _is_added_to_samples(self, name: str, sample: Batch) -> bool:
        """Whether a parameter as places or a class token have it is every sample's own row, where it has one for each.

        Tried: with another row for the second of three samples, its outputs are those of that row, the others' stay.
        """
        own, known = self._own[name], _PROBED[self._model].by_sample
        if own.dim() < 3 or len(own) != 1:
            return False
        if name not in known:
            three = sample.take(torch.zeros(3, dtype=torch.int64))
            chance = torch.Generator().manual_seed(0)
            moved = own + (1.0 + own.abs().mean()) * torch.randn(own.shape, generator=chance).to(own)
            rows = torch.cat([own, moved, own])
            try:
                with torch.no_grad():
                    plain, others, mixed = (self._outputs_with(name, tensor, three) for tensor in (own, moved, rows))
                wanted = torch.stack([plain[0], others[1], plain[2]])
                effect = torch.linalg.vector_norm((others[1] - plain[1]).double())
                seen = effect > 1e-2 * torch.linalg.vector_norm(plain[1].double())
                known[name] = bool(seen & (torch.linalg.vector_norm((mixed - wanted).double()) <= 1e-3 * effect))
            except (RuntimeError, ValueError):  # it does not take as many rows
                known[name] = False
        return known[name]

    def _outputs_with(self, name: str, tensor: Tensor, batch: Batch) -> Tensor:
        tensors = {**self._own, name: tensor, **self._snapshot.buffers}
        return run(self._model, batch, self._run, tensors=tensors, twice=True)

    def _probed(self, layers: list[Any], sample: Batch) -> dict[Any, list[_Call]]:
        """How each layer is called by the forward pass; torch's attention has one that it never calls.

        A first dimension of another meaning than samples is of the right size for one number of samples at most, so
        two numbers are tried.
        """
        seen: dict[Any, list[_Call]] = {}
        made: dict[Any, Tensor] = {}

        def noting(count: int) -> Hook:
            def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
                made[layer] = outputs
                if not inputs or not isinstance(outputs, Tensor):
                    seen.setdefault(layer, []).append(_Call(False, False, ()))
                    return
                given = inputs[0].detach()
                by_sample = given.dim() > 0 and len(given) == count and len(outputs) == count
                names = scale_parameters(layer, given, outputs.detach())
                seen.setdefault(layer, []).append(_Call(is_over_tokens(layer, given, count), by_sample, names))

            return hook

        for count in PROBES:
            several = sample.take(torch.zeros(count, dtype=torch.int64))
            saved = SavedBytes((*several.tensors(), *self._own.values(), *self._model.parameters()))
            with saved:
                outputs, _ = self._forward(several, [(layer, noting(count)) for layer in layers], list(self._own))
            self._saved = saved.total // count
            self.at_once = _at_once(outputs.numel() // count, self._saved, self._snapshot.parameters.device)
            whose = [layer for layer, own in made.items() if own is outputs]
            self._last = whose[0] if len(whose) == 1 and self._last in (None, whose[0]) else None
        return seen

    def _readable(self, scales: dict[str, Any], calls: dict[Any, list[_Call]]) -> dict[str, tuple[str, ...]]:
        """Layers that see samples along the first dimension whenever they are called, and which scales they have."""
        found = {}
        for name, layer in scales.items():
            own = calls.get(layer, [])
            names = tuple(each for each in (own[0].scales if own else ()) if _joined(name, each) in self._own)
            if names and all(call.by_sample and call.scales == own[0].scales for call in own):
                found[name] = names
        return found

    def _forward(
        self, batch: Batch, hooks: list[tuple[Any, Hook]], wanted: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs, with hooks on layers while they are made, and the tensors that gradients are wanted in."""
        own = {**self._own, **self._snapshot.buffers}
        for name in self._by_sample:
            own[name] = own[name].expand(len(batch), *own[name].shape[1:])
        tensors = {name: own[name].detach().requires_grad_() for name in wanted}
        handles = [layer.register_forward_hook(hook) for layer, hook in hooks]
        try:
            outputs = run(self._model, batch, self._run, tensors={**own, **tensors}, twice=True)
        finally:
            for handle in handles:
                handle.remove()
        return outputs, tensors

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
        """What a layer gave, with a gradient: where nothing before it has one, the graph begins here."""
        if outputs.requires_grad:
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
                    key = _joined(name, own)
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


class _Call:
    """How the forward pass called a layer, once."""

    def __init__(self, over_tokens: bool, by_sample: bool, scales: tuple[str, ...]) -> None:
        self.over_tokens, self.by_sample, self.scales = over_tokens, by_sample, scales


class _Probed(NamedTuple):
    """What was found out of a model: layers by number, since one may be the model, which then would never be let go."""

    form: object
    calls: list[list[_Call] | None]
    at_once: int
    saved: int
    last: int | None
    by_sample: dict[str, bool]


_PROBED: WeakKeyDictionary[nn.Module, _Probed] = WeakKeyDictionary()
"""The last that was found out of each model."""


def samples_at_once(model: nn.Module, budget_bytes: int | None = None) -> int:
    """How many samples may go through a model in one pass, by what was seen when its factors were made.

    Where what autograd saves has to fit into a budget, no more than would take a quarter of it: what is differentiated
    twice takes a few times as much.

    Example:
        >>> samples_at_once(nn.Linear(1, 1))
        250
    """
    known = _PROBED.get(model)
    if known is None or budget_bytes is None:
        return known.at_once if known is not None else CHUNK
    return max(1, min(known.at_once, budget_bytes // (4 * max(1, known.saved))))


def _at_once(answers: int, saved: int, device: torch.device) -> int:
    """How many samples go through a model in one pass, given the outputs and the saved bytes of each."""
    limit = ANSWERS // max(1, answers)
    if device.type != "cuda":
        return max(1, min(CHUNK, limit))
    memory = torch.cuda.get_device_properties(device).total_memory // PART_OF_MEMORY
    return max(1, min(MANY, limit, memory // max(1, saved)))


def _signed(drawn: Tensor, part: _Part) -> Tensor:
    """Gradients of drawn targets with a random sign for each sample, times what the part's count."""
    signs = 2.0 * torch.randint(2, (len(drawn),), generator=part.generator).to(drawn) - 1
    return drawn * (part.of_gradients * signs).view(-1, *[1] * (drawn.dim() - 1))


def _owners(model: nn.Module) -> dict[int, int]:
    """How many layers have each parameter."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def _is_tied_pair(layers: list[Any], owners: dict[int, int]) -> bool:
    """Whether these are a table and a linear layer, and nobody else has their weight."""
    kinds = sorted(type(layer) is nn.Linear for layer in layers)
    return kinds == [False, True] and any(map(is_table, layers)) and owners[id(layers[0].weight)] == 2


def _block(name: str, layers: list[Any], calls: dict[Any, list[_Call]], last: Any) -> Block:
    """Two terms where it is called once, with samples along the first dimension and tokens of theirs along others."""
    layer, shape = layers[0], product_shape(layers[0])
    assert shape is not None
    terms = 2 if [call.over_tokens for call in calls[layer]] == [True] * len(PROBES) else 1
    table = is_table(layer)
    alone = len(layers) == 1 and layer is last and len(calls[layer]) == len(PROBES)
    return Block(name, *shape[:3], terms + len(layers) - 1, shape.transposed, "i" if table else "", alone)


def _affordable(blocks: list[Block]) -> tuple[Block, ...]:
    """The blocks with the longest sides as diagonals, as far as all would take too much."""
    limit = WIDEST
    while True:
        found = [_limited(block, limit) for block in blocks]
        if sum(block.numbers for block in found) <= NUMBERS or limit < 2:
            return tuple(found)
        limit = max(side for block in found for side, diagonal in block.sides if not diagonal) - 1


def _limited(block: Block, longest: int) -> Block:
    sides = zip("io", block.sides, strict=True)
    wide = "".join(which for which, (side, diagonal) in sides if diagonal or side > longest)
    return replace(block, diagonal=wide)


def _joined(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter
