"""What is given with a round: taken where it is plain what is meant, else refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expunge.core.vectors import Layout
from expunge.errors import RequestError

Array = Tensor | np.ndarray[Any, Any]
"""Numbers, as torch or numpy has them."""

Update = Array | Mapping[str, Array]
"""What a client sent minus what it got: a flat vector, or named tensors."""


def number(given: object, what: str) -> float:
    """A number, also one in a tensor; not a text.

    Example:
        >>> number(torch.tensor([2.0]), "weight")
        2.0
        >>> number("0.1", "learning rate of client 'ada'")
        Traceback (most recent call last):
        expunge.errors.RequestError: The learning rate of client 'ada' must be a number, not '0.1'.
    """
    try:
        if not isinstance(given, str | bytes):
            return float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # the last one from tensors of several numbers
        pass
    raise RequestError(f"The {what} must be a number, not {_short(given)}.")


def by_client(given: object, what: str) -> dict[str, Any]:
    """What is given for each client, under its name.

    Example:
        >>> by_client([3, 4], "Weights")
        Traceback (most recent call last):
        expunge.errors.RequestError: Weights are given by client, as {'ada': ..., 'bob': ...}, not as [3, 4].
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"{what} are given by client, as {{'ada': ..., 'bob': ...}}, not as {_short(given)}.")
    return {named(name): value for name, value in given.items()}


def named(name: object) -> str:
    """A client's name, which is kept as text."""
    if not isinstance(name, str):
        raise RequestError(f"Clients are named by texts: write str({name!r}) for {name!r}, here and in every request.")
    return name


def several(names: object) -> tuple[str, ...]:
    """Clients' names; one alone is no list of letters.

    Example:
        >>> several("ada"), several(["ada", "bob"])
        (('ada',), ('ada', 'bob'))
    """
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, Iterable):
        raise RequestError(f"Clients are named by a text, or by several in a list, not by {_short(names)}.")
    return tuple(named(name) for name in names)


def flat(name: str, update: object, layout: Layout | None) -> Tensor:
    """A client's update as one vector, in single precision at least.

    Args:
        name: the client's.
        update: a vector, or tensors by parameter; numpy's arrays and sparse tensors will do.
        layout: of the model, if the memory was made with it.
    """
    if isinstance(update, Mapping):
        if layout is None:
            raise RequestError("To record named tensors, make the memory with its model: Memory(model).")
        tensors = {key: _tensor(own) for key, own in update.items() if isinstance(key, str)}
        update = layout.flatten({key: own for key, own in tensors.items() if own is not None})
    vector = _tensor(update)
    if vector is None or vector.dim() != 1 or not vector.is_floating_point() or vector.is_meta:
        raise RequestError(
            f"An update is a flat vector or a mapping of parameter names to tensors, what was sent minus what was "
            f"received; that of client {name!r} is {_short(update)}."
        )
    return vector.detach().to(torch.promote_types(vector.dtype, torch.float32))


def shares(weights: object, names: Iterable[str]) -> dict[str, float]:
    """Each participant's part of all weights."""
    given = {name: number(own, f"weight of client {name!r}") for name, own in by_client(weights, "Weights").items()}
    names, total = list(names), sum(given.values())
    if set(names) != set(given) or not (0 < total < math.inf) or not all(own >= 0 for own in given.values()):
        raise RequestError("Each update needs a weight of at least 0, not all zero, under the same client's name.")
    return {name: given[name] / total for name in names}


def _tensor(given: object) -> Tensor | None:
    """As a dense tensor; None where it is none."""
    if isinstance(given, np.ndarray) and given.dtype.kind in "fiub":
        return torch.from_numpy(np.ascontiguousarray(given))
    if not isinstance(given, Tensor):
        return None
    return given if given.layout == torch.strided else given.to_dense()


def _short(given: object) -> str:
    """For a sentence."""
    text = repr(given)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(given).__name__}"
