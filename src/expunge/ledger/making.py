"""From an accepted request to a new model in the workplace: what is about to be done, then the method itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from expunge.core.seeds import derived_seed
from expunge.errors import ExpungeError, RequestError, SiteError
from expunge.federation.keeping.journal import Journal, JournaledEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import StateStore
from expunge.forgetting import Choice, choose
from expunge.ledger.candidate import file_digest, memory_digest
from expunge.ledger.cases import Case
from expunge.ledger.job import TRAINED_ON, Job
from expunge.ledger.names import Names
from expunge.ledger.watching import plainly
from expunge.unlearning.registry import AUTO
from expunge.unlearning.request import Parties, Request
from expunge.version import __version__


@dataclass(frozen=True)
class Settings:
    """How requests are worked on.

    Attributes:
        method: any of ``expunge methods``.
        options: of that method; plain values.
        retrains: models to retrain for a verdict; 0 for what can be said without.
        grace: how long the old model is kept after the federation has gone over to the new one.
        override: why to go on without an audit that passed; empty to wait for one. It stands in the receipt.
    """

    method: str = AUTO
    options: Mapping[str, Any] = field(default_factory=dict)
    retrains: int = 0
    grace: timedelta = timedelta(0)
    override: str = ""


def begin(job: Job, settings: Settings) -> None:
    """Write down what is about to be done, to which model, and who got that model."""
    store, request = job.federation.state_store(), job.request()
    state = store.load(job.federation.model())
    for name in set(request.clients) & set(store.book.departed):
        raise RequestError(f"Client {name!r} has left already: its tombstone stands, so refuse the request.")
    earlier = sum(event.kind == "running" for event in job.ledger.events())
    seed = derived_seed(job.federation.plan.seed, "request", earlier)  # a second try is another one
    chosen = {"method": settings.method, "options": dict(settings.options), "seed": seed}
    choice, parties = _choice(job, state, store, request, chosen)
    if not choice.method.forgets:
        raise RequestError(f"The model that {choice.method.name} leaves remembers: use a method that forgets.")
    memory = memory_digest(store.state)

    def content(table: Names, found: Mapping[str, Case]) -> dict[str, Any]:
        staying = [name for name in store.book.counts if name not in parties.leaving]
        return {
            **chosen,
            "seed": getattr(choice.method.options, "seed", seed),
            "together": list(job.numbers),
            "leaving": [digest for digest in _clients(found, job.numbers) if table.text(digest) in parties.leaving],
            "recipients": [table.add(name, "site", *job.numbers) for name in staying],
            "models": {"before": state.model.digest},
            "memory": {"before": memory},
            "retrains": settings.retrains,
            "grace": int(settings.grace.total_seconds()),
            "expunge": __version__,
        }

    job.ledger.record("running", job.numbers, content)


def forget(job: Job) -> None:
    """The new model, into the workplace and then into the log; where it fails, that."""
    running, candidate = job.case.facts["running"], job.candidate
    if not candidate.exists:
        _make(job, running)
    if not candidate.exists:
        return
    _release(job)
    record, known = candidate.record(), job.known()

    def content(table: Names, _: object) -> dict[str, Any]:
        return {
            "models": {**running["models"], "after": record["model"]},
            "memory": {**running["memory"], "after": file_digest(candidate.memory)},
            **{name: plainly(record[name], known) for name in ("method", "options", "cost", "details", "warnings")},
            "answered": sorted(table.add(name, "site", *job.numbers) for name in record["answered"]),
        }

    job.ledger.record("forgotten", job.numbers, content)


def _make(job: Job, running: Mapping[str, Any]) -> None:
    """Run the method, with every finished message round on the disk."""
    store, request, model = job.federation.state_store(), job.request(), job.federation.model()
    mark = _mark(job)
    with store.alone():
        state = store.load(model)
        if state.model.digest != running["models"]["before"]:
            job.fail(TRAINED_ON)
            return
        choice, parties = _choice(job, state, store, request, running)
        if store.book.pending is None:
            store.write(dataclasses.replace(store.book, pending=mark))
        elif store.book.pending != mark:
            raise RequestError(f"Another request is unfinished in {store.folder}: resume or abandon that first.")
        journal = Journal(store.journal)
        try:
            engine = job.reach(store, () if choice.may_miss else _needed(choice, state, store, parties))
            job.watch.rounds(engine, choice.expected_rounds(state, parties), job.numbers)
            outcome = choice.run(JournaledEngine(engine, journal), state, request)
        except SiteError:  # it may come back: the work can be resumed
            raise
        except ExpungeError as problem:
            store.write(dataclasses.replace(store.book, pending=None))
            job.fail(plainly(str(problem), job.known()))
            return
        if outcome.succeeded:
            job.candidate.write(outcome, choice.method.options, _answered(journal), model)
    if not outcome.succeeded:
        _release(job)
        job.fail("The safety belt held the step back: the model is as it was.")


def _release(job: Job) -> None:
    """Let others work on the store again; what the clients replied is deleted with that."""
    store = job.federation.state_store()
    with store.alone():
        if store.book.pending == _mark(job):
            store.write(dataclasses.replace(store.book, pending=None))


def _mark(job: Job) -> dict[str, Any]:
    """What stands in the store while it is worked on."""
    return {"requests": list(job.numbers)}


def _choice(
    job: Job, state: ServerState, store: StateStore, request: Request, chosen: Mapping[str, Any]
) -> tuple[Choice, Parties]:
    """The method with its options, and who is touched."""
    remembered = state.memory.clients if state.memory is not None else ()
    parties = request.parties(store.book.counts, remembered)
    options = job.federation.completed(chosen["method"], chosen["options"], chosen["seed"])
    choice = choose(state, parties, chosen["method"], options).of_a_store(state, parties)
    return choice.doubting(store.book.doubts), parties


def _needed(choice: Choice, state: ServerState, store: StateStore, parties: Parties) -> list[str]:
    """Whom the work has to wait for."""
    known = state.memory.clients if state.memory is not None else tuple(store.book.counts)
    return [name for name in known if choice.asks_owners or name not in parties.leaving]


def _clients(known: Mapping[str, Case], numbers: Sequence[str]) -> list[str]:
    """Salted digests of all clients that requests are about."""
    scopes = [known[number].facts["received"]["scope"] for number in numbers]
    return [digest for scope in scopes for digest in (*scope["clients"], *(own["client"] for own in scope["samples"]))]


def _answered(journal: Journal) -> list[str]:
    """Who answered in any round."""
    rounds = (journal.read(number) for number in range(len(journal)))
    return sorted({name for found in rounds if found is not None for name in found.replies})
