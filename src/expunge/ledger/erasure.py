"""Going over to the new model, and destroying the old one with all that remembers; or going back while it is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from expunge.errors import RequestError
from expunge.federation.keeping.files import appear, read_json, remove
from expunge.federation.keeping.state_files import kept_in, load_state, save_state
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.plan import Schedule
from expunge.ledger.federation import Federation
from expunge.ledger.job import TRAINED_ON, Job
from expunge.ledger.judging import ATTEMPTS

CUT_OFF = "It was being rolled back when the work was cut off."
NOT_REACHED = (
    "Backups and snapshots of this machine's disks.",
    "Blocks of deleted files that the disk has not yet written over.",
    "Copies of the old model that recipients hold.",
)
SUPERLINK = (
    "SuperLink's database, which keeps what passed through it: stop SuperLink and run sqlite3 superlink.db"
    " 'PRAGMA secure_delete=ON; VACUUM; PRAGMA wal_checkpoint(TRUNCATE);'"
)


def adopt(job: Job) -> None:
    """Let the store go over to the new model in one move; the old one goes with it, or is put aside for a while."""
    case, store, model = job.case, job.federation.state_store(), job.federation.model()
    models, names = case.facts["forgotten"]["models"], job.ledger.names()
    leavers = {names.text(digest): digest for digest in case.facts["running"]["leaving"]}
    with store.alone():
        done = any(own.get("run") == case.run for own in store.book.forgotten)  # and cut off before that was written
        if not done and store.load(model).model.digest != models["before"]:
            job.fail(TRAINED_ON)
            return
        if not done:
            if case.facts["running"]["grace"]:
                _put_aside(store, job.federation, _aside(job))
            book = dataclasses.replace(
                store.book,
                counts={name: count for name, count in store.book.counts.items() if name not in leavers},
                departed=tuple(dict.fromkeys([*store.book.departed, *leavers])),
                forgotten=(
                    *store.book.forgotten,
                    {"requests": list(job.numbers), "run": case.run, "model": models["after"]},
                ),
            )
            store.write(book, job.candidate.load(model), model)
    job.ledger.record("adopted", job.numbers, {"tombstones": sorted(leavers.values())})


def erase(job: Job) -> None:
    """Destroy whatever remembers and is in reach, and list what is not."""
    facts = job.case.facts
    for place in (_aside(job), job.candidate.folder, job.place / ATTEMPTS):
        remove(place)
    store = job.federation.state_store()  # opening it deletes what a crash has left
    forgotten = facts["forgotten"]
    deleted: list[dict[str, Any]] = [{"what": "the old model", "sha256": forgotten["models"]["before"]}]
    if forgotten["memory"]["before"]:
        deleted.append({"what": "the old vectors", "sha256": forgotten["memory"]["before"]})
    deleted += [{"what": "replies of clients during the work"}, {"what": "the new model's copy in the workplace"}]
    deleted += [{"what": "the copy kept for going back"}] if facts["running"]["grace"] else []
    job.ledger.record("erased", job.numbers, {"deleted": deleted, "left": _left(job, store)})


def has_gone_back(job: Job) -> bool:
    """Whether the store holds the old model again: somebody who was going back was cut off before that was written."""
    models = job.case.facts["forgotten"]["models"]
    now = job.federation.state_store().load(job.federation.model()).model.digest
    return bool(now == models["before"] != models["after"])


def roll_back(job: Job, reason: str) -> None:
    """Put the old model back in its place."""
    aside, model, store = _aside(job), job.federation.model(), job.federation.state_store()
    models = job.case.facts["forgotten"]["models"]
    with store.alone():
        now = store.load(model).model.digest
        if now not in (models["after"], models["before"]):
            raise RequestError("The federation has trained on with the new model: it cannot go back.")
        if now == models["after"]:
            if not aside.is_dir():
                raise RequestError(f"{job.numbers[0]} was run without a --grace: there is nothing to go back to.")
            said = read_json(aside / "book.json")
            schedule = Schedule(**said["schedule"]) if said["schedule"] is not None else None
            book = dataclasses.replace(store.book, counts=said["counts"], departed=tuple(said["departed"]))
            store.write(book, load_state(model, aside, schedule, said["kept"]), model)
    candidate = job.candidate.folder
    job.ledger.record(
        "rolled-back", job.numbers, lambda names, _: {"reason": names.add(reason, "reason", *job.numbers)}
    )
    remove(aside)
    remove(candidate)


def _put_aside(store: StateStore, federation: Federation, aside: Path) -> None:
    state, model = store.load(federation.model()), federation.model()
    said = {
        "counts": dict(store.book.counts),
        "departed": list(store.book.departed),
        "schedule": dict(store.book.schedule) if store.book.schedule is not None else None,
        "kept": kept_in(state),
    }

    def fill(folder: Path) -> None:
        save_state(state, model, folder)
        (folder / "book.json").write_text(json.dumps(said))

    remove(aside)
    appear(aside, fill)


def _aside(job: Job) -> Path:
    return job.place / f"superseded-{job.case.run[:16]}"


def _left(job: Job, store: StateStore) -> list[str]:
    """What was not reached, in sentences without names."""
    federation = job.federation
    said = [*NOT_REACHED, *federation.not_reached]
    if federation.clients is None:
        return [*said, SUPERLINK]
    if any(name in federation.data() for name in store.book.departed):
        said.append("The data of clients that left, as long as the federation file reaches it.")
    if any(job.ledger.case(number).facts["received"]["scope"]["samples"] for number in job.numbers):
        said.append("The samples themselves, in the data of their client.")
    return said
