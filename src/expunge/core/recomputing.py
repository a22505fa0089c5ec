"""Models that save memory by running parts of themselves again for a gradient (torch.utils.checkpoint).

Where a model is run with other weights than its own, these are in their place only while it is called. What runs again
later would have its own ones, unsaid: products of curvature were off by up to their whole length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch.utils import checkpoint

_torch: Any = checkpoint
_lock = Lock()
_kept: list[tuple[Any, Any]] = []
"""What torch has for it, once for each run that is inside."""


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside it, torch.utils.checkpoint calls what it is given, and nothing runs again.

    Whoever trains in another thread meanwhile saves no memory, and has the same gradients.
    """
    with _lock:
        _kept.append(
            _kept[-1] if _kept else (_torch.CheckpointFunction, _torch._checkpoint_without_reentrant_generator)
        )
        _torch.CheckpointFunction, _torch._checkpoint_without_reentrant_generator = _Called, _nothing_around
    try:
        yield
    finally:
        with _lock:
            own = _kept.pop()
            if not _kept:
                _torch.CheckpointFunction, _torch._checkpoint_without_reentrant_generator = own


class _Called:
    """In the place of torch's function that runs again."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *given: Any) -> Any:
        """What the function gives."""
        return function(*given)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    """What torch does around the call, left out."""
    yield
