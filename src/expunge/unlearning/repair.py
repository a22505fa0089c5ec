"""What follows the filtered step: a correction or a round of recovery, and how dear a step may be that they repair.

A shortened step leaves something of the client, while most of what a whole one costs those who stay can be repaired. So
steps are tried whole first, and judged by what is left of their cost in the end: no more than tau.

A step of first order is trusted near where it begins. After a long one the correction, of first order too, is not
enough: a short round of local training follows instead, and the correction only where that does not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Engine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Trained
from expunge.federation.training.fedavg import aggregate
from expunge.federation.training.plan import Schedule
from expunge.unlearning.correction import corrected
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.preparation import forgotten_memory
from expunge.unlearning.recovery import has_statistics, recovery_round, short_draws, short_round
from expunge.unlearning.request import Parties
from expunge.unlearning.scaling import TRIES, lowest_loss

ROOM = 3.0
"""A step that a correction or a recovery follows may cost those who stay so many times tau at first."""

FAR = 0.1
"""A step longer than this share of the model's own length is a long one."""

FOLLOWING = ("recovery", "short_round", "correction")
"""Where the record says what followed the step."""

RECOVERY_LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How far a recovery round may be taken; the one with the least retained loss is."""


def tries(
    steps: Mapping[str, Tensor], options: HfKcuOptions, *, repaired: bool
) -> list[tuple[str, float, tuple[tuple[float, ...], ...]]]:
    """Which steps are tried one after another: what each may cost those who stay, and in which lengths.

    All but the last one are taken whole or not at all: a shortened step leaves something of the client. What is going
    to be repaired may cost more than tau at first.
    """
    *earlier, last = steps
    if repaired and not earlier:
        earlier = [last]
    room = ROOM if repaired else 1.0
    return [*((name, room * options.tau, TRIES[:1]) for name in earlier), (last, options.tau, TRIES)]


def is_repaired(state: ServerState, curvature: KroneckerCurvature | None, options: HfKcuOptions) -> bool:
    """Whether something follows that may repair what a step costs; what an unfiltered one does is no small error."""
    return options.influence_decay and (options.recovery is not None or is_corrected(state, curvature, options))


def is_corrected(state: ServerState, curvature: KroneckerCurvature | None, options: HfKcuOptions) -> bool:
    """Whether a correction follows, or a short round: they need factors and a schedule."""
    return curvature is not None and state.schedule is not None and options.may_correct


def followed(
    engine: Engine,
    state: ServerState,
    model: Snapshot,
    curvature: KroneckerCurvature | None,
    parties: Parties,
    options: HfKcuOptions,
    losses: Mapping[str, float],
    details: dict[str, Any],
) -> tuple[Snapshot, Memory | None, float]:
    """What follows the step: the others' vectors, a correction or a round of recovery.

    Returns:
        The model, the vectors, and what is left of the rise that the step has cost those who stay.
    """
    memory, risen = forgotten_memory(state, parties), losses.get("retained_rise", 0.0)
    schedule, record = state.schedule, None
    if options.recovery is not None:
        updates = recovery_round(engine, state.model, model, parties.retained, options.recovery.plan(state))
        model, memory, record = _recovered(engine, model, memory, updates, parties, options)
        details["recovery"] = record
    elif curvature is not None and schedule is not None and is_corrected(state, curvature, options):
        if is_far(state.model, model) and not engine.sums_only and not has_statistics(model):
            model, memory, record = _after_a_long_step(engine, state, model, memory, schedule, parties, options)
            details["short_round"] = record
        if record is None or not record["length"]:
            model, record = corrected(engine, state.model, model, curvature, schedule, parties, options, risen)
            details["correction"] = record
    return model, memory, risen + (record["retained_rise"] if record is not None else 0.0)


def is_far(remembers: Snapshot, model: Snapshot) -> bool:
    """Whether the step between the two was a long one.

    Example:
        >>> start = Snapshot(torch.tensor([3.0, 4.0]), {})
        >>> [is_far(start, start.moved(start.parameters + torch.tensor([0.0, step]))) for step in (0.4, 0.6)]
        [False, True]
    """
    step, whole = (torch.linalg.vector_norm(v) for v in (model.parameters - remembers.parameters, remembers.parameters))
    return bool(step > FAR * whole)


def _after_a_long_step(
    engine: Engine,
    state: ServerState,
    model: Snapshot,
    memory: Memory | None,
    schedule: Schedule,
    parties: Parties,
    options: HfKcuOptions,
) -> tuple[Snapshot, Memory | None, dict[str, float]]:
    """A short round, of length 0 where it does not help."""
    draws = short_draws(parties, options.seed)
    updates = short_round(engine, state.model, model, parties.retained, schedule, draws, options.seed)
    assert options.samples != "auto", "hf_kcu decides before it draws"
    left = sum(parties.counts[name] - len(left_out) for name, left_out in parties.retained.items())
    others = max(1, left - sum(draw.size for draw in draws.values()))  # its length is judged on samples not trained on
    fewer = replace(options, samples=min(others, others if options.samples is None else options.samples))
    return _recovered(engine, model, memory, updates, parties, fewer)


def _recovered(
    engine: Engine,
    model: Snapshot,
    memory: Memory | None,
    updates: Mapping[str, Trained],
    parties: Parties,
    options: HfKcuOptions,
) -> tuple[Snapshot, Memory | None, dict[str, float]]:
    """A round of the clients that stay, taken as far as it lowers their loss: the safety belt holds here, too."""
    full = aggregate(model, updates)
    way = model.parameters - full.parameters
    # With the buffers as they are: the round's own ones (batch norm) can raise the loss before any step is taken.
    length, losses = lowest_loss(engine, model, way, RECOVERY_LENGTHS, parties, options)
    record = {"length": length, **losses}
    if length == 0:
        return model, memory, record
    if memory is not None:
        memory.record(
            {name: length * reply.update for name, reply in updates.items()},
            {name: reply.count for name, reply in updates.items()},
        )
    return model.moved(model.parameters - length * way), memory, record
