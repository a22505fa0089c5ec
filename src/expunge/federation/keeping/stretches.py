"""Stretches of rounds: one vector per client for each, so that it is known about when a client pulled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

Pulls = Mapping[str, Tensor]
"""One vector per client, of one round."""

Corrections = Mapping[str, tuple[float, float]]
"""Of those who met a leaver: how much of its vector is added to theirs, and what the sum is divided by."""


class Vectors(Protocol):
    """One vector per client, which nobody changes: whatever would gives others. In memory (Held) or on disk (Filed)."""

    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...

    @property
    def length(self) -> int | None:
        """Of each vector; None where there is none."""

    @property
    def stored_bytes(self) -> int:
        """Of all together."""

    def plus(self, pulls: Pulls) -> Self:
        """With the pulls of one more round."""

    def joined(self, other: Self) -> Self:
        """With the vectors of another stretch."""

    def without(self, gone: str, corrections: Corrections) -> Self:
        """Without a client's vector, and those of the clients that it met corrected by it."""


class Held(dict[str, Tensor]):
    """Vectors in memory.

    Example:
        >>> kept = Held(ada=torch.ones(1)).plus({"ada": torch.ones(1), "bob": torch.zeros(1)})
        >>> kept.without("ada", {"bob": (0.5, 0.5)})
        {'bob': tensor([2.])}
    """

    @property
    def length(self) -> int | None:
        """Of each vector; None where there is none."""
        return next((vector.numel() for vector in self.values()), None)

    @property
    def stored_bytes(self) -> int:
        """Of all together."""
        return sum(vector.numel() * vector.element_size() for vector in self.values())

    def plus(self, pulls: Pulls) -> Held:
        """With the pulls of one more round."""
        found = Held(self)
        for name, vector in pulls.items():
            known = found.get(name)
            found[name] = vector if known is None else known + vector.to(known.device)
        return found

    joined = plus

    def without(self, gone: str, corrections: Corrections) -> Held:
        """Without a client's vector, and those of the clients that it met corrected by it."""
        found = Held(self)
        leaving = found.pop(gone, None)
        for name, (added, divisor) in corrections.items():
            if leaving is not None and name in found:
                found[name] = (found[name] + added * leaving) / divisor
        return found


@dataclass(frozen=True, eq=False)
class Stretch:
    """A few rounds one after another, and one vector per client: the sum of its pulls in them."""

    rounds: range
    vectors: Vectors

    def joined(self, other: Stretch) -> Stretch:
        """This one and the one after it as one."""
        return Stretch(range(self.rounds.start, other.rounds.stop), self.vectors.joined(other.vectors))

    def longer(self, number: int, pulls: Pulls) -> Stretch:
        """With one more round, of this number."""
        return Stretch(range(self.rounds.start, number + 1), self.vectors.plus(pulls))


def added(
    stretches: Sequence[Stretch], pulls: Pulls, number: int, most: int, fresh: Callable[[Pulls], Vectors] = Held
) -> list[Stretch]:
    """The stretches with one more round: at most so many, so that neighbours are joined, as evenly as can be.

    Args:
        stretches: as they are.
        pulls: of the round.
        number: of the round.
        most: how many stretches there may be.
        fresh: makes the vectors of a new stretch.

    Example:
        >>> kept: list[Stretch] = []
        >>> for number in range(9):
        ...     kept = added(kept, {}, number, most=4)
        >>> [stretch.rounds for stretch in kept]
        [range(0, 4), range(4, 8), range(8, 9)]
    """
    found = list(stretches)
    longest = max((len(stretch.rounds) for stretch in found), default=0)
    if found and (most == 1 or len(found[-1].rounds) < longest):
        return [*found[:-1], found[-1].longer(number, pulls)]
    if len(found) == most:
        found = [one.joined(other) for one, other in zip(found[::2], found[1::2], strict=True)]
    return [*found, Stretch(range(number, number + 1), fresh(pulls))]


class Totals(Mapping[str, Tensor]):
    """Each client's vector over all stretches, added up when it is asked for.

    Args:
        stretches: as they are.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._parts = tuple(stretch.vectors for stretch in stretches)

    def __getitem__(self, name: str) -> Tensor:
        own = [vectors[name] for vectors in self._parts if name in vectors]
        if not own:
            raise KeyError(name)
        return own[0] if len(own) == 1 else torch.stack(own).sum(dim=0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return any(name in vectors for vectors in self._parts)

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(name for vectors in self._parts for name in vectors)
