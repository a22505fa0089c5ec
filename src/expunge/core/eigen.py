"""Eigenvectors of one side of a layer: all of them, those of a diagonal, or of a wide side the strongest alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STRONGEST = 256
"""Of a side that is too wide for all its eigenvectors, so many are taken."""

SWEEPS = 2
"""So many times the strongest directions are looked for by products, after random ones."""

CUBES = {"cpu": 2.5e10, "cuda": 1e12}
"""The sum of cubed sides whose eigenvectors are all taken: a dozen seconds of one core, a few of a GPU."""


TOGETHER = 1 << 27
"""At most so many numbers are diagonalised together."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of a side, the eigenvalues of one or two terms in them, and one more value for the rest.

    Attributes:
        values: a row for each term; where vectors are fewer than the side is long, the last is the rest's mean.
        vectors: as columns; None for those of a diagonal.
        side: how long the side is.
    """

    values: Tensor
    vectors: Tensor | None
    side: int

    @property
    def is_partial(self) -> bool:
        """Whether some directions share one value."""
        return self.values.shape[1] != self.side

    def analysed(self, matrix: Tensor) -> Tensor:
        """The rows of a matrix in this basis; what is outside the strongest directions stands behind, as it is."""
        if self.vectors is None:
            return matrix
        inside = matrix @ self.vectors
        return torch.cat([inside, matrix - inside @ self.vectors.T], dim=-1) if self.is_partial else inside

    def composed(self, coordinates: Tensor) -> Tensor:
        """Back from that."""
        if self.vectors is None:
            return coordinates
        if not self.is_partial:
            return coordinates @ self.vectors.T
        count = self.vectors.shape[1]
        return coordinates[..., :count] @ self.vectors.T + coordinates[..., count:]

    def spread(self, columns: Tensor) -> Tensor:
        """One column for each coordinate out of one for each value."""
        if not self.is_partial:
            return columns
        rest = columns[..., -1:].expand(*columns.shape[:-1], self.side)
        return torch.cat([columns[..., :-1], rest], dim=-1)

    def gathered(self, columns: Tensor) -> Tensor:
        """One column for each value out of one for each coordinate: those that share a value are summed.

        Example:
            >>> Basis(torch.ones(1, 2), torch.eye(3)[:, :1], 3).gathered(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
            tensor([[1., 9.]])
        """
        if not self.is_partial:
            return columns
        count = self.values.shape[1] - 1
        return torch.cat([columns[..., :count], columns[..., count:].sum(dim=-1, keepdim=True)], dim=-1)


def diagonal_basis(values: Sequence[Tensor]) -> Basis:
    """Of a side whose factors are diagonals.

    Example:
        >>> diagonal_basis([torch.tensor([1.0, 2.0])]).values
        tensor([[1., 2.]])
    """
    return Basis(torch.stack(list(values)).clamp(min=0.0), None, len(values[0]))


def bases(sides: Sequence[Sequence[Tensor]], strongest: Sequence[int | None]) -> list[Basis]:
    """Eigenvectors of sums of symmetric matrices without negative eigenvalues, and each one's diagonal in them.

    Sides of one length are diagonalised together, which a GPU does side by side.

    Args:
        sides: of each side one matrix, whose eigenvalues these then are, or a few.
        strongest: of each side so many of them alone; None is all, taken in double precision.

    Example:
        >>> found = bases([[torch.diag(torch.tensor([3.0, 1.0, 2.0]))]], [1])
        >>> [round(value, 4) for value in found[0].values[0].tolist()]
        [3.0, 1.5]
    """
    found: dict[int, Basis] = {}
    alike: dict[int, list[int]] = {}
    for number, (matrices, most) in enumerate(zip(sides, strongest, strict=True)):
        side = len(matrices[0])
        if most is None or most >= side:
            alike.setdefault(side, []).append(number)
        else:
            found[number] = _partial_basis(matrices, most)
    for side, numbers in alike.items():
        at_once = max(1, TOGETHER // side**2)
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            totals = torch.stack([_total(sides[number]).double() for number in some])
            for number, values, vectors in zip(some, *_eigenvectors(totals), strict=True):
                found[number] = _whole_basis(sides[number], values, vectors)
    return [found[number] for number in range(len(sides))]


def _total(matrices: Sequence[Tensor]) -> Tensor:
    return sum(matrices[1:], start=matrices[0])


def _whole_basis(matrices: Sequence[Tensor], values: Tensor, vectors: Tensor) -> Basis:
    rows = [values]
    if len(matrices) > 1:
        rows = [(vectors * (each.double() @ vectors)).sum(dim=0) for each in matrices]
    return Basis(torch.stack(rows).clamp(min=0.0), vectors.to(matrices[0]), len(vectors))


def _partial_basis(matrices: Sequence[Tensor], strongest: int) -> Basis:
    side, vectors = len(matrices[0]), _strongest(_total(matrices), strongest)
    rows = [(vectors * (each @ vectors)).sum(dim=0).double() for each in matrices]
    rest = [(each.trace() - row.sum()) / (side - strongest) for each, row in zip(matrices, rows, strict=True)]
    joined = [torch.cat([row, mean[None]]) for row, mean in zip(rows, rest, strict=True)]
    return Basis(torch.stack(joined).clamp(min=0.0), vectors, side)


def too_wide(sides: Sequence[int], device: str) -> int:
    """Sides longer than this are too wide for all eigenvectors, so that the rest takes no longer than it may.

    Example:
        >>> too_wide([100, 4096, 4096], "cpu"), too_wide([100, 200], "cpu")
        (100, 200)
    """
    left = CUBES.get(device, CUBES["cpu"])
    widest = 0
    for side in sorted(sides):
        left -= float(side) ** 3
        if left < 0 and side > 2 * STRONGEST:
            break
        widest = side
    return widest


def _strongest(matrix: Tensor, count: int) -> Tensor:
    """The eigenvectors of the largest eigenvalues, by products with an orthonormal set (subspace iteration)."""
    chance = torch.Generator().manual_seed(len(matrix))
    width = min(len(matrix), count + max(8, count // 8))
    columns = torch.randn(len(matrix), width, generator=chance, dtype=torch.float64).to(matrix)
    for _ in range(SWEEPS):
        columns = torch.linalg.qr(matrix @ columns).Q
    _, inner = _eigenvectors((columns.T @ matrix @ columns).double())
    return columns @ inner[:, -count:].to(columns)


def _eigenvectors(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices without negative ones.

    Where divide and conquer does not converge, as with many equal eigenvalues, the singular vectors are the same.
    """
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        vectors, values, _ = torch.linalg.svd(matrices)
        return values.flip(-1), vectors.flip(-1)
    return values, vectors
