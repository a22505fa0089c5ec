"""A client's own samples: tensors or any map-style dataset, read by index, checked before use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from expunge.errors import DataError, RequestError


class MapStyleDataset(Protocol):
    """What ``torch.utils.data.Dataset`` promises: a length, and (input, target) pairs by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LocalData:
    """One client's samples.

    Args:
        source: a pair of tensors (inputs, targets), or a map-style dataset of (input, target) pairs.
        name: the client's name, for error messages.

    Example:
        >>> data = LocalData((torch.zeros(3, 2), torch.tensor([0, 1, 1])), "ada")
        >>> len(data), data.take([2])[1]
        (3, tensor([1]))
    """

    def __init__(self, source: tuple[Tensor, Tensor] | MapStyleDataset, name: str) -> None:
        self.name = name
        self._tensors: tuple[Tensor, Tensor] | None = None
        if isinstance(source, tuple) and len(source) == 2 and all(isinstance(part, Tensor) for part in source):
            if len(source[0]) != len(source[1]):
                raise DataError(f"Client {name!r} has {len(source[0])} inputs but {len(source[1])} targets.")
            self._require_finite(*source)
            self._tensors = source
        elif not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(source, tuple | str):
            raise DataError(
                f"The data of client {name!r} must be a pair of tensors or a map-style dataset, "
                f"not {type(source).__name__}."
            )
        self._source = source
        if len(self) == 0:
            raise DataError(f"Client {name!r} has no samples: leave it out of the federation.")

    def __len__(self) -> int:
        return len(self._tensors[0]) if self._tensors else len(self._source)

    def take(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples, stacked."""
        if self._tensors:
            chosen = torch.as_tensor(indices, device=self._tensors[0].device)
            return self._tensors[0][chosen], self._tensors[1][chosen]
        pairs = [self._pair(int(i)) for i in indices]
        inputs = torch.stack([torch.as_tensor(pair[0]) for pair in pairs])
        targets = torch.stack([torch.as_tensor(pair[1]) for pair in pairs])
        self._require_finite(inputs, targets)
        return inputs, targets

    def first(self, count: int) -> LocalData:
        """Its first samples alone.

        Example:
            >>> len(LocalData((torch.zeros(3, 2), torch.tensor([0, 1, 1])), "ada").first(2))
            2
        """
        if not 0 < count <= len(self):
            raise DataError(f"Client {self.name!r} has {len(self)} samples where its first {count} are asked for.")
        if self._tensors:
            return LocalData((self._tensors[0][:count], self._tensors[1][:count]), self.name)
        return LocalData(Subset(cast(Dataset[Any], self._source), range(count)), self.name)

    def available(self, exclude: Sequence[int] = ()) -> Tensor:
        """Indices of all samples but the excluded ones, where the samples are: no transfer for every batch."""
        keep = torch.ones(len(self), dtype=torch.bool)
        keep[self.checked(exclude)] = False
        indices = keep.nonzero().squeeze(1)
        return indices.to(self._tensors[0].device) if self._tensors else indices

    def checked(self, indices: Sequence[int]) -> Tensor:
        """The indices as a tensor, refused where one is not this client's."""
        chosen = torch.as_tensor(tuple(indices), dtype=torch.int64)
        if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= len(self)):
            raise RequestError(f"Client {self.name!r} has samples 0 to {len(self) - 1} only: check the indices.")
        return chosen

    def _pair(self, index: int) -> Any:
        assert not isinstance(self._source, tuple)
        pair = self._source[index]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"The dataset of client {self.name!r} must give (input, target) pairs.")
        return pair

    def _require_finite(self, *tensors: Tensor) -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise DataError(f"The data of client {self.name!r} has a NaN or infinite value: clean it first.")
