"""Second moments ``X'X`` of long matrices, on a GPU by its tensor cores and yet in single precision.

Tensor cores multiply numbers of 11 bits. A number of 24 is the sum of two such, ``x = h + l``, up to a rest of a few
millionths of ``l``, so

    X'X = H'H + H'L + (H'L)' + L'L,        L'L below 2^-22 of the first: left out.

Two products of theirs take a fourth of the time that the plain one takes. They cut off where others round, so what they
add up drifts with the number of rows: a thousand at a time are added up by them, and the sums of these plainly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

ROWS = 1024
"""So many rows are summed by tensor cores alone: what is cut off then stays below a few millionths."""

WORTHWHILE = 1 << 33
"""Fewer multiplications are done before the halves are made."""

ALIGNED = 8
"""Tensor cores want sides of a multiple of so many numbers."""

HALVED, NUMBERS = 1 << 27, 1 << 29
"""At most so many numbers are halved at a time, and so many kept before they are summed."""

HIGH = -(1 << 13)
"""A mask of all bits of a number but the last 13: what tensor cores see."""


def second_moments(rows: Tensor) -> Tensor:
    """``X'X`` of the rows of X.

    Example:
        >>> second_moments(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[1., 2.],
                [2., 5.]])
    """
    count, width = rows.shape
    worthwhile = rows.dtype == torch.float32 and count * width**2 >= WORTHWHILE and count >= ROWS
    if not worthwhile or not _has_tensor_cores(rows.device):
        return rows.T @ rows
    whole, at_once = count - count % ROWS, max(1, HALVED // (ROWS * width)) * ROWS
    total = rows[whole:].T @ rows[whole:]
    for part in torch.split(rows[:whole], at_once):
        total += by_halves(part)
    return total


def by_halves(rows: Tensor) -> Tensor:
    """The same of a multiple of ``ROWS`` rows, by halves of their numbers.

    Example:
        >>> rows = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(by_halves(rows), rows.T @ rows, rtol=1e-5)
        True
    """
    (count, width), high = rows.shape, (rows.view(torch.int32) & HIGH).view(torch.float32)
    by_column = rows.stride(0) == 1 and count > 1
    side = width if by_column else width + -width % ALIGNED
    both = rows.new_zeros(2 * side, count).T if by_column else rows.new_zeros(count, 2 * side)
    both[:, :width] = high
    both[:, side : side + width] = rows - high
    total = rows.new_zeros(side, 2 * side)
    with _tensor_cores():
        for part in torch.split(both.view(-1, ROWS, 2 * side), max(1, NUMBERS // (2 * side**2))):
            total += torch.bmm(part[..., :side].mT, part).sum(dim=0)
    mixed = total[:width, side : side + width]
    return total[:width, :width] + mixed + mixed.T


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Inside it, products of single precision may be by tensor cores."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
