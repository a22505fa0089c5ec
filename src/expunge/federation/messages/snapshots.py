"""A model as named tensors and JSON, and back: the one way in which messages and files hold a snapshot.

The tensors stand under the model's digest, so that a receiver who has kept them need not get them again, and a file
holds a model that it needs twice only once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from expunge.core.vectors import Layout, Snapshot


def parameters_name(digest: str) -> str:
    """The name of the tensor with the parameters of the model of that digest."""
    return f"{digest}/parameters"


def pack_snapshot(model: Snapshot) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model's tensors, and what else is needed to read it back, fit for JSON.

    Example:
        >>> snapshot = Snapshot.of(torch.nn.Linear(2, 1))
        >>> tensors, described = pack_snapshot(snapshot)
        >>> [name.split("/")[1] for name in tensors], described["layers"]
        (['parameters'], [['weight', [1, 2]], ['bias', [1]]])
        >>> unpack_snapshot(described, tensors).digest == snapshot.digest
        True
    """
    named = {parameters_name(model.digest): model.parameters}
    named |= {f"{model.digest}/buffers/{name}": buffer for name, buffer in model.buffers.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    layers = [[name, list(shape)] for name, shape in model.layout.shapes] if model.layout is not None else None
    return tensors, {"digest": model.digest, "buffers": list(model.buffers), "layers": layers}


def unpack_snapshot(described: Any, tensors: Mapping[str, Tensor]) -> Snapshot:
    """The model that was packed; ValueError where this is not one, with a word for what is wanted."""
    if not isinstance(described, dict) or described.keys() != {"digest", "buffers", "layers"}:
        raise ValueError("a model")
    digest, names, layers = described["digest"], described["buffers"], described["layers"]
    if not isinstance(digest, str) or not _are(str, names):
        raise ValueError("a model")
    wanted = [parameters_name(digest), *(f"{digest}/buffers/{name}" for name in names)]
    if any(not isinstance(tensors.get(name), Tensor) for name in wanted):
        raise ValueError("a tensor")
    parameters, *buffers = (tensors[name] for name in wanted)
    layout = _layout(layers) if layers is not None else None
    if parameters.dim() != 1 or (layout is not None and layout.size != parameters.numel()):
        raise ValueError("a model whose layers make up its parameters")
    model = Snapshot(parameters, dict(zip(names, buffers, strict=True)), layout)
    if model.digest != digest:
        raise ValueError("the model that it names")
    return model


def _layout(written: Any) -> Layout:
    pairs = written if isinstance(written, list) else [None]
    shapes = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or not _are(int, pair[1]):
            raise ValueError("a model with layers")
        if min(pair[1], default=0) < 0:
            raise ValueError("a model with layers")
        shapes.append((pair[0], torch.Size(pair[1])))
    return Layout(tuple(shapes))


def _are(kind: type[Any], written: Any) -> bool:
    """Whether this is a list of such things."""
    return isinstance(written, list) and all(type(entry) is kind for entry in written)
