"""Vectors on disk, a row for each client, and what is to be changed in them.

    vector 3 "ada"     the vector of ada in block 3; a stretch is one block, or the sum of several that were joined

What would change vectors is first noted as an edit, and applied whenever a vector is read: a round's pulls, or a
departure, which is the leaver's vector and two numbers for each client that it met. So a memory can be copied and tried
out while the rows are as they were, and nothing is read or written but what a round or a departure touches. When the
edits are written, each of these vectors is written once, the leaver's is deleted, and no edit is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from expunge.errors import DataError
from expunge.federation.keeping.rows import Row, Rows
from expunge.federation.keeping.stretches import Corrections, Pulls

_TYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64)}


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
    """Rows of one number, and what is to be done to them, in this order."""

    number: int
    edits: tuple[Added | Departed, ...] = ()


@dataclass(frozen=True, eq=False)
class Filed:
    """The vectors of one stretch in a file of rows.

    Attributes:
        rows: the file.
        revision: of the rows, that the edits are made from.
        blocks: that add up to the vectors.
        length: of each vector.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> place = tempfile.TemporaryDirectory()
        >>> kept = Filed(Rows(Path(place.name)), 0, (Block(0),), 1).plus({"ada": torch.ones(1), "bob": torch.zeros(1)})
        >>> kept.rows.change(kept.changes(), revision=0)
        >>> after = kept.settled(1).without("ada", {"bob": (0.5, 0.5)})
        >>> list(after), after["bob"], list(kept.settled(1))
        (['bob'], tensor([1.]), ['ada', 'bob'])
        >>> place.cleanup()
    """

    rows: Rows
    revision: int
    blocks: tuple[Block, ...]
    length: int | None

    def __getitem__(self, name: str) -> Tensor:
        found = [own for block in self.blocks if (own := self._read(block, name)) is not None]
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
        count = sum(len(self._names_in(block)) for block in self.blocks)
        first = next(iter(self._names), None)
        return 0 if first is None else count * self[first].nbytes

    def plus(self, pulls: Pulls) -> Filed:
        """With the pulls of one more round."""
        *earlier, last = self.blocks
        return replace(self, blocks=(*earlier, replace(last, edits=(*last.edits, Added(pulls)))))

    def joined(self, other: Filed) -> Filed:
        """With the vectors of another stretch: nothing is read or written, its blocks are added up from now on."""
        return replace(self, blocks=(*self.blocks, *other.blocks))

    def without(self, gone: str, corrections: Corrections) -> Filed:
        """Without a client's vector, and those of the clients that it met corrected by it, block by block."""
        leaving = [self._read(block, gone) for block in self.blocks]
        met = {} if all(own is None for own in leaving) else corrections
        blocks = [
            replace(block, edits=(*block.edits, Departed(gone, own, met)))
            for block, own in zip(self.blocks, leaving, strict=True)
        ]
        return replace(self, blocks=tuple(blocks))

    def changes(self) -> Iterator[tuple[str, Row | None]]:
        """The rows that the edits change, each read when its turn comes."""
        for block in self.blocks:
            for name in dict.fromkeys(name for edit in block.edits for name in edit.names()):
                vector = self._read(block, name)
                yield _key(block, name), None if vector is None else row_of(vector)

    def deletions(self) -> Iterator[tuple[str, None]]:
        """The rows that go where nothing of it is kept."""
        for block in self.blocks:
            for key in self.rows.keys(_key(block), self.revision):
                yield key, None

    def settled(self, revision: int) -> Filed:
        """The same once its changes are in the rows."""
        return replace(self, revision=revision, blocks=tuple(Block(block.number) for block in self.blocks))

    @cached_property
    def _names(self) -> dict[str, None]:
        """Who has a vector, in the order in which they came."""
        return dict.fromkeys(name for block in self.blocks for name in self._names_in(block))

    def _names_in(self, block: Block) -> dict[str, None]:
        start = _key(block)
        found = dict.fromkeys(json.loads(key[len(start) :]) for key in self.rows.keys(start, self.revision))
        for edit in block.edits:
            if isinstance(edit, Added) or edit.leaving is not None:
                found |= dict.fromkeys(edit.names())
            if isinstance(edit, Departed):
                found.pop(edit.gone, None)
        return found

    def _has(self, block: Block, name: str) -> bool:
        for edit in reversed(block.edits):
            if isinstance(edit, Departed) and name == edit.gone:
                return False
            if (isinstance(edit, Added) or edit.leaving is not None) and name in edit.names():
                return True
        return self.rows.has(_key(block, name), self.revision)

    def _read(self, block: Block, name: str) -> Tensor | None:
        row = self.rows.read(_key(block, name), self.revision)
        vector = None if row is None else tensor_of(row)
        for edit in block.edits:
            vector = edit.apply(name, vector)
        return vector


def row_of(vector: Tensor) -> Row:
    """A vector as a row."""
    return Row(str(vector.dtype).removeprefix("torch."), vector.detach().cpu().contiguous().numpy().tobytes())


def tensor_of(row: Row) -> Tensor:
    """A row as a vector."""
    if row.type not in _TYPES:
        raise DataError(f"A row holds {row.type} where a vector should be: take the folder from a backup.")
    return torch.frombuffer(bytearray(row.value), dtype=_TYPES[row.type])


def _key(block: Block, name: str | None = None) -> str:
    """Of a client's row; without a name, what the keys of all rows of the block begin with.

    In JSON, since a client's name may hold whatever it likes.
    """
    return f"vector {block.number} " + ("" if name is None else json.dumps(name))
