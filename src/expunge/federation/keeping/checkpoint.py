"""Models on disk: safetensors under their own parameter names, never a pickle; checked before they are believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError


def save_snapshot(snapshot: Snapshot, model: nn.Module, path: Path) -> None:
    """Write parameters and buffers as one named tensor each."""
    tensors = {**Layout.of(model).unflatten(snapshot.parameters), **snapshot.buffers}
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def load_snapshot(model: nn.Module, path: Path) -> Snapshot:
    """Read a checkpoint for this architecture; another one's, a damaged one or one with a NaN is refused."""
    try:
        tensors = load_file(path)
    except FileNotFoundError as problem:
        raise DataError(f"The checkpoint {path} is missing: train first.") from problem
    except (OSError, SafetensorError) as problem:
        raise DataError(f"The checkpoint {path} cannot be read: it is damaged or not safetensors.") from problem
    layout = Layout.of(model)
    expected = {name for name, _ in layout.shapes} | {name for name, _ in model.named_buffers()}
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)[0]
        raise ModelError(f"The checkpoint {path} is of another architecture: {odd!r} is in only one of the two.")
    like = next(model.parameters())
    buffers = {name: tensors[name].to(like.device) for name, _ in model.named_buffers()}
    snapshot = Snapshot(layout.flatten(tensors).to(like), buffers, layout)
    snapshot.require_finite()
    return snapshot


Take = Callable[[str], Tensor]
"""Gives the tensor of that name out of a file."""


def pack(snapshot: Snapshot, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A snapshot as tensors under a prefix, for a file with more in it, and what else is needed to read it back.

    Example:
        >>> snapshot = Snapshot.of(nn.Linear(2, 1))
        >>> tensors, described = pack(snapshot, "first/")
        >>> list(tensors), described["layers"]
        (['first/parameters'], [['weight', [1, 2]], ['bias', [1]]])
        >>> unpack(tensors.__getitem__, "first/", described).digest == snapshot.digest
        True
    """
    named = {"parameters": snapshot.parameters, **{f"buffers/{name}": b for name, b in snapshot.buffers.items()}}
    tensors = {prefix + name: tensor.detach().cpu().clone().contiguous() for name, tensor in named.items()}
    layers = [[name, list(shape)] for name, shape in snapshot.layout.shapes] if snapshot.layout is not None else None
    return tensors, {"digest": snapshot.digest, "buffers": list(snapshot.buffers), "layers": layers}


def unpack(take: Take, prefix: str, described: dict[str, Any]) -> Snapshot:
    """The snapshot that was packed; ValueError where it is no longer the same."""
    layers = described["layers"]
    layout = Layout(tuple((name, torch.Size(shape)) for name, shape in layers)) if layers is not None else None
    buffers = {name: take(f"{prefix}buffers/{name}") for name in described["buffers"]}
    snapshot = Snapshot(take(f"{prefix}parameters"), buffers, layout)
    if snapshot.digest != described["digest"]:
        raise ValueError("a model in it is not the one that was written")
    return snapshot
