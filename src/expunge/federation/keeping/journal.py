"""Finished message rounds on disk, so that work that was cut off goes on where it was, to the same result.

A method's course is decided by its request, model and options and by what the clients reply. So it is enough to keep
the replies: run again, the method asks the same, gets from the journal what was answered before, and so is brought
back to where it was, solver and phase included. On another machine, or with another number of threads, sums may be
rounded otherwise, and then the tasks differ and the journal is refused.

A round that failed is written down as soon as the work goes on without it: the same work goes on without it again. One
that ended the work is not, so that whoever failed is asked again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from expunge.errors import DataError, NumericalError, RequestError, SiteError
from expunge.federation.engines.client import Client
from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.keeping.files import read_json, tidy, write_whole
from expunge.federation.keeping.tensor_file import read_tensors, reading, write_tensors
from expunge.federation.messages.tasks import Reply, Task
from expunge.federation.messages.wire import Packed, pack, unpack

KIND, VERSION = "journal", 2

_CLIENTS = "clients.json"

_FAILED = {kind.__name__: kind for kind in (NumericalError, SiteError)}
"""With what a round may fail that the work can go on without."""


@dataclass(frozen=True, eq=False)
class Round:
    """One finished message round: the digest of what was asked, the replies, and what it cost.

    Attributes:
        asked: the digest.
        replies: by client; none where it failed.
        cost: in seconds, messages, bytes and sample-gradients.
        failed: the kind of the error that it failed with, and its sentence.
    """

    asked: str
    replies: Mapping[str, Packed]
    cost: Cost
    failed: tuple[str, str] | None = None


class Journal:
    """A folder with one file per finished round. It holds what sites replied: delete it when the work is done.

    Args:
        folder: made when the first round is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        """How many rounds are on disk."""
        number = 0
        while self._file(number).exists():
            number += 1
        return number

    def read(self, number: int) -> Round | None:
        """Round ``number``, from 0; None where it has not been written."""
        if not self._file(number).exists():
            return None
        file = self._file(number)
        try:
            found = read_tensors(file, KIND, VERSION)
            with reading(file, KIND):
                told, replies = found.content, {}
                for index, (name, entry) in enumerate(told["replies"]):
                    own = {key: found.tensors[f"{index}:{key}"] for key in entry["tensors"]}
                    replies[name] = Packed(own, entry["described"])
                failed = told.get("failed")
                kind = None if failed is None else (_FAILED[failed[0]].__name__, str(failed[1]))
                return Round(told["asked"], replies, Cost(**told["cost"]), kind)
        except DataError as problem:
            raise DataError(
                f"The journal {self.folder} is damaged: delete it and start the request again."
            ) from problem

    def write(self, number: int, finished: Round) -> None:
        """Put a round on disk; when this returns, it outlives a crash of the machine."""
        tensors, told = {}, []
        for index, (name, packed) in enumerate(finished.replies.items()):
            tensors.update({f"{index}:{key}": tensor for key, tensor in packed.tensors.items()})
            told.append((name, {"described": packed.described, "tensors": list(packed.tensors)}))
        content = {"asked": finished.asked, "replies": told, "cost": finished.cost.as_dict()}
        content |= {} if finished.failed is None else {"failed": list(finished.failed)}
        try:
            tidy(self.folder, alone=True)  # a journal belongs to one piece of work
            write_tensors(self._file(number), KIND, VERSION, tensors, content)
        except RequestError as problem:
            raise RequestError(f"Cannot write the journal {self.folder}: {problem}") from problem

    def clients(self) -> dict[str, int] | None:
        """The clients as they were when the work began, if it has begun."""
        file = self.folder / _CLIENTS
        return read_json(file) if file.exists() else None

    def write_clients(self, counts: Mapping[str, int]) -> None:
        """Note the clients with which the work begins."""
        write_whole(self.folder / _CLIENTS, json.dumps(dict(counts)))

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:04}.safetensors"


class JournaledEngine:
    """An engine that gives the replies of rounds that are in the journal, and writes down those that are not.

    The cost of rounds from the journal is counted as it was when they were made, seconds included; only the round
    that a crash cut short is lost to the account.

    Args:
        engine: reaches the clients.
        journal: of this piece of work and no other.
    """

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self.cost = engine.cost
        self._engine, self._journal, self._number = engine, journal, 0
        self._failed: Round | None = None  # it is written down if the work goes on

    @property
    def validation(self) -> Client | None:
        """The server's own samples, where it has some."""
        return self._engine.validation

    @property
    def sums_only(self) -> bool:
        """Whether only sums of replies are to be seen."""
        return self._engine.sums_only

    def clients(self) -> dict[str, int]:
        """Names and sample counts as they were when the work began."""
        counts = self._journal.clients()
        if counts is None:
            counts = dict(self._engine.clients())
            self._journal.write_clients(counts)
        return counts

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """One message round, from the journal or from the clients."""
        asked = _asked(tasks)
        if self._failed is not None:
            self._journal.write(self._number, self._failed)
            self._number, self._failed = self._number + 1, None
        finished = self._journal.read(self._number)
        if finished is None:
            finished = self._live(tasks, asked)
        elif finished.asked == asked:
            self._count(finished.cost)
        else:
            raise RequestError(
                f"The journal {self._journal.folder} is of other work (round {self._number + 1} asked something else): "
                "resume with the same request, model and options, or delete it and start again."
            )
        self._number += 1
        if finished.failed is not None:
            kind, sentence = finished.failed
            raise _FAILED[kind](sentence)
        device = next(iter(tasks.values())).model.parameters.device
        return {name: self._reply(packed, device) for name, packed in finished.replies.items()}

    def _live(self, tasks: Mapping[str, Task], asked: str) -> Round:
        before, started = Cost(**asdict(self.cost)), time.perf_counter()
        try:
            replies = self._engine.ask(tasks)
        except (NumericalError, SiteError) as problem:
            kind = next(name for name, kind in _FAILED.items() if isinstance(problem, kind))
            self._failed = Round(asked, {}, self._spent(before, started), (kind, str(problem)))
            raise
        finished = Round(asked, {name: pack(reply) for name, reply in replies.items()}, self._spent(before, started))
        self._journal.write(self._number, finished)
        return finished

    def _spent(self, before: Cost, started: float) -> Cost:
        return Cost(
            time.perf_counter() - started,
            self.cost.sample_gradients - before.sample_gradients,
            self.cost.rounds - before.rounds,
            self.cost.bytes_down - before.bytes_down,
            self.cost.bytes_up - before.bytes_up,
        )

    def _reply(self, packed: Packed, device: torch.device) -> Reply:
        try:
            reply = unpack(packed, device=device)
        except DataError as problem:
            raise DataError(
                f"The journal {self._journal.folder} is of another version: delete it and start the request again."
            ) from problem
        if not isinstance(reply, Reply):
            kind = type(reply).__name__
            raise DataError(f"The journal {self._journal.folder} holds a {kind} where a reply should be: delete it.")
        return reply

    def _count(self, spent: Cost) -> None:
        self.cost.seconds += spent.seconds
        self.cost.sample_gradients += spent.sample_gradients
        self.cost.rounds += spent.rounds
        self.cost.bytes_down += spent.bytes_down
        self.cost.bytes_up += spent.bytes_up


def _asked(tasks: Mapping[str, Task]) -> str:
    """A digest of who was asked what, in which order."""
    parts = [(name, pack(task, known=task.model.digest).digest) for name, task in tasks.items()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
