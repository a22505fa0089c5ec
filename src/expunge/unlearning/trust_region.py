"""Adaptive scaling as a trust region: the longest step that those who stay can bear, and what repairs its cost.

Of several steps the earlier ones, nearer or sharper, are tried whole or not at all: a shortened step leaves something
of the client. What is going to be repaired may cost more than tau at first, if no more than tau is left in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.lengths import Trial, longest_safe
from expunge.unlearning.preparation import require_finite
from expunge.unlearning.registry import Outcome
from expunge.unlearning.repair import Moved, Repair, repaired
from expunge.unlearning.retained import Retained

ROOM = 3.0
"""A step that a repair follows may cost those who stay so many times what is allowed in the end."""

CAP = 4.0
"""What a step is expected to cost is allowed, but no more than so many times tau: whoever lies cannot lift that."""


GENTLE = "gentle"
"""The filter that is the last to be tried."""

GENTLER = (
    "The retained clients could not bear the predicted step, so a gentler one was taken: something of the data may be "
    "left; look at it beside a retrained model."
)


@dataclass(frozen=True)
class Bounds:
    """What a step may cost those who stay, and how it may be shortened.

    Attributes:
        tau: how much the retained loss may rise in the end; None takes the first step whole.
        lengths: the lengths that are tried, longest first.
        expected: what each step is expected to cost, by its own curvature and its filter's name.

    Example:
        >>> bounds = Bounds(0.1, (1.0,), {"sharp": 0.9, "gentle": 0.2})
        >>> [round(bounds.allowed(name), 3) for name in ("sharp", "gentle", "unknown")]
        [0.5, 0.3, 0.1]
    """

    tau: float | None
    lengths: tuple[float, ...]
    expected: Mapping[str, float] = field(default_factory=dict)

    def allowed(self, name: str) -> float:
        """Tau, and what the step is expected to cost as far as the cap."""
        tau = self.tau if self.tau is not None else math.inf
        return tau + min(max(self.expected.get(name, 0.0), 0.0), CAP * tau)


@dataclass(frozen=True, eq=False)
class Following:
    """What follows a step that was taken.

    Attributes:
        remembers: the model that the request found.
        memory: gives a memory of its own without those who leave, where vectors are kept.
        repairs: gives the repairs for where the step ended, by name, in their order.
        may_cost_more: whether the step may cost more than tau at first, since something repairs it.
    """

    remembers: Snapshot
    memory: Callable[[], Memory | None]
    repairs: Callable[[Snapshot], Mapping[str, Repair]]
    may_cost_more: bool


@dataclass(frozen=True, eq=False)
class Taken:
    """The step that was taken.

    Attributes:
        record: which filter, how long (None: no length was safe), the retained loss before and after.
        model: where it led, repairs included; the model that was given where no length was safe.
        memory: the vectors of those who stay, where they are kept and something follows.
        repairs: the record of each repair, by name.
    """

    record: dict[str, float | str | None]
    model: Snapshot
    memory: Memory | None = None
    repairs: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def length(self) -> float | None:
        """The part of the step that was taken."""
        length = self.record["length"]
        return None if length is None else float(length)


def shortened(taken: Taken, tau: float | None) -> tuple[str, ...]:
    """The warning that a step had to be cut short, or a gentler one taken; none where the first was whole."""
    if tau is None or taken.length is None:
        return ()
    if taken.length >= 1:
        return (GENTLER,) if taken.record["filter"] == GENTLE else ()
    return (
        f"Only {taken.length:.0%} of the predicted step was safe for the retained clients (tau {tau:g}): "
        "something of the data may be left; look at it beside a retrained model.",
    )


def unsafe(method: str, state: ServerState, cost: Cost, details: dict[str, Any]) -> Outcome:
    """The outcome where the safety belt held."""
    reason = "No length of the step keeps the retained loss within tau: the model is left as it was."
    return Outcome(method, state, cost, succeeded=False, details=details, warnings=(reason,))


def take(
    stay: Retained,
    model: Snapshot,
    steps: Mapping[str, Tensor],
    bounds: Bounds,
    following: Following | None,
) -> Taken:
    """Take the first of these steps that those who stay can bear.

    Args:
        stay: those who stay.
        model: theta.
        steps: what is subtracted at length 1, by the filter's name; gentler ones come later.
        bounds: what it may cost them, and in which lengths it is tried.
        following: what follows, where this is the last step.
    """
    if bounds.tau is None:
        name, step = next(iter(steps.items()))
        require_finite(step)
        whole = Trial(1.0, stay.statistics(model.moved(model.parameters - step)), {})
        return _followed(stay, _record(name, step, 1.0, {}), whole, following)[0]
    taken = Taken({}, model)
    for name, room, tried in _tries(tuple(steps), bounds.lengths, following is not None and following.may_cost_more):
        require_finite(steps[name])
        allowed = bounds.allowed(name)
        trial, losses = longest_safe(stay.trials(model, steps[name], tried), room * allowed)
        record = _record(name, steps[name], trial.length if trial is not None else None, losses)
        if trial is None:
            taken = Taken(record, model)
            continue
        taken, left = _followed(stay, record, trial, following)
        if left <= allowed:
            break
    return taken


def _tries(
    names: tuple[str, ...], lengths: tuple[float, ...], repaired: bool
) -> list[tuple[str, float, tuple[float, ...]]]:
    """Which steps are tried one after another: how much of what is allowed each may cost at first, in which lengths."""
    *earlier, last = names
    if repaired and not earlier:
        earlier = [last]
    room = ROOM if repaired else 1.0
    return [*((name, room, lengths[:1]) for name in earlier), (last, 1.0, lengths)]


def _record(
    name: str, step: Tensor, length: float | None, losses: Mapping[str, float]
) -> dict[str, float | str | None]:
    return {**losses, "filter": name, "length": length, "norm": float(step.norm())}


def _followed(
    stay: Retained, record: dict[str, float | str | None], trial: Trial, following: Following | None
) -> tuple[Taken, float]:
    """The step with what follows it, and what is left of the rise that it has cost those who stay."""
    risen = trial.losses.get("retained_rise", 0.0)
    if following is None:
        return Taken(record, trial.model), risen
    memory = following.memory()
    begun = Moved(following.remembers, trial.model, memory, risen)
    moved, repairs = repaired(stay, begun, following.repairs(trial.model))
    return Taken(record, moved.model, memory, repairs), moved.risen
