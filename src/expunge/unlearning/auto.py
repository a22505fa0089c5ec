"""The default: retrace by vectors that were kept or by a replay from checkpoints, else the influence step; and why."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.options import StepOptions
from expunge.unlearning.preparation import require_reachable
from expunge.unlearning.pulls import Replay
from expunge.unlearning.registry import AUTO, Method, Outcome, method, register
from expunge.unlearning.request import Parties, Request


@dataclass(frozen=True)
class AutoOptions(StepOptions):
    """The options that both methods have.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: how many retained samples the curvature uses, and how many others the trust region looks at;
            ``auto`` is the method's own choice, None is all.
        tau: how much the retained loss may rise, in the loss's own unit; None takes the whole step.
        lengths: step lengths that are tried, longest first.
        recovery: a round of the clients that stay afterwards, or None.
        missing: what to do when a client that stays cannot be reached: ``refuse`` or ``leave-out``.
        seed: of the samples drawn.
    """


def resolved(
    chosen: Method, state: ServerState, parties: Parties, *, sums_only: bool = False
) -> tuple[Method, tuple[str, ...]]:
    """The method that runs, and why where it is not retrace by recorded vectors; any but ``auto`` is itself."""
    if chosen.name != AUTO:
        return chosen, ()
    remembered = state.memory.clients if state.memory is not None else ()
    never = [name for name in parties.leaving if name not in remembered]
    given = {part.name: getattr(chosen.options, part.name) for part in fields(StepOptions)}
    if state.memory is None:
        reason = "There are no vectors here" if state.lost else "No vectors were kept while training"
    elif parties.partly:
        reason = "Samples whose client stays have no vector of their own"
    elif never:
        reason = f"No vector of {', '.join(never)} was kept"
    else:
        return method("retrace").configured(given), ()
    hindrance = "only sums of replies are seen" if sums_only else _hindrance(state, parties)
    if hindrance is None and state.checkpoints is not None:
        count = len(state.checkpoints.models)
        return method("retrace").configured(given), (
            f"{reason}, so its owners replay a round from each of {count} checkpoints: retrace by replay.",
        )
    warning = (
        f"{reason}, and {hindrance}, so hf-kcu runs: one gradient of the data to forget, which sees little of what the "
        "model fits perfectly, strong backdoors among it."
    )
    return method("hf-kcu").configured(given), (warning,)


def _hindrance(state: ServerState, parties: Parties) -> str | None:
    """Why nothing can be replayed; None where it can."""
    try:
        Replay(state, parties).require_followed()
        if state.checkpoints is None:
            return "no checkpoints are there to replay from"
        require_reachable(parties)
        Replay(state, parties).require_possible()
    except RequestError as problem:
        told = str(problem)
        return told[0].lower() + told[1:].rstrip(".")
    return None


def auto(engine: Engine, state: ServerState, request: Request, options: AutoOptions) -> Outcome:
    """Run the method that fits what was kept; the outcome has that method's name.

    Args:
        engine: reaches the clients.
        state: the trained model, and what was kept while training.
        request: what is to be forgotten.
        options: handed on to the method.
    """
    parties = request.parties(engine.clients(), state.memory.clients if state.memory is not None else ())
    chosen, warnings = resolved(replace(method(AUTO), options=options), state, parties, sums_only=engine.sums_only)
    outcome = chosen(engine, state, request)
    return replace(outcome, warnings=(*warnings, *outcome.warnings))


register(
    Method(
        AUTO,
        auto,
        AutoOptions(),
        "the default: retrace where vectors or checkpoints were kept, else hf-kcu",
        needs="vectors",
    )
)
