"""Methods by name. A method is one file in this folder; importing it registers it.

    method(engine, state, request, options) -> Outcome

with the same meaning for all: the inputs are left untouched, the cost is accounted, a bad request is refused before
any work.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import nn

from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.estimate import Estimate, Size
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.request import Request

RECOVERY = "+recovery"
"""Stands behind a method's name in results where a recovery round ran."""

AUTO = "auto"
"""The name under which the method is chosen by what was kept while training (auto.py)."""


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
    """A registered method.

    Attributes:
        name: in results.
        function: what it does.
        options: those that its name stands for.
        summary: one line for people.
        needs: what training has to keep for it.
        asks_owners: whether those who hold the data to forget are asked, so must be there.
        forgets: False where the model that it makes is known to remember: what remembers too is then not deleted.
        estimate: tells from the options and the federation's size what it will cost at most, where it can.
    """

    name: str
    function: Function
    options: Any
    summary: str
    needs: Need | None = None
    asks_owners: bool = False
    forgets: bool = True
    estimate: Callable[[Any, Size], Estimate] | None = None

    def configured(self, changes: Mapping[str, Any]) -> Method:
        """The same method with some options changed; an option that it does not have is refused.

        Plain values are taken for what they stand for: ``recovery=True`` or a mapping for ``Recovery(...)``, False for
        None, a list for a tuple.
        """
        known = {part.name for part in fields(self.options)}
        for name in changes:
            if name not in known:
                raise RequestError(self._unknown(name, known))
        return replace(self, options=replace(self.options, **{name: _meant(name, changes[name]) for name in changes}))

    def __call__(self, engine: Engine, state: ServerState, request: Request) -> Outcome:
        """Run it with its own options; results carry its name, where it did not choose another method."""
        outcome = self.function(engine, state, request, self.options)
        if self.name == AUTO:  # the chosen method has put its name and its warnings there
            return outcome
        return replace(outcome, method=self.label, warnings=(*state.lost, *outcome.warnings))

    @property
    def label(self) -> str:
        """The name in results: with its recovery, where its options have one."""
        recovers = getattr(self.options, "recovery", None) is not None and not self.name.endswith(RECOVERY)
        return self.name + (RECOVERY if recovers else "")

    def _unknown(self, name: str, known: set[str]) -> str:
        others = sorted(
            other for other, own in methods().items() if name in {part.name for part in fields(own.options)}
        )
        having = f"; methods that have it: {', '.join(others)}" if others else ""
        return f"The method {self.name!r} has no option {name!r}; it has {', '.join(sorted(known)) or 'none'}{having}."


_METHODS: dict[str, Method] = {}


def register(method: Method, *, recovery: bool = False) -> None:
    """Make a method known by its name in results; with ``recovery`` also followed by a recovery round."""
    variants = [method]
    if recovery:
        options, summary = replace(method.options, recovery=Recovery()), f"{method.summary}; then a recovery round"
        variants.append(replace(method, name=method.name + RECOVERY, options=options, summary=summary))
    for own in variants:
        if own.name in _METHODS:
            raise ValueError(f"A method {own.name!r} is registered already.")
        _METHODS[own.name] = own


def methods() -> dict[str, Method]:
    """All registered methods.

    Example:
        >>> sorted(methods())[0]
        'auto'
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


def _meant(name: str, value: Any) -> Any:
    """What a plain value of an option stands for."""
    if name == "recovery":
        if isinstance(value, bool):
            return Recovery() if value else None
        if isinstance(value, Mapping):
            unknown = set(value) - {part.name for part in fields(Recovery)}
            if unknown:
                raise RequestError(f"A recovery round has no option {sorted(unknown)[0]!r}.")
            return Recovery(**{key: _meant(key, item) for key, item in value.items()})
        if not isinstance(value, Recovery | None):
            raise RequestError(f"The option recovery takes True, False or Recovery(...), not {value!r}.")
    return tuple(value) if isinstance(value, list) else value
