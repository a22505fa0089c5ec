"""Vectors in files of their own, which a state has in common with the state before it.

    vectors/3f2a....safetensors     a client's vector in one block, under the SHA-256 of its numbers

A file is never changed: a vector that changes is another file. So the next state takes over what stays as it is by a
second name for the same file (a hard link), and reads and writes nothing of it; when a state is deleted, the files that
no other one has taken over are gone with it. Where the file system has no such names, or the next state is to be on
another one, files are copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expunge.core.vectors import tensors_digest
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.filed import Block, Filed
from expunge.federation.keeping.files import private_folder
from expunge.federation.keeping.stretches import Vectors
from expunge.federation.keeping.tensor_file import reading

_KIND, _NAME = "vector", "vector"

Names = Mapping[str, str]
"""By client the file of its vector in one block."""


@dataclass(frozen=True, eq=False)
class VectorFiles:
    """The vectors in a folder.

    Attributes:
        folder: where they are.
        files: of each block.
    """

    folder: Path
    files: Mapping[int, Names]

    @property
    def blocks(self) -> Iterable[int]:
        """The numbers of its blocks."""
        return self.files.keys()

    def names(self, block: int) -> Iterable[str]:
        """Whose vectors there are, in the order in which they came."""
        return self.files.get(block, {}).keys()

    def has(self, block: int, name: str) -> bool:
        """Whether there is one."""
        return name in self.files.get(block, {})

    def read(self, block: int, name: str) -> Tensor | None:
        """It, whole and as it was written; None where there is none."""
        return _read(self.place(block, name)) if self.has(block, name) else None

    def place(self, block: int, name: str) -> Path:
        """The file of a vector that there is."""
        return self.folder / self.files[block][name]

    def require_all(self) -> None:
        """Refuse a folder that lacks a file; none is read."""
        found = set(os.listdir(self.folder)) if self.folder.is_dir() else set[str]()
        lost = dict.fromkeys(name for own in self.files.values() for name, file in own.items() if file not in found)
        if lost:
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            whose = f"{next(iter(lost))!r}{others}"
            raise DataError(f"The vectors of {whose} are missing in {self.folder}: take it from a backup.")


def write_vectors(folder: Path, vectors: Vectors) -> Iterator[dict[str, str]]:
    """Put the vectors of a stretch into a folder, block by block: those that another one has by a second name.

    Example:
        >>> import tempfile, torch
        >>> from expunge.federation.keeping.stretches import Held
        >>> with tempfile.TemporaryDirectory() as place:
        ...     (names,) = write_vectors(Path(place) / "one", Held(ada=torch.ones(1), bob=torch.zeros(1)))
        ...     kept = Filed(VectorFiles(Path(place) / "one", {0: names}), (Block(0),), 1)
        ...     (names,) = write_vectors(Path(place) / "two", kept.plus({"ada": torch.ones(1)}))
        ...     VectorFiles(Path(place) / "two", {0: names}).read(0, "ada"), len(os.listdir(Path(place) / "two"))
        (tensor([2.]), 2)
    """
    private_folder(folder)
    if isinstance(vectors, Filed) and isinstance(vectors.source, VectorFiles):
        for block in vectors.blocks:
            yield _taken_over(folder, vectors, vectors.source, block)
    else:
        yield {name: _written(folder, vectors[name]) for name in vectors}


def _taken_over(folder: Path, vectors: Filed, source: VectorFiles, block: Block) -> dict[str, str]:
    touched, found = set(block.touched()), dict[str, str]()
    for name in vectors.names_in(block):
        vector = vectors.read(block, name) if name in touched else None
        if vector is None:
            file = source.place(block.number, name)
            _link(file, folder / file.name)
            found[name] = file.name
        else:
            found[name] = _written(folder, vector)
    return found


def _written(folder: Path, vector: Tensor) -> str:
    """The name of the file, which is read back: what cannot be read again must not take the place of what can."""
    own = vector.detach().cpu().contiguous()
    file = folder / _file_name(own)
    if not file.exists():  # nothing is written into a file that another state has, too
        save_file({_NAME: own}, file)
    _read(file)
    return file.name


def _read(file: Path) -> Tensor:
    if not file.exists():
        raise _gone(file)
    with reading(file, _KIND):
        vector = load_file(file)[_NAME]
        if _file_name(vector) != file.name:
            raise ValueError("it is not the one that was written, so take it from a backup")
        if not bool(torch.isfinite(vector).all()):
            raise ValueError("a vector is NaN or infinite")
    return vector


def _gone(file: Path) -> DataError | RequestError:
    """Why a file is not there."""
    if file.parent.is_dir():
        return DataError(f"The {_KIND} file {file} is missing: take it from a backup.")
    return RequestError(f"{file.parent} is no more, a later state has taken its place: load the store again.")


def _link(file: Path, other: Path) -> None:
    """Give a file a second name."""
    try:
        os.link(file, other)
    except FileExistsError:  # of the same vector
        return
    except FileNotFoundError as problem:
        raise _gone(file) from problem
    except OSError:  # on another file system, or on one that has no second names
        shutil.copyfile(file, other)


def _file_name(vector: Tensor) -> str:
    return tensors_digest([(_NAME, vector)]) + ".safetensors"
