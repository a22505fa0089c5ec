"""Every step of every torch optimiser in this process, told to whoever listens.

Torch goes through its own hooks while it calls them: one that is added or removed meanwhile, by another thread or by
the garbage collector, ends somebody's training with an error. So there is one pair of hooks for good, and who listens
is kept here, in a tuple that is replaced and never changed.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Listener(Protocol):
    """Wants to know of steps."""

    def before_step(self, optimiser: Optimizer) -> None:
        """A step begins."""

    def after_step(self, optimiser: Optimizer) -> None:
        """A step is done."""


_lock = threading.Lock()
_listeners: tuple[weakref.ref[Listener], ...] = ()
_is_hooked = False


def listen(listener: Listener) -> None:
    """Tell it of every step from now on, as long as somebody else holds it."""
    global _listeners, _is_hooked
    with _lock:
        _listeners = (*(own for own in _listeners if own() is not None), weakref.ref(listener))
        if not _is_hooked:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _is_hooked = True


def leave(listener: Listener) -> None:
    """Tell it no more."""
    global _listeners
    with _lock:
        _listeners = tuple(own for own in _listeners if own() not in (None, listener))


def _before(optimiser: Optimizer, arguments: object, named: object) -> None:
    del arguments, named
    for own in _listeners:
        listener = own()
        if listener is not None:
            listener.before_step(optimiser)


def _after(optimiser: Optimizer, arguments: object, named: object) -> None:
    del arguments, named
    for own in _listeners:
        listener = own()
        if listener is not None:
            listener.after_step(optimiser)
