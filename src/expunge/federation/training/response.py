"""The response of a training: what is left, at its end, of a pull in each of its rounds.

Let D be how far the trained model lies from the one without the leaver. In round t the mean update differs by

    q = (c_t(e) - 1) D + a_t        those who stay answer a displaced model; a_t is the leaver's pull
    D, M <- server's rule(D, M, q)

along a direction of curvature e, with ``c_t(e)`` what one round of their local training leaves of a displacement
(recipe.py). So the filter is the training itself, run on a quadratic with the pulls as they were: schedules, momentum,
slow devices and absent clients are in it, and no case has a formula of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

TOGETHER = 1 << 24
"""At most so many curvatures of several groups are interpolated together, unless one group has more."""

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
            places = _places(flat)
            moved, momentum = self._run(places, pulls, [names for _, names in some])
            helds = _between(momentum, places, flat) if isinstance(self._server, FedAvgM) else momentum[..., :1]
            for (like, _), left, held in zip(some, _between(moved, places, flat), helds, strict=True):
                shape = (len(pulls), *like.shape)
                found.append((left.to(like).view(shape), held.to(like).expand(-1, like.numel()).view(shape)))
        return found

    @property
    def _server(self) -> FedAvg | FedAvgM:
        rule = self.recipe.server
        if isinstance(rule, AdaptiveServer):
            raise RequestError(refusal(rule))
        return rule

    def _contractions(self, groups: Sequence[Sequence[str]]) -> Contractions:
        asked = tuple(map(tuple, groups))
        if asked not in self._made:
            self._made[asked] = Contractions(self.recipe.client, self.rounds, self.layout, asked)
        return self._made[asked]

    @cached_property
    def _made(self) -> dict[tuple[tuple[str, ...], ...], Contractions]:
        return {}

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


def _places(curvatures: Sequence[Tensor]) -> Tensor:
    """For which curvatures the training is run, a row for each group: its own, or where they are many, a grid.

    That is 0, and curvatures up to the largest, evenly by their logarithm.
    """
    first = curvatures[0]
    powers = 10.0 ** torch.linspace(-DECADES, 0, GRID - 1, dtype=torch.float64, device=first.device)
    grid = torch.cat([first.new_zeros(1), powers])
    rows = [own if len(own) <= GRID else own.max().clamp(min=1e-300) * grid for own in curvatures]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _between(values: Tensor, places: Tensor, curvatures: Sequence[Tensor]) -> list[Tensor]:
    """Of each group a row for each pull: values at its places, or where these are a grid, between them.

    They are interpolated by the logarithm of the curvature; below the grid, by itself.
    """
    found = [own[:, : len(curvature)] for own, curvature in zip(values, curvatures, strict=True)]
    table, by_decade = values.transpose(0, 1).flatten(1), (GRID - 2) / (DECADES * math.log(10.0))
    for some in _together([number for number, own in enumerate(curvatures) if len(own) > GRID], curvatures):
        sizes = [len(curvatures[number]) for number in some]
        above = torch.cat([curvatures[number] / places[number, 1] for number in some])
        place = torch.where(above > 1, 1 + by_decade * above.log(), above).clamp_(0, GRID - 1)
        at = place.long().clamp_(max=GRID - 2)
        part = place - at
        if len(some) > 1:
            first = torch.tensor([GRID * number for number in some], device=at.device)
            at += first.repeat_interleave(torch.tensor(sizes, device=at.device), output_size=len(at))
        else:
            at += GRID * some[0]
        told = torch.lerp(table[:, at], table[:, at + 1], part)
        for number, own in zip(some, torch.split(told, sizes, dim=1), strict=True):
            found[number] = own
    return found


def _together(numbers: Sequence[int], curvatures: Sequence[Tensor]) -> Iterator[list[int]]:
    """Groups one after another, as many as have few enough curvatures."""
    some, count = list[int](), 0
    for number in numbers:
        if some and count + len(curvatures[number]) > TOGETHER:
            yield some
            some, count = [], 0
        some.append(number)
        count += len(curvatures[number])
    if some:
        yield some
