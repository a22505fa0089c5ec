"""Contractions: what each round leaves of a displacement, for many curvatures, rounds and layers at once.

    c_t(e) = sum over those who took part of  share x left(e, rate, steps, moment)

A client's optimiser is a recursion over its steps, hundreds of small operations. Here those of all rounds and layers
run side by side, once; who made fewer steps than others is read off on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from expunge.core.vectors import Layout
from expunge.errors import RequestError
from expunge.federation.training.recipe import BatchedRule, ClientRule
from expunge.federation.training.works import Round

SMALL = 1e-7
"""A curvature, times how far the longest round goes, that a round nearly leaves as it is."""


class Contractions:
    """Of all rounds, for some groups of parameters.

    Args:
        rule: the clients' optimiser.
        rounds: of those who stay.
        layout: names and sizes of the parameters, where moments differ between them.
        groups: names of the parameters in each group; none are all.

    Who had the same rate and, in every group, the same moment is one row of the recursion.

    Example:
        >>> from expunge.federation.training.recipe import SGD
        >>> from expunge.federation.training.works import Work
        >>> twice = Contractions(SGD(), (Round((Work(1.0, 0.1, 2),)), Round(())), None, [()])
        >>> twice.of(torch.tensor([[0.0, 1.0]]))
        tensor([[[1.0000, 0.8100],
                 [1.0000, 1.0000]]])
    """

    def __init__(
        self, rule: ClientRule, rounds: Sequence[Round], layout: Layout | None, groups: Sequence[Sequence[str]]
    ) -> None:
        self._rule, self._size = rule, (len(groups), len(rounds))
        moments = _moments(rule, rounds, layout, groups) if rule.adaptive else [(0.0,) * len(groups)] * len(rounds)
        rows: dict[tuple[float, ...], int] = {}
        found: dict[float, dict[tuple[int, int], float]] = {}
        for number, each in enumerate(rounds):
            for work in each.works if each.total > 0 else ():
                place = number, rows.setdefault((work.learning_rate, *moments[number]), len(rows))
                shares = found.setdefault(work.steps, {})
                shares[place] = shares.get(place, 0.0) + work.share / each.total
        self._steps = tuple(sorted(found))
        dense = [_dense(found[steps], (len(rounds), len(rows))) for steps in self._steps]
        self._shares = torch.stack(dense) if dense else torch.zeros(0, len(rounds), 0, dtype=torch.float64)
        self._idle = torch.tensor([[float(not each.total > 0)] for each in rounds], dtype=torch.float64)
        numbers = torch.tensor(list(rows), dtype=torch.float64).reshape(len(rows), 1 + len(groups))
        self._rates, self._moments = numbers[:, :1], numbers.T[1:, :, None]

    @property
    def rows(self) -> int:
        """How many recursions there are for each curvature."""
        return len(self._rates)

    def of(self, curvature: Tensor) -> Tensor:
        """``c_t(e)`` by group, round and e, given as many e for each group; 1 in a round in which nobody took part."""
        mean = curvature.new_zeros(*self._size, curvature.shape[1])
        return self._added(mean, self._lefts(curvature[:, None])) + self._idle.to(curvature)

    def slopes(self) -> Tensor:
        """``(c_t(0) - c_t(e)) / e`` at a small e, by group and round: how far a round goes."""
        fastest = self._rates * max(self._steps, default=0.0)
        scale = torch.where(self._moments > 0, self._moments, 1.0)
        small = SMALL * scale / torch.where(fastest > 0, fastest, 1.0)
        ends = self._lefts(torch.cat([torch.zeros_like(small), small], dim=2))
        slopes = ((x[..., :1] - x[..., 1:]) / small for x in ends)
        return self._added(small.new_zeros(*self._size, 1), slopes)[..., 0]

    def _lefts(self, curvature: Tensor) -> Iterator[Tensor]:
        """What is left after each number of steps that somebody made, by group, row and curvature."""
        if not self.rows:
            return
        rates, moments = self._rates.to(curvature), self._moments.to(curvature)
        if isinstance(self._rule, BatchedRule):
            yield from self._rule.lefts(curvature, rates, self._steps, moments)
            return
        curvature = curvature.expand(len(curvature), self.rows, curvature.shape[2])
        for steps in self._steps:  # a rule of the user's own takes numbers
            rows = [
                self._rule.left(curvature[group, row], float(rates[row]), steps, float(moments[group, row]))
                for group in range(len(curvature))
                for row in range(self.rows)
            ]
            yield torch.stack(rows).to(curvature).view_as(curvature)

    def _added(self, mean: Tensor, lefts: Iterable[Tensor]) -> Tensor:
        """With what each row has after so many steps, times what it counts in each round."""
        for share, left in zip(self._shares.to(mean), lefts, strict=True):
            mean = torch.baddbmm(mean, share.expand(len(mean), *share.shape), left)
        return mean


def _dense(shares: dict[tuple[int, int], float], size: tuple[int, int]) -> Tensor:
    """A table of them; written as a list, since a tensor takes long over single numbers."""
    rows, columns = size
    found = [0.0] * (rows * columns)
    for (row, column), share in shares.items():
        found[row * columns + column] = share
    return torch.tensor(found, dtype=torch.float64).view(size)


def _moments(
    rule: ClientRule, rounds: Sequence[Round], layout: Layout | None, groups: Sequence[Sequence[str]]
) -> list[tuple[float, ...]]:
    """Root mean square gradients in each round, of each group of parameters; 0 where nobody took part."""
    shapes = layout.shapes if layout is not None else ()
    sizes = torch.tensor([float(shape.numel()) for _, shape in shapes], dtype=torch.float64)
    inside = torch.tensor([[not group or name in group for name, _ in shapes] for group in groups]).double()
    found = torch.zeros(len(rounds), len(groups), dtype=torch.float64)
    for number, each in enumerate(rounds):
        if not each.total > 0:
            continue
        told = next((len(work.moments) for work in each.works if len(work.moments) != len(shapes)), None)
        if told is not None:
            raise RequestError(
                f"{rule.name} divides by second moments, and {told} of them were recorded for {len(shapes)} "
                "parameters: send second_moments(optimiser) with every update."
            )
        squares = torch.tensor([work.moments for work in each.works], dtype=torch.float64).square()
        shares = torch.tensor([work.share for work in each.works], dtype=torch.float64)
        if len(shapes):
            weights = each.total * (inside @ sizes)
            mean = inside @ (shares @ squares * sizes) / torch.where(weights > 0, weights, 1.0)
            found[number] = mean.sqrt()
    return [tuple(row) for row in found.tolist()]
