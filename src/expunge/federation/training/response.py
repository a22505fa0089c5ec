"""The response of a training: what is left, at its end, of a pull in each of its rounds.

Let D be how far the trained model lies from the one without the leaver. In round t the mean update differs by

    q = (c_t(e) - 1) D + a_t        those who stay answer a displaced model; a_t is the leaver's pull
    D, M <- server's rule(D, M, q)

along a direction of curvature e, with ``c_t(e)`` what one round of their local training leaves of a displacement
(recipe.py). So the filter is the training itself, run on a quadratic with the pulls as they were: schedules, momentum,
slow devices and absent clients are in it, and no case has a formula of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.vectors import Layout
from expunge.errors import RequestError
from expunge.federation.training.recipe import AdaptiveServer, FedAvg, FedAvgM, Recipe, refusal

GRID = 1024
"""Curvatures for which the training is run; where there are more, what lies between is interpolated."""

SMALL = 1e-7
"""A curvature that a round nearly leaves as it is."""

DECADES = 14
"""How far below the largest curvature the grid reaches; what is smaller is nearly flat."""


@dataclass(frozen=True)
class Work:
    """What one client did in one round.

    Attributes:
        share: its weight in the mean.
        learning_rate: of its optimiser.
        steps: that it made.
        moments: root mean square gradients by parameter, where its optimiser divides by them.
        pull: how long its pull was, where that was recorded.
    """

    share: float
    learning_rate: float
    steps: float
    moments: tuple[float, ...] = ()
    pull: float = 0.0

    def __post_init__(self) -> None:
        if not (self.learning_rate >= 0 and self.steps >= 0 and self.share >= 0):
            raise RequestError("A client's share, learning rate and steps in a round must be at least 0.")


@dataclass(frozen=True)
class Round:
    """One round of those who stay.

    Attributes:
        works: of each who took part.
        plain: whether its mean was added as it is, whatever the server's rule (a repair after an earlier request).
    """

    works: tuple[Work, ...]
    plain: bool = False


@dataclass(frozen=True)
class Response:
    """How those who stay trained, round by round, and what they leave of pulls.

    Attributes:
        recipe: the rules of clients and server.
        rounds: of those who stay; one in which none of them took part corrects nothing.
        layout: names and sizes of the parameters, where moments differ between them.

    Example:
        >>> twice = Response(Recipe(), (Round((Work(1.0, 0.1, 1),)),) * 2)
        >>> twice.left(torch.tensor([0.0, 1.0]), torch.tensor([[0.5, 0.5]]))[0]
        tensor([[1.0000, 0.9500]])
    """

    recipe: Recipe
    rounds: tuple[Round, ...]
    layout: Layout | None = None

    def travel(self, parameters: Sequence[str] = ()) -> float:
        """What a small curvature is multiplied by in all rounds together: rate x steps in plain FedAvg.

        Its inverse is where the filter cuts off: directions of less curvature keep a pull, those of more correct it.

        Example:
            >>> Response(Recipe(), (Round((Work(1.0, 0.1, 3),)),) * 2).travel()
            0.6
        """
        rule, total = self.recipe.server, 0.0
        if isinstance(rule, AdaptiveServer):
            raise RequestError(refusal(rule))
        gain = rule.learning_rate / (1 - rule.momentum if isinstance(rule, FedAvgM) else 1.0)
        for each in self.rounds:
            fastest = max((work.learning_rate * work.steps for work in each.works), default=0.0)
            if not fastest > 0:
                continue
            moment = self._moment(each, parameters) if self.recipe.client.adaptive else 1.0
            small = SMALL * (moment or 1.0) / fastest
            kept = self._contraction(each, torch.tensor([0.0, small], dtype=torch.float64), parameters, {})
            total += (1.0 if each.plain else gain) * float(kept[0] - kept[1]) / small
        if not total > 0:
            raise RequestError("Nobody who stays has trained: there is nothing to tell a filter from.")
        return float(f"{total:.6g}")  # what is left of a difference of two numbers near 1

    def left(self, curvature: Tensor, pulls: Tensor, parameters: Sequence[str] = ()) -> tuple[Tensor, Tensor]:
        """What is left of pulls along directions of this curvature: in the model, and in the server's momentum.

        Args:
            curvature: eigenvalues of those who stay, in a tensor of any shape.
            pulls: one row for each pull: how much of it came in each round.
            parameters: names of the parameters that the eigenvalues belong to, where moments differ between them.

        Returns:
            Two tensors with a row for each pull in front of the curvature's own shape.
        """
        if pulls.dim() != 2 or pulls.shape[1] != len(self.rounds):
            raise RequestError(f"Pulls are given for each of {len(self.rounds)} rounds, not as {tuple(pulls.shape)}.")
        flat = curvature.double().reshape(-1)
        rows = pulls.to(flat)
        if flat.numel() <= GRID:
            moved, momentum = self._run(flat, rows, parameters)
        else:
            grid = _grid(flat)
            moved, momentum = (_between(grid, values, flat) for values in self._run(grid, rows, parameters))
        shape = (len(pulls), *curvature.shape)
        return moved.to(curvature).view(shape), momentum.to(curvature).view(shape)

    def _run(self, curvature: Tensor, pulls: Tensor, parameters: Sequence[str]) -> tuple[Tensor, Tensor]:
        rule = self.recipe.server
        if isinstance(rule, AdaptiveServer):
            raise RequestError(refusal(rule))
        known: dict[tuple[float, float, float], Tensor] = {}
        moved = curvature.new_zeros(len(pulls), len(curvature))
        momentum = torch.zeros_like(moved)
        for number, each in enumerate(self.rounds):
            change = (self._contraction(each, curvature, parameters, known) - 1) * moved + pulls[:, number, None]
            server = FedAvg() if each.plain else rule
            moved, momentum = server.apply(moved, momentum, change)
        return moved, momentum

    def _contraction(
        self,
        each: Round,
        curvature: Tensor,
        parameters: Sequence[str],
        known: dict[tuple[float, float, float], Tensor],
    ) -> Tensor:
        """c_t: what the round leaves of a displacement, the mean over those who took part."""
        total = sum(work.share for work in each.works)
        if not total > 0:
            return torch.ones_like(curvature)
        moment = self._moment(each, parameters) if self.recipe.client.adaptive else 0.0
        shares: dict[tuple[float, float, float], float] = {}  # of those who trained alike, together
        for work in each.works:
            key = (work.learning_rate, work.steps, moment)
            shares[key] = shares.get(key, 0.0) + work.share
        mean = torch.zeros_like(curvature)
        for key, share in shares.items():
            if key not in known:
                known[key] = self.recipe.client.left(curvature, *key)
            mean += share / total * known[key]
        return mean

    def _moment(self, each: Round, parameters: Sequence[str]) -> float:
        """Root mean square gradient of these parameters (of all, where none are named) in a round."""
        sizes = [shape.numel() for _, shape in self.layout.shapes] if self.layout is not None else []
        wanted = [name in parameters or not parameters for name, _ in self.layout.shapes] if self.layout else []
        total, weight = 0.0, 0.0
        for work in each.works:
            if len(work.moments) != len(sizes):
                raise RequestError(
                    f"{self.recipe.client.name} divides by second moments, and {len(work.moments)} of them were "
                    f"recorded for {len(sizes)} parameters: send second_moments(optimiser) with every update."
                )
            for moment, size, counts in zip(work.moments, sizes, wanted, strict=True):
                if counts:
                    total, weight = total + work.share * size * moment**2, weight + work.share * size
        return (total / weight) ** 0.5 if weight else 0.0


def spread(works: Sequence[Mapping[str, Work]], names: Sequence[str], rounds: range) -> Tensor:
    """How the pull of these clients is spread over the rounds of a stretch: by its length in each, as recorded.

    Where lengths were not recorded, by rate x steps of the rounds in which they took part.

    Args:
        works: of every client, round by round.
        names: who pulls.
        rounds: the stretch, in which one sum of pulls was kept.

    Example:
        >>> first, last = ({"ada": Work(0.5, 0.1, 2, pull=length)} for length in (3.0, 1.0))
        >>> spread([first, {}, last], ["ada"], range(0, 3))
        tensor([0.7500, 0.0000, 0.2500], dtype=torch.float64)
    """
    row = torch.zeros(len(works), dtype=torch.float64)
    own = {number: [works[number][name] for name in names if name in works[number]] for number in rounds}
    known = all(work.pull > 0 for each in own.values() for work in each)
    for number, each in own.items():
        row[number] = sum(work.pull if known else work.share * work.learning_rate * work.steps for work in each)
    if not row.sum() > 0:
        for number in rounds:
            row[number] = float(any(name in works[number] for name in names))
    total = row.sum()
    return row / total if total > 0 else row


def _grid(curvature: Tensor) -> Tensor:
    """0, and curvatures up to the largest, evenly by their logarithm."""
    largest = float(curvature.max().clamp(min=1e-300))
    powers = torch.linspace(-DECADES, 0, GRID - 1, dtype=torch.float64, device=curvature.device)
    return torch.cat([curvature.new_zeros(1), largest * 10.0**powers])


def _between(grid: Tensor, values: Tensor, curvature: Tensor) -> Tensor:
    """Values on the grid (rows), interpolated by the logarithm of the curvature; below the grid, by itself."""
    at = torch.searchsorted(grid, curvature.clamp(min=0.0).contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[at - 1], grid[at]
    flat = (curvature - low) / (high - low)
    steep = torch.log(curvature.clamp(min=1e-300) / low.clamp(min=1e-300)) / torch.log(high / low.clamp(min=1e-300))
    part = torch.where(low > 0, steep, flat).clamp(0.0, 1.0)
    return values[:, at - 1] * (1 - part) + values[:, at] * part
