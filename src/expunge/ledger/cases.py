"""Requests as a state machine: what the log says of each, folded from its events.

    received -> accepted | refused;  accepted -> running -> forgotten -> audited -> closed
    running -> failed;  an audit against it -> retrain-needed;  both may run again

Nothing else is kept of a request: the log is the one truth, and an event that does not follow is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from expunge.errors import DataError, RequestError
from expunge.ledger.log import Event

OPEN = ("received", "accepted", "running", "forgotten", "audited", "failed", "retrain-needed")
"""Requests that somebody still has to do something about."""

ABOUT_LEDGER = ("opened", "readmitted")
"""Events that change no request's state."""

_AFTER: Mapping[str, tuple[str, ...]] = {
    "accepted": ("received",),
    "refused": ("received", "accepted", "failed", "retrain-needed"),
    "extended": OPEN,
    "running": ("accepted", "failed", "retrain-needed", "forgotten", "audited"),
    "forgotten": ("running",),
    "failed": ("running", "forgotten", "audited"),
    "audited": ("forgotten", "audited", "retrain-needed"),
    "overridden": ("forgotten", "audited", "retrain-needed"),
    "adopted": ("audited",),
    "rolled-back": ("audited",),
    "erased": ("audited",),
    "told": ("audited",),
    "receipt": ("audited",),
    "closed": ("audited",),
}
"""In which states an event may come."""


@dataclass(frozen=True)
class Case:
    """One request, as it stands now.

    Attributes:
        number: its name, such as R-0001; receipts and files are called by it.
        state: where it is.
        gate: whether the old model may be destroyed: after an audit that passed, or an override.
        adopted: whether the federation goes on with the new model.
        erased: whether the old one is destroyed.
        facts: the content of the last event of each kind.
        told: recipients that were told, and when.
        events: all of them.
    """

    number: str
    state: str
    gate: bool = False
    adopted: bool = False
    erased: bool = False
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    @property
    def due(self) -> str:
        """The day by which it must be answered."""
        return str(self.facts.get("extended", self.facts["received"])["due"])

    @property
    def run(self) -> str:
        """The hash of the event with which its work began."""
        return next(event.hash for event in reversed(self.events) if event.kind == "running")

    @property
    def is_open(self) -> bool:
        """Whether something is still to be done."""
        return self.state in OPEN

    def require(self, kind: str) -> None:
        """Refuse an event that does not follow."""
        fits = self.state in _AFTER.get(kind, ())
        fits &= kind not in ("running", "audited", "overridden") or not self.adopted
        fits &= kind != "adopted" or (self.gate and not self.adopted)
        fits &= kind not in ("rolled-back", "erased") or (self.adopted and not self.erased)
        fits &= kind not in ("receipt", "told") or self.adopted
        fits &= kind != "receipt" or self.erased
        fits &= kind != "closed" or "receipt" in self.facts
        fits &= kind != "failed" or not self.adopted
        if not fits:
            raise RequestError(f"{self.number} is {self.described}: it cannot be {kind.replace('-', ' ')} now.")

    @property
    def described(self) -> str:
        """The state, with what it waits for."""
        if self.state == "audited" and self.erased:
            return "audited and erased"
        if self.state == "audited" and self.adopted:
            return "audited, its old model kept for a while"
        return self.state

    def after(self, event: Event) -> Case:
        """The request after an event of its own."""
        self.require(event.kind)
        case = dataclasses.replace(
            self, events=(*self.events, event), facts={**self.facts, event.kind: dict(event.content)}
        )
        return dataclasses.replace(case, **_changes(case, event))


def _changes(case: Case, event: Event) -> dict[str, Any]:
    """What an event changes, beside being the last."""
    kind, content = event.kind, event.content
    if kind == "running":
        fresh = ("forgotten", "audited", "overridden", "adopted", "failed", "rolled-back")
        facts = {name: fact for name, fact in case.facts.items() if name not in fresh}
        return {"state": "running", "gate": False, "facts": facts}
    if kind == "audited":
        passed = content["passed"]  # None where nothing can be said
        return {"state": "retrain-needed" if passed is False else "audited", "gate": passed is True}
    if kind == "overridden":
        return {"state": "audited", "gate": True}
    if kind == "rolled-back":
        return {"state": "failed", "gate": False, "adopted": False}
    if kind in ("adopted", "erased"):
        return {kind: True}
    if kind == "told":
        return {"told": {**case.told, **dict.fromkeys(content["recipients"], content["on"])}}
    return {"state": kind} if kind not in ("extended", "receipt") else {}


def cases(events: Iterable[Event]) -> dict[str, Case]:
    """Every request, by its number.

    Example:
        >>> filed = Event(1, "2026-11-16T12:00:00Z", "received", ("R-0001",), "", {"due": "2026-12-16"})
        >>> cases([filed])["R-0001"].state
        'received'
    """
    found: dict[str, Case] = {}
    for event in events:
        if event.kind in ABOUT_LEDGER:
            continue
        try:
            for number in event.requests:
                if event.kind == "received":
                    new = Case(number, "received", facts={"received": dict(event.content)}, events=(event,))
                    if found.setdefault(number, new) is not new:
                        raise RequestError(f"{number} is there twice.")
                else:
                    found[number] = found[number].after(event)
        except (RequestError, LookupError) as problem:
            raise DataError(f"Event {event.number} does not follow: {problem}") from problem
    return found


def tombstones(events: Sequence[Event]) -> dict[str, str]:
    """Departed clients by their salted digest, each with the request that it left by.

    Example:
        >>> tombstones([])
        {}
    """
    found: dict[str, str] = {}
    for event in events:
        if event.kind == "adopted":
            found.update(dict.fromkeys(event.content["tombstones"], event.requests[0]))
        elif event.kind == "rolled-back":
            found = {digest: number for digest, number in found.items() if number not in event.requests}
        elif event.kind == "readmitted":
            found.pop(event.content["tombstone"], None)
    return found
