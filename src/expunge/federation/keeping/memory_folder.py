"""A memory in a folder, of which a round writes no more than its participants' vectors.

facts                     recipe, stretches and their blocks, how many rounds
round 7                   who took part, with which weight, rate and steps (JSON)
start, now, momentum      where the rounds lead (place.py)
vector 0 "ada"            one vector per client and block (filed.py)

Everything stands in rows of one file (rows.py), so a memory goes from one round to the next as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expunge.core.vectors import Layout
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.filed import Block, Filed, blocks_of
from expunge.federation.keeping.memory_file import KIND, MemoryContent
from expunge.federation.keeping.place import Place
from expunge.federation.keeping.rounds import KeptRound
from expunge.federation.keeping.rows import Row, Rows
from expunge.federation.keeping.stretches import Pulls, Stretch
from expunge.federation.keeping.tensor_file import reading
from expunge.federation.training.recipe import ClientRule, Recipe

VERSION = 2
"""Of what stands in the rows; in version 1 a vector was the sum of ``w_u (D_u - D)``."""

_TENSORS = ("start", "now", "momentum", "origin")

_TYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64)}


@dataclass(frozen=True, eq=False)
class RowVectors:
    """The vectors that the rows hold at one revision.

    Attributes:
        rows: the file.
        revision: of the rows.
        blocks: that are known to be there.
    """

    rows: Rows
    revision: int
    blocks: tuple[int, ...] = ()

    def names(self, block: int) -> Iterator[str]:
        """Whose vectors there are, in the order in which they came."""
        start = _key(block)
        return (json.loads(key[len(start) :]) for key in self.rows.keys(start, self.revision))

    def has(self, block: int, name: str) -> bool:
        """Whether there is one."""
        return self.rows.has(_key(block, name), self.revision)

    def read(self, block: int, name: str) -> Tensor | None:
        """It, whole and as it was written; None where there is none."""
        row = self.rows.read(_key(block, name), self.revision)
        return None if row is None else tensor_of(row)


@dataclass(frozen=True, eq=False)
class MemoryFolder:
    """The folder at one moment: what it holds, so that only what differs is written.

    Attributes:
        rows: the file.
        revision: of the rows at that moment.
        content: what they held then; None before anything was written.
    """

    rows: Rows
    revision: int
    content: MemoryContent | None

    @classmethod
    def new(cls, folder: Path) -> MemoryFolder:
        """An empty folder, or one that is to be made."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RequestError(f"{folder} is not empty: go on with Memory.load(folder), or choose another folder.")
        return cls(Rows(folder), 0, None)

    @classmethod
    def opened(cls, folder: Path, client: ClientRule | None = None) -> MemoryFolder:
        """What is in a folder, with a client rule that is not ours as it is given; no vector is read."""
        if not Rows.are_in(folder):
            raise DataError(f"There is no memory in {folder}: give the folder that a Memory was made with.")
        rows = Rows(folder)
        revision = rows.revision
        if revision == 0:
            raise DataError(f"Nothing was written into {folder} but its file: remove it, and make the memory again.")
        with reading(folder, KIND):
            return cls(rows, revision, _read(rows, revision, client))

    def vectors(self, pulls: Pulls, known: Sequence[Stretch]) -> Filed:
        """Those of a new stretch beside the known ones: on disk with whatever is written next."""
        source = RowVectors(self.rows, self.revision, tuple(block.number for block in self._before))
        return Filed.fresh(source, pulls, _blocks(known))

    def written(self, content: MemoryContent) -> MemoryFolder:
        """Write this in one transaction; what its stretches no longer have is overwritten and deleted with that."""
        self.rows.change(self._changes(content), self.revision)
        after = RowVectors(self.rows, self.revision + 1)
        stretches = [Stretch(own.rounds, _filed(own).settled(after)) for own in content.stretches]
        content = replace(content, rounds=list(content.rounds), stretches=stretches)
        return MemoryFolder(self.rows, after.revision, content)

    def _changes(self, content: MemoryContent) -> Iterator[tuple[str, Row | None]]:
        yield from self._vector_changes(content.stretches)
        before = self.content.rounds if self.content is not None else []
        for number, each in enumerate(content.rounds):
            if number >= len(before) or each is not before[number]:
                yield f"round {number}", _json(each.as_dict())
        for number in range(len(content.rounds), len(before)):
            yield f"round {number}", None
        known = self.content.place if self.content is not None else None
        for name in _TENSORS:
            tensor, old = getattr(content.place, name, None), getattr(known, name, None)
            if tensor is not old:
                yield name, None if tensor is None else row_of(tensor)
        yield "facts", _json(_facts(content))

    def _vector_changes(self, stretches: Sequence[Stretch]) -> Iterator[tuple[str, Row | None]]:
        for stretch in stretches:
            for block, name, vector in _filed(stretch).changes():
                yield _key(block, name), None if vector is None else row_of(vector)
        left = {block.number for block in _blocks(stretches)}
        for number in (block.number for block in self._before if block.number not in left):
            yield from ((key, None) for key in self.rows.keys(_key(number), self.revision))

    @property
    def _before(self) -> list[Block]:
        """The blocks that are in the rows."""
        return _blocks(self.content.stretches) if self.content is not None else []


