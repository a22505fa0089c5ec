"""Tensors on disk that tell when they are damaged: safetensors with a kind, a version and a digest of all that counts.

    __metadata__: {"expunge": "DIGEST {kind, version, content}"}     SHA-256 of what follows it and of every tensor

One text, since safetensors writes several in any order, and the same content is to be the same file.
Tensors have names of ours, never those of clients: a name that safetensors keeps for itself (``__metadata__``) or that
no file can hold would make the whole file unreadable. Clients' names stand in the content, which is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from expunge.core.vectors import tensors_digest
from expunge.errors import DataError, ExpungeError, RequestError
from expunge.federation.keeping.files import whole

TYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
"""What a tensor in a file of ours may be; with others (float8, complex numbers) nothing here can calculate."""


@dataclass(frozen=True, eq=False)
class TensorFile:
    """What a file holds.

    Attributes:
        tensors: by name.
        content: what was written beside them; None where expunge did not write the file, or an older version did.
        metadata: the header's texts, as they are.
        version: that it was written in; 1 where it does not say.
    """

    tensors: dict[str, Tensor]
    content: Any
    metadata: Mapping[str, str]
    version: int = 1


def write_tensors(path: Path, kind: str, version: int, tensors: Mapping[str, Tensor], content: Any) -> None:
    """Write a file whole or not at all, for its owner only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     write_tensors(Path(place) / "f", "memory", 2, {"0": torch.ones(1)}, {"clients": ["ada"]})
        ...     read_tensors(Path(place) / "f", "memory", 2).content
        {'clients': ['ada']}
    """
    own = _apart(tensors)
    text = json.dumps({"kind": kind, "version": version, "content": content})
    digest = tensors_digest(sorted(own.items()), text)
    try:
        with whole(path) as file:
            save_file(own, file, metadata={"expunge": f"{digest} {text}"})
    except (OSError, SafetensorError) as problem:
        raise RequestError(f"Cannot write {path}: {getattr(problem, 'strerror', None) or problem}.") from problem


def read_tensors(path: Path, kind: str, version: int, others: tuple[int, ...] = ()) -> TensorFile:
    """Read a file; refused where it is not what was written, of another kind or of another version."""
    with reading(path, kind):
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        for name, tensor in tensors.items():
            if tensor.dtype not in TYPES:
                raise ValueError(f"nothing here calculates with {name!r}, which is {tensor.dtype}")
        if "expunge" not in metadata:
            return TensorFile(tensors, None, metadata)
        digest, _, text = metadata["expunge"].partition(" ")
        if tensors_digest(sorted(tensors.items()), text) != digest:
            raise ValueError("it is not the one that was written, so take it from a backup")
        header = json.loads(text)
        if header["kind"] != kind:
            raise ValueError(f"it holds something else, {header['kind']!r}")
        if header["version"] not in (version, *others):
            raise ValueError(f"its version is {header['version']}, so use an expunge that reads that, not {version}")
        return TensorFile(tensors, header["content"], metadata, header["version"])


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Tell whatever a file does to its reader as one error that names the file."""
    try:
        yield
    except FileNotFoundError as problem:
        raise DataError(f"The {kind} file {path} cannot be read: it is missing.") from problem
    except (OSError, SafetensorError) as problem:
        raise DataError(f"The {kind} file {path} cannot be read: it is damaged or not safetensors.") from problem
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError, ExpungeError) as problem:
        reason = str(problem).split("\n")[0].rstrip(".") or type(problem).__name__
        raise DataError(f"The {kind} file {path} cannot be read: {reason}.") from problem


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, each in a memory of its own, which safetensors asks for."""
    own, seen = {}, set()
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        own[name] = tensor
    return own
