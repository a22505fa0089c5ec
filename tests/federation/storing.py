"""Write the next state of a store and die on the way, before each file operation in turn.

python storing.py FOLDER

First everything is written; then ada leaves, and those who met it are corrected; then a round is added. The later
states take over from the one before what they do not change.
"""

from __future__ import annotations

import dataclasses
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

NAMES = ("ada", "bob", "cyd", "dee", "eve")
ROUNDS = (NAMES[:3], NAMES[3:])  # dee and eve never meet ada
LAST = ("cyd", "dee")


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(40, 3)


def record(memory: Memory, names: tuple[str, ...]) -> Memory:
    """With one more round of these; the same for the same names."""
    source, more = torch.Generator().manual_seed(len(names)), memory.copy()
    more.record({name: torch.randn(123, generator=source) for name in names}, dict.fromkeys(names, 1))
    return more


def state(memory: Memory) -> ServerState:
    """A state with this memory, and a model of its own."""
    weights = torch.full((123,), float(memory.rounds + len(memory.clients)))
    return ServerState(Snapshot.of(model()).moved(weights), memory=memory)


BEFORE = state(record(record(Memory(), ROUNDS[0]), ROUNDS[1]))
assert BEFORE.memory is not None
AFTER = state(BEFORE.memory.without(["ada"]))
assert AFTER.memory is not None
LATER = state(record(AFTER.memory, LAST))

STEPS = ("before", "after", "later")
STATES = dict(zip(STEPS, (BEFORE, AFTER, LATER), strict=True))
FIRST = Book(counts={"ada": 1, "bob": 2, "cyd": 3, "dee": 4, "eve": 5})
SECOND = Book(counts={"bob": 2, "cyd": 3, "dee": 4, "eve": 5}, departed=("ada",))


def write(folder: Path) -> None:
    """Let the store go on by a step, from what is in it."""
    store = StateStore(folder)
    if not store.exists:
        store.write(FIRST, BEFORE, model())
        return
    memory = store.memory()
    assert memory is not None
    own, book = (
        (AFTER, SECOND) if store.book.departed == () else (LATER, dataclasses.replace(SECOND, keys={"bob": ("k",)}))
    )
    memory = memory.without(["ada"]) if own is AFTER else record(memory, LAST)
    store.write(book, dataclasses.replace(own, memory=memory), model())


def found(folder: Path) -> str:
    """What the next run finds, whole."""
    store = StateStore(folder)
    if not store.exists:
        return "nothing"
    step = STEPS[bool(store.book.departed) + bool(store.book.keys)]
    loaded, expected = store.load(model()), STATES[step]
    assert loaded.memory is not None
    assert expected.memory is not None
    assert {place.name for place in folder.iterdir()} == {f"state-{store.book.state}", "store.json", ".lock"}
    assert loaded.model.digest == expected.model.digest
    assert loaded.memory.clients == expected.memory.clients
    assert loaded.memory.shares == expected.memory.shares
    for name, vector in expected.memory.vectors.items():
        assert torch.equal(loaded.memory.vectors[name], vector)
    vectors = list((store.state / "vectors").iterdir())
    assert {file.stat().st_nlink for file in vectors} == {1}, "a file that is deleted here would be left elsewhere"
    assert len(vectors) == len(expected.memory.clients)
    if step != "before":
        assert BEFORE.memory is not None
        for name in ROUNDS[0]:  # the vectors of those who met it tell ada's, too
            gone = BEFORE.memory.vectors[name].numpy().tobytes()
            assert not [file for file in folder.rglob("*") if file.is_file() and gone in file.read_bytes()]
    return step


def main(place: str) -> None:
    folder, counts = Path(place) / "store", dict.fromkeys(("nothing", *STEPS), 0)
    pristine = Path(place) / "pristine"
    for before, step in zip(("nothing", *STEPS), STEPS, strict=False):
        number = 0
        while True:
            number += 1
            shutil.rmtree(folder, ignore_errors=True)
            if pristine.exists():
                shutil.copytree(pristine, folder)
            if not killed(lambda: write(folder), before=number):
                assert found(folder) == step
                break
            state_now = found(folder)
            assert state_now in (before, step)
            counts[state_now] += 1
            if state_now == before:
                write(folder)  # it is usable
                assert found(folder) == step
        shutil.rmtree(pristine, ignore_errors=True)
        shutil.copytree(folder, pristine)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
