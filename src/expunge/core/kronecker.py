"""The Gauss-Newton matrix as Kronecker products, layer by layer, diagonalised: any function of it is applied exactly.

A layer's weights act as ``z = W a``, with 1 appended to the inputs a where there is a bias, so the gradient of one
sample is ``sum over positions of g a'``, with g the gradient in z. Where inputs and gradients are about independent,
the layer's block of the matrix is (Martens & Grosse 2015; Grosse & Martens 2016 for convolutions)

    G ~ (sum of a a' over positions) x (mean of g g' over positions),

an outer product of two small matrices, whose eigenvectors diagonalise it: any function of G is then applied exactly,
with no solve. What is left out: the curvature between layers. `factors.py` makes the two matrices.

That also takes positions for independent. Of a convolution's it is true enough, of a transformer's it is not: tokens
and their gradients are much alike. With the means over its P positions taken out, a sample's gradient is, exactly,

    sum of g a'  =  P mean(g) mean(a)'  +  sum of (g - mean(g)) (a - mean(a))',

so a linear layer over tokens gets two such products (one alone saw down to a tenth of what there is). What is left
out: the curvature between the two, and of the second, which has P - 1 directions, one part in P. Their sum is taken
by its diagonal in the eigenvectors of the summed factors.

Of an embedding a is one-hot, and ``a a'`` the diagonal of how often each row was looked up. A side that takes too many
bytes is a diagonal, too; of one that takes too long to diagonalise the strongest directions are, and the others share
their mean. Both are said (``notes``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.core.eigen import STRONGEST, Basis, bases, diagonal_basis, too_wide
from expunge.core.vectors import Layout
from expunge.errors import DataError

Filter = Callable[[Tensor, Sequence[str]], Tensor]
"""A function of eigenvalues, given with the names of the parameters that they belong to; none are named for all.

One that has a method ``at_once`` is given all layers together, a spectrum each, where it is cheaper so.
"""

Spectrum = tuple[Tensor, Sequence[str]]
"""Eigenvalues in a tensor of any shape, and the names of the parameters that they belong to; none are all."""


@dataclass(frozen=True)
class Block:
    """A layer whose curvature is a Kronecker product, or a sum of them: its name, and the sides of the two factors.

    ``inputs`` counts the appended 1 where ``bias`` is True; ``terms`` is 2 for a linear layer over tokens, and one more
    where its weight is an embedding's, too;
    ``transposed`` says that the weight is kept inputs first; ``diagonal`` has an "i" or an "o" for a factor of inputs
    or outputs that is a diagonal; ``last`` says that its outputs are the model's own log-odds: to scale its parameters
    is to scale these.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    terms: int = 1
    transposed: bool = False
    diagonal: str = ""
    last: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        prefix = f"{self.name}." if self.name else ""
        return (f"{prefix}weight", f"{prefix}bias") if self.bias else (f"{prefix}weight",)

    @property
    def sides(self) -> tuple[tuple[int, bool], tuple[int, bool]]:
        """Of inputs and outputs how long they are, and whether their factor is a diagonal."""
        return (self.inputs, "i" in self.diagonal), (self.outputs, "o" in self.diagonal)

    @property
    def numbers(self) -> int:
        """How many numbers its symmetric factors take."""
        return self.terms * sum(side if diagonal else triangle(side) for side, diagonal in self.sides)


@dataclass(frozen=True, eq=False)
class Factors:
    """Means over samples, as one flat vector: of each block its factors' triangles, then the diagonal, then l2."""

    values: Tensor
    blocks: tuple[Block, ...]


class _Diagonalised(NamedTuple):
    block: Block
    inputs: Basis
    outputs: Basis
    eigenvalues: Tensor


