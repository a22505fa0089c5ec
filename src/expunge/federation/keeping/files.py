"""Files and folders that appear whole or not at all, and a server's state inside a folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.checkpoint import load_snapshot, save_snapshot
from expunge.federation.keeping.history import History
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.shards import Shards
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule

STAGING = ".staging-"
"""What half-made folders begin with; then comes the process."""


def save_state(state: ServerState, model: nn.Module, folder: Path) -> None:
    """Write the state's model, of this architecture, and whatever else it keeps, one safetensors file each."""
    folder.mkdir(exist_ok=True)
    if state.shards is not None:
        state.shards.save(folder / "shards.safetensors")  # the model is theirs
    else:
        save_snapshot(state.model, model, folder / "model.safetensors")
    if state.memory is not None:
        state.memory.save(folder / "memory.safetensors")
    if state.history is not None:
        state.history.save(folder / "history.safetensors")
    for file in (*folder.iterdir(), folder):
        to_disk(file)


def load_state(model: nn.Module, folder: Path, schedule: Schedule | None) -> ServerState:
    """Read it back onto the architecture's device; what is kept beside the model goes there when it is used."""
    device = next(model.parameters()).device
    memory_file, history_file = folder / "memory.safetensors", folder / "history.safetensors"
    memory = Memory.load(memory_file) if memory_file.exists() else None
    history = History.load(history_file) if history_file.exists() else None
    if (shards_file := folder / "shards.safetensors").exists():
        shards = Shards.load(shards_file, device)
        return ServerState(shards.model, schedule, memory, history, shards)
    return ServerState(load_snapshot(model, folder / "model.safetensors"), schedule, memory, history)


def appear(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside its place and move it there, so that it is whole or not there.

    One that is there already is moved aside first; where another process was quicker, its folder stays.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{STAGING}{os.getpid()}-", dir=target.parent))
        try:
            fill(staging)
            staging.chmod(0o755)
            if target.exists():
                target.rename(staging.with_name(staging.name + ".old"))
            with suppress(FileExistsError):
                _move(staging, target)
        finally:
            for rest in (staging, staging.with_name(staging.name + ".old")):
                shutil.rmtree(rest, ignore_errors=True)
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise RequestError(f"{target} cannot be written: {reason}.") from problem


def _move(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError from problem
        raise


def tidy(folder: Path) -> None:
    """Remove what processes that are no more have left half-made."""
    for staging in folder.glob(f"{STAGING}*"):
        number = staging.name.removeprefix(STAGING).partition("-")[0]
        if number.isdigit() and not _is_running(int(number)):
            shutil.rmtree(staging, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        to_disk(temporary)
        temporary.replace(path)
        to_disk(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RequestError(f"Cannot write {path}: {error.strerror or error}.") from error


def to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk itself: a crash of the machine must find it there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path) -> dict[str, Any]:
    """The content of a file that we wrote."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as problem:
        raise DataError(f"{file} cannot be read: it is damaged.") from problem
    return content


def require_new(path: Path) -> None:
    """Refuse to write over something: called before the work starts."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(f"{path} exists already and is not empty: choose another folder or remove it.")
    require_writable(path)


def require_writable(path: Path) -> None:
    """Refuse a folder that cannot be written, by writing a file that vanishes at once where it would be."""
    ancestor = next(place for place in [path.absolute(), *path.absolute().parents] if place.exists())
    try:
        tempfile.TemporaryFile(dir=ancestor).close()
    except OSError as problem:
        raise RequestError(f"{path} cannot be written: choose a folder that you may write to.") from problem
