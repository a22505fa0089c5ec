"""What ``run.json`` says of a run, and what is written down of an outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.bench.results import utc_now
from expunge.bench.scenario import Scenario
from expunge.errors import DataError
from expunge.federation.keeping.book import list_of
from expunge.federation.training.plan import Schedule
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request

VERSION = 2
"""Of the folder; another one is refused. In version 1 methods had other names."""


@dataclass(frozen=True)
class RunBook:
    """What ``run.json`` says.

    Attributes:
        scenario: data, model and training.
        schedule: what unlearning has to know of the training.
        state: number of the state to forget from.
        kept: what that state keeps beside the model.
        departed: clients that left for good.
        forgotten: for each time that somebody left for good, what was done; no weights.
        erasing: that somebody left for good, and what remembers is not all deleted yet.
        counts: sample counts of the clients that have not left; runs of earlier versions have none.
        pending: the deletion request that is being worked on.
    """

    scenario: Scenario
    schedule: Schedule | None
    state: int = 1
    kept: tuple[str, ...] = ()
    departed: tuple[str, ...] = ()
    forgotten: tuple[Mapping[str, Any], ...] = ()
    erasing: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        described = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        schedule = dataclasses.asdict(self.schedule) if self.schedule else None
        return {"version": VERSION, **described, "scenario": self.scenario.as_dict(), "schedule": schedule}

    @classmethod
    def read(cls, content: Mapping[str, Any], file: Path) -> RunBook:
        """From JSON."""
        try:
            if "version" not in content and content.keys() >= {"scenario", "departed"}:
                raise DataError(
                    f"{file} is of an older expunge, whose methods had other names: train again, in a new folder."
                )
            if content["version"] != VERSION:
                raise DataError(
                    f"{file} is of version {content['version']}, not {VERSION}: use the expunge that made it."
                )
            return cls(
                Scenario.from_dict(content["scenario"]),
                Schedule(**content["schedule"]) if content["schedule"] is not None else None,
                *_checked(content),
                *_requested(content),
            )
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as problem:
            raise DataError(f"{file} cannot be read: it is damaged or not ours.") from problem


def _checked(content: Mapping[str, Any]) -> tuple[int, tuple[str, ...], tuple[str, ...], tuple[Any, ...], bool]:
    """The state's number, what it keeps, who has left, how, and whether that is not over."""
    state, erasing = content["state"], content["erasing"]
    if type(state) is not int or state < 1 or type(erasing) is not bool:
        raise TypeError("these are no entries of a book")
    kept, departed, forgotten = (
        tuple(list_of(kind, content[name])) for name, kind in (("kept", str), ("departed", str), ("forgotten", dict))
    )
    return state, kept, departed, forgotten, erasing


def _requested(content: Mapping[str, Any]) -> tuple[Mapping[str, int], Mapping[str, Any] | None]:
    """Sample counts, and the request that is being worked on."""
    counts, pending = content.get("counts", {}), content.get("pending")
    if not all(type(count) is int and count > 0 for count in counts.values()) or not isinstance(pending, dict | None):
        raise TypeError("these are no entries of a book")
    return counts, pending


def outcome_record(request: Request, outcome: Outcome, before: str) -> dict[str, Any]:
    """What is written down of an outcome, for JSON.

    Args:
        request: what was to be forgotten.
        outcome: what came of it.
        before: digest of the model that it began with.
    """
    return {
        "method": outcome.method,
        "request": {"clients": request.clients, "samples": request.samples},
        "date": utc_now(),
        "before": before,
        "after": outcome.state.model.digest,
        "cost": outcome.cost.as_dict(),
        "succeeded": outcome.succeeded,
        "warnings": outcome.warnings,
        "details": outcome.details,
    }
