"""A new model in the workplace, until the federation goes over to it: whole, or not there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from expunge.errors import DataError
from expunge.federation.keeping.files import appear, read_json
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_files import kept_in, load_state, save_state
from expunge.federation.training.plan import Schedule
from expunge.ledger.federation import described
from expunge.unlearning.registry import Outcome

_MEMORY, _RECORD = "memory.safetensors", "outcome.json"


class Candidate:
    """What a piece of work has made.

    Args:
        place: the workplace.
        run: the hash of the event with which the work began.
    """

    def __init__(self, place: Path, run: str) -> None:
        self.folder = place / f"candidate-{run[:16]}"

    @property
    def exists(self) -> bool:
        """Whether it is there, which is to say: whole."""
        return self.folder.is_dir()

    @property
    def memory(self) -> Path:
        """What is remembered of those who stay: the file in which the digests of their vectors stand."""
        return self.folder / _MEMORY

    def write(self, outcome: Outcome, options: Any, answered: Sequence[str], model: nn.Module) -> None:
        """Keep an outcome: the new state, and what is to be said of it."""
        schedule = outcome.state.schedule
        record = {
            "model": outcome.state.model.digest,
            "method": outcome.method,
            "options": described(options),
            "cost": {name: _short(value) for name, value in outcome.cost.as_dict().items()},
            "details": outcome.details,
            "warnings": list(outcome.warnings),
            "answered": list(answered),
            "schedule": dataclasses.asdict(schedule) if schedule is not None else None,
            "kept": kept_in(outcome.state),
        }
        text = json.dumps(record)

        def fill(folder: Path) -> None:
            save_state(outcome.state, model, folder)
            (folder / _RECORD).write_text(text)

        appear(self.folder, fill)

    def record(self) -> dict[str, Any]:
        """What is said of it."""
        return read_json(self.folder / _RECORD)

    def load(self, model: nn.Module) -> ServerState:
        """The state, checked: the model is the one that was written."""
        record = self.record()
        schedule = Schedule(**record["schedule"]) if record["schedule"] is not None else None
        state = load_state(model, self.folder, schedule, record["kept"])
        if state.model.digest != record["model"]:
            raise DataError(f"{self.folder} holds another model than was written: run the request again.")
        return state


def file_digest(file: Path) -> str | None:
    """SHA-256 of a file; None where there is none.

    Example:
        >>> file_digest(Path("nowhere"))
    """
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def memory_digest(state: Path) -> str | None:
    """SHA-256 of the memory's file in a state's folder, in which those of all vectors stand."""
    return file_digest(state / _MEMORY)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