class KroneckerCurvature:
    """The curvature ``G`` whose factors are known, diagonalised.

    Args:
        factors: means over all samples.
        layout: where each parameter lies in the flat vector.

    ``stiffness`` is by how much its eigenvalues are taken larger than the factors say.
    """

    def __init__(self, factors: Factors, layout: Layout) -> None:
        sizes = {name: shape.numel() for name, shape in layout.shapes}
        covered = {name: block for block in factors.blocks for name in block.parameters}
        rest = [(name, size) for name, size in sizes.items() if name not in covered]
        expected = sum(block.numbers for block in factors.blocks) + sum(size for _, size in rest) + 1
        fits = factors.values.shape == (expected,) and all(
            block.terms > 0 and block.inputs * block.outputs == sum(sizes.get(name, 0) for name in block.parameters)
            for block in factors.blocks
        )
        if not fits:
            raise DataError("The curvature factors do not fit the model: they are of another architecture.")
        self._layout, self.stiffness = layout, 1.0
        self._l2 = max(float(factors.values[-1]), 0.0)  # as below: what is negative was not made by honest samples
        dense = [side for block in factors.blocks for side, diagonal in block.sides if not diagonal]
        self._widest = too_wide(dense, factors.values.device.type)
        at, parts = 0, list[list[Tensor]]()
        for block in factors.blocks:
            parts += _parts(block, factors.values[at : at + block.numbers])
            at += block.numbers
        self._bases = self._diagonalised(factors.blocks, parts)
        self._diagonal = {}
        for name, size in rest:
            self._diagonal[name] = factors.values[at : at + size].double().clamp(min=0.0)
            at += size

    def _diagonalised(self, blocks: Sequence[Block], parts: list[list[Tensor]]) -> list[_Diagonalised]:
        """Of each block, given the factors of its inputs and of its outputs one after another."""
        sides = [(own, diagonal) for block in blocks for own, diagonal in block.sides]
        dense = [number for number, (_, diagonal) in enumerate(sides) if not diagonal]
        strongest = [STRONGEST if sides[number][0] > self._widest else None for number in dense]
        found = dict(zip(dense, bases([parts[number] for number in dense], strongest), strict=True))
        every = [found[number] if number in found else diagonal_basis(own) for number, own in enumerate(parts)]
        pairs = zip(blocks, every[::2], every[1::2], strict=True)
        return [_Diagonalised(block, one, other, other.values.T @ one.values) for block, one, other in pairs]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is coarser than it could be, a sentence each."""
        partial, diagonal = [], []
        for block, of_inputs, of_outputs, _ in self._bases:
            if of_inputs.is_partial or of_outputs.is_partial:
                partial.append(block.name)
            if "o" in block.diagonal or ("i" in block.diagonal and block.bias):
                diagonal.append(block.name)
        found = []
        if partial:
            found.append(
                f"The curvature of {_named(partial)} has its {STRONGEST} strongest directions, and a mean for the "
                "others: such wide layers would take too long."
            )
        if diagonal:
            found.append(f"One side of the curvature of {_named(diagonal)} is a diagonal: all of it is too large.")
        return tuple(found)

    def apply(self, function: Filter, vector: Tensor) -> Tensor:
        """``f(G) v`` for a function of eigenvalues (a tensor of any shape) and of the parameters that they belong to.

        Of several vectors, the rows of a matrix, each has a function of its own where it gives as many rows in front.

        Example:
            >>> factors = Factors(torch.tensor([4.0, 0.0, 1.0, 2.0, 0.0]), (Block("", 2, 1, False),))
            >>> layout = Layout.of(torch.nn.Linear(2, 1, bias=False))
            >>> KroneckerCurvature(factors, layout).apply(lambda e, names: e, torch.tensor([1.0, 1.0]))
            tensor([8., 2.])
        """
        return self.applying(function, vector)(vector)

    def applying(self, function: Filter, like: Tensor) -> Callable[[Tensor], Tensor]:
        """``v -> f(G) v`` for many vectors of the type of this one: the function is looked at once."""
        told = [factor.to(like) for factor in _told(function, self._spectra())]
        for number, (_, of_inputs, of_outputs, _) in enumerate(self._bases):
            told[number] = of_outputs.spread(of_inputs.spread(told[number]).mT).mT

        def applied(vector: Tensor) -> Tensor:
            return self._applied(told, vector[None])[0] if vector.dim() == 1 else self._applied(told, vector)

        return applied

    def _applied(self, told: Sequence[Tensor], vector: Tensor) -> Tensor:
        """What each layer's coordinates are multiplied with is told."""
        parts, factors = self._layout.unflatten_rows(vector), iter(told)
        found: dict[str, Tensor] = {}
        for block, of_inputs, of_outputs, _ in self._bases:
            names, matrix, factor = block.parameters, _matrix(block, parts), next(factors)
            matrix = of_outputs.analysed(of_inputs.analysed(matrix).mT).mT * factor
            matrix = of_inputs.composed(of_outputs.composed(matrix.mT).mT)
            weight = matrix[..., :-1] if block.bias else matrix
            found[names[0]] = weight.mT if block.transposed else weight
            if block.bias:
                found[names[1]] = matrix[..., -1]
        for name in self._diagonal:
            factor = next(factors)
            found[name] = parts[name].reshape(len(vector), -1) * factor.reshape(*factor.shape[:-1], -1)
        return torch.cat([found[name].reshape(len(vector), -1) for name, _ in self._layout.shapes], dim=1)

    def _spectra(self) -> list[Spectrum]:
        found: list[Spectrum] = []
        found += [(self.stiffness * base.eigenvalues + self._l2, base.block.parameters) for base in self._bases]
        found += [(self.stiffness * diagonal + self._l2, (name,)) for name, diagonal in self._diagonal.items()]
        return found

    def along(self, vector: Tensor) -> Callable[[Filter], float]:
        """``f -> v' f(G) v``, for many f of one vector: it is taken apart once.

        Example:
            >>> factors = Factors(torch.tensor([4.0, 0.0, 1.0, 2.0, 0.0]), (Block("", 2, 1, False),))
            >>> layout = Layout.of(torch.nn.Linear(2, 1, bias=False))
            >>> KroneckerCurvature(factors, layout).along(torch.tensor([1.0, 1.0]))(lambda e, names: e)
            10.0
        """
        parts, squares = self._layout.unflatten_rows(vector[None]), list[Tensor]()
        for block, of_inputs, of_outputs, _ in self._bases:
            matrix = of_outputs.analysed(of_inputs.analysed(_matrix(block, parts)).mT).mT[0].double().square()
            squares.append(of_outputs.gathered(of_inputs.gathered(matrix).T).T)
        squares += [parts[name].double().square().flatten() for name in self._diagonal]
        spectra, weights = self._spectra(), torch.cat([own.flatten() for own in squares])

        def quadratic(function: Filter) -> float:
            return float(weights @ torch.cat([own.flatten() for own in _told(function, spectra)]).to(weights))

        return quadratic

    def coupling(self, vector: Tensor, product: Tensor) -> float:
        """By how much the layers curve together along a vector, given the exact product with it; 1 is as one by one.

        What is left out between layers adds up where they all pull at one thing: along a client's pull on a language
        model the exact ``v'Gv`` was 2.6 times that of its layers one by one.
        """
        own = self._l2 * float(vector @ vector)
        apart, together = self.quadratic(vector) - own, float(vector @ product) - own
        return max(1.0, together / apart if apart > 0 else 1.0)

    def spread(self, vector: Tensor, product: Tensor) -> float:
        """By how much more than the factors tell the exact curvature along a vector is spread; 0 is as they tell.

        Where curvature is k times that of the factors, and k differs between directions that these take for alike, it
        is the variance of k over its mean's square, by the second moment that the product has: ``|Gv|^2 = v'G^2 v``.

        Example:
            >>> factors = Factors(torch.tensor([1.0, 0.0, 1.0, 2.0, 0.0]), (Block("", 2, 1, False),))
            >>> curvature = KroneckerCurvature(factors, Layout.of(torch.nn.Linear(2, 1, bias=False)))
            >>> vector = torch.tensor([1.0, 1.0])
            >>> [curvature.spread(vector, torch.tensor(product)) for product in ([6.0, 6.0], [4.0, 0.0])]
            [0.0, 1.0]
        """
        own = self._l2 * vector
        apart, together = self.apply(lambda values, _: values, vector) - own, product - own
        first, least = float(vector @ together), float(apart @ apart)
        if not (first > 0 and least > 0):
            return 0.0
        mean = first / float(vector @ apart)
        return max(0.0, float(together @ together) / (least * mean**2) - 1.0)

    def stiffer(self, times: float) -> KroneckerCurvature:
        """The same with so many times the curvature; what L2 adds stays."""
        other = copy.copy(self)
        other.stiffness = self.stiffness * times
        return other

    @property
    def layers(self) -> int:
        """How many layers have factors of their own."""
        return len(self._bases)

    @property
    def over_tokens(self) -> bool:
        """Whether a layer works over tokens or steps: it has two products, or a matrix has none, as recurrent ones."""
        return any(base.block.terms > 1 for base in self._bases) or self.without_factors > 0

    @property
    def without_factors(self) -> float:
        """The share of all matrices' entries that have a diagonal alone, as those of recurrent layers."""
        sizes = {name: shape.numel() for name, shape in self._layout.shapes if len(shape) > 1}
        alone = sum(sizes[name] for name in self.unfactored)
        return alone / sum(sizes.values()) if alone else 0.0

    @property
    def unfactored(self) -> tuple[str, ...]:
        """Names of the matrices that have a diagonal alone."""
        return tuple(name for name, shape in self._layout.shapes if len(shape) > 1 and name in self._diagonal)

    def last(self, vector: Tensor) -> Tensor | None:
        """The vector's part in the layer whose outputs are the model's own, zeros elsewhere; None where there is none.

        Example:
            >>> factors = Factors(torch.tensor([1.0, 1.0, 5.0, 0.0]), (Block("1", 1, 1, False, last=True),))
            >>> layout = Layout((("0", torch.Size([1])), ("1.weight", torch.Size([1, 1]))))
            >>> KroneckerCurvature(factors, layout).last(torch.tensor([2.0, 3.0]))
            tensor([0., 3.])
        """
        own = {name for base in self._bases if base.block.last for name in base.block.parameters}
        parts = self._layout.unflatten(vector)
        zeros = {name: part if name in own else torch.zeros_like(part) for name, part in parts.items()}
        return self._layout.flatten(zeros) if own else None

    def quadratic(self, vector: Tensor) -> float:
        """``v' G v``."""
        return self.along(vector)(lambda values, _: values)


