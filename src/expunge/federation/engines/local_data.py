"""A client's own samples: tensors, any map-style dataset or a loader of one, read by index, checked before use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from expunge.core.batch import Batch
from expunge.errors import DataError, RequestError
from expunge.federation.engines.collating import Collate, Rows, collated, opened

__all__ = ["Collate", "Data", "LocalData", "MapStyleDataset"]


class MapStyleDataset(Protocol):
    """What ``torch.utils.data.Dataset`` promises: a length, and rows by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = tuple[Any, Any] | Mapping[str, Any] | MapStyleDataset | DataLoader[Any] | Batch
"""Samples with their targets, in any of the ways that ``LocalData`` takes."""


class LocalData:
    """One client's samples.

    Args:
        source: a pair of tensors or arrays (inputs, targets), where inputs may be several in a tuple or a dict; a dict
            of tensors with ``labels`` in it; a map-style dataset of (input, target), ((input, input), target) or dicts;
            a list of such; a DataLoader, whose dataset and collate function are used, not its order.
        name: the client's name, for error messages.
        collate: makes a batch of rows, for instance by padding; torch's own where it is not given.

    Example:
        >>> data = LocalData((torch.zeros(3, 2), torch.tensor([0, 1, 1])), "ada")
        >>> len(data), data.take([2]).targets
        (3, tensor([1]))
    """

    def __init__(self, source: Data, name: str, collate: Collate | None = None) -> None:
        self.name = name
        self._samples = opened(source, self._who, collate)
        self._available: tuple[tuple[int, ...], Tensor] | None = None  # as last asked for
        if isinstance(self._samples, Batch):
            self._require_finite(self._samples)
        if len(self) == 0:
            raise DataError(f"Client {name!r} has no samples: leave it out of the federation.")

    def __len__(self) -> int:
        return len(self._samples) if isinstance(self._samples, Batch) else len(self._samples.source)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the person who asked should know of the data."""
        return self._samples.warnings if isinstance(self._samples, Rows) else ()

    @property
    def alike(self) -> bool:
        """Whether samples of several batches may be looked up together: none is padded to its batch."""
        return isinstance(self._samples, Batch) or self._samples.collate is None

    @property
    def whole(self) -> Batch | None:
        """All samples, where they are in tensors."""
        return self._samples if isinstance(self._samples, Batch) else None

    def take(self, indices: Sequence[int] | Tensor) -> Batch:
        """Some samples as a batch."""
        if isinstance(self._samples, Batch):
            return self._samples.take(torch.as_tensor(indices))
        rows = [self._row(int(index)) for index in indices]
        batch = collated(rows, self._who, self._samples.collate)
        if len(batch) != len(rows):
            raise DataError(f"{self._who} has a collate function that makes {len(batch)} samples of {len(rows)}.")
        self._require_finite(batch)
        return batch

    def first(self, count: int) -> LocalData:
        """Its first samples alone.

        Example:
            >>> len(LocalData((torch.zeros(3, 2), torch.tensor([0, 1, 1])), "ada").first(2))
            2
        """
        if not 0 < count <= len(self):
            raise DataError(f"Client {self.name!r} has {len(self)} samples where its first {count} are asked for.")
        if isinstance(self._samples, Batch):
            return LocalData(self._samples.split([count])[0], self.name)
        return LocalData(Subset(self._samples.source, range(count)), self.name, self._samples.collate)

    def available(self, exclude: Sequence[int] = ()) -> Tensor:
        """Indices of all samples but the excluded ones, where the samples are: no transfer for every batch."""
        asked = tuple(exclude)
        if self._available is None or self._available[0] != asked:
            keep = torch.ones(len(self), dtype=torch.bool)
            keep[self.checked(asked)] = False
            found = keep.nonzero().squeeze(1)
            found = found.to(next(self._samples.tensors()).device) if isinstance(self._samples, Batch) else found
            self._available = (asked, found)
        return self._available[1]

    def checked(self, indices: Sequence[int]) -> Tensor:
        """The indices as a tensor, refused where one is not this client's."""
        chosen = torch.as_tensor(tuple(indices), dtype=torch.int64)
        if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= len(self)):
            raise RequestError(f"Client {self.name!r} has samples 0 to {len(self) - 1} only: check the indices.")
        return chosen

    def _row(self, index: int) -> Any:
        """One sample of a dataset, whose code is the user's own."""
        assert isinstance(self._samples, Rows)
        try:
            return self._samples.source[index]
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            raise DataError(
                f"{self._who} does not give its sample {index} ({reason}): look at its dataset."
            ) from problem

    @property
    def _who(self) -> str:
        return f"The data of client {self.name!r}"

    def _require_finite(self, batch: Batch) -> None:
        """No NaN, and nothing infinite in a plain pair: a mask may be minus infinity."""
        plain = batch.pair is not None
        for tensor in batch.tensors():
            if not bool((torch.isfinite(tensor) if plain else ~torch.isnan(tensor)).all()):
                raise DataError(f"{self._who} has a NaN or infinite value: clean it first.")
