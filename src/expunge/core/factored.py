"""Which of a model's parameters have Kronecker factors or a diagonal, and how its layers are called.

Found out with a few samples, once for a model: which layers multiply by one matrix and are nobody else's, along which
dimension they see samples and tokens, what is added to every sample, and how much a sample takes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, run
from expunge.core.curvature import SavedBytes
from expunge.core.kronecker import Block
from expunge.core.layers import is_over_tokens, is_table, product_shape, scale_parameters
from expunge.core.uses import Uses
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError, listed

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]

CHUNK = 250
MANY = 2048
PART_OF_MEMORY = 8
"""Samples in one pass; on a GPU more of them, while what autograd saves takes no more than one part in so many of its
memory."""
ANSWERS = 1 << 26
"""At most so many outputs are made in one pass."""
PROBES = (1, 3)
"""So many samples a pass to find out along which dimension a layer sees samples."""
WIDEST = 1 << 14
"""A longer side of a layer is a diagonal."""
NUMBERS = 1 << 29
"""At most so many numbers are kept for all layers together; the longest sides are diagonals until it is so."""


class Factored:
    """What has factors in a model, and how it is run so that they can be seen.

    Args:
        model: the architecture, in evaluation mode.
        snapshot: parameters and buffers.
        sample: one sample, whose form is that of all.
        forward: how the model is run, where calling it is not enough.
    """

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
            name: [own for own in names if joined_name(name, own) not in covered]
            for name, names in self._readable(scales, calls).items()
        }
        self._told = {name: names for name, names in self._told.items() if names}
        self._scaling = {name: scales[name] for name in self._told}
        told = {joined_name(name, own) for name, names in self._told.items() for own in names}
        self.others = [name for name, _ in layout.shapes if name not in covered]
        untold = [name for name in self.others if name not in told]
        self._by_sample = {name for name in untold if self._is_added_to_samples(name, sample)}
        self.estimated = [name for name in untold if name not in self._by_sample]
        watched = [*chain.from_iterable(self._layers.values()), *self._scaling.values()]
        # Rows of samples can be told apart where all layers have them in front.
        by_sample = all(call.by_sample for layer in watched for call in calls[layer])
        self.may_join = by_sample and not self.estimated

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
            if "weight" not in own or len(own) > 2:  # parametrised, or more than a product
                continue
            if all(joined_name(name, each) in self._own and id(own[each]) in self._alone for each in own):
                found[name] = [module]
            elif list(own) == ["weight"]:
                tied.setdefault(id(module.weight), []).append(module)
        for name, module in self._model.named_modules():
            pair = tied.get(id(getattr(module, "weight", None)), [])
            if joined_name(name, "weight") in self._own and _is_tied_pair(pair, self._owners):
                found[name] = sorted(pair, key=is_table)  # the linear layer first
        return found

    def _scales(self) -> dict[str, Any]:
        """Layers with scales, shifts or biases that are trained, and nobody else's."""
        found: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            names = [each for each in scale_parameters(module) if joined_name(name, each) in self._own]
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
        two numbers are tried. Layers whose calls are not all that their parameters are used for are left out.
        """
        seen: dict[Any, list[_Call]] = {}
        made: dict[Any, Tensor] = {}
        uses = Uses(self._model, self._own)
        names_of = {layer: uses.of(layer) for layer in layers}

        def noting(count: int) -> Hook:
            def hook(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
                made[layer] = outputs
                if not inputs or not isinstance(outputs, Tensor):
                    seen.setdefault(layer, []).append(_Call(False, False, ()))
                    return
                if not outputs.requires_grad:
                    raise ModelError(
                        f"{listed(list(names_of[layer].values()))} can be trained, but run without gradients: freeze "
                        "them, requires_grad_(False), or leave out torch.no_grad and torch.utils.checkpoint."
                    )
                given = inputs[0].detach()
                if count == PROBES[-1]:
                    uses.watch(layer, names_of[layer], given, outputs)
                by_sample = given.dim() > 0 and len(given) == count and len(outputs) == count
                names = scale_parameters(layer, given, outputs.detach())
                seen.setdefault(layer, []).append(_Call(is_over_tokens(layer, given, count), by_sample, names))

            return hook

        for count in PROBES:
            several = sample.take(torch.zeros(count, dtype=torch.int64))
            saved = SavedBytes((*several.tensors(), *self._own.values(), *self._model.parameters()))
            with saved:
                hooks = [(layer, noting(count)) for layer in layers]
                outputs, tensors = self._forward(several, hooks, list(self._own))
            self._saved = saved.total // count
            self.at_once = _at_once(outputs.numel() // count, self._saved, self._snapshot.parameters.device)
            whose = [layer for layer, own in made.items() if own is outputs]
            self._last = whose[0] if len(whose) == 1 and self._last in (None, whose[0]) else None
        chance = torch.Generator().manual_seed(0)
        drawn = torch.randn(outputs.shape, generator=chance).to(outputs)
        found = torch.autograd.grad((outputs * drawn).sum(), list(tensors.values()), allow_unused=True)
        gradients = dict(zip(tensors, found, strict=True))
        self._last = self._last if self._last is None or uses.explain(self._last, gradients) else None
        return {layer: calls for layer, calls in seen.items() if uses.explain(layer, gradients)}

    def _readable(self, scales: dict[str, Any], calls: dict[Any, list[_Call]]) -> dict[str, tuple[str, ...]]:
        """Layers that see samples along the first dimension whenever they are called, and which scales they have."""
        found = {}
        for name, layer in scales.items():
            own = calls.get(layer, [])
            names = tuple(each for each in (own[0].scales if own else ()) if joined_name(name, each) in self._own)
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


def samples_at_once(model: nn.Module, budget_bytes: int | None = None, *, unknown: int = CHUNK) -> int:
    """How many samples may go through a model in one pass, by what was seen when its factors were made.

    Where none were, ``unknown``. Where what autograd saves has to fit into a budget, no more than would take a quarter
    of it: what is differentiated twice takes a few times as much.

    Example:
        >>> samples_at_once(nn.Linear(1, 1))
        250
    """
    known = _PROBED.get(model)
    if known is None or budget_bytes is None:
        return known.at_once if known is not None else unknown
    return max(1, min(known.at_once, budget_bytes // (4 * max(1, known.saved))))


def _at_once(answers: int, saved: int, device: torch.device) -> int:
    """How many samples go through a model in one pass, given the outputs and the saved bytes of each."""
    limit = ANSWERS // max(1, answers)
    if device.type != "cuda":
        return max(1, min(CHUNK, limit))
    memory = torch.cuda.get_device_properties(device).total_memory // PART_OF_MEMORY
    return max(1, min(MANY, limit, memory // max(1, saved)))


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


def joined_name(layer: str, parameter: str) -> str:
    """A parameter's name in the model, given its layer's and its own there.

    Example:
        >>> joined_name("head", "bias"), joined_name("", "bias")
        ('head.bias', 'bias')
    """
    return f"{layer}.{parameter}" if layer else parameter