def _blocks(stretches: Sequence[Stretch]) -> list[Block]:
    return blocks_of(stretch.vectors for stretch in stretches)


def _facts(content: MemoryContent) -> dict[str, Any]:
    vectors = [(own.rounds, _filed(own)) for own in content.stretches]
    return {
        "version": VERSION,
        "rounds": len(content.rounds),
        "stretches": [
            [rounds.start, rounds.stop, [block.number for block in own.blocks], own.length] for rounds, own in vectors
        ],
        "recipe": content.recipe.as_dict(),
        "parameters": None if content.parameters is None else list(content.parameters),
        "layout": None if content.layout is None else [[name, list(shape)] for name, shape in content.layout.shapes],
        "place": None if content.place is None else [content.place.first, content.place.travelled],
    }


def _read(rows: Rows, revision: int, client: ClientRule | None) -> MemoryContent:
    def read(key: str) -> Row:
        row = rows.read(key, revision)
        if row is None:
            raise ValueError(f"its row {key!r} is missing, so take it from a backup")
        return row

    facts = json.loads(read("facts").value)
    if facts["version"] != VERSION:
        raise ValueError(f"its version is {facts['version']}, so use an expunge that reads that, not {VERSION}")
    rounds = [KeptRound.from_dict(json.loads(read(f"round {number}").value)) for number in range(facts["rounds"])]
    stretches = [
        Stretch(
            range(first, last), Filed(RowVectors(rows, revision), tuple(Block(number) for number in blocks), length)
        )
        for first, last, blocks, length in facts["stretches"]
    ]
    place = None
    if facts["place"] is not None:
        found = {name: rows.read(name, revision) for name in _TENSORS}
        tensors = {name: tensor_of(row) for name, row in found.items() if row is not None}
        momentum, (first, travelled) = tensors.get("momentum"), facts["place"]
        place = Place(tensors["start"], tensors["now"], momentum, first, travelled, tensors.get("origin"))
    chosen, shapes, recipe = facts["parameters"], facts["layout"], Recipe.from_dict(facts["recipe"], client)
    parameters = None if chosen is None else tuple(chosen)
    layout = None if shapes is None else Layout(tuple((name, torch.Size(shape)) for name, shape in shapes))
    return MemoryContent(recipe, rounds, stretches, place, parameters, layout)


def _filed(stretch: Stretch) -> Filed:
    assert isinstance(stretch.vectors, Filed)
    return stretch.vectors


def _json(content: Any) -> Row:
    return Row("json", json.dumps(content).encode())


def row_of(vector: Tensor) -> Row:
    """A vector as a row."""
    return Row(str(vector.dtype).removeprefix("torch."), vector.detach().cpu().contiguous().numpy().tobytes())


def tensor_of(row: Row) -> Tensor:
    """A row as a vector."""
    if row.type not in _TYPES:
        raise DataError(f"A row holds {row.type} where a vector should be: take the folder from a backup.")
    return torch.frombuffer(bytearray(row.value), dtype=_TYPES[row.type])


def _key(block: int, name: str | None = None) -> str:
    """Of a client's row; without a name, what the keys of all rows of the block begin with.

    In JSON, since a client's name may hold whatever it likes.
    """
    return f"vector {block} " + ("" if name is None else json.dumps(name))
