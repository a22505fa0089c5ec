"""What was measured of one setting, seed and method, kept beside the cells; results are put together from it anywhere.

    ROOT/measured/DIGEST.json      rows, noise and curves; the digest is that of all models behind them

So an experiment whose seeds were run on several machines needs nothing but these small files to be put together, and a
method that has changed is measured again without the others' models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from expunge.bench.cells import Cell
from expunge.bench.measuring import REFERENCES, SHARDED, Curves, Part, measure
from expunge.bench.results import Row, Series, environment, plain, utc_now
from expunge.bench.settings import Contender, Setting
from expunge.bench.store import Store
from expunge.errors import DataError
from expunge.federation.keeping.files import read_json, write_whole

FORMAT = 2
"""Of what is measured; after a change in a measure it is another one, and everything is measured again."""

Entry = TypeVar("Entry", Row, Series)


def alone(setting: Setting, contender: Contender) -> Setting:
    """The same with one method only."""
    return dataclasses.replace(setting, contenders=(contender,))


def part_path(setting: Setting, cells: list[Cell], experiment: str, store: Store) -> Path:
    """Where what is measured of this setting is, or will be: under a name for all that determines it."""
    content = [FORMAT, experiment, setting.label, sorted(store.path(cell).name for cell in cells)]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return store.root / "measured" / f"{digest}.json"


def measured_part(setting: Setting, curves: Curves | None, store: Store, paths: Sequence[Path]) -> Part:
    """The part, measured now or before; models are needed only of methods that were not.

    Args:
        setting: with its seed.
        curves: what is drawn from the methods' own records, or None.
        store: where finished cells are.
        paths: where each of the setting's contenders is, or will be, measured.
    """
    missing = [(own, path) for own, path in zip(setting.contenders, paths, strict=True) if not path.exists()]
    if missing:
        contenders = tuple(contender for contender, _ in missing)
        part = measure(dataclasses.replace(setting, contenders=contenders), curves, store)
        for contender, path in missing:
            _write(split(part, contender, contenders), path, store)
    return joined([named(_read(path), own) for own, path in zip(setting.contenders, paths, strict=True)])


def kept_part(path: Path, measuring: Callable[[], Part], store: Store) -> Part:
    """The part of that path; measured now where it is not there yet."""
    if not path.exists():
        _write(measuring(), path, store)
    return _read(path)


def split(part: Part, contender: Contender, contenders: Sequence[Contender]) -> Part:
    """What is left of a part without the other contenders."""
    others = {other.label for other in contenders} - {contender.label}
    return dataclasses.replace(
        part,
        rows=[row for row in part.rows if row.method not in others],
        series=[curve for curve in part.series if curve.method not in others],
    )


def named(part: Part, contender: Contender) -> Part:
    """A contender's part under its label of today: files go by models, which do not know what they are called."""
    own = {row.method for row in part.rows} - {*REFERENCES, SHARDED}

    def under_label(entry: Entry) -> Entry:
        return dataclasses.replace(entry, method=contender.label) if entry.method in own else entry

    return dataclasses.replace(
        part, rows=[under_label(row) for row in part.rows], series=[under_label(curve) for curve in part.series]
    )


def joined(parts: Sequence[Part]) -> Part:
    """Several contenders' parts as one, of the last one's date: what all are compared with is the first one's."""
    return dataclasses.replace(
        parts[0],
        rows=_each_once([part.rows for part in parts]),
        series=_each_once([part.series for part in parts]),
        date=max((part.date for part in parts if part.date is not None), default=None),
    )


def _each_once(lists: Sequence[list[Entry]]) -> list[Entry]:
    found: list[Entry] = []
    for entries in lists:
        there = {entry.method for entry in found} & {*REFERENCES, SHARDED}
        found += [entry for entry in entries if entry.method not in there and entry not in found]
    return found


def _write(part: Part, path: Path, store: Store) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = dataclasses.replace(part, environment=environment(store.device), date=utc_now())
    write_whole(path, json.dumps(plain(dataclasses.asdict(part), path.name)) + "\n")


def _read(path: Path) -> Part:
    content: dict[str, Any] = read_json(path)
    try:
        content["rows"] = [Row(**row) for row in content["rows"]]
        content["series"] = [Series(**curve) for curve in content["series"]]
        return Part(**content)
    except (KeyError, TypeError) as problem:
        raise DataError(f"{path} is damaged ({problem}): delete it, and it is measured again.") from problem
