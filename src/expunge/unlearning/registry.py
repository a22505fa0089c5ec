"""Methods by name. A method is one file in this folder; importing it registers it.

    method(engine, state, request, options) -> Outcome

with the same meaning for all: the inputs are left untouched, the cost is accounted, a bad request is refused before
any work.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.request import Request

RECOVERY = "+recovery"
"""Stands behind a method's name in results where a recovery round ran."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a method did.

    Attributes:
        method: its name in results.
        state: the server's state afterwards; where ``succeeded`` is False it is the state that was given.
        cost: seconds, sample-gradients, rounds and bytes.
        succeeded: False where the safety belt held the step back.
        details: what a sceptic wants to see (residuals, damping, step length), ready for JSON.
        warnings: sentences for the person who asked.
    """

    method: str
    state: ServerState
    cost: Cost
    succeeded: bool = True
    details: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def memory(self) -> Memory | None:
        """The vectors of the clients that stay, for the next request."""
        return self.state.memory

    def write_to(self, model: nn.Module) -> None:
        """Copy the new weights into a model, in place."""
        self.state.model.write_to(model)


Function = Callable[[Engine, ServerState, Request, Any], Outcome]

Need = Literal["vectors", "updates", "shards"]
"""What training has to keep for a method: one vector per client, every n-th round's updates, or sharded models."""


@dataclass(frozen=True)
class Method:
    """A registered method: its function and the options that its name stands for.

    ``forgets`` is False where the model that it makes is known to remember: what remembers too is then not deleted.
    """

    name: str
    function: Function
    options: Any
    summary: str
    needs: Need | None = None
    forgets: bool = True

    def configured(self, **changes: Any) -> Method:
        """The same method with some options changed; an option that it does not have is refused."""
        known = vars(self.options)
        for name in changes:
            if name not in known:
                raise RequestError(
                    f"The method {self.name!r} has no option {name!r}; it has {', '.join(sorted(known))}."
                )
        changed = getattr(self.options, "changed", None)  # where one option decides another
        return replace(self, options=changed(**changes) if changed else replace(self.options, **changes))

    def __call__(self, engine: Engine, state: ServerState, request: Request) -> Outcome:
        """Run it with its own options."""
        recovers = getattr(self.options, "recovery", None) is not None and not self.name.endswith(RECOVERY)
        outcome = self.function(engine, state, request, self.options)
        name, warnings = self.name + (RECOVERY if recovers else ""), (*state.lost, *outcome.warnings)
        return replace(outcome, method=name, warnings=warnings)


_METHODS: dict[str, Method] = {}


def register(
    name: str, function: Function, options: Any, summary: str, needs: Need | None = None, *, forgets: bool = True
) -> None:
    """Make a method known by its name in results, with what it needs training to keep, and whether it forgets."""
    if name in _METHODS:
        raise ValueError(f"A method {name!r} is registered already.")
    _METHODS[name] = Method(name, function, options, summary, needs, forgets)


def methods() -> dict[str, Method]:
    """All registered methods.

    Example:
        >>> sorted(methods())[0]
        'do-nothing'
    """
    package = importlib.import_module("expunge.unlearning")
    for module in pkgutil.iter_modules(package.__path__, "expunge.unlearning."):
        importlib.import_module(module.name)
    return dict(_METHODS)


def method(name: str) -> Method:
    """The method of that name; an unknown one is refused with the known ones listed."""
    known = methods()
    if name not in known:
        raise RequestError(f"There is no method {name!r}; there are {', '.join(sorted(known))}.")
    return known[name]
