"""What a leaver has left in a folder: pieces of vectors and models, searched byte by byte in every file.

A search that can find nothing proves nothing: whoever uses it first looks for the same where it must be (`found_in`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from expunge.federation.keeping.state import ServerState

PIECE = 8
"""Numbers in a row: files keep a model layer by layer, each perhaps elsewhere, so whole vectors are not looked for."""

KINDS = (torch.float32, torch.float64, torch.bfloat16)


class Traces:
    """Pieces of tensors as bytes, in three kinds of numbers.

    Args:
        tensors: what must not be left.
        start: the initial weights: where nobody has changed them, for want of inputs, they stay in every model.
    """

    def __init__(self, tensors: Iterable[Tensor], start: Tensor | None = None) -> None:
        self.pieces = {_bytes(piece.to(kind)) for own in tensors for piece in _pieces(own, start) for kind in KINDS}

    def found_in(self, folder: Path) -> set[Path]:
        """The files that hold any of them."""
        files = [file for file in folder.rglob("*") if file.is_file()]
        return {file for file in files if self.in_text(file.read_bytes())}

    def kinds_in(self, folder: Path) -> set[str]:
        """The names of these files, that of the folder for all that is in one of vectors."""
        found = self.found_in(folder)
        return {file.parent.name if file.parent.name == "vectors" else file.name for file in found}

    def in_text(self, content: bytes) -> bool:
        return any(piece in content for piece in self.pieces)


def remembering(state: ServerState, leavers: Iterable[str]) -> list[Tensor]:
    """All of a state that remembers leavers: their vectors, stretch by stretch and in sum, and every model."""
    found = [state.model.parameters]
    if state.memory is not None:
        stretches = state.memory._stretches
        found += [own.vectors[name] for own in stretches for name in leavers if name in own.vectors]
        found += [state.memory.vectors[name] for name in leavers]
    if state.checkpoints is not None:
        found += [own.parameters for number, own in state.checkpoints.models.items() if number]
    return found


def _pieces(tensor: Tensor, start: Tensor | None) -> list[Tensor]:
    """Those that could be of nothing else: mostly different numbers, and not the initial ones, rounded."""
    rows = _rows(tensor)
    others = torch.zeros_like(rows) if start is None else _rows(start)
    changed = ((rows - others).abs() > 1e-6).any(dim=1)
    return [row for row in rows[changed] if len(row.unique()) > PIECE // 2]


def _rows(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // PIECE * PIECE].reshape(-1, PIECE)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
