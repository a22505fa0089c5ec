"""Models on disk: safetensors under their own parameter names, never a pickle; checked before they are believed."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

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
