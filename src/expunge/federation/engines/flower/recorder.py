"""A Flower strategy that keeps, while another one trains, what forgetting needs later: vectors and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.server.strategy import Strategy as Legacy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from expunge.core.vectors import Snapshot, shared_copy, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.flower.attendance import Attendance
from expunge.federation.engines.flower.legacy import Modern
from expunge.federation.engines.flower.mail import listed
from expunge.federation.engines.flower.replies import Contribution, Names, Reading
from expunge.federation.engines.flower.rules import go_on_with, proximal_mu, require_followed, server_rule
from expunge.federation.engines.flower.trainings import Statement, scheduled
from expunge.federation.keeping.checkpoints import Checkpoints, thinned
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.place import Place
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.notes import Rule, written
from expunge.federation.training.plan import Schedule
from expunge.federation.training.recipe import FedAvg, FedAvgM, Recipe

_log = logging.getLogger("flwr")

PARTS = {
    "apart": (
        "Site {name} sends {names}, but trains it from values of its own, so that what others did to it wears off "
        "at once and is overstated: set requires_grad=False on it in the models of Recorder and Site."
    ),
    "strange": (
        "Site {name} trains with another {names} than the model of its Site(...) has: let site(context) put its own "
        "there, from context.state or where else the app keeps it, or it answers for a model that nobody has."
    ),
}
"""What is said of such parts of a ``Contribution``."""

REDRAWN = (
    "Site {name} has other samples under the same numbers than in an earlier round, so that samples={{...}} would "
    "forget others than are meant: give Site its data without random transforms, in a fixed order, split with a seed."
)
"""What is said of a site with other first samples than before."""


class Recorder(Strategy):
    """Wraps a strategy that averages; model, vectors and how the sites trained are in a folder after each round.

    How the sites train is read from their torch optimisers, round by round: which they are, their learning rate and
    steps, and Adam's second moments (``unlearnable`` sees to that). Where they do not show it, it has to be stated;
    what is stated and seen must agree. How the server averages is read from the strategy, and checked in every round:
    FedAvg, FedProx and FedAvgM can be followed. FedAdam and its like are refused at once, everything else whose round
    is not what its rule gives (medians, noise on the server, ...) at the first round in which it shows.

    Args:
        strategy: ``FedAvg``, ``FedAvgM``, ``FedProx`` or your own, of today's API or of the old one
            (``flwr.server.strategy``); everything is passed on to it, and the rounds are those of its own ``start``.
        model: the model that is trained, with its initial weights; it is not changed.
        store: the folder; where a training is in it already, this one goes on from there.
        optimiser: of the sites, where they do not show it: ``SGD``, ``Adam`` or ``AdamW`` of ``expunge.flower``.
        learning_rate: of the sites, where they do not show it: a number, or a function of the round's number.
        batch_size: of the sites; where they do not show their steps, and for a short round after a long step (else 64).
        local_epochs: epochs that a site trains in one round, where the sites do not show their steps.
        keep_checkpoints: at most so many global models of the training's way, spread over its rounds, from which the
            owners of samples can replay what these did; 0 keeps none. Under FedAvgM none are kept: no replay follows
            a server's momentum.
    """

    def __init__(
        self,
        strategy: Strategy | Legacy,
        *,
        model: nn.Module,
        store: str | Path,
        optimiser: Rule | None = None,
        learning_rate: float | Callable[[int], float] | None = None,
        batch_size: int | None = None,
        local_epochs: int | None = None,
        keep_checkpoints: int = 3,
    ) -> None:
        if isinstance(keep_checkpoints, bool) or not isinstance(keep_checkpoints, int) or keep_checkpoints < 0:
            raise RequestError(f"A Recorder keeps 0, 1, 2 or more checkpoints, not {keep_checkpoints!r}.")
        self._strategy, self._name = _todays(strategy), type(strategy).__name__
        self._configure, self._aggregate = self._strategy.configure_train, self._strategy.aggregate_train
        self._server = server_rule(self._strategy)
        self._stated = Statement(optimiser, learning_rate, batch_size, local_epochs, proximal_mu(self._strategy))
        self._store = StateStore(store)
        self._attendance = Attendance(self._store.book)
        here = all(own.device.type == "cpu" for own in model.parameters())
        self._model = shared_copy(model) if here else copy.deepcopy(model).cpu()
        self._names = Names(self._model)
        self._memory: Memory | None = None
        self._schedule: Schedule | None = None
        self._most = keep_checkpoints if isinstance(self._server, FedAvg) else 0
        self._way: dict[int, Snapshot] = {}
        self._planned: int | None = None
        self._before = Snapshot(self._now, {}, self._names.layout)
        self._begun, self._warned, self._doubts = False, set[str](), self._store.book.doubts
        self._marks: dict[str, str] = {}
        if self._store.exists:
            self._go_on()

    @property
    def arrays(self) -> ArrayRecord:
        """What to start from: ``recorder.start(grid, recorder.arrays)``; the stored model, or else the given one.

        Of a model with PEFT's adapters it is their state dict, under PEFT's own names.
        """
        if type(self._model).__module__.startswith("peft."):
            import peft

            return ArrayRecord(peft.get_peft_model_state_dict(self._model))
        return ArrayRecord(self._model.state_dict())

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *arguments: Any, **named: Any) -> Result:
        """As the strategy does: its own ``start`` runs, with whatever it does around the rounds."""
        self._begun, self._planned = False, self._rounds(grid, initial_arrays, *arguments, **named)
        with self._listening():
            result = self._strategy.start(grid, initial_arrays, *arguments, **named)
        returned = getattr(result, "arrays", None)
        if returned and not torch.equal(self._flat(returned), self._now):
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
        self._before = self._snapshot(self._names.tensors(arrays))
        if self._store.exists and not torch.equal(self._sent, self._now):
            raise RequestError(
                f"The round starts from another model than the one in {self._store.folder}: "
                "start from recorder.arrays, or choose a new folder."
            )
        if not self._begun:
            self._begin(arrays)
        asked = self._configure(server_round, arrays, config, grid)
        return self._attendance.asked(asked, grid, self._store.book.departed)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy does; then the round is recorded, unless the strategy did something else than its rule."""
        replies = self._attendance.staying(replies, self._store.book.departed)
        self._require_same_rule()
        key = getattr(self._strategy, "weighted_by_key", "num-examples")
        reading = Reading(self._names, self._sent, key, self._stated, server_round, self._known)
        sent = reading.contributions(replies)  # before the strategy, which may empty the replies
        recipe = self._recipe(sent)
        self._warn_of_parts(sent)
        arrays, metrics = self._aggregate(server_round, replies)
        if arrays is not None:
            self._record(recipe, sent, self._names.tensors(arrays))
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
    def _known(self) -> Rule | None:
        """By which the sites trained so far."""
        rule = self._memory.recipe.client if self._memory is not None and self._memory.rounds else None
        return rule if isinstance(rule, Rule) else None

    @property
    def _sent(self) -> Tensor:
        return self._before.parameters

    @property
    def _now(self) -> Tensor:
        return self._names.layout.flatten(dict(self._model.named_parameters()))

    def _flat(self, arrays: ArrayRecord) -> Tensor:
        return self._names.layout.flatten(self._names.tensors(arrays))

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """The model with these values, and with the buffers among them.

        What is never sent stays at the sites: statistics of norms that are their own (FedBN), or a frozen base's.
        """
        own = {name: buffer for name, buffer in self._model.named_buffers() if name in tensors}
        buffers = {name: _like(buffer, tensors[name]) for name, buffer in own.items()}
        return Snapshot(self._names.layout.flatten(tensors), buffers, self._names.layout)

    def _rounds(self, *arguments: Any, **named: Any) -> int | None:
        """How many rounds the training will have with this run; None where its ``start`` does not say."""
        try:
            bound = inspect.signature(self._strategy.start).bind(*arguments, **named)
        except (TypeError, ValueError):  # start itself will say so
            return None
        bound.apply_defaults()
        more = bound.arguments.get("num_rounds")
        done = self._memory.rounds if self._memory is not None else 0
        return done + more if isinstance(more, int) and more > 0 else None

    def _go_on(self) -> None:
        """Take up the training in the store."""
        state, folder = self._store.load(self._model), self._store.folder
        if self._store.book.pending is not None:
            raise RequestError(f"A request to forget is unfinished in {folder}: resume() or abandon() it.")
        state.model.write_to(self._model)
        memory = state.memory if state.memory is not None else Memory()
        if memory.rounds and memory.recipe.server != self._server:
            raise RequestError(
                f"The training in {folder} was by {memory.recipe.server}, and {self._name} is {self._server}: "
                "go on with the same, or choose a new folder."
            )
        self._memory = memory.bound_to(state.model, memory.server_momentum, goes_on=True)
        self._schedule = state.schedule
        if state.checkpoints is not None and state.memory is not None:  # else their rounds are not those to come
            self._way = dict(state.checkpoints.models)
        _log.warning(
            "expunge: the training goes on from the model in %s, after %d rounds; a new folder begins anew.",
            folder,
            memory.rounds,
        )

    def _begin(self, arrays: ArrayRecord) -> None:
        """Before the first round of a run: the strategy goes on with the momentum that the store has, or with none."""
        self._begun, kept = True, self._memory
        has_momentum = isinstance(self._server, FedAvgM) and kept is not None and kept.rounds > 0
        momentum = kept.server_momentum if kept is not None and has_momentum else None
        if has_momentum and momentum is None:
            _log.warning("expunge: the server's momentum was not kept in %s: it begins anew.", self._store.folder)
        parts = {} if momentum is None else self._names.layout.unflatten(momentum)
        named = {key: parts[name] for key, name in self._names.of(arrays).items() if name in parts}
        go_on_with(self._strategy, named or None, arrays)

    def _require_same_rule(self) -> None:
        """A server whose settings change on the way is not the one that was recorded so far."""
        now, mu = server_rule(self._strategy), proximal_mu(self._strategy)
        if (now, mu) != (self._server, self._stated.proximal_mu):
            before, after = (self._server, now) if now != self._server else (self._stated.proximal_mu, mu)
            raise RequestError(
                f"{self._name} has changed between rounds, from {before} to {after}, and one rule for all is recorded: "
                "keep its settings as they are, or train without a Recorder."
            )

    def _recipe(self, sent: Mapping[str, Contribution]) -> Recipe:
        """How all train: one rule for all sites and rounds."""
        known = self._memory.recipe if self._memory is not None and self._memory.rounds else None
        first, whose = (known.client, "the training so far") if known is not None else (None, "")
        for name, own in sent.items():
            if first is None:
                first, whose = own.training.rule, f"site {name!r}"
                _log.info(
                    "expunge: the sites train with %s, the server by %s.", written(own.training.rule), self._server
                )
            elif own.training.rule != first:
                raise RequestError(
                    f"Site {name!r} trains with {written(own.training.rule)} and {whose} with "
                    f"{written(first) if isinstance(first, Rule) else first.name}: train everybody alike, or choose a "
                    "new folder."
                )
        return known if known is not None else Recipe(first if first is not None else Recipe().client, self._server)

    def _warn_of_parts(self, sent: Mapping[str, Contribution]) -> None:
        """What is wrong with parts of the model, or with samples that are others in every round."""
        for what, sentence in PARTS.items():
            name, names = next(((name, found) for name, own in sent.items() if (found := getattr(own, what))), ("", ()))
            if names:
                self._doubt(what, sentence.format(name=repr(name), names=listed(names)))
        for name in (n for n, own in sent.items() if own.mark and self._marks.setdefault(n, own.mark) != own.mark):
            self._doubt("samples", REDRAWN.format(name=repr(name)))

    def _doubt(self, what: str, sentence: str) -> None:
        """Say it once a run; every forget says it again."""
        if what in self._warned:
            return
        self._warned.add(what)
        self._doubts = tuple(dict.fromkeys((*self._doubts, sentence)))
        _log.warning("expunge: %s", sentence)

    def _record(self, recipe: Recipe, sent: Mapping[str, Contribution], aggregated: Mapping[str, Tensor]) -> None:
        layout, snapshot = self._names.layout, self._snapshot(aggregated)
        known = self._memory if self._memory is not None and self._memory.rounds else None
        memory = known.copy() if known is not None else Memory(Snapshot(self._sent, {}, layout), recipe)
        before, number = Place.at(self._sent, momentum=memory.server_momentum), memory.rounds
        memory.record(
            {name: own.update for name, own in sent.items()},
            {name: own.weight for name, own in sent.items()},
            learning_rate={name: own.training.learning_rate for name, own in sent.items()},
            steps={name: own.training.steps for name, own in sent.items()},
            moments={name: own.moments for name, own in sent.items() if own.moments},
            altered=[name for name, own in sent.items() if own.training.altered],
        )
        require_followed(self._name, self._server, before, _mean(sent), snapshot.parameters, len(sent))
        # So that roundings of many rounds do not add up. Where sites have parts of their own, the first round cannot be
        # trained again: those have gone on since.
        memory = memory.bound_to(snapshot, memory.server_momentum, goes_on=not any(own.own for own in sent.values()))
        counts = {**self._store.book.counts, **{name: own.samples for name, own in sent.items()}}
        works = [(own.weight, own.training) for own in sent.values()]
        schedule = scheduled(self._schedule, memory.rounds, works, self._stated)
        way = {**self._way, number: self._before}
        way = {own: way[own] for own in thinned(way, self._most, self._planned)}
        checkpoints = Checkpoints(way, memory.recipe) if way else None
        state = ServerState(snapshot, schedule, memory, checkpoints=checkpoints)
        book = self._attendance.noted(dataclasses.replace(self._store.book, counts=counts, doubts=self._doubts))
        self._store.write(book, state, self._model)
        snapshot.write_to(self._model)
        self._memory, self._schedule, self._way = self._store.memory(), schedule, way  # vectors stay on disk


def _todays(strategy: object) -> Strategy:
    """The strategy as one of today's API, or a sentence."""
    if isinstance(strategy, Legacy):
        return Modern(strategy)
    if not isinstance(strategy, Strategy):
        raise RequestError(
            f"A Recorder wraps a strategy of flwr.serverapp.strategy or flwr.server.strategy, not {strategy!r}."
        )
    return strategy


def _mean(sent: Mapping[str, Contribution]) -> Tensor:
    total = sum(own.weight for own in sent.values())
    return weighted_sum((own.update for own in sent.values()), (own.weight / total for own in sent.values()))


def _like(buffer: Tensor, averaged: Tensor) -> Tensor:
    """The averaged buffer in its own type: the mean of a counter (batch norm's) is rounded."""
    return (averaged if buffer.is_floating_point() else averaged.round()).to(buffer.dtype)
