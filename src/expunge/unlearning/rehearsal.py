"""Whether a method would refuse a request, found out without asking anybody.

Methods refuse what they can before their first question (registry.py), so they are run up to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from expunge.federation.engines.client import Client
from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Reply, Task
from expunge.unlearning.registry import Method
from expunge.unlearning.request import Request


def require_possible(method: Method, engine: Engine, state: ServerState, request: Request) -> None:
    """Raise what the method would raise before it asks anybody."""
    try:
        method(_Unasked(engine), state, request)
    except _FirstQuestion:
        return


class _FirstQuestion(Exception):  # noqa: N818  # it is no error: the request is possible
    """Somebody was about to be asked."""


class _Unasked:
    """The same clients, whom nobody can ask anything."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.cost = engine, Cost()

    @property
    def validation(self) -> Client | None:
        return self._engine.validation

    @property
    def sums_only(self) -> bool:
        return self._engine.sums_only

    def clients(self) -> Mapping[str, int]:
        return self._engine.clients()

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:  # noqa: ARG002
        raise _FirstQuestion