def _matrix(block: Block, parts: Mapping[str, Tensor]) -> Tensor:
    """A layer's parts of several vectors as matrices, outputs by inputs; the bias is the last column."""
    names = block.parameters
    weight = parts[names[0]].flatten(2)
    matrix = weight.mT if block.transposed else weight
    return torch.cat([matrix, parts[names[1]][..., None]], dim=2) if block.bias else matrix


def _told(function: Filter, spectra: list[Spectrum]) -> list[Tensor]:
    at_once = getattr(function, "at_once", None)
    return at_once(spectra) if at_once is not None else [function(values, names) for values, names in spectra]


def triangle(side: int) -> int:
    """How many numbers a symmetric matrix has.

    Example:
        >>> triangle(3)
        6
    """
    return side * (side + 1) // 2


def _parts(block: Block, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The factors of a block's inputs and of its outputs, one for each term."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    at = 0
    for _ in range(block.terms):
        for (side, diagonal), found in zip(block.sides, parts, strict=True):
            numbers = side if diagonal else triangle(side)
            part = values[at : at + numbers]
            found.append(part.double() if diagonal else _symmetric(part, side))
            at += numbers
    return parts


def _symmetric(values: Tensor, side: int) -> Tensor:
    matrix = values.new_zeros(side, side)
    rows, columns = torch.triu_indices(side, side, device=values.device)
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix


def _named(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more layers" if len(names) > 3 else shown
