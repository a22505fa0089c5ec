"""Numbers that belong to a loss, such as class weights: written down once, and tensors wherever they are needed."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def frozen(values: Any) -> Any:
    """Numbers as tuples, which compare and do not change; None stays None.

    Example:
        >>> frozen(torch.tensor([[1.0], [2.0]]))
        ((1.0,), (2.0,))
    """
    if isinstance(values, Tensor):
        values = values.tolist()
    return tuple(frozen(value) for value in values) if isinstance(values, list | tuple) else values


def constant(values: Any, like: Tensor) -> Tensor | None:
    """The numbers as a tensor of the type of another one, on its device.

    Example:
        >>> constant((1.0, 2.0), torch.zeros(1, dtype=torch.float64))
        tensor([1., 2.], dtype=torch.float64)
    """
    if values is None or not like.is_cuda:  # one made inside a transform of torch.func must not outlive it
        return None if values is None else torch.tensor(values, dtype=like.dtype, device=like.device)
    return _kept(values, like.dtype, like.device)


@lru_cache(maxsize=64)  # a step that is recorded as a CUDA graph must not copy anything from the host
def _kept(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def brief(own: Any) -> str:
    """What a dataclass says of itself: its first value, and the others that are not as by default.

    Example:
        >>> from expunge.core.cross_entropy import CrossEntropy
        >>> CrossEntropy(label_smoothing=0.1)
        CrossEntropy(l2=0.0, label_smoothing=0.1)
    """
    first, *rest = fields(own)
    told = [first, *(part for part in rest if getattr(own, part.name) != part.default)]
    return f"{type(own).__name__}({', '.join(f'{part.name}={getattr(own, part.name)!r}' for part in told)})"
