"""The response of a training: what is left, at its end, of a pull in each of its rounds.

Let D be how far the trained model lies from the one without the leaver. In round t the mean update differs by

    q = (c_t(e) - 1) D + a_t        those who stay answer a displaced model; a_t is the leaver's pull
    D, M <- server's rule(D, M, q)

along a direction of curvature e, with ``c_t(e)`` what one round of their local training leaves of a displacement
(recipe.py). So the filter is the training itself, run on a quadratic with the pulls as they were: schedules, momentum,
slow devices and absent clients are in it, and no case has a formula of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from expunge.core.kronecker import Spectrum
from expunge.core.vectors import Layout
from expunge.errors import RequestError
from expunge.federation.training.contraction import Contractions
from expunge.federation.training.recipe import AdaptiveServer, FedAvg, FedAvgM, Recipe, refusal
from expunge.federation.training.works import Round

GRID = 1024
"""Curvatures for which the training is run; where there are more, what lies between is interpolated."""

DECADES = 14
"""How far below the largest curvature the grid reaches; what is smaller is nearly flat."""

CELLS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""So many numbers run side by side: as many as a core's cache holds, or a GPU takes at once."""


@dataclass(frozen=True)
class Response:
    """How those who stay trained, round by round, and what they leave of pulls.

    Attributes:
        recipe: the rules of clients and server.
        rounds: of those who stay; one in which none of them took part corrects nothing.
        layout: names and sizes of the parameters, where moments differ between them.

    Example:
        >>> from expunge.federation.training.works import Work
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
            >>> from expunge.federation.training.works import Work
            >>> Response(Recipe(), (Round((Work(1.0, 0.1, 3),)),) * 2).travel()
            0.6
        """
        return self.travels([parameters])[0] if parameters else self._whole_travel

    @property
    def steps(self) -> float:
        """Of all clients in all rounds."""
        return sum(work.steps for each in self.rounds for work in each.works)

    @cached_property
    def _whole_travel(self) -> float:
        return self.travels([()])[0]

    def travels(self, groups: Sequence[Sequence[str]]) -> list[float]:
        """The same for several groups of parameters at once; what was told before is remembered."""
        asked = tuple(map(tuple, groups))
        if asked not in self._travels:
            self._travels[asked] = self._travelled(groups)
        return list(self._travels[asked])

    @cached_property
    def _travels(self) -> dict[tuple[tuple[str, ...], ...], list[float]]:
        return {}

    def _travelled(self, groups: Sequence[Sequence[str]]) -> list[float]:
        rule = self._server
        gain = rule.learning_rate / (1 - rule.momentum if isinstance(rule, FedAvgM) else 1.0)
        gains = torch.tensor([1.0 if each.plain else gain for each in self.rounds], dtype=torch.float64)
        totals = (self._contractions(groups).slopes() @ gains).tolist()
        if not all(total > 0 for total in totals):
            raise RequestError("Nobody who stays has trained: there is nothing to tell a filter from.")
        return [float(f"{total:.6g}") for total in totals]  # what is left of a difference of two numbers near 1

    def left(self, curvature: Tensor, pulls: Tensor, parameters: Sequence[str] = ()) -> tuple[Tensor, Tensor]:
        """What is left of pulls along directions of this curvature: in the model, and in the server's momentum.

        Args:
            curvature: eigenvalues of those who stay, in a tensor of any shape.
            pulls: one row for each pull: how much of it came in each round.
            parameters: names of the parameters that the eigenvalues belong to, where moments differ between them.

        Returns:
            Two tensors with a row for each pull in front of the curvature's own shape.
        """
        return self.lefts([(curvature, parameters)], pulls)[0]

    def lefts(self, spectra: Sequence[Spectrum], pulls: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same for several groups of parameters at once: their recursions run side by side."""
        if pulls.dim() != 2 or pulls.shape[1] != len(self.rounds):
            raise RequestError(f"Pulls are given for each of {len(self.rounds)} rounds, not as {tuple(pulls.shape)}.")
        at_once = max(1, CELLS.get(spectra[0][0].device.type, CELLS["cpu"]) // (GRID * max(1, len(self.rounds))))
        found = []
        for start in range(0, len(spectra), at_once):
            some = spectra[start : start + at_once]
            flat = [curvature.double().reshape(-1) for curvature, _ in some]
            places = [own if own.numel() <= GRID else _grid(own) for own in flat]
            both = self._run(torch.nn.utils.rnn.pad_sequence(places, batch_first=True), pulls, [own for _, own in some])
            for (curvature, _), own, grid, *values in zip(some, flat, places, *both, strict=True):
                if grid is not own:
                    values = _between(grid, values, own)
                shape = (len(pulls), *curvature.shape)
                moved, momentum = (each[:, : own.numel()].to(curvature).view(shape) for each in values)
                found.append((moved, momentum))
        return found

    @property
    def _server(self) -> FedAvg | FedAvgM:
        rule = self.recipe.server
        if isinstance(rule, AdaptiveServer):
            raise RequestError(refusal(rule))
        return rule

    def _contractions(self, groups: Sequence[Sequence[str]]) -> Contractions:
        return Contractions(self.recipe.client, self.rounds, self.layout, groups)

    def _run(self, curvature: Tensor, pulls: Tensor, groups: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
        """What is left in the model and in the momentum, by group, pull and curvature."""
        rule, rows = self._server, pulls.to(curvature)
        answered = self._contractions(groups).of(curvature) - 1
        moved = curvature.new_zeros(len(curvature), len(rows), curvature.shape[1])
        momentum = torch.zeros_like(moved)
        for number, each in enumerate(self.rounds):
            change = torch.addcmul(rows[:, number, None], answered[:, number, None], moved)
            moved, momentum = (FedAvg() if each.plain else rule).apply(moved, momentum, change)
        return moved, momentum


def _grid(curvature: Tensor) -> Tensor:
    """0, and curvatures up to the largest, evenly by their logarithm."""
    powers = torch.linspace(-DECADES, 0, GRID - 1, dtype=torch.float64, device=curvature.device)
    return torch.cat([curvature.new_zeros(1), curvature.max().clamp(min=1e-300) * 10.0**powers])


def _between(grid: Tensor, values: Sequence[Tensor], curvature: Tensor) -> list[Tensor]:
    """Values on the grid (rows), interpolated by the logarithm of the curvature; below the grid, by itself."""
    at = torch.searchsorted(grid, curvature.clamp(min=0.0).contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[at - 1], grid[at]
    flat = (curvature - low) / (high - low)
    steep = torch.log(curvature.clamp(min=1e-300) / low.clamp(min=1e-300)) / torch.log(high / low.clamp(min=1e-300))
    part = torch.where(low > 0, steep, flat).clamp(0.0, 1.0)
    return [torch.lerp(own[:, at - 1], own[:, at], part) for own in values]
