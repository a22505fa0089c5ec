"""From what people keep their samples in to a batch: rows of pairs, of tuples, of dicts; columns; loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from expunge.core.batch import Batch
from expunge.errors import DataError

Collate = Callable[[list[Any]], Any]
"""Makes a batch of rows: (inputs, targets), a dict with the targets in it, or a ``Batch``."""

TARGETS = ("labels", "label", "targets", "target")
"""Under one of these names a dict has its targets."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples that are looked up one by one.

    Attributes:
        source: a length, and a row by its index.
        collate: makes a batch of rows; None is torch's own, of rows whose numbers are tensors.
        warnings: what the person who asked should know.
    """

    source: Any
    collate: Collate | None = None
    warnings: tuple[str, ...] = ()


def opened(source: Any, who: str, collate: Collate | None) -> Batch | Rows:
    """The samples in one of two forms: all in tensors, or rows.

    Args:
        source: what the user gave.
        who: whose it is, to begin a sentence with, such as "The data of client 'ada'".
        collate: as the user gave it.

    Example:
        >>> opened((np.zeros((3, 2)), np.zeros(3)), "The data", None).size
        3
        >>> opened([{"x": 1.0, "label": 0}], "The data", None).collate is None
        True
    """
    if isinstance(source, Batch):
        return source
    if isinstance(source, DataLoader):
        return _of_loader(source, who, collate)
    if isinstance(source, IterableDataset):
        raise DataError(f"{who} comes as a stream, and samples are looked up by their number: give list(dataset).")
    if isinstance(source, tuple) and len(source) == 2 and any(isinstance(part, DataLoader) for part in source):
        raise DataError(f"{who} is two DataLoaders: give the one that the client trains with.")
    columns = isinstance(source, Mapping) or (isinstance(source, tuple) and len(source) == 2)
    if columns and not isinstance(source, Mapping) and not _has_rows(source[1]):
        columns = False
    if columns:
        return _of_columns(source, who)
    if isinstance(source, tuple | str | Mapping) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DataError(
            f"{who} must be a pair of tensors, a map-style dataset or a DataLoader, not {type(source).__name__}."
        )
    return Rows(source, collate)


def collated(rows: Sequence[Any], who: str, collate: Collate | None) -> Batch:
    """A batch of these rows.

    Example:
        >>> batch = collated([{"a": [1, 2], "label": 0}, {"a": [3, 4], "label": 1}], "The data", None)
        >>> batch.named, batch.targets
        ({'a': tensor([[1, 2],
                [3, 4]])}, tensor([0, 1]))
    """
    try:
        found = collate(list(rows)) if collate is not None else default_collate([_as_tensors(row, who) for row in rows])
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise DataError(
            f"{who} has samples that do not go into one batch ({reason}): give collate=, a function of a list of "
            "samples that pads or stacks them and returns (inputs, targets)."
        ) from problem
    return as_batch(found, len(rows), who)


def as_batch(found: Any, size: int, who: str) -> Batch:
    """What a collate function returned, as a batch."""
    if isinstance(found, Batch):
        return found
    if isinstance(found, Mapping):
        return _of_dict(found, size, who)
    if isinstance(found, list | tuple) and len(found) == 2:
        inputs, targets = found
        if isinstance(inputs, Mapping):
            return Batch((), targets, dict(inputs), size)
        return Batch(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), targets, size=size)
    raise DataError(
        f"{who} must give (input, target) pairs, of several inputs ((first, second), target), or dicts with "
        f"'labels': give collate=, which returns (inputs, targets) for a list of samples."
    )


def _of_dict(found: Mapping[str, Any], size: int, who: str) -> Batch:
    name = next((name for name in TARGETS if name in found), None)
    if name is None:
        raise DataError(
            f"{who} has {', '.join(map(repr, found))} and none of them is {', '.join(map(repr, TARGETS))}: "
            "rename the target, or give collate=, which returns (inputs, targets) for a list of samples."
        )
    return Batch((), found[name], {key: value for key, value in found.items() if key != name}, size)


def _of_columns(source: Any, who: str) -> Batch:
    try:
        tree = _arrays(source)
    except TypeError as problem:
        raise DataError(f"{who} has arrays that are no numbers: {problem}") from problem
    batch = as_batch(tree, 0, who)
    lengths = {len(tensor) for tensor in batch.tensors() if tensor.dim()}
    inputs = [tensor for tensor in Batch(batch.inputs, None, batch.named).tensors() if tensor.dim()]
    if not inputs or not isinstance(batch.targets, Tensor):
        raise DataError(
            f"{who} must be a pair of tensors, a map-style dataset or a DataLoader, not {type(source).__name__} "
            "without tensors in it."
        )
    if len(lengths) != 1:
        odd = next((len(tensor) for tensor in inputs if len(tensor) != len(batch.targets)), len(inputs[0]))
        raise DataError(f"{who} has {odd} inputs but {len(batch.targets)} targets.")
    return Batch(batch.inputs, batch.targets, batch.named, lengths.pop())


def _of_loader(loader: DataLoader[Any], who: str, collate: Collate | None) -> Rows:
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(f"{who} comes as a stream, and samples are looked up by their number: give list(dataset).")
    own = collate
    if own is None and loader.batch_size is not None and loader.collate_fn is not default_collate:
        own = loader.collate_fn
    drawn = loader.sampler
    whole = isinstance(drawn, SequentialSampler) or (
        isinstance(drawn, RandomSampler) and not drawn.replacement and drawn.num_samples == len(drawn.data_source)
    )
    usual = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    told = () if whole and usual else (f"{who} is a DataLoader that draws samples: all of its dataset are taken.",)
    return Rows(loader.dataset, own, told)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _arrays(tree: Any) -> Any:
    """Numpy's arrays as tensors."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, Mapping):
        return {name: _arrays(value) for name, value in tree.items()}
    return tuple(_arrays(value) for value in tree) if isinstance(tree, list | tuple) else tree


def _as_tensors(row: Any, who: str) -> Any:
    """A row whose numbers, lists of numbers and arrays are tensors: torch's collate would turn lists around."""
    if isinstance(row, Tensor):
        return row
    if isinstance(row, Number | np.ndarray | np.generic) or _is_numbers(row):
        return torch.as_tensor(row)
    if isinstance(row, Mapping):
        for name, value in row.items():
            if isinstance(value, str | bytes) or value is None:
                raise DataError(
                    f"{who} has {name!r}, which is no number: leave it out, as in "
                    f"dataset.remove_columns([{name!r}]), or give collate=."
                )
        return {name: _as_tensors(value, who) for name, value in row.items()}
    return tuple(_as_tensors(value, who) for value in row) if isinstance(row, list | tuple) else row


def _is_numbers(value: Any) -> bool:
    """Whether it is a list of numbers, or of such lists; a tuple is several things."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Number) or _is_numbers(v) for v in value)
