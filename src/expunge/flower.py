"""Forgetting in a Flower federation: what the author of a Flower app needs.

client_app.py    app = unlearnable(ClientApp(), site)             it answers expunge, and says how it trains
server_app.py    Recorder(FedAvg(), model=..., store=...)         trains, and keeps one vector per site
                 forget(grid, "hospital-3", store=..., model=...) weeks later; the site may have gone
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from expunge.core.batch import Forward
from expunge.core.losses import as_loss
from expunge.core.vectors import shared_copy
from expunge.errors import ExpungeError, RequestError, SiteError
from expunge.federation.engines.client import Client
from expunge.federation.engines.fitting import require_fitting
from expunge.federation.engines.flower.app import unlearnable, unlearning_mod
from expunge.federation.engines.flower.engine import FlowerEngine
from expunge.federation.engines.flower.recorder import Recorder
from expunge.federation.engines.flower.site import Site, pairs
from expunge.federation.engines.local_data import Collate, Data, LocalData
from expunge.federation.keeping.journal import Journal, JournaledEngine
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.messages.wire import Packed
from expunge.federation.training.recipe import SGD, Adam, AdamW
from expunge.forgetting import DryRun, choose
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import AUTO, Outcome
from expunge.unlearning.registry import method as registered
from expunge.unlearning.request import Request

if TYPE_CHECKING:  # where Flower is missing, the imports above say so in a sentence
    from flwr.serverapp import Grid

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "FlowerEngine",
    "Recorder",
    "Site",
    "abandon",
    "forget",
    "pairs",
    "resume",
    "unlearnable",
    "unlearning_mod",
    "work",
]

_log = logging.getLogger("flwr")  # what a ServerApp writes there is shown by `flwr run --stream`


def forget(
    grid: Grid,
    sites: str | Sequence[str] = (),
    *,
    store: str | Path,
    model: nn.Module,
    samples: Mapping[str, Sequence[int]] | None = None,
    method: str = AUTO,
    validation: Data | None = None,
    loss: object = "cross_entropy",
    l2: float = 0.0,
    collate: Collate | None = None,
    forward: Forward | None = None,
    deadline: float = 900.0,
    dry_run: bool = False,
    force: bool = False,
    **options: Any,
) -> Outcome | DryRun:
    """Take sites (or samples inside sites) out of the model that a ``Recorder`` keeps.

    Afterwards the store holds the new model; the old one, the vectors of those who left and all checkpoints, which
    remember them, are deleted. Where the outcome did not succeed, or an error is raised, the store's model is as it
    was; after a crash, or an error on the way, ``resume`` goes on where it was.

    Args:
        grid: from the ServerApp's main function.
        sites: names of the sites to forget; they may be gone.
        store: the Recorder's folder.
        model: the architecture; its weights play no part.
        samples: indices to forget inside sites that stay.
        method: any of ``expunge methods``; ``auto`` is retrace where the store has a vector of everybody who leaves, or
            checkpoints from which the sites that hold the data can replay it; else hf-kcu.
        validation: the server's own data, on which the safety belt then looks at the loss.
        loss: of the validation data.
        l2: of the validation data's loss.
        collate: makes a batch of validation samples.
        forward: how the model is run on such a batch.
        deadline: seconds that one message round may take.
        dry_run: only say what would be done, by which method, and what it would cost at most; no site is asked to work.
        force: even by a method whose model is known to remember (``do-nothing``, ``hf-kcu-paper``).
        options: any option of that method, such as ``curvature_samples=500`` or ``recovery=True``.

    Returns:
        What was done; ``outcome.write_to(model)`` puts the new weights into a model. Or the dry run.
    """
    if not registered(method).forgets and not force:
        raise RequestError(
            f"The model that {method} leaves remembers, and the vectors of those who leave would be deleted: "
            "use a method that forgets, or force=True."
        )
    own, request = StateStore(store), Request.of(sites, samples)
    asked = _described(request, method, options, _digest(validation, loss, l2, collate))
    with own.alone():
        for name in set(request.clients) & set(own.book.departed):
            raise RequestError(f"Site {name!r} was forgotten already.")
        pending = own.book.pending
        if pending is not None and {**pending, "validation": None} != {**asked, "validation": None}:
            unfinished = ", ".join([*pending["clients"], *pending["samples"]])
            raise RequestError(
                f"A request to forget {unfinished} is unfinished in {own.folder}: resume() or abandon() it."
            )
        _require_same_validation(own, asked["validation"])
        work = _Work(grid, own, model, asked, _validation(validation, model, loss, l2, collate, forward), deadline)
        return work.dry_run() if dry_run else work.run()


def resume(
    grid: Grid,
    *,
    store: str | Path,
    model: nn.Module,
    validation: Data | None = None,
    loss: object = "cross_entropy",
    l2: float = 0.0,
    collate: Collate | None = None,
    forward: Forward | None = None,
    deadline: float = 900.0,
) -> Outcome:
    """Finish a request that a crash or an error has cut off: the same result as if nothing had happened.

    Args: as those of ``forget``, with the same validation data; the request and its options are in the store.
    """
    own = StateStore(store)
    with own.alone():
        if own.book.pending is None:
            raise RequestError(f"Nothing is unfinished in {own.folder}.")
        _require_same_validation(own, _digest(validation, loss, l2, collate))
        return _Work(
            grid, own, model, own.book.pending, _validation(validation, model, loss, l2, collate, forward), deadline
        ).run()


def abandon(store: str | Path) -> None:
    """Give up an unfinished request, for instance because a site that should stay will not come back.

    Model and vectors are those from before it; what the sites have replied so far is deleted.
    """
    own = StateStore(store)
    with own.alone():
        own.write(dataclasses.replace(own.book, pending=None))


def work(
    grid: Grid, federation: str | Path, numbers: Sequence[str] = (), *, deadline: float = 900.0, **settings: Any
) -> None:
    """Work on the requests in the ledger beside a federation file, as ``expunge request run`` does on one machine.

    What a crash, or a site that stayed away, has cut off is finished first: run the app again.

    Args:
        grid: from the ServerApp's main function.
        federation: the file; its ``clients`` are None, and its ``store`` is the Recorder's.
        numbers: requests; all that are accepted where none is named.
        deadline: seconds that one message round may take.
        settings: ``method``, ``options``, ``grace`` and ``override`` as of ``expunge request run``.
    """
    # Imported here: a ClientApp, which Flower starts anew for every message, has no ledger and judges nothing.
    from expunge.ledger.federation import Federation
    from expunge.ledger.ledger import Ledger
    from expunge.ledger.making import Settings
    from expunge.ledger.showing import advice
    from expunge.ledger.work import Work

    own = Federation.load(Path(federation))
    ledger = Ledger(own.folder / "ledger")
    data = own.validation() if own.validation is not None else None

    def reach(store: StateStore, needed: Sequence[str]) -> FlowerEngine:
        engine = FlowerEngine(
            grid,
            deadline=deadline,
            wait_for=needed,
            validation=_validation(data, own.model(), own.loss, own.l2, own.collate, own.forward),
            on_round=lambda done: _log.info("expunge: message round %d of forgetting is done", done),
            trained_with=store.book.counts,
        )
        return engine.without(set(engine.clients()) - set(store.book.counts))

    problems = Work(ledger, own, Settings(**settings), reach).run(numbers)
    for case in ledger.cases().values():
        if todo := advice(case):
            _log.info("expunge: %s is %s. %s", case.number, case.state, todo)
    if problems:
        raise RequestError(" ".join(problems))


class _Work:
    """One request on the sites that stay: the method is settled by the store, the engine waits for whom it needs."""

    def __init__(
        self,
        grid: Grid,
        store: StateStore,
        model: nn.Module,
        asked: Mapping[str, Any],
        validation: Client | None,
        deadline: float,
    ) -> None:
        self._store, self._model, self._asked = store, model, asked
        self._request, self._state = Request.of(asked["clients"], asked["samples"]), store.load(model)
        remembered = self._state.memory.clients if self._state.memory is not None else tuple(store.book.counts)
        self._parties = self._request.parties(store.book.counts, remembered)  # who trained; it need not be online
        choice = choose(self._state, self._parties, asked["method"], asked["options"])
        self._choice = choice.of_a_store(self._state, self._parties).doubting(store.book.doubts)
        needed = [name for name in remembered if self._choice.asks_owners or name not in self._parties.leaving]
        engine = FlowerEngine(
            grid,
            deadline=deadline,
            wait_for=() if self._choice.may_miss else needed,
            validation=validation,
            on_round=lambda done: _log.info("expunge: message round %d of forgetting is done", done),
            trained_with=store.book.counts,
        )
        # Who was forgotten earlier may still be online, and who is new has no part in the model yet.
        self._engine = engine.without(set(engine.clients()) - set(remembered))
        self._warnings = tuple(
            f"Site {name!r} has {own.samples + own.newer} samples where it trained with {own.samples}: "
            f"its first {own.samples} are used, so new ones must come last in its data."
            for name, own in self._engine.members().items()
            if own.newer
        )
        for warning in self._warnings:
            _log.warning("expunge: %s", warning)

    def dry_run(self) -> DryRun:
        """What would be done."""
        planned = self._choice.dry_run(self._engine, self._state, self._request)
        return dataclasses.replace(planned, warnings=(*planned.warnings, *self._warnings))

    def run(self) -> Outcome:
        """Run the method with every finished round on disk, and let the store go on without those who leave."""
        store = self._store
        if store.book.pending is None:
            store.write(dataclasses.replace(store.book, pending=self._asked))
        journal = Journal(store.journal)
        try:
            outcome = self._choice.run(JournaledEngine(self._engine, journal), self._state, self._request)
        except ExpungeError as problem:
            if not isinstance(problem, SiteError | RequestError) or len(journal) == 0:  # no use in going on
                store.write(dataclasses.replace(store.book, pending=None))
            raise
        outcome = dataclasses.replace(outcome, warnings=(*outcome.warnings, *self._warnings))
        return _finish(store, self._request, self._parties.leaving, outcome, self._model)


def _finish(
    store: StateStore, request: Request, leaving: tuple[str, ...], outcome: Outcome, model: nn.Module
) -> Outcome:
    """Write down what came of it; the journal goes with the pending request, in the same move as the new state.

    Returns:
        The outcome, its memory as the store has it now: that of the old state can no longer be read.
    """
    record = {
        "clients": list(request.clients),
        "samples": {name: list(indices) for name, indices in request.samples.items()},
        "method": outcome.method,
        "succeeded": outcome.succeeded,
        "cost": outcome.cost.as_dict(),
        "warnings": list(outcome.warnings),
        "details": outcome.details,
    }
    book = dataclasses.replace(store.book, pending=None, forgotten=(*store.book.forgotten, record))
    if not outcome.succeeded:
        store.write(book)
        return outcome
    counts = {name: count for name, count in book.counts.items() if name not in leaving}
    departed = (*book.departed, *leaving)
    store.write(dataclasses.replace(book, counts=counts, departed=departed), outcome.state, model)
    return dataclasses.replace(outcome, state=dataclasses.replace(outcome.state, memory=store.memory()))


def _described(request: Request, method: str, options: Mapping[str, Any], validation: str | None) -> dict[str, Any]:
    """The request as it stands in the store; options that the method does not have are refused here."""
    registered(method).configured(options)
    samples = {name: list(indices) for name, indices in request.samples.items()}
    plain = {name: _plain(value) for name, value in options.items()}
    asked = {
        "clients": list(request.clients),
        "samples": samples,
        "method": method,
        "options": plain,
        "validation": validation,
    }
    try:
        described: dict[str, Any] = json.loads(json.dumps(asked))
    except TypeError as problem:
        raise RequestError(f"Options must be plain values, so that they can be written down: {problem}.") from problem
    return described


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Recovery) else value


def _validation(
    data: Data | None,
    model: nn.Module,
    loss: object,
    l2: float,
    collate: Collate | None,
    forward: Forward | None,
) -> Client | None:
    if data is None:
        return None
    own, trained_with = LocalData(data, "validation", collate), as_loss(loss, l2)
    require_fitting(model, own, trained_with, forward)
    return Client(own, shared_copy(model), trained_with, forward=forward)


def _digest(data: Data | None, loss: object, l2: float, collate: Collate | None) -> str | None:
    """What validation data and loss are known by: tensors whole, of a dataset its length, first and last sample."""
    if data is None:
        return None
    own = LocalData(data, "validation", collate)
    batch = own.whole if own.whole is not None else own.take([0, len(own) - 1])
    described = {"samples": len(own), "loss": repr(as_loss(loss, l2))}
    names = ("inputs", "targets") if batch.pair is not None else map(str, count())
    return Packed(dict(zip(names, batch.tensors(), strict=False)), described).digest


def _require_same_validation(store: StateStore, digest: str | None) -> None:
    if store.book.pending is not None and store.book.pending.get("validation") != digest:
        raise RequestError(
            f"The unfinished request in {store.folder} was begun with other validation data or loss, or without: "
            "give the same validation data, or abandon() it."
        )
