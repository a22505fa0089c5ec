"""What each client did in each round of a training, and how a pull is spread over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.errors import RequestError


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
