"""Write the next state of a store and die on the way, before each file operation in turn.

python storing.py FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

from expunge.core.vectors import Snapshot
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import Book, StateStore
from killing import killed


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(40, 3)


def state(*names: str) -> ServerState:
    """A state with a vector of each of these; the same for the same names."""
    source, memory = torch.Generator().manual_seed(len(names)), Memory()
    updates = {name: torch.randn(123, generator=source) for name in names}
    memory.record(updates, dict.fromkeys(names, 1))
    return ServerState(Snapshot.of(model()).moved(torch.full((123,), float(len(names)))), memory=memory)


BEFORE, AFTER = state("ada", "bob", "cyd"), state("bob", "cyd")
FIRST, SECOND = Book(counts={"ada": 1, "bob": 2, "cyd": 3}), Book(counts={"bob": 2, "cyd": 3}, departed=("ada",))


def write(folder: Path) -> None:
    """Let the store go on without ada."""
    store = StateStore(folder)
    book = SECOND if store.exists else FIRST
    store.write(book, AFTER if store.exists else BEFORE, model())


def found(folder: Path) -> str:
    """What the next run finds, whole."""
    store = StateStore(folder)
    if not store.exists:
        return "nothing"
    loaded = store.load(model())
    assert loaded.memory is not None
    names = {f"state-{store.book.state}", "store.json", ".lock"}
    assert {place.name for place in folder.iterdir()} == names
    if store.book.departed == ():
        assert loaded.model.digest == BEFORE.model.digest
        assert loaded.memory.clients == ("ada", "bob", "cyd")
        return "before"
    assert loaded.model.digest == AFTER.model.digest
    assert loaded.memory.clients == ("bob", "cyd")
    assert BEFORE.memory is not None
    gone = BEFORE.memory.vectors["ada"].numpy().tobytes()
    assert not [file for file in folder.rglob("*") if file.is_file() and gone in file.read_bytes()]
    return "after"


def main(place: str) -> None:
    folder, counts = Path(place) / "store", {"nothing": 0, "before": 0, "after": 0}
    for there in (False, True):
        number = 0
        while True:
            number += 1
            shutil.rmtree(folder, ignore_errors=True)
            if there:
                write(folder)
            if not killed(lambda: write(folder), before=number):
                assert found(folder) == ("after" if there else "before")
                break
            state_now = found(folder)
            assert state_now in (("before", "after") if there else ("nothing", "before"))
            counts[state_now] += 1
            write(folder)  # it is usable
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
