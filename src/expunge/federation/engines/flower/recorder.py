"""A Flower strategy that keeps, while another one trains, what forgetting needs later: one vector per site."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.server.strategy import Strategy as Legacy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from expunge.core.vectors import Layout, Snapshot, weighted_sum
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.flower.app import STAMP
from expunge.federation.engines.flower.attendance import Attendance
from expunge.federation.engines.flower.legacy import Modern, declined
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.plan import Schedule, TrainingPlan

_log = logging.getLogger("flwr")


@dataclass(frozen=True, eq=False)
class _Contribution:
    """What one site sent in one round."""

    update: Tensor
    weight: float
    samples: int


class Recorder(Strategy):
    """Wraps a strategy that averages, and writes model, vectors and schedule to a folder after each round.

    A strategy that does not take the plain weighted mean of the replies (FedAdam, FedMedian, server-side noise, ...)
    is refused at the first round in which this shows: the vectors would be wrong.

    Args:
        strategy: ``FedAvg``, ``FedProx`` or your own, of today's API or of the old one (``flwr.server.strategy``);
            everything is passed on to it, and the rounds are those of its own ``start``.
        model: the model that is trained, with its initial weights; it is not changed.
        store: the folder; where a training is in it already, this one goes on from there.
        learning_rate: of the sites' SGD.
        batch_size: of the sites' SGD.
        local_epochs: epochs that a site trains in one round.
    """

    def __init__(
        self,
        strategy: Strategy | Legacy,
        *,
        model: nn.Module,
        store: str | Path,
        learning_rate: float,
        batch_size: int,
        local_epochs: int,
    ) -> None:
        self._strategy, self._name = _todays(strategy), type(strategy).__name__
        self._configure, self._aggregate = self._strategy.configure_train, self._strategy.aggregate_train
        self._plan = TrainingPlan(1, local_epochs, batch_size, learning_rate)
        self._store = StateStore(store)
        self._attendance = Attendance(self._store.book)
        self._model = copy.deepcopy(model).cpu()
        self._layout = Layout.of(self._model)
        self._memory = Memory()
        self._sent = self._now
        if self._store.exists:
            self._go_on()

    @property
    def arrays(self) -> ArrayRecord:
        """What to start from: ``recorder.start(grid, recorder.arrays)``; the stored model, or else the given one."""
        return ArrayRecord(self._model.state_dict())

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *arguments: Any, **named: Any) -> Result:
        """As the strategy does: its own ``start`` runs, with whatever it does around the rounds."""
        with self._listening():
            result = self._strategy.start(grid, initial_arrays, *arguments, **named)
        returned = getattr(result, "arrays", None)
        if returned and not torch.equal(self._layout.flatten(self._named(returned)), self._now):
            _log.warning(
                "expunge: the model that %s.start returned is not that of the last recorded round; what will be "
                "forgotten is forgotten from the recorded one, in %s.",
                self._name,
                self._store.folder,
            )
        return result

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """While this lasts, the strategy's own loop over rounds comes by here."""
        own = self._strategy.__dict__
        heard = {"configure_train": self.configure_train, "aggregate_train": self.aggregate_train}
        before = {name: own[name] for name in heard if name in own}
        own.update(heard)
        try:
            yield
        finally:
            for name in heard:
                del own[name]
            own.update(before)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does; remembers the model that is sent."""
        self._sent = self._layout.flatten(self._named(arrays))
        if self._store.exists and not torch.equal(self._sent, self._now):
            raise RequestError(
                f"The round starts from another model than the one in {self._store.folder}: "
                "start from recorder.arrays, or choose a new folder."
            )
        asked = self._configure(server_round, arrays, config, grid)
        return self._attendance.asked(asked, grid, self._store.book.departed)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy does; then the round is recorded, unless the strategy did not average."""
        replies = self._attendance.staying(replies, self._store.book.departed)
        sent = self._contributions(replies)  # before the strategy, which may empty the replies
        arrays, metrics = self._aggregate(server_round, replies)
        if arrays is not None:
            self._record(sent, self._named(arrays))
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does."""
        return self._strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does."""
        return self._strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the strategy does."""
        self._strategy.summary()

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Asked for by Flower's old workflows, which cannot train with a Recorder; it says what can."""
        del client_manager
        raise RequestError(
            "Flower's old workflows cannot train with a Recorder: call recorder.start(grid, recorder.arrays, "
            "num_rounds=...) in the ServerApp's main function; under SecAgg+ no site's own update is seen, so train "
            "without a Recorder there and forget by hf-kcu."
        )

    @property
    def _now(self) -> Tensor:
        return self._layout.flatten(dict(self._model.named_parameters()))

    def _go_on(self) -> None:
        state, pending = self._store.load(self._model), self._store.book.pending
        if pending is not None:
            raise RequestError(f"A request to forget is unfinished in {self._store.folder}: resume() or abandon() it.")
        plan, past = self._plan, state.schedule
        now = (plan.learning_rate, plan.batch_size, plan.epochs)
        if past is not None and now != (past.learning_rate, past.batch_size, past.epochs):
            raise RequestError(
                f"The training in {self._store.folder} had another learning rate, batch size or number of local "
                "epochs: go on with the same, or choose a new folder."
            )
        state.model.write_to(self._model)
        self._memory = state.memory or Memory()
        _log.warning(
            "expunge: the training goes on from the model in %s, after %d rounds; a new folder begins anew.",
            self._store.folder,
            self._memory.rounds,
        )

    def _schedule(self, rounds: int, counts: Mapping[str, int]) -> Schedule:
        return dataclasses.replace(self._plan, rounds=rounds).schedule(counts)

    def _contributions(self, replies: Iterable[Message]) -> dict[str, _Contribution]:
        """Each site's update, weight and sample count; replies that are errors are the strategy's business."""
        found: dict[str, _Contribution] = {}
        key = getattr(self._strategy, "weighted_by_key", "num-examples")
        for content in (reply.content for reply in replies if reply.has_content()):
            if declined(content):
                continue
            stamp = content.config_records.get(STAMP)
            if stamp is None:
                raise RequestError("A training reply does not name its site: wrap the ClientApp with unlearnable().")
            name, samples = _stamped(stamp)
            if name in found:
                raise RequestError(f"Two sites call themselves {name!r}: every site needs a name of its own.")
            arrays, metrics = list(content.array_records.values()), list(content.metric_records.values())
            weight = metrics[0].get(key) if len(metrics) == 1 else None
            if len(arrays) != 1 or not isinstance(weight, int | float):
                raise RequestError(f"The training reply of site {name!r} needs one set of arrays and a weight {key!r}.")
            update = self._layout.flatten(self._named(arrays[0])) - self._sent
            found[name] = _Contribution(update, float(weight), samples)
        return dict(sorted(found.items()))  # replies come in any order

    def _record(self, sent: Mapping[str, _Contribution], aggregated: Mapping[str, Tensor]) -> None:
        memory = self._memory.copy()
        memory.record({n: own.update for n, own in sent.items()}, {n: own.weight for n, own in sent.items()})
        parameters = self._layout.flatten(aggregated)
        self._require_average(sent, parameters)
        buffers = {name: _like(buffer, aggregated.get(name, buffer)) for name, buffer in self._model.named_buffers()}
        snapshot = Snapshot(parameters, buffers, self._layout)
        counts = {**self._store.book.counts, **{name: own.samples for name, own in sent.items()}}
        state = ServerState(snapshot, self._schedule(memory.rounds, counts), memory)
        book = self._attendance.noted(dataclasses.replace(self._store.book, counts=counts))
        self._store.write(book, state, self._model)
        snapshot.write_to(self._model)
        self._memory = memory

    def _require_average(self, sent: Mapping[str, _Contribution], aggregated: Tensor) -> None:
        """Refuse a strategy whose result is not the weighted mean, up to rounding, of what the sites sent."""
        total = sum(own.weight for own in sent.values())
        mean = weighted_sum((own.update for own in sent.values()), (own.weight / total for own in sent.values()))
        rounding = (100 + len(sent)) * torch.finfo(aggregated.dtype).eps * float(aggregated.norm())
        if not float((self._sent + mean - aggregated).norm()) <= rounding:
            raise RequestError(
                f"{self._name} does not take the plain weighted mean of the sites' models, and only "
                "then can their parts be told apart: use FedAvg, or train without a Recorder."
            )

    def _named(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """The arrays under the model's names; those of a legacy client are only numbered."""
        tensors = {key: torch.from_numpy(array.numpy()) for key, array in arrays.items()}
        trained = [name for name, _ in self._layout.shapes]
        if set(trained) <= set(tensors):
            return tensors
        for names in (list(self._model.state_dict()), trained):
            if len(names) == len(tensors):
                return dict(zip(names, tensors.values(), strict=True))
        raise ModelError(
            f"The arrays are of another model: {len(tensors)} of them, where the model has {len(trained)}."
        )


def _todays(strategy: object) -> Strategy:
    """The strategy as one of today's API, or a sentence."""
    if isinstance(strategy, Legacy):
        return Modern(strategy)
    if not isinstance(strategy, Strategy):
        raise RequestError(
            f"A Recorder wraps a strategy of flwr.serverapp.strategy or flwr.server.strategy, not {strategy!r}."
        )
    return strategy


def _stamped(stamp: ConfigRecord) -> tuple[str, int]:
    """The site that trained, and its sample count."""
    name, samples = stamp.get("site"), stamp.get("samples")
    if not isinstance(name, str) or not name:
        raise RequestError("A training reply has a stamp without the name of its site: give its Site(...) one.")
    if type(samples) is not int or samples <= 0:
        raise RequestError(f"The training reply of site {name!r} needs a sample count that is a whole number above 0.")
    return name, samples


def _like(buffer: Tensor, averaged: Tensor) -> Tensor:
    """The averaged buffer in its own type: the mean of a counter (batch norm's) is rounded."""
    return (averaged if buffer.is_floating_point() else averaged.round()).to(buffer.dtype)
