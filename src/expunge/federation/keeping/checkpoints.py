"""A few global models of the training's way: where no vector tells what data did, a replay from them can.

They remember everybody who took part, so a forget drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.tensor_file import read_tensors, reading, write_tensors
from expunge.federation.messages.snapshots import pack_snapshot, unpack_snapshot

KIND, VERSION = "checkpoints", 1


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """Models by the number of rounds that they had been trained for.

    Example:
        >>> import torch
        >>> kept = Checkpoints({4: Snapshot(torch.zeros(2), {}), 1: Snapshot(torch.ones(2), {})})
        >>> list(kept.models), kept.stored_bytes
        ([1, 4], 16)
    """

    models: Mapping[int, Snapshot]

    def __post_init__(self) -> None:
        if not self.models:
            raise RequestError("Checkpoints are at least one model with the number of rounds before it.")
        if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in self.models):
            raise RequestError("Checkpoints stand under the number of rounds before them: 0, 1, 2 and so on.")
        if len({model.parameters.numel() for model in self.models.values()}) > 1:
            raise RequestError("The checkpoints are of models of different sizes.")
        object.__setattr__(self, "models", dict(sorted(self.models.items())))

    @property
    def stored_bytes(self) -> int:
        """What keeping them costs."""
        return sum(model.stored_bytes for model in self.models.values())

    def save(self, path: Path) -> None:
        """Write them to one safetensors file."""
        tensors, described = dict[str, Tensor](), dict[str, Any]()
        for number, model in self.models.items():
            own, described[str(number)] = pack_snapshot(model)
            tensors |= own
        write_tensors(path, KIND, VERSION, tensors, {"models": described})

    @classmethod
    def load(cls, path: Path) -> Checkpoints:
        """Read them back."""
        found = read_tensors(path, KIND, VERSION)
        with reading(path, KIND):
            if found.content is None:
                raise ValueError("it is not ours")
            models = found.content["models"].items()
            return cls({int(number): unpack_snapshot(written, found.tensors) for number, written in models})


def wanted_rounds(count: int, rounds: int) -> tuple[int, ...]:
    """After which rounds so many checkpoints are kept: the middle of as many equal stretches.

    Example:
        >>> wanted_rounds(3, 20), wanted_rounds(5, 2)
        ((3, 10, 16), (0, 1))
    """
    return tuple(sorted({int((number + 0.5) * rounds / count) for number in range(count)}))
