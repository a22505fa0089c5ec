"""Stretches of rounds: one vector per client for each, so that it is known about when a client pulled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Stretch:
    """A few rounds one after another, and one vector per client: the sum of its pulls in them."""

    rounds: range
    vectors: Mapping[str, Tensor]

    def joined(self, other: Stretch) -> Stretch:
        """This one and the one after it as one."""
        vectors = dict(self.vectors)
        for name, vector in other.vectors.items():
            known = vectors.get(name)
            vectors[name] = vector if known is None else known + vector.to(known.device)
        return Stretch(range(self.rounds.start, other.rounds.stop), vectors)


def added(stretches: Sequence[Stretch], pulls: Mapping[str, Tensor], number: int, most: int) -> list[Stretch]:
    """The stretches with one more round: at most so many, so that neighbours are joined, as evenly as can be.

    Example:
        >>> kept: list[Stretch] = []
        >>> for number in range(9):
        ...     kept = added(kept, {}, number, most=4)
        >>> [stretch.rounds for stretch in kept]
        [range(0, 4), range(4, 8), range(8, 9)]
    """
    found, fresh = list(stretches), Stretch(range(number, number + 1), dict(pulls))
    longest = max((len(stretch.rounds) for stretch in found), default=0)
    if found and (most == 1 or len(found[-1].rounds) < longest):
        return [*found[:-1], found[-1].joined(fresh)]
    if len(found) == most:
        found = [one.joined(other) for one, other in zip(found[::2], found[1::2], strict=True)]
    return [*found, fresh]
