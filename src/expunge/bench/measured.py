"""What was measured of one setting and seed, kept beside the cells: results can be put together from it anywhere.

    ROOT/measured/DIGEST.json      rows, noise and curves; the digest is that of all models behind them

So an experiment whose seeds were run on several machines needs nothing but these small files to be put together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from expunge.bench.cells import Cell
from expunge.bench.measuring import Curves, Part, measure
from expunge.bench.results import Row, Series, environment, plain
from expunge.bench.settings import Setting
from expunge.bench.store import Store
from expunge.errors import DataError
from expunge.federation.files import read_json, write_whole

FORMAT = 1
"""Of what is measured; after a change in a measure it is another one, and everything is measured again."""


def part_path(setting: Setting, cells: list[Cell], experiment: str, store: Store) -> Path:
    """Where the part of this setting is, or will be: under a name for all that determines it."""
    content = [FORMAT, experiment, setting.label, sorted(store.path(cell).name for cell in cells)]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return store.root / "measured" / f"{digest}.json"


def measured_part(setting: Setting, curves: Curves | None, store: Store, path: Path) -> Part:
    """The part, measured now or before; its models are needed only where it was not."""
    if not path.exists():
        part = dataclasses.replace(measure(setting, curves, store), environment=environment(store.device))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(dataclasses.asdict(part), path.name)) + "\n")
    return _read(path)


def _read(path: Path) -> Part:
    content: dict[str, Any] = read_json(path)
    try:
        content["rows"] = [Row(**row) for row in content["rows"]]
        content["series"] = [Series(**curve) for curve in content["series"]]
        return Part(**content)
    except (KeyError, TypeError) as problem:
        raise DataError(f"{path} is damaged ({problem}): delete it, and it is measured again.") from problem
