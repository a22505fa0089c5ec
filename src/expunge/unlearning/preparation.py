"""What all methods do alike before and after their work: refuse early, and say what is left of the forgotten data."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.errors import NumericalError, RequestError, listed
from expunge.federation.engines.engine import Engine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import has_statistics


def prepared(engine: Engine, state: ServerState, request: Request, *, leave_out: bool | None = None) -> Parties:
    """Who is touched; a broken model, a bad request and a client that stays but is away are refused.

    Args:
        engine: reaches the clients.
        state: the trained model, and whom the server remembers.
        request: what is to be forgotten.
        leave_out: whether to go on without clients that stay but are away, where the method offers the choice.
    """
    state.model.require_finite()
    if state.memory is not None:
        state.memory.require_model(state.model)
    remembered = state.memory.clients if state.memory is not None else ()
    parties = request.parties(engine.clients(), remembered)
    if (missing := away(state, parties)) and not leave_out:
        raise RequestError(
            f"Client {missing[0]!r} stays but cannot be reached, and leaving it out would solve another problem: "
            + ("wait for it." if leave_out is None else "wait for it, or choose missing='leave-out'.")
        )
    return parties


def away(state: ServerState, parties: Parties) -> list[str]:
    """Clients that the server remembers and that stay, but cannot be reached."""
    remembered = state.memory.clients if state.memory is not None else ()
    return [name for name in remembered if name not in parties.leaving and name not in parties.counts]


def away_warnings(state: ServerState, parties: Parties) -> tuple[str, ...]:
    """Who was left out by the choice ``missing="leave-out"``."""
    missing = away(state, parties)
    return (f"Left out, since they cannot be reached: {listed(missing)}.",) if missing else ()


def require_reachable(parties: Parties) -> None:
    """A method that asks the owners of the data to forget needs them once."""
    gone = [name for name in parties.owners if name not in parties.counts]
    if gone:
        raise RequestError(
            f"Client {gone[0]!r} cannot be reached, and this method needs its data once: "
            "use retrace, which does not, where vectors were kept while training."
        )


def require_single_replies(engine: Engine, state: ServerState, *, asks_for_them: bool) -> None:
    """Refuse, where only masked sums are seen, what needs a client's own reply: local training, batch norm."""
    if engine.sums_only and (asks_for_them or has_statistics(state.model)):
        raise RequestError(
            "Where only sums of the clients' replies are seen there is no recovery, no printed update and no model "
            "with batch norm: their replies are not sums."
        )


def require_finite(step: Tensor) -> None:
    """A step with a NaN or an infinite value is not taken."""
    if not bool(torch.isfinite(step).all()):
        raise NumericalError("The step has a NaN or infinite value: the model is left as it was.")


def forgotten_memory(state: ServerState, parties: Parties) -> Memory | None:
    """A memory of its own without those who leave, where vectors were kept; it belongs to no model yet."""
    return state.memory.without(parties.leaving) if state.memory is not None else None


def memory_warnings(parties: Parties, memory: Memory | None) -> tuple[str, ...]:
    """What the vectors of clients that stay still hold of their forgotten samples."""
    if not parties.partly or memory is None:
        return ()
    names = ", ".join(parties.partly)
    return (f"The vectors kept of {names} still hold the forgotten samples' pull: it cannot be told apart.",)
