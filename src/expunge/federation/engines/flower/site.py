"""What a site of a Flower federation does: it says who it is, and does the tasks that the server sends.

In a deployment every message is handled by a new process. The model that came with the last message is kept in
Flower's ``context.state``, which dies with the node; the site then says that it does not know the model, and gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import DataLoader

from expunge.core.batch import Forward
from expunge.core.losses import as_loss
from expunge.core.vectors import Layout
from expunge.errors import DataError, ExpungeError
from expunge.federation.engines.client import Client
from expunge.federation.engines.fitting import TRIED, require_fitting
from expunge.federation.engines.flower.records import facts_of, packed_of, to_arrays, to_records, to_tensors
from expunge.federation.engines.local_data import Collate, Data, LocalData, MapStyleDataset
from expunge.federation.messages.tasks import Task
from expunge.federation.messages.wire import WIRE_VERSION, Packed, UnknownModelError, pack, unpack
from expunge.version import __version__

HELLO = "expunge_hello"
TASK = "expunge_task"
"""Names of the two queries; ``unlearnable`` answers them."""

FIRST = "first-samples"
"""Beside a task: how many of its samples a site is to use that has got more since it trained."""

KEPT_MODEL = "expunge-model"
"""Where in ``context.state`` the model of the last task is."""


@dataclass(frozen=True, eq=False)
class Site:
    """One member of the federation: its name, and what it trains with.

    Attributes:
        name: unique in the federation, the same for ever: forgetting is asked for by this name.
        model: any module; it works on the device that the model is on, and overwrites the weights.
        data: a pair of tensors (inputs, labels), a map-style dataset, a DataLoader, or what else ``LocalData`` takes.
        loss: the training loss: a name or what ``core.losses.as_loss`` takes.
        l2: weight of the L2 term of the training loss.
        boost: factor on its updates when expunge trains it: 1 unless a test plays a malicious site.
        collate: makes a batch of samples, for instance by padding; a DataLoader's own, or torch's, by default.
        forward: ``forward(model, batch)`` gives the outputs, where calling the model with the inputs does not.
    """

    name: str
    model: nn.Module
    data: Data
    loss: object = "cross_entropy"
    l2: float = 0.0
    boost: float = 1.0
    collate: Collate | None = None
    forward: Forward | None = None

    @property
    def samples(self) -> int:
        """How many it has."""
        return len(LocalData(self.data, self.name, self.collate))

    def checked(self) -> LocalData:
        """Its samples, refused where they, the model and the loss do not go together."""
        data = LocalData(self.data, self.name, self.collate)
        require_fitting(self.model, data, as_loss(self.loss, self.l2), self.forward)
        return data

    def mark(self) -> str:
        """A digest of its first samples."""
        data = LocalData(self.data, self.name, self.collate)
        batch = data.take(range(min(TRIED, len(data))))
        return Packed({str(number): each for number, each in enumerate(batch.tensors())}, {}).digest

    def client(self, first: int | None = None) -> Client:
        """The one who works on the data, or on its first samples."""
        data = LocalData(self.data, self.name, self.collate)
        own = data if first is None else data.first(first)
        return Client(own, self.model, as_loss(self.loss, self.l2), boost=self.boost, forward=self.forward)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Rows that are dicts, as (input, target) pairs."""

    rows: Any
    inputs: str
    target: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self.rows[index]
        missing = [name for name in (self.inputs, self.target) if name not in row]
        if missing:
            raise DataError(
                f"A row has no {missing[0]!r}, but {', '.join(map(repr, row))}: name two of these to pairs()."
            )
        return row[self.inputs], row[self.target]


def pairs(rows: Any, inputs: str, target: str) -> MapStyleDataset:
    """Rows that are dicts, as in Flower's and Hugging Face's datasets, as the (input, target) pairs of a ``Site``.

    Args:
        rows: a dataset whose rows are dicts, or a ``DataLoader`` of one. Random transforms should be left out of it.
        inputs: what the model gets, such as "img".
        target: such as "label".

    Example:
        >>> pairs([{"img": 0.5, "label": 3}], "img", "label")[0]
        (0.5, 3)
    """
    return _Pairs(rows.dataset if isinstance(rows, DataLoader) else rows, inputs, target)


MakeSite = Callable[[Context], Site]
"""Given by the app's author; called for every message, so that what goes wrong in it is reported, too."""


def answer_hello(message: Message, context: Context, site: MakeSite) -> Message:
    """Say who the site is, how many samples it has, and which version it speaks."""
    try:
        here = site(context)
        records = to_records(
            status="hello",
            name=here.name,
            samples=len(here.client().data),
            parameters=Layout.of(here.model).size,
            version=__version__,
            wire=WIRE_VERSION,
        )
    except ExpungeError as problem:
        records = _failed(problem)
    return Message(records, reply_to=message)


def answer_task(message: Message, context: Context, site: MakeSite) -> Message:
    """Do the task; an ``ExpungeError`` on the way is part of the reply, not an error of Flower's."""
    try:
        records = _done(message.content, context, site(context))
    except UnknownModelError as problem:
        records = to_records(status="unknown-model", sentence=str(problem))
    except ExpungeError as problem:
        records = _failed(problem)
    return Message(records, reply_to=message)


def _done(content: RecordDict, context: Context, here: Site) -> RecordDict:
    """The reply to a task, with what it answers: the server believes no reply without."""
    spoken = facts_of(content).get("wire")
    if spoken != WIRE_VERSION:
        raise DataError(f"The server speaks version {spoken} of the messages and this site {WIRE_VERSION}: update one.")
    packed = packed_of(content)
    kept = context.state.get(KEPT_MODEL)
    device = next(here.model.parameters()).device
    task = unpack(packed, to_tensors(kept) if isinstance(kept, ArrayRecord) else {}, device)
    if not isinstance(task, Task):
        raise DataError(f"A site does tasks; {type(task).__name__} is a reply.")
    if packed.model:
        context.state[KEPT_MODEL] = to_arrays(packed.model)
    first = facts_of(content).get(FIRST)
    if type(first) not in (int, NoneType):
        raise DataError(f"A message cannot be read: {FIRST} is not a whole number.")
    reply = here.client(first).perform(task)
    used = {} if first is None else {FIRST: first}
    return to_records(pack(reply), status="done", site=here.name, model=task.model.digest, task=packed.digest, **used)


def _failed(problem: ExpungeError) -> RecordDict:
    return to_records(status="failed", sentence=str(problem))
