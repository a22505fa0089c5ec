"""Mods of a ClientApp that never see what its site answers expunge: local noise, clipping and masks are such mods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getclosurevars, isfunction
from typing import Any

from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod, message_size_mod
from flwr.clientapp.typing import Mod

from expunge.errors import RequestError

BYPASSED = "bypassed-mods"
"""In a greeting: the mods that never see the site's answers, for the server's log."""

_LOOK_ONLY: tuple[Mod, ...] = (arrays_size_mod, message_size_mod)
"""Mods of Flower's that change nothing."""


def bypassed_mods(app: ClientApp | Callable[..., Any]) -> tuple[Mod, ...]:
    """The mods of an app, or around one handler, that may change a message.

    Example:
        >>> def noise(message, context, call_next):
        ...     return call_next(message, context)
        >>> named(bypassed_mods(ClientApp(mods=[message_size_mod, noise])))
        'noise'
    """
    if not isinstance(app, ClientApp):
        return changing(_around(app))
    handlers = [*app._registered_funcs.values(), *([app._call] if app._call is not None else [])]
    return changing([*app._mods, *(mod for handler in handlers for mod in _around(handler))])


def changing(mods: Iterable[Mod]) -> tuple[Mod, ...]:
    """Those that may change a message, each once."""
    found: list[Mod] = []
    for mod in mods:
        if not any(mod is other for other in (*_LOOK_ONLY, *found)):
            found.append(mod)
    return tuple(found)


def named(mods: Iterable[Mod]) -> str:
    """Their names for a sentence."""
    return ", ".join(getattr(mod, "__name__", type(mod).__name__) for mod in mods)


def require_yes(bypassed: tuple[Mod, ...], answers_bypass_mods: bool) -> None:
    """Refuse mods that would be bypassed unless the app's author has said yes to that."""
    if bypassed and not answers_bypass_mods:
        raise RequestError(
            f"What a site answers expunge does not pass the app's mods ({named(bypassed)}), so no noise, clipping or "
            "mask of theirs is in it: take them away, or say yes by unlearnable(app, site, answers_bypass_mods=True)."
        )


def _around(handler: Callable[..., Any]) -> list[Mod]:
    """The mods that Flower has laid around a handler: they are nowhere but in closures (flwr 1.41, ``make_ffn``)."""
    found: list[Mod] = []
    while isfunction(handler) and set(handler.__code__.co_freevars) == {"_mod", "_ffn"}:
        inside = getclosurevars(handler).nonlocals
        found.append(inside["_mod"])
        handler = inside["_ffn"]
    return found
