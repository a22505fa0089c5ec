"""A server's state as the files of one folder.

model.safetensors         the model; or shards.safetensors
memory.safetensors        what is remembered of each round, and which vector is in which file
vectors/                  a file for each client's vector, shared with the state before (vector_files.py)
history.safetensors       stored updates, where they are kept
checkpoints.safetensors   a few models of the training's way
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from expunge.federation.keeping.checkpoint import load_snapshot, save_snapshot
from expunge.federation.keeping.checkpoints import Checkpoints
from expunge.federation.keeping.history import History
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.shards import Shards
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule

_MODEL, _VECTORS, _UPDATES, _SHARDS, _WAY = (
    f"{name}.safetensors" for name in ("model", "memory", "history", "shards", "checkpoints")
)


def save_state(state: ServerState, model: nn.Module, folder: Path) -> None:
    """Write the state's model, of this architecture, and whatever else it keeps.

    What is written is read back at once: what cannot be read again must not take the place of what can. Vectors that
    another state has on disk are taken over from there unread.
    """
    folder.mkdir(exist_ok=True, mode=0o700)
    if state.shards is not None:
        state.shards.save(folder / _SHARDS)  # the model is theirs
    else:
        save_snapshot(state.model, model, folder / _MODEL)
    if state.memory is not None:
        state.memory.save_apart(folder / _VECTORS)
    if state.history is not None:
        state.history.save(folder / _UPDATES)
    if state.checkpoints is not None:
        state.checkpoints.save(folder / _WAY)
    load_state(model, folder, state.schedule)


def kept_in(state: ServerState) -> list[str]:
    """What the state keeps beside the model, in the words of ``Method.needs``: for whoever writes down what there is.

    Example:
        >>> import torch
        >>> from expunge.core.vectors import Snapshot
        >>> kept_in(ServerState(Snapshot(torch.zeros(1), {}), memory=Memory()))
        ['vectors']
    """
    parts = {
        **{"vectors": state.memory, "updates": state.history},
        **{"shards": state.shards, "checkpoints": state.checkpoints},
    }
    return [name for name, part in parts.items() if part is not None]


def load_memory(folder: Path) -> Memory | None:
    """The memory alone, where there is one; of its vectors none is read."""
    return Memory.load(folder / _VECTORS) if (folder / _VECTORS).exists() else None


def load_state(model: nn.Module, folder: Path, schedule: Schedule | None, kept: Iterable[str] = ()) -> ServerState:
    """Read it back onto the architecture's device; what is kept beside the model goes there when it is used.

    Args:
        model: the architecture.
        folder: where the files are.
        schedule: of the training.
        kept: what was kept (``kept_in``): a file of it that is missing is told in ``state.lost``.
    """
    device = next(model.parameters()).device
    memory = load_memory(folder)
    history = History.load(folder / _UPDATES) if (folder / _UPDATES).exists() else None
    way = Checkpoints.load(folder / _WAY) if (folder / _WAY).exists() else None
    parts = (("vectors", _VECTORS, memory), ("updates", _UPDATES, history), ("checkpoints", _WAY, way))
    lost = tuple(
        f"{folder / file} is missing, though {what} were kept: put it back if you can."
        for what, file, part in parts
        if what in kept and part is None
    )
    if (folder / _SHARDS).exists() or "shards" in kept:
        shards = Shards.load(folder / _SHARDS, device)
        return ServerState(shards.model, schedule, memory, history, shards, lost=lost)
    trained = load_snapshot(model, folder / _MODEL)
    recipe = way.recipe if way is not None and memory is None else None
    return ServerState(trained, schedule, memory, history, checkpoints=way, recipe=recipe, lost=lost)
