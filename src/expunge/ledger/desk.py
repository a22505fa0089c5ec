"""What is done at the desk: file a request, accept, refuse or extend it, tell recipients, close it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

from expunge.errors import RequestError
from expunge.ledger.cases import Case, tombstones
from expunge.ledger.law import EXCEPTIONS, GROUNDS, article, due_date, read_date
from expunge.ledger.ledger import Ledger
from expunge.ledger.log import Event
from expunge.ledger.names import Names
from expunge.ledger.receipt import make_receipt

LONGEST_NAME = 65_536
"""Characters; what is longer is no name."""


@dataclass(frozen=True)
class Filing:
    """What stands in a letter.

    Attributes:
        clients: to be forgotten as a whole.
        samples: numbers of samples to be forgotten, by client.
        received: the day it came; today where nothing is said.
        due: the day by which to answer; a month later where nothing is said.
        ground: a letter of Article 17(1).
        checked_by: who has checked that it comes from whom it says; the request is then accepted at once.
        note: anything else, for the desk; it can be erased.
    """

    clients: tuple[str, ...] = ()
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
    received: str | None = None
    due: str | None = None
    ground: str = "b"
    checked_by: str = ""
    note: str = ""


def add(ledger: Ledger, filing: Filing) -> str:
    """Write a request down before anything else is done; its number is R-0001 and so on."""
    _require_names(filing)
    today = ledger.clock().date()
    received = read_date(filing.received, "The day of receipt") if filing.received else today
    if received > today + timedelta(days=1):  # it may be tomorrow already where the letter came
        raise RequestError(f"A request cannot have come on {received}, which is still to be.")
    due = read_date(filing.due, "The due date") if filing.due else due_date(received)
    if filing.due and due < today:
        raise RequestError(f"The due date {due} is past: give a later one, or the day of receipt alone.")
    if due > due_date(received):
        raise RequestError(
            f"The due date can be {due_date(received)} at the latest, one month after receipt: use extend."
        )
    if due < today:
        ledger.notes.append(f"This request was due on {due}: it is late already.")
    ground = article(filing.ground, GROUNDS, 1)
    numbers: list[str] = []

    def content(names: Names, known: Mapping[str, Case]) -> dict[str, Any]:
        numbers.append(f"R-{len(known) + 1:04}")
        told = {"received": str(received), "due": str(due), "ground": ground}
        note = {"note": names.add(filing.note, "note", numbers[0])} if filing.note else {}
        return {**told, "scope": _scope(filing, names, numbers[0]), **note}

    ledger.record("received", numbers, content)
    if filing.checked_by:
        accept(ledger, numbers[0], filing.checked_by)
    return numbers[0]


def accept(ledger: Ledger, number: str, checked_by: str) -> Event:
    """Let a request be worked on, once somebody has checked who asks."""
    require_text(checked_by, "Who has checked the identity")
    return ledger.record("accepted", [number], lambda names, _: {"checked_by": names.add(checked_by, "person", number)})


def refuse(ledger: Ledger, number: str, reason: str, exception: str | None = None) -> Event:
    """Say no, with a reason and where there is one an exception of Article 17(3)."""
    require_text(reason, "The reason")
    legal = {"exception": article(exception, EXCEPTIONS, 3)} if exception else {}
    return ledger.record("refused", [number], lambda names, _: {"reason": names.add(reason, "reason", number), **legal})


def extend(ledger: Ledger, number: str, reason: str, until: str | None = None) -> Event:
    """Take up to two months more (Article 12(3)); the person has to be told why within the first month."""
    require_text(reason, "The reason")
    case, today = ledger.case(number), ledger.clock().date()
    received = date.fromisoformat(case.facts["received"]["received"])
    latest = due_date(received, 3)
    due = read_date(until, "The new due date") if until else latest
    if due < today:
        raise RequestError(f"The due date {due} is past: give a later one.")
    if not date.fromisoformat(case.due) < due <= latest:
        raise RequestError(f"{number} is due on {case.due} and can be extended to {latest} at the latest.")
    if today > due_date(received):
        ledger.notes.append("An extension must be told within one month of receipt: that is over.")
    return ledger.record(
        "extended", [number], lambda names, _: {"due": str(due), "reason": names.add(reason, "reason", number)}
    )


def tell(ledger: Ledger, number: str, recipients: Sequence[str], on: str | None = None) -> None:
    """Note that recipients of the model were told (Article 19); an empty list is all that were not yet."""
    case, today = ledger.case(number), ledger.clock().date()
    case.require("told")
    day = read_date(on, "The day") if on else today
    if day > today + timedelta(days=1):
        raise RequestError(f"Nobody can have been told on {day}, which is still to be.")
    names = ledger.names()
    known = {names.text(digest): digest for digest in case.facts["running"]["recipients"]}
    for name in recipients:
        if name not in known:
            raise RequestError(f"{name[:80]!r} did not get the model; those who did: {', '.join(known)[:400]}.")
    asked = [known[name] for name in recipients] if recipients else case.facts["running"]["recipients"]
    if new := [digest for digest in asked if digest not in case.told]:
        ledger.record("told", [number], {"recipients": new, "on": str(day)})


def close(ledger: Ledger, number: str, untold: str = "") -> None:
    """Sign the receipt, and end the request; refused before everybody was told, or a reason why not is given."""
    case = ledger.case(number)
    if case.state != "audited" or not case.erased:
        case.require("receipt")
    left = [digest for digest in case.facts["running"]["recipients"] if digest not in case.told]
    if left and not untold:
        raise RequestError(
            f"{len(left)} of {len(case.facts['running']['recipients'])} recipients were not told yet: "
            "say --told NAME, --told-all, or --untold with the reason why not."
        )
    if "receipt" not in case.facts:
        make_receipt(ledger, case, untold)
    ledger.record("closed", [number], {"untold": len(left)})


def readmit(ledger: Ledger, client: str, reason: str) -> Event:
    """Lift a client's tombstone in the ledger; the store has to let it in, too (Federation.readmit)."""
    require_text(reason, "The reason")
    names, standing = ledger.names(), tombstones(ledger.events())
    found = [digest for digest in standing if names.text(digest) == client]
    if not found:
        raise RequestError(f"Nobody called {client[:80]!r} has left: there is nothing to lift.")
    return ledger.record(
        "readmitted",
        (),
        lambda table, _: {"tombstone": found[-1], "reason": table.add(reason, "reason", standing[found[-1]])},
    )


