"""Models on disk: safetensors under their own parameter names, never a pickle; checked before they are believed."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError
from expunge.federation.keeping.tensor_file import read_tensors, reading, write_tensors

KIND, VERSION = "checkpoint", 1

LOCAL = "local"
"""In the content: names of buffers that are not in the file, since they stay with the clients."""


def save_snapshot(snapshot: Snapshot, model: nn.Module, path: Path) -> None:
    """Write parameters and buffers as one named tensor each."""
    left_out = [name for name, _ in model.named_buffers() if name not in snapshot.buffers]
    tensors = {**Layout.of(model).unflatten(snapshot.parameters), **snapshot.buffers}
    write_tensors(path, KIND, VERSION, tensors, {LOCAL: left_out} if left_out else None)


def load_snapshot(model: nn.Module, path: Path) -> Snapshot:
    """Read a checkpoint for this architecture; another one's, a damaged one or one with a NaN is refused.

    One that expunge did not write has no digest: of that one names, shapes and numbers are checked.
    """
    file = read_tensors(path, KIND, VERSION)
    tensors, left_out = file.tensors, set((file.content or {}).get(LOCAL, ()))
    layout, own_buffers = Layout.of(model), {n: own for n, own in model.named_buffers() if n not in left_out}
    expected = dict(layout.shapes) | {name: b.shape for name, b in own_buffers.items()}
    for name in sorted(tensors.keys() ^ expected.keys()):
        raise ModelError(f"The checkpoint {path} is of another architecture: {name!r} is in only one of the two.")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = tuple(tensors[name].shape)
            raise ModelError(
                f"The checkpoint {path} is of another architecture: {name!r} is {found} there and {tuple(shape)} here."
            )
    like = layout.like(model)
    with reading(path, KIND):
        buffers = {name: tensors[name].to(like.device) for name in own_buffers}
        snapshot = Snapshot(layout.flatten(tensors).to(like), buffers, layout)
    try:
        snapshot.require_finite()
    except ModelError as problem:
        raise ModelError(f"The checkpoint {path} cannot be used: it has a NaN or infinite value.") from problem
    return snapshot
