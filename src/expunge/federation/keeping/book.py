"""What ``store.json`` says of a federation that lives on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.errors import DataError, RequestError
from expunge.federation.training.plan import Schedule

VERSION = 2
"""Of the folder; version 1 is converted."""

RENAMED = {"hf-kcu": "retrace", "hf-kcu-trajectory": "retrace-krylov", "hf-kcu-gradient": "hf-kcu"}
"""What methods of version 1 are called now."""


@dataclass(frozen=True)
class Book:
    """What ``store.json`` says.

    Attributes:
        state: number of the state that counts; 0 before the first.
        schedule: of the training so far.
        counts: sample counts of the clients that trained and have not left.
        departed: clients that were forgotten.
        pending: the request being worked on.
        forgotten: what came of earlier requests: who left, the method, its cost and details; no weights.
        kept: what the state keeps beside the model.
        keys: fingerprints of the keys that sites had, by name; those of who has left are kept with the name.
        doubts: what was warned of while training; every forget says it again.
    """

    state: int = 0
    schedule: Mapping[str, Any] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    departed: tuple[str, ...] = ()
    pending: Mapping[str, Any] | None = None
    forgotten: tuple[Mapping[str, Any], ...] = ()
    kept: tuple[str, ...] = ()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def read(cls, content: Mapping[str, Any], file: Path) -> Book:
        """From JSON; a book of version 1 is converted."""
        try:
            if content.get("format") == 1:
                content = _converted(content, file)
            if content["version"] != VERSION:
                raise DataError(
                    f"{file} is of version {content['version']}, not {VERSION}: use the expunge that made it."
                )
            parts = {name: value for name, value in content.items() if name != "version"}
            parts |= {name: tuple(list_of(kind, parts[name])) for name, kind in _LISTS.items()}
            parts["doubts"] = tuple(list_of(str, parts.get("doubts", [])))
            parts["keys"] = {name: tuple(list_of(str, own)) for name, own in parts.get("keys", {}).items()}
            book = cls(**parts)
            _require_sound(book)
            return book
        except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError, RequestError) as problem:
            raise DataError(f"{file} cannot be read: it is damaged or not ours.") from problem


_LISTS: dict[str, type[Any]] = {"departed": str, "forgotten": dict, "kept": str}


def list_of(kind: type[Any], value: Any) -> list[Any]:
    """The value, if it is a list of such entries.

    Example:
        >>> list_of(str, ["ada"])
        ['ada']
    """
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise TypeError(f"{value!r} is no list of such entries")
    return value


def _require_sound(book: Book) -> None:
    """Refuse what no store of ours says."""
    counts = isinstance(book.counts, dict) and all(type(count) is int and count > 0 for count in book.counts.values())
    if type(book.state) is not int or book.state < 0 or not counts or not isinstance(book.pending, dict | None):
        raise TypeError("these are no entries of a book")
    if book.schedule is not None:
        Schedule(**book.schedule)


def _converted(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A book of version 1 as this version writes it; what was begun under another name cannot be gone on with."""
    if content["pending"] is not None:
        raise DataError(
            f"{file} is of version 1 and has an unfinished request: finish it with the expunge that began it."
        )
    forgotten = [{**record, "method": _renamed(record["method"])} for record in content["forgotten"]]
    rest = {name: value for name, value in content.items() if name not in ("format", "number")}
    return {**rest, "version": VERSION, "state": content["number"], "forgotten": forgotten, "kept": ["vectors"]}


def _renamed(method: str) -> str:
    name, recovery, _ = method.partition("+recovery")
    return RENAMED.get(name, name) + recovery
