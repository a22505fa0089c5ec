"""What the server stores for FedEraser: the initial model, and every n-th round's updates of each client.

It costs d floats for each client in each stored round, where the memory (memory.py) costs d floats a client in all.
Updates are derived from the clients' data: those of a client are deleted with it. They are kept on the CPU, since
there are many of them and they are needed one round at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.tensor_file import read_tensors, reading, write_tensors
from expunge.federation.messages.snapshots import pack_snapshot, unpack_snapshot

KIND, VERSION = "history", 2


@dataclass(frozen=True, eq=False)
class StoredRound:
    """One round of the training: who sent which update, and how many samples stood behind it."""

    number: int
    updates: Mapping[str, Tensor]
    counts: Mapping[str, int]


class History:
    """Stored rounds, in the order of the training.

    Args:
        initial: the model that the training began with.

    Example:
        >>> history = History(Snapshot(torch.zeros(1), {}))
        >>> history.record(0, {"ada": torch.tensor([1.0]), "bob": torch.tensor([3.0])}, {"ada": 10, "bob": 20})
        >>> history.clients, history.stored_bytes
        (('ada', 'bob'), 12)
        >>> history.without(["ada"]).clients
        ('bob',)
    """

    def __init__(self, initial: Snapshot) -> None:
        self.initial = initial
        self._rounds: list[StoredRound] = []

    @property
    def rounds(self) -> tuple[StoredRound, ...]:
        """The stored rounds."""
        return tuple(self._rounds)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients with at least one stored update."""
        return tuple(dict.fromkeys(name for stored in self._rounds for name in stored.updates))

    @property
    def stored_bytes(self) -> int:
        """What keeping it costs, the initial model included."""
        updates = (update for stored in self._rounds for update in stored.updates.values())
        return self.initial.stored_bytes + sum(update.numel() * update.element_size() for update in updates)

    def record(self, number: int, updates: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Store one round.

        Args:
            number: of the round in the training, the first is 0.
            updates: each participant's update (what it sent minus what it got) as a flat vector.
            counts: each participant's sample count.
        """
        if not updates or set(updates) != set(counts) or any(count < 1 for count in counts.values()):
            raise RequestError("A stored round needs at least one update, and a sample count of at least 1 for each.")
        if number <= (self._rounds[-1].number if self._rounds else -1):
            raise RequestError(f"Rounds are stored in their order: round {number} comes too late or twice.")
        for name, update in updates.items():
            if update.shape != self.initial.parameters.shape:
                raise RequestError(f"The update of client {name!r} is not a flat vector of the model's length.")
            if not bool(torch.isfinite(update).all()):
                raise DataError(f"The update of client {name!r} has a NaN or infinite value: it is not stored.")
        own = {name: update.detach().to("cpu", copy=True) for name, update in updates.items()}
        self._rounds.append(StoredRound(number, own, dict(counts)))

    def copy(self) -> History:
        """A history of its own with the same content."""
        return self.without(())

    def without(self, names: Iterable[str]) -> History:
        """The same without these clients' updates; a round in which nobody else took part is gone."""
        gone, other = set(names), History(self.initial)
        for stored in self._rounds:
            updates = {name: update for name, update in stored.updates.items() if name not in gone}
            counts = {name: stored.counts[name] for name in updates}
            if updates:
                other._rounds.append(StoredRound(stored.number, updates, counts))
        return other

    def save(self, path: Path) -> None:
        """Write it to one safetensors file."""
        tensors, initial = pack_snapshot(self.initial)
        for stored in self._rounds:
            tensors |= {f"{stored.number}/{index}": update for index, update in enumerate(stored.updates.values())}
        rounds = [
            {"number": stored.number, "counts": {name: stored.counts[name] for name in stored.updates}}
            for stored in self._rounds
        ]
        write_tensors(path, KIND, VERSION, tensors, {"initial": initial, "rounds": rounds})

    @classmethod
    def load(cls, path: Path) -> History:
        """Read it back; a file of an older version is refused."""
        found = read_tensors(path, KIND, VERSION)
        with reading(path, KIND):
            if found.content is None:
                raise ValueError("it is not ours or of an older version, so train again with this one")
            history = cls(unpack_snapshot(found.content["initial"], found.tensors))
            for stored in found.content["rounds"]:
                names = enumerate(stored["counts"])
                updates = {name: found.tensors[f"{stored['number']}/{index}"] for index, name in names}
                history.record(stored["number"], updates, stored["counts"])
        return history
