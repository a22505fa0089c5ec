"""Tasks and replies as named tensors and JSON, and back: exact to the bit, no pickle, nothing believed.

The annotations of a message class say what is in a message, so a new class needs nothing here. Tensors are numbered.
The tensors of a model stand under the model's digest, so that a receiver who has kept them need not get them again.
"""

from __future__ import annotations

import json
import operator
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot, tensors_digest
from expunge.errors import DataError, RequestError
from expunge.federation.messages.snapshots import pack_snapshot, parameters_name, unpack_snapshot
from expunge.federation.messages.tasks import Reply, Task

WIRE_VERSION = 9
"""Counted up whenever a site and a server of two versions would no longer understand each other."""

MESSAGES: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(Task), *get_args(Reply))}
"""The message classes by name."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A message ready to be sent or stored.

    Attributes:
        tensors: by number, and those of a model under ``<digest>/``.
        described: everything else, fit for JSON.
    """

    tensors: Mapping[str, Tensor]
    described: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the message, the same whether its model is inside or only named."""
        names = sorted(self.tensors.keys() - self.model.keys())
        return tensors_digest(
            ((name, self.tensors[name]) for name in names), json.dumps(self.described, sort_keys=True)
        )

    @property
    def model(self) -> dict[str, Tensor]:
        """The tensors of the model inside, for the receiver to keep; empty where it is only named."""
        return {name: tensor for name, tensor in self.tensors.items() if "/" in name}


class UnknownModelError(DataError):
    """A message names a model that is neither inside it nor kept."""


def pack(message: Task | Reply, known: str | None = None) -> Packed:
    """A message as tensors and JSON.

    Args:
        message: any task or reply.
        known: digest of the model that the receiver has kept; that one is only named.

    Example:
        >>> from expunge.federation.messages.tasks import Sum
        >>> packed = pack(Sum(torch.ones(2), count=3, sample_gradients=3.0))
        >>> packed.described["kind"], packed.described["fields"]["count"], list(packed.tensors)
        ('Sum', 3, ['0'])
        >>> unpack(packed).total
        tensor([1., 1.])
    """
    tensors: dict[str, Tensor] = {}
    described = {"kind": type(message).__name__, "fields": _written_fields(message, tensors)}
    if known is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{known}/")}
    return Packed(tensors, described)


def unpack(
    packed: Packed, kept: Mapping[str, Tensor] | None = None, device: torch.device | None = None
) -> Task | Reply:
    """The task or reply that was packed; DataError where anything in it is not as it should be.

    Args:
        packed: from anywhere.
        kept: the tensors of a model that came with an earlier message (``Packed.model``).
        device: where the tensors are to be.
    """
    reader = _Reader({**(kept or {}), **packed.tensors}, device)
    name = packed.described.get("kind") if isinstance(packed.described, Mapping) else None
    if not isinstance(name, str) or name not in MESSAGES:
        raise DataError(f"A message of the kind {name!r} is not known: bring site and server to the same version.")
    message: Task | Reply = reader.fields(MESSAGES[name], packed.described.get("fields"), name)
    return message


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row by row."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _annotations(kind: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {part.name: hints[part.name] for part in fields(kind)}


def _written_fields(value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: _written(getattr(value, name), kind, tensors) for name, kind in _annotations(type(value)).items()}


def _written(value: Any, kind: Any, tensors: dict[str, Tensor]) -> Any:
    """A field's value as JSON; the tensors in it are put aside."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Tensor:
        name = str(sum("/" not in name for name in tensors))
        tensors[name] = value.detach().cpu().contiguous()
        return name
    if kind is Snapshot:
        return _written_snapshot(value, tensors)
    if origin in (Union, UnionType):
        if value is None:
            return None
        chosen = _alternatives(parts)
        if len(chosen) == 1:
            return _written(value, chosen[0], tensors)
        return {"kind": type(value).__name__, "fields": _written_fields(value, tensors)}
    if origin is tuple:
        return [_written(entry, part, tensors) for entry, part in zip(value, _entries(parts, value), strict=True)]
    if origin is abc.Mapping:
        return {name: _written(entry, parts[1], tensors) for name, entry in value.items()}
    if is_dataclass(kind):
        return _written_fields(value, tensors)
    if kind is int:
        return operator.index(value)
    if kind is float:
        return float(value)
    if kind in (str, bool) or origin is Literal:
        return value
    raise TypeError(f"No message can hold a {kind}.")


