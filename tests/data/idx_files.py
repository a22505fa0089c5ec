"""Tiny files in the format of the real ones."""

import gzip
import struct

import torch


def idx(array: torch.Tensor, kind: int = 8) -> bytes:
    """Gzipped IDX; `kind` is the element type of the header, 8 for unsigned bytes."""
    header = struct.pack(f">BBBB{array.dim()}I", 0, 0, kind, array.dim(), *array.shape)
    return gzip.compress(header + array.numpy().tobytes(), mtime=0)
