"""Wrong labels: samples that a model can only know by heart, since nothing in them tells their label.

Memorisation in the sense of Feldman, "Does Learning Require Memorization? A Short Tale about a Long Tail" (STOC 2020):
only a model that was trained on such a sample gives its label.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.errors import RequestError


@dataclass(frozen=True)
class Mislabelling:
    """A client whose labels are partly wrong.

    Attributes:
        share: of its samples that get another label, in (0, 1].
        boost: factor on its update, or the mean of all washes out what one client knows by heart.

    Raises:
        RequestError: a value is out of range.

    Example:
        >>> Mislabelling(share=0.3).boost
        1.0
    """

    share: float = 0.5
    boost: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise RequestError(f"Choose a share of wrong labels above 0 and at most 1, not {self.share}.")
        if not 0 < self.boost < math.inf:
            raise RequestError(f"Choose a finite boost above 0, not {self.boost}.")


def mislabel(labels: Tensor, share: float, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Give a random part of the samples a wrong label, each of the others alike often; the originals stay untouched.

    Args:
        labels: (n,) classes.
        share: of the samples, rounded to whole ones.
        classes: how many there are.
        seed: equal seeds change the same samples to the same labels.

    Returns:
        The labels, and a boolean mask (n,) of those that were changed.

    Example:
        >>> changed, mask = mislabel(torch.tensor([0, 1, 2, 0]), 0.5, classes=3, seed=0)
        >>> changed.tolist(), mask.tolist()
        ([1, 0, 2, 0], [True, True, False, False])
    """
    if classes < 2:
        raise RequestError("A label can only be wrong where there are two classes or more.")
    # On the CPU whatever the device of the data, so that a seed means the same samples everywhere.
    chance = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=chance)[: round(share * len(labels))]
    moves = torch.randint(1, classes, (len(chosen),), generator=chance)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[chosen] = True
    changed = labels.clone()
    where = chosen.to(labels.device)
    changed[where] = (labels[where] + moves.to(labels)) % classes
    return changed, mask.to(labels.device)