def _written_snapshot(model: Snapshot, tensors: dict[str, Tensor]) -> dict[str, Any]:
    own, described = pack_snapshot(model)
    tensors.update(own)
    return described


def _alternatives(parts: tuple[Any, ...]) -> list[Any]:
    """What a field may hold where it is not None: one type, or one of several dataclasses, which is then named."""
    return [part for part in parts if part is not NoneType]


def _entries(parts: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """The types of a tuple's entries."""
    return (parts[0],) * len(value) if parts[1:] == (Ellipsis,) else parts


@dataclass(frozen=True)
class _Reader:
    """Reads what ``_written`` wrote, and refuses everything else."""

    tensors: Mapping[str, Tensor]
    device: torch.device | None

    def fields(self, kind: type[Any], written: Any, where: str) -> Any:
        annotations = _annotations(kind)
        if not isinstance(written, dict) or written.keys() != annotations.keys():
            _refuse(where, f"the fields {', '.join(annotations)}")
        values = {name: self.value(part, written[name], f"{where}.{name}") for name, part in annotations.items()}
        try:
            return kind(**values)
        except RequestError as problem:
            _refuse(where, f"valid ({problem})")

    def value(self, kind: Any, written: Any, where: str) -> Any:
        origin, parts = get_origin(kind), get_args(kind)
        if kind is Tensor:
            return self.tensor(written, where)
        if kind is Snapshot:
            return self.snapshot(written, where)
        if origin in (Union, UnionType):
            return None if written is None else self.alternative(_alternatives(parts), written, where)
        if origin is tuple:
            return self.entries(parts, written, where)
        if origin is abc.Mapping:
            if not isinstance(written, dict):
                _refuse(where, "a mapping")
            return {name: self.value(parts[1], entry, f"{where}[{name!r}]") for name, entry in written.items()}
        if is_dataclass(kind) and isinstance(kind, type):
            return self.fields(kind, written, where)
        return _scalar(kind, written, where)

    def alternative(self, kinds: list[Any], written: Any, where: str) -> Any:
        if len(kinds) == 1:
            return self.value(kinds[0], written, where)
        named = {kind.__name__: kind for kind in kinds}
        name = written.get("kind") if isinstance(written, dict) else None
        if not isinstance(name, str) or name not in named:
            _refuse(where, f"one of {', '.join(named)}")
        return self.fields(named[name], written.get("fields"), where)

    def entries(self, parts: tuple[Any, ...], written: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(written, list):
            _refuse(where, "a list")
        kinds = _entries(parts, written)
        if len(kinds) != len(written):
            _refuse(where, f"a list of {len(kinds)}")
        return tuple(self.value(kind, entry, where) for kind, entry in zip(kinds, written, strict=True))

    def tensor(self, name: Any, where: str) -> Tensor:
        tensor = self.tensors.get(name) if isinstance(name, str) else None
        if not isinstance(tensor, Tensor):
            _refuse(where, "a tensor")
        return tensor.to(self.device) if self.device is not None else tensor

    def snapshot(self, written: Any, where: str) -> Snapshot:
        digest = written.get("digest") if isinstance(written, dict) else None
        if isinstance(digest, str) and parameters_name(digest) not in self.tensors:
            raise UnknownModelError(f"The model {digest} is not known here: send it whole.")
        try:
            model = unpack_snapshot(written, self.tensors)
        except ValueError as problem:
            _refuse(where, str(problem))
        return model.on(self.device) if self.device is not None else model


def _scalar(kind: Any, written: Any, where: str) -> Any:
    if kind is float and type(written) in (int, float):
        try:
            return float(written)
        except OverflowError:
            _refuse(where, "a number that a float can hold")
    if get_origin(kind) is Literal:
        if not isinstance(written, str) or written not in get_args(kind):
            _refuse(where, f"one of {', '.join(map(str, get_args(kind)))}")
        return written
    if type(written) is not kind:  # True is no number
        _refuse(where, {int: "a whole number", float: "a number", bool: "a truth value"}.get(kind, "a text"))
    return written


def _refuse(where: str, wanted: str) -> NoReturn:
    raise DataError(f"A message cannot be read: {where} is not {wanted}.")
