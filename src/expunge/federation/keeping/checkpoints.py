"""A few global models of the training's way: where no vector tells what data did, a replay from them can.

They remember everybody who took part, so a forget drops them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.tensor_file import read_tensors, reading, write_tensors
from expunge.federation.messages.snapshots import pack_snapshot, unpack_snapshot
from expunge.federation.training.recipe import Recipe

KIND, VERSION = "checkpoints", 1


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """Models by the number of rounds that they had been trained for.

    Attributes:
        models: at least one.
        recipe: how clients and server trained, where that is to be known without a memory.

    Example:
        >>> import torch
        >>> kept = Checkpoints({4: Snapshot(torch.zeros(2), {}), 1: Snapshot(torch.ones(2), {})})
        >>> list(kept.models), kept.stored_bytes
        ([1, 4], 16)
    """

    models: Mapping[int, Snapshot]
    recipe: Recipe | None = None

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
        recipe = {"recipe": self.recipe.as_dict()} if self.recipe is not None else {}
        write_tensors(path, KIND, VERSION, tensors, {"models": described, **recipe})

    @classmethod
    def load(cls, path: Path) -> Checkpoints:
        """Read them back."""
        found = read_tensors(path, KIND, VERSION)
        with reading(path, KIND):
            if found.content is None:
                raise ValueError("it is not ours")
            models, recipe = found.content["models"].items(), found.content.get("recipe")
            read = {int(number): unpack_snapshot(written, found.tensors) for number, written in models}
            return cls(read, Recipe.from_dict(recipe) if recipe is not None else None)


def wanted_rounds(count: int, rounds: int) -> tuple[int, ...]:
    """After which rounds so many checkpoints are kept: the middle of as many equal stretches.

    Example:
        >>> wanted_rounds(3, 20), wanted_rounds(5, 2)
        ((3, 10, 16), (0, 1))
    """
    return tuple(sorted({int((number + 0.5) * rounds / count) for number in range(count)}))


def thinned(numbers: Collection[int], count: int, rounds: int | None = None) -> tuple[int, ...]:
    """Which of these checkpoints are kept, so many at most, while nobody knows how long the training will go on.

    Those go first without which the rounds so far lie least far from a checkpoint; never one that a training of
    so many rounds would keep in the end.

    Args:
        numbers: of rounds before them, with the newest.
        count: how many may be kept.
        rounds: how many the training will have, where that is known.

    Example:
        >>> kept: tuple[int, ...] = ()
        >>> for number in range(15):
        ...     kept = thinned((*kept, number), 3, rounds=20)
        >>> kept, thinned((*kept, 16), 3, rounds=20)
        ((3, 10, 14), (3, 10, 16))
    """
    left, wanted = sorted(numbers), wanted_rounds(count, rounds) if count and rounds else ()
    while len(left) > count:
        may_go = [number for number in left if number not in wanted] or left
        left.remove(min(may_go, key=lambda gone: _apart([own for own in left if own != gone], left[-1])))
    return tuple(left)


def _apart(numbers: Collection[int], last: int) -> int:
    """How far the rounds up to the last lie from the nearest of these, all together."""
    return sum(min((abs(number - own) for own in numbers), default=0) for number in range(last + 1))
