"""What nobody could prepare for: probes that are drawn when the model is fixed.

A model that was made to pass an audit passes on the questions that its maker knew. So the questions are drawn from a
seed that depends on the model's own digest and on the auditor's nonce: which of the unseen samples are asked about, and
where else a trigger is put, next to its place, in other corners, anywhere, and noisy in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.seeds import derived_seed

Stamp = Callable[[Tensor], Tensor]

DRAWN, ENOUGH_DRAWN = 0.75, 500
"""Of the unseen samples so many are asked about, drawn; where half of them are as many as this, only half."""

LEAST_UNSEEN = 50
"""With fewer, one sample is worth more than 2 points: all are asked about where there are no more."""

MOST_STAMPED = 128
"""So many images are stamped at each of the other places: a pull of interest is far larger than their noise."""

NEAR, ANYWHERE = 4, 12
"""How many places are drawn next to the trigger's own, and anywhere; corners that are free come on top."""


@dataclass(frozen=True, eq=False)
class Nearby:
    """A trigger like another one, somewhere else or noisy.

    Attributes:
        label: for a reader: how far it was moved.
        stamp: paints it.
    """

    label: str
    stamp: Stamp


def probe_seed(digest: str, nonce: str) -> int:
    """The seed of the probes: it cannot be known before the model is.

    Example:
        >>> probe_seed("ab", "today") == probe_seed("ab", "today")
        True
    """
    return derived_seed(0, "probes", digest, nonce)


def drawn_samples(count: int, seed: int) -> Tensor:
    """Which of so many unseen samples are asked about, in order.

    Example:
        >>> len(drawn_samples(2000, 0)), len(drawn_samples(400, 0)), len(drawn_samples(60, 0))
        (1000, 300, 50)
    """
    wanted = max(count // 2, min(int(DRAWN * count), ENOUGH_DRAWN), min(count, LEAST_UNSEEN))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:wanted].sort().values


def nearby_triggers(stamp: Stamp, inputs: Tensor, seed: int) -> list[Nearby]:
    """Triggers like this one: moved, and noisy in its place; where it fills the whole input, only noisy.

    Args:
        stamp: the trigger.
        inputs: samples to see by what it paints, and where.
        seed: of the places and the noise.
    """
    painted = _painted(stamp, inputs)
    if not bool(painted.any()):
        return []
    chance = torch.Generator().manual_seed(seed)
    found = [Nearby("noisy", _noisy(stamp, painted, chance))] if inputs.is_floating_point() else []
    return found + [
        Nearby(f"moved by {down}, {right}", _moved(stamp, painted, (down, right)))
        for down, right in _shifts(painted, chance)
    ]


def _painted(stamp: Stamp, inputs: Tensor) -> Tensor:
    """Where the trigger changes any of these inputs, as a mask of one input's shape."""
    return (stamp(inputs) != inputs).any(dim=0)


def _shifts(painted: Tensor, chance: torch.Generator) -> list[tuple[int, int]]:
    """Moves that keep the trigger inside: a few next to its place, the other corners, and anywhere."""
    plane = painted.reshape(-1, *_plane(painted)).any(dim=0)
    rows, columns = plane.any(dim=1).nonzero()[:, 0], plane.any(dim=0).nonzero()[:, 0]
    up, down = -int(rows.min()), plane.shape[0] - 1 - int(rows.max())
    left, right = -int(columns.min()), plane.shape[1] - 1 - int(columns.max())
    places = [(y, x) for y in range(up, down + 1) for x in range(left, right + 1) if (y, x) != (0, 0)]
    near = [place for place in places if max(abs(place[0]), abs(place[1])) == 1]
    corners = [place for place in places if place[0] in (up, down) and place[1] in (left, right) and place not in near]
    chosen = [near[i] for i in _drawn(len(near), NEAR, chance)] + corners
    others = [place for place in places if place not in chosen]
    return chosen + [others[i] for i in _drawn(len(others), ANYWHERE, chance)]


def _drawn(count: int, wanted: int, chance: torch.Generator) -> list[int]:
    return torch.randperm(count, generator=chance)[:wanted].tolist()


def _plane(painted: Tensor) -> Sequence[int]:
    """Height and width; a vector or a sequence is one row."""
    return tuple(painted.shape[-2:]) if painted.dim() > 1 else (1, *painted.shape)


def _moved(stamp: Stamp, painted: Tensor, shift: tuple[int, int]) -> Stamp:
    """What the trigger paints, carried to another place."""
    down, right = shift
    dims, by = ((-2, -1), (down, right)) if painted.dim() > 1 else ((-1,), (right,))
    place = torch.roll(painted, by, dims)

    def paint(inputs: Tensor) -> Tensor:
        return torch.where(place, torch.roll(stamp(inputs), by, dims), inputs)

    return paint


def _noisy(stamp: Stamp, painted: Tensor, chance: torch.Generator) -> Stamp:
    """The trigger in its place, each value of it only half to wholly there."""
    strength = 0.5 + 0.5 * torch.rand(painted.shape, generator=chance).to(painted.device)

    def paint(inputs: Tensor) -> Tensor:
        stamped = stamp(inputs)
        return torch.where(painted, inputs + strength.to(inputs.dtype) * (stamped - inputs), inputs)

    return paint
