"""Whether a layer's calls tell of all that its parameters are used for: beside the gradient that autograd finds.

Factors take a layer for ``z = W a``, with the z and a that its calls show. A layer with a forward of its own, a hook
that changes what it gives, or a weight that is used outside its layer, too, would have factors of something else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from expunge.core.layers import columns_of, is_table, product_shape, rows_of, scale_gradients, scaled_by
from expunge.core.vectors import length

ALIKE = 0.05
"""Gradients that differ by no more than this part of their length are the same, in half precision, too."""

ROUNDING = 0.01
"""So much of a layer's whole gradient is rounding in one of its parameters: that of a key's bias is nothing else."""


class Uses:
    """The gradients of parameters, added up from what layers are given and what gradients come back to them.

    Args:
        model: whose layers are watched.
        trained: names of the parameters that count.
    """

    def __init__(self, model: nn.Module, trained: Collection[str]) -> None:
        self._names = {id(own): name for name, own in model.named_parameters() if name in trained}
        self._found: dict[str, Tensor] = {}
        self._strange: set[Any] = set()

    def of(self, layer: Any) -> dict[str, str]:
        """A layer's own parameters that count: what they are called in it, and in the model."""
        own = layer.named_parameters(recurse=False)
        return {name: self._names[id(each)] for name, each in own if id(each) in self._names}

    def watch(self, layer: Any, names: Mapping[str, str], inputs: Tensor, outputs: Tensor) -> None:
        """One call of a layer whose parameters have these names, before what it gave is differentiated."""
        product = product_shape(layer) is not None
        if product and not _fits(layer, inputs):
            self._strange.add(layer)
            return
        rows = rows_of(layer, inputs) if product and not is_table(layer) else None
        normed = None if product else scaled_by(layer, inputs)

        def backward(gradient: Tensor) -> None:
            if product:
                found = _gradients(layer, gradient, inputs, rows)
            else:
                found = {name: own.sum(dim=0) for name, own in scale_gradients(layer, gradient, normed).items()}
            for name, own in found.items():
                if name in names:
                    before = self._found.get(names[name])
                    self._found[names[name]] = own if before is None else before + own

        outputs.register_hook(backward)  # type: ignore[no-untyped-call]

    def explain(self, layer: Any, gradients: Mapping[str, Tensor | None]) -> bool:
        """Whether the gradients of this layer's parameters are those of its calls, or of its partner's, too."""
        names = self.of(layer).values()
        lengths = {name: _length(gradients[name]) for name in names}
        rounding = ROUNDING * sum(lengths.values())
        apart = {name: _length(_difference(self._found.get(name), gradients[name])) for name in names}
        alike = all(apart[name] <= ALIKE * lengths[name] + rounding for name in names)
        return alike and layer not in self._strange


def _fits(layer: Any, inputs: Tensor) -> bool:
    """Whether a layer that multiplies is given rows as long as its matrix is wide, or pictures."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return inputs.dim() == layer.weight.dim()
    return is_table(layer) or (inputs.dim() > 0 and inputs.shape[-1] in layer.weight.shape)


def _gradients(layer: Any, gradient: Tensor, inputs: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
    """Of a layer that multiplies by a matrix, or looks up its rows."""
    columns = columns_of(layer, gradient, inputs)
    if rows is None:
        return {"weight": torch.zeros_like(layer.weight).index_add(0, inputs.flatten(), columns.to(layer.weight))}
    matrix = columns.T @ rows
    if layer.bias is None:
        return {"weight": matrix.reshape(layer.weight.shape)}
    weight = matrix[:, :-1]
    shape = product_shape(layer)
    assert shape is not None
    return {"weight": (weight.T if shape.transposed else weight).reshape(layer.weight.shape), "bias": matrix[:, -1]}


def _difference(found: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if found is None else found if gradient is None else found - gradient.to(found)


def _length(vector: Tensor | None) -> float:
    return 0.0 if vector is None else float(length(vector.flatten()))
