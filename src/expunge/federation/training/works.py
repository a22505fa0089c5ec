"""What each client did in each round of a training, and how a pull is spread over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.errors import RequestError

ROUNDING = 1e-9
"""Shares that add up to one add up to a little less in floating point."""


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

    @property
    def total(self) -> float:
        """The weight of all who took part."""
        return sum(work.share for work in self.works)


def lengthened(shares: Mapping[str, float], names: Collection[str]) -> dict[str, float] | None:
    """By what the pulls of those of them who took part count in a round; None where they had it to themselves.

    Example:
        >>> lengthened({"ada": 0.5, "bob": 0.25, "cyd": 0.25}, ["ada", "bob"])
        {'ada': 2.0, 'bob': 3.0}
        >>> lengthened({"ada": 1.0}, ["ada", "bob"])
        {'ada': 1.0}
        >>> lengthened({"ada": 0.5, "bob": 0.5}, ["ada", "bob"])
    """
    own = {name: shares[name] for name in names if shares.get(name, 0.0) > 0}
    if len(own) < 2:
        return dict.fromkeys(own, 1.0)
    rest = 1 - sum(own.values())
    return None if rest <= ROUNDING else {name: (1 - share) / rest for name, share in own.items()}


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
    own = {number: {name: works[number][name] for name in names if name in works[number]} for number in rounds}
    known = all(work.pull > 0 or not work.share for each in own.values() for work in each.values())
    for number, each in own.items():
        factors = lengthened({name: work.share for name, work in each.items()}, names) or dict.fromkeys(each, 1.0)
        counts = {
            name: work.pull if known else work.share * work.learning_rate * work.steps for name, work in each.items()
        }
        row[number] = sum(factor * counts[name] for name, factor in factors.items())
    if not row.sum() > 0:
        for number in rounds:
            row[number] = float(any(name in works[number] for name in names))
    total = row.sum()
    return row / total if total > 0 else row
