"""Vectors on disk, one for each client and block; a stretch is one block, or the sum of several that were joined.

Where they lie is their source's: in rows of one file (memory_folder.py) or in files of their own (vector_files.py).

What would change vectors is first noted as an edit, and applied whenever a vector is read: a round's pulls, or a
departure, which is the leaver's vector and two numbers for each client that it met. So a memory can be copied and tried
out while the disk is as it was, and nothing is read or written but what a round or a departure touches. When the edits
are written, each of these vectors is written once, the leaver's is not any more, and no edit is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from expunge.federation.keeping.stretches import Corrections, Pulls


class Source(Protocol):
    """What is on the disk: vectors by the number of their block and the client's name. It does not change."""

    @property
    def blocks(self) -> Iterable[int]:
        """The numbers of the blocks that it has, or at least all that it still has vectors of."""

    def names(self, block: int) -> Iterable[str]:
        """Whose vectors there are, in the order in which they came."""

    def has(self, block: int, name: str) -> bool:
        """Whether there is one."""

    def read(self, block: int, name: str) -> Tensor | None:
        """It, whole and as it was written; None where there is none."""


@dataclass(frozen=True, eq=False)
class Added:
    """A round's pulls."""

    pulls: Pulls

    def names(self) -> Iterator[str]:
        """Whom it touches."""
        return iter(self.pulls)

    def apply(self, name: str, vector: Tensor | None) -> Tensor | None:
        """A client's vector after it."""
        pull = self.pulls.get(name)
        return vector if pull is None else pull if vector is None else vector + pull.to(vector.device)


@dataclass(frozen=True, eq=False)
class Departed:
    """A departure: ``(B_v + added B_u) / divisor`` for each v that met u; of B_u this block may have no part."""

    gone: str
    leaving: Tensor | None
    corrections: Corrections

    def names(self) -> Iterator[str]:
        """Whom it touches."""
        return iter((self.gone, *self.corrections))

    def apply(self, name: str, vector: Tensor | None) -> Tensor | None:
        """A client's vector after it."""
        if name == self.gone:
            return None
        if name not in self.corrections:
            return vector
        added, divisor = self.corrections[name]
        moved = None if self.leaving is None else added * self.leaving
        parts = [part for part in (vector, moved) if part is not None]
        return sum(parts[1:], parts[0]) / divisor if parts else None


@dataclass(frozen=True, eq=False)
class Block:
    """Vectors under one number, and what is to be done to them, in this order."""

    number: int
    edits: tuple[Added | Departed, ...] = ()

    def touched(self) -> list[str]:
        """Whose vectors the edits change."""
        return list(dict.fromkeys(name for edit in self.edits for name in edit.names()))


@dataclass(frozen=True, eq=False)
class Filed:
    """The vectors of one stretch on disk.

    Attributes:
        source: where they are, as the edits found it.
        blocks: that add up to the vectors.
        length: of each vector.

    Example:
        >>> from pathlib import Path
        >>> from expunge.federation.keeping.vector_files import VectorFiles
        >>> nothing = VectorFiles(Path("nowhere"), {})
        >>> kept = Filed(nothing, (Block(0),), 1).plus({"ada": torch.ones(1), "bob": torch.zeros(1)})
        >>> after = kept.without("ada", {"bob": (0.5, 0.5)})
        >>> list(after), after["bob"], list(kept)
        (['bob'], tensor([1.]), ['ada', 'bob'])
    """

    source: Source
    blocks: tuple[Block, ...]
    length: int | None

    def __getitem__(self, name: str) -> Tensor:
        found = [own for block in self.blocks if (own := self.read(block, name)) is not None]
        if not found:
            raise KeyError(name)
        return found[0] if len(found) == 1 else torch.stack(found).sum(dim=0)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(self._has(block, name) for block in self.blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @property
    def stored_bytes(self) -> int:
        """Of all together, as they will be on disk."""
        count = sum(len(self.names_in(block)) for block in self.blocks)
        first = next(iter(self._names), None)
        return 0 if first is None else count * self[first].nbytes

    @classmethod
    def fresh(cls, source: Source, pulls: Pulls, beside: Iterable[Block]) -> Filed:
        """Of a new stretch with these pulls, under a number that no block of the source has, nor of those beside."""
        number = 1 + max((*source.blocks, *(block.number for block in beside)), default=-1)
        length = next((vector.numel() for vector in pulls.values()), None)
        return cls(source, (Block(number),), length).plus(pulls)

    def plus(self, pulls: Pulls) -> Filed:
        """With the pulls of one more round."""
        *earlier, last = self.blocks
        return replace(self, blocks=(*earlier, replace(last, edits=(*last.edits, Added(pulls)))))

    def joined(self, other: Filed) -> Filed:
        """With the vectors of another stretch: nothing is read or written, its blocks are added up from now on."""
        return replace(self, blocks=(*self.blocks, *other.blocks))

    def without(self, gone: str, corrections: Corrections) -> Filed:
        """Without a client's vector, and those of the clients that it met corrected by it, block by block."""
        leaving = [self.read(block, gone) for block in self.blocks]
        met = {} if all(own is None for own in leaving) else corrections
        blocks = [
            replace(block, edits=(*block.edits, Departed(gone, own, met)))
            for block, own in zip(self.blocks, leaving, strict=True)
        ]
        return replace(self, blocks=tuple(blocks))

    def changes(self) -> Iterator[tuple[int, str, Tensor | None]]:
        """Block, client and vector of all that the edits change, each read when its turn comes; None where it goes."""
        for block in self.blocks:
            for name in block.touched():
                yield block.number, name, self.read(block, name)

    def settled(self, source: Source) -> Filed:
        """The same once its changes are in a source."""
        return replace(self, source=source, blocks=tuple(Block(block.number) for block in self.blocks))

    @cached_property
    def _names(self) -> dict[str, None]:
        """Who has a vector, in the order in which they came."""
        return dict.fromkeys(name for block in self.blocks for name in self.names_in(block))

    def names_in(self, block: Block) -> dict[str, None]:
        """Who has a vector in one of its blocks."""
        found = dict.fromkeys(self.source.names(block.number))
        for edit in block.edits:
            if isinstance(edit, Added) or edit.leaving is not None:
                found |= dict.fromkeys(edit.names())
            if isinstance(edit, Departed):
                found.pop(edit.gone, None)
        return found

    def read(self, block: Block, name: str) -> Tensor | None:
        """A client's vector in one of its blocks; None where it has none there."""
        vector = self.source.read(block.number, name)
        for edit in block.edits:
            vector = edit.apply(name, vector)
        return vector

    def _has(self, block: Block, name: str) -> bool:
        for edit in reversed(block.edits):
            if isinstance(edit, Departed) and name == edit.gone:
                return False
            if (isinstance(edit, Added) or edit.leaving is not None) and name in edit.names():
                return True
        return self.source.has(block.number, name)


def blocks_of(vectors: Iterable[object]) -> list[Block]:
    """The blocks of all of these that are on disk."""
    return [block for own in vectors if isinstance(own, Filed) for block in own.blocks]
