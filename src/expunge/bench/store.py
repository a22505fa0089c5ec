"""Finished cells on disk, under what determines them.

A finished cell is never made again, whichever experiment asks for it; a crash loses the one that was being made. Since
models are kept, a new measure needs no new training.

    ROOT/bench.json                     the format and version of everything below
    ROOT/cells/KIND-DIGEST/cell.json    what it is, what it cost, what was noticed
    ROOT/cells/KIND-DIGEST/*.safetensors
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from expunge.bench.cells import (
    SHARDS,
    SLICES,
    UPDATES_EVERY,
    Cell,
    ContinuedCell,
    ForgottenCell,
    Kept,
    RetrainedCell,
    ShardedCell,
    TrainedCell,
)
from expunge.bench.scenario import Federation, Scenario, SwitchableEngine
from expunge.bench.scheming import Scheming
from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.files import appear, read_json, require_writable, tidy, write_whole
from expunge.federation.keeping.state_files import kept_in, load_state, save_state
from expunge.federation.training.plan import Schedule
from expunge.version import __version__

FORMAT = 2
"""Of the folder; another one is refused."""


class Store:
    """The kept cells of one folder.

    Args:
        root: made where it is missing; one of another version is refused.
        device: where models are made; those of one device are never taken for another's.
        data_dir: where the datasets are.
        connect: gives the engine that reaches a federation's clients; by default they are in this process.
    """

    def __init__(
        self,
        root: Path,
        device: str = "cpu",
        data_dir: Path | None = None,
        connect: Callable[[Federation], SwitchableEngine] = Federation.engine,
    ) -> None:
        self.root, self.device, self.data_dir, self._connect = root, device, data_dir, connect
        require_writable(root)
        mark, own = root / "bench.json", {"format": FORMAT, "expunge": __version__}
        for folder in (root, root / "cells", root / "measured"):
            tidy(folder)
        if mark.exists():
            found = read_json(mark)
            if found != own:
                raise RequestError(
                    f"{root} was written by expunge {found.get('expunge')} (format {found.get('format')}), this is "
                    f"{__version__} (format {FORMAT}): choose another folder, results are not mixed."
                )
        elif root.exists() and any(root.iterdir()):
            raise RequestError(f"{root} is not empty and not a folder of bench: choose another one.")
        else:
            write_whole(mark, json.dumps(own) + "\n")

    def path(self, cell: Cell) -> Path:
        """Where the cell is, or will be."""
        return self.root / "cells" / f"{cell.kind}-{digest(cell, self.device)}"

    def has(self, cell: Cell) -> bool:
        """Whether it is finished, with all that is asked of it."""
        file = self.path(cell) / "cell.json"
        if not file.exists():
            return False
        return not cell.keeps_more or bool(read_json(file).get("updates"))

    def make(self, cell: Cell) -> None:
        """Make it, with what it needs, unless it is there."""
        if self.has(cell):
            return
        for other in cell.needs:
            self.make(other)
        state, cost, record = cell.make(self)
        schedule = dataclasses.asdict(state.schedule) if state.schedule is not None else None
        kept = kept_in(state)
        content = {"cell": described(cell), "cost": cost.as_dict(), "schedule": schedule, "kept": kept, **record}
        federation = self.federation(cell.scenario)

        def fill(folder: Path) -> None:
            save_state(state, federation.model, folder)
            (folder / "cell.json").write_text(json.dumps(content, indent=2) + "\n")

        appear(self.path(cell), fill)
        if self.device == "cuda":  # engines hold recorded kernels: a dozen models took twenty gigabytes
            del state, federation
            gc.collect()
            torch.cuda.empty_cache()

    def kept(self, cell: Cell) -> Kept:
        """A finished cell."""
        record = read_json(self.path(cell) / "cell.json")
        schedule = Schedule(**record["schedule"]) if record["schedule"] else None
        state = load_state(self.federation(cell.scenario).model, self.path(cell), schedule, record["kept"])
        return Kept(state, Cost(**record["cost"]), record)

    def federation(self, scenario: Scenario) -> Federation:
        """The scenario made real; the last one is remembered."""
        return built(json.dumps(scenario.as_dict()), self.data_dir, self.device)

    def engine(self, scenario: Scenario) -> tuple[Federation, SwitchableEngine]:
        """The federation and a new engine on it."""
        federation = self.federation(scenario)
        engine = self._connect(federation)
        if scenario.schemes:
            honest = self.federation(scenario.without_deeds(tuple(scenario.schemes)))
            engine = Scheming(engine, self._connect(honest), scenario)
        return federation, engine


@functools.lru_cache(maxsize=2)
def built(scenario: str, data_dir: Path | None = None, device: str = "cpu") -> Federation:
    """The federation of a scenario that is written as JSON; kept, since it is asked for again and again."""
    return Scenario.from_dict(json.loads(scenario)).build(data_dir, device=device)


def described(cell: Cell) -> dict[str, Any]:
    """What determines the cell's model, for JSON: a method's options are written out, so that a new default is seen."""
    parts = {
        part.name: getattr(cell, part.name) for part in dataclasses.fields(cell) if not part.metadata.get("content")
    }
    if isinstance(cell, ForgottenCell):
        parts |= {"contender": cell.contender.method, "options": vars(cell.configured().options)}
        if cell.contender.budget_of is not None:
            parts["budget_of"] = described(dataclasses.replace(cell, contender=cell.contender.budget_of))
        parts["before"] = described(cell.before)
    if isinstance(cell, RetrainedCell) and cell.same_batches:  # written as they always were
        del parts["same_batches"]
    if isinstance(cell, ContinuedCell):
        parts["of"] = described(cell.of)
    if isinstance(cell, ShardedCell):
        parts |= {"shards": SHARDS, "slices": SLICES}
    if isinstance(cell, TrainedCell) and cell.updates:
        parts["updates_every"] = UPDATES_EVERY
    return {"kind": cell.kind, **{name: _plain(value) for name, value in parts.items()}}


def digest(cell: Cell, device: str) -> str:
    """A short name for what determines the cell's model."""
    content = described(cell)
    content.pop("updates_every", None)  # kept beside the model, which does not depend on it
    return hashlib.sha256(json.dumps([content, device], sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Scenario):
        return _plain(value.as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: _plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
