"""Do nothing: the control that every table needs. A bar that it passes proves nothing.

The model stays as it was trained; only what the server keeps of the leavers is deleted. It fails by construction,
except where the data to forget left no trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.estimate import Estimate, Size
from expunge.unlearning.preparation import forgotten_memory, memory_warnings, prepared
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Request


@dataclass(frozen=True)
class DoNothingOptions:
    """There is nothing to choose."""


def do_nothing(engine: Engine, state: ServerState, request: Request, options: DoNothingOptions) -> Outcome:
    """The model as it was; the memory forgets the leavers; nobody is asked, so the cost is zero."""
    del options
    parties = prepared(engine, state, request, leave_out=True)
    memory = forgotten_memory(state, parties)
    after = state.moved(state.model, memory)
    return Outcome("do-nothing", after, Cost(), warnings=memory_warnings(parties, memory))


def _estimate(options: DoNothingOptions, size: Size) -> Estimate:
    """Nothing."""
    del options, size
    return Estimate(0, 0, 0, 0.0)


register(
    Method(
        "do-nothing",
        do_nothing,
        DoNothingOptions(),
        "a control: the trained model, unchanged",
        forgets=False,
        estimate=_estimate,
    )
)