def forget_names(ledger: Ledger, number: str) -> int:
    """Erase the names and texts of a request that has ended; tombstones stay."""
    case = ledger.case(number)
    if case.is_open:
        raise RequestError(f"{number} is {case.state}: names are erased once it has ended.")
    standing, known = tombstones(ledger.events()), ledger.cases()
    gone = [
        digest
        for digest, own in ledger.names().of(number).items()
        if digest not in standing and not any(known[other].is_open for other in own.requests)
    ]
    ledger.erase_names(gone)
    return len(gone)


def _scope(filing: Filing, names: Names, number: str) -> dict[str, Any]:
    """Whom and what it is about, as digests."""
    samples = [
        {
            "client": names.add(name, "client", number),
            "indices": names.add(",".join(map(str, indices)), "samples", number),
            "count": len(indices),
        }
        for name, indices in filing.samples.items()
    ]
    clients = [names.add(name, "client", number) for name in dict.fromkeys(filing.clients)]
    return {"clients": clients, "samples": samples}


def _require_names(filing: Filing) -> None:
    both = [name for name in filing.clients if name in filing.samples]
    if not filing.clients and not any(filing.samples.values()):
        raise RequestError("The request names nothing to forget: give a client or some samples.")
    if both:
        raise RequestError(f"The request names client {both[0][:80]!r} as a whole and some of its samples: choose one.")
    for name in [*filing.clients, *filing.samples]:
        require_text(name, "A client's name")
    for name, indices in filing.samples.items():
        if not indices or min(indices) < 0 or len(set(indices)) != len(indices):
            raise RequestError(f"Samples of client {name[:80]!r} are numbers from 0 on, each once.")


def require_text(text: str, what: str) -> None:
    """Refuse what is no text of bearable length."""
    if not text.strip() or "\x00" in text or len(text) > LONGEST_NAME:
        raise RequestError(f"{what} is missing, or is no text of at most {LONGEST_NAME} characters.")
