"""The in-process engine: all clients on this machine, one after another, or side by side on a GPU."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from expunge.core.batch import Forward
from expunge.core.losses import Loss
from expunge.core.vectors import Snapshot, shared_copy
from expunge.errors import RequestError, listed
from expunge.federation.engines.client import Client
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local_data import Collate, Data, LocalData
from expunge.federation.engines.looking import losses_of, may_look_together
from expunge.federation.engines.summing import Summing
from expunge.federation.engines.workbench import Workbench, can_record, side_by_side, worthwhile
from expunge.federation.messages.tasks import Losses, Reply, Sum, Task, Train, payload_bytes

_NOTHING = Snapshot(torch.empty(0), {})
"""What a client knows before it is sent a model."""


class LocalEngine:
    """A federation inside one process.

    Args:
        model: any module; only its architecture is used.
        loss: the training loss.
        datasets: client names and their samples, in any way that ``LocalData`` takes.
        boosts: factors by which malicious clients multiply their updates.
        validation: the server's own samples, from which the loss of those who stay is then taken.
        budget_bytes: what all clients together may keep between curvature products.
        compiled: compile the training step, where a GPU records it: a quarter of a minute once, then nearly twice as
            fast; for long trainings.
        collate: makes a batch of samples; torch's own where it is not given.
        forward: how the model is run on a batch, where calling it with the inputs is not enough.

    Example:
        >>> import torch
        >>> from expunge.core.losses import CrossEntropy
        >>> data = (torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
        >>> LocalEngine(nn.Linear(2, 2), CrossEntropy(), {"ada": data}).clients()
        {'ada': 4}
    """

    sums_only = False

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        datasets: Mapping[str, Data],
        boosts: Mapping[str, float] | None = None,
        *,
        validation: Data | None = None,
        budget_bytes: int = 4 << 30,
        compiled: bool = False,
        collate: Collate | None = None,
        forward: Forward | None = None,
    ) -> None:
        if not datasets:
            raise RequestError("A federation needs at least one client.")
        self.cost = Cost()
        self.on_round: Callable[[int], None] | None = None
        workbench = shared_copy(model)  # one for all: they take turns
        own = None if validation is None else LocalData(validation, "validation", collate)
        self.validation = None if own is None else Client(own, workbench, loss, forward=forward)
        self._clients = {
            name: Client(
                LocalData(data, name, collate),
                workbench,
                loss,
                boost=(boosts or {}).get(name, 1.0),
                budget_bytes=budget_bytes // len(datasets),
                forward=forward,
            )
            for name, data in datasets.items()
        }
        self._known_model: dict[str, Snapshot] = {}
        self._summing = Summing(budget_bytes) if next(model.parameters()).is_cuda else None
        self._make_bench = partial(_bench, workbench, loss, compiled=compiled, forward=forward)
        self._records = can_record(model)
        self._benches: list[Workbench] = []  # made when somebody trains: they take memory
        self._steps: Counter[object] = Counter()  # that were made of each kind, so that many are worth more benches

    def clients(self) -> dict[str, int]:
        """Names and sample counts."""
        return {name: len(client.data) for name, client in self._clients.items()}

    def local_data(self) -> tuple[LocalData, ...]:
        """Everybody's samples, and the server's own."""
        own = (self.validation,) if self.validation is not None else ()
        return tuple(client.data for client in (*self._clients.values(), *own))

    def without(self, names: tuple[str, ...]) -> LocalEngine:
        """An engine on the same clients but these, with its own cost account: they have been switched off."""
        other = copy.copy(self)
        other.cost, other._known_model = Cost(), {}
        other._clients = {name: client for name, client in self._clients.items() if name not in names}
        return other

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """One message round."""
        self._send(tasks)
        replies = self._performed(tasks)
        for reply in replies.values():
            self._receive(reply)
        if self.on_round is not None:
            self.on_round(self.cost.rounds)
        return replies

    def ask_sum(self, tasks: Mapping[str, Task]) -> Sum | None:
        """One message round of which only the sum of replies is wanted: in one pass, and at the cost of all replies.

        None, and at no cost, where each has to be asked: also where somebody makes other replies of these clients'. On
        a CPU each is: there is nothing to be won, and sums are the same to the last bit however they come (journal.py).
        """
        if self._summing is None or not self._clients.keys() >= tasks.keys():
            return None
        if type(self).ask is not LocalEngine.ask or "ask" in vars(self):
            return None
        reply = self._summing.of(self._clients, tasks)
        if reply is None:
            return None
        self._send(tasks)
        self._receive(reply, len(tasks))
        if self.on_round is not None:
            self.on_round(self.cost.rounds)
        return reply

    def _send(self, tasks: Mapping[str, Task]) -> None:
        """What goes down to the clients."""
        unknown = [name for name in tasks if name not in self._clients]
        if unknown:
            raise RequestError(f"No client {unknown[0]!r} can be reached; there are {listed(self._clients)}.")
        compared: dict[tuple[int, int], bool] = {}  # mostly all know one model and are sent another
        for name, task in tasks.items():
            known = self._known_model.get(name, _NOTHING)
            pair = id(known), id(task.model)
            if pair not in compared:
                compared[pair] = task.model.is_same(known)
            self.cost.bytes_down += payload_bytes(task, model_is_known=compared[pair])
            self._known_model[name] = task.model
        self.cost.rounds += 1

    def _receive(self, reply: Reply, clients: int = 1) -> None:
        """What comes up, from one client or the sum of several."""
        self.cost.bytes_up += clients * payload_bytes(reply)
        self.cost.sample_gradients += reply.sample_gradients

    def _performed(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """All replies: one client after another, but losses together, and trainings side by side where a GPU can."""
        trainings = {name: task for name, task in tasks.items() if isinstance(task, Train)}
        trainings = trainings if self._records or self._benches else {}
        largest = sorted(trainings, key=lambda name: -self._samples(name, trainings[name]))
        runs = {name: partial(self._clients[name].training, trainings[name]) for name in largest}
        replies: dict[str, Reply] = dict(side_by_side(self._enough_benches(trainings), runs))
        losses = {name: task for name, task in tasks.items() if isinstance(task, Losses)}
        if may_look_together(losses.values()):
            replies |= losses_of(self._clients, losses)
        for name, task in tasks.items():
            if name not in replies:
                replies[name] = self._clients[name].perform(task)
        return {name: replies[name] for name in tasks}

    def _enough_benches(self, tasks: Mapping[str, Train]) -> list[Workbench]:
        """As many as these trainings are worth, with those before that made the same steps."""
        if not self._records or not tasks:
            return self._benches
        task = next(iter(tasks.values()))
        kind = task.optimiser, task.batch_size, task.optimiser.adaptive or task.learning_rate
        self._steps[kind] += sum(
            own.epochs * math.ceil(self._samples(name, own) / own.batch_size) for name, own in tasks.items()
        )
        wanted = worthwhile(self._steps[kind], len(tasks))
        while len(self._benches) < wanted:
            self._benches.append(self._make_bench())
        return self._benches[:wanted]

    def _samples(self, name: str, task: Train) -> int:
        """How many samples a client trains on in an epoch."""
        left = len(self._clients[name].data) - len(set(task.exclude))
        return left if task.draw is None else min(left, task.draw.size)


def _bench(model: nn.Module, loss: Loss, *, compiled: bool, forward: Forward | None) -> Workbench:
    own = copy.deepcopy(model) if compiled else shared_copy(model)
    return Workbench(own, loss, compiled=compiled, forward=forward)
