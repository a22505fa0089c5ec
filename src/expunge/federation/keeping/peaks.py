"""Whether updates that are stated as SGD's look like Adam's, by nothing but the updates themselves.

Adam divides by the size of gradients, so in s steps of a rate no coordinate goes much further than rate x s, and those
whose gradient keeps its sign go just as far, whatever the loss, the model and the data. Most of the others go a good
part of that way. SGD's updates have no such bound: their largest coordinate lies anywhere, far below it as a rule, and
most coordinates are small beside it.

Where it fails: rounds of hundreds of steps or with a large rate, in which gradients change their signs, look like
SGD's; so do updates whose steps are stated wrong, and those of RMSprop.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOOKED_AT = 2
"""Rounds whose updates are looked at, the first ones: later on gradients change their signs."""

USUAL, ANY, MOST = (0.85, 1.1), (0.7, 1.15), 0.75
"""Where the largest coordinate lies under Adam, over rate x steps: the median of all updates, and most of them."""

EVEN = 0.35
"""The root mean square of an update beside its largest coordinate: mostly more under Adam, less under SGD."""

DOUBT = (
    "The clients are stated to train by {name}, but their updates look like those of Adam or its like: no coordinate "
    "goes further than learning rate x steps, and most go a good part of that way. If so, too little is known to take "
    "a pull back: state it, Memory(model, Recipe(Adam())), and record moments."
)

SIGNS, MANY = 0.98, 100
"""As even as this only updates of signs are, where a model has so many weights."""

COMPRESSED = (
    "The numbers of the clients' updates differ by their signs alone, as after compression to one bit or signSGD, so "
    "they tell little of how those who stay answer: two fifths to three quarters were left where that was measured. "
    "Watch the clients, which counts by what was sent, audit the model, or retrain."
)


@dataclass(frozen=True)
class Peak:
    """The shape of one update.

    Attributes:
        height: its largest coordinate.
        evenness: its root mean square over coordinates that moved, beside the largest.

    Example:
        >>> Peak.of(torch.tensor([0.5, -0.5, 0.0]))
        Peak(height=0.5, evenness=1.0)
    """

    height: float
    evenness: float

    @classmethod
    def of(cls, update: Tensor) -> Peak:
        """Of this update; one that did not move has no shape."""
        height, moved = float(update.abs().max()), int(torch.count_nonzero(update))
        if not height > 0:
            return cls(0.0, 0.0)
        return cls(height, float((update / height).double().square().sum() / moved) ** 0.5)


def looks_adaptive(peaks: Sequence[tuple[Peak, float]]) -> bool:
    """Whether these look like Adam's updates.

    Args:
        peaks: of each update its shape, and rate x steps that it was made with.

    Example:
        >>> signs = Peak(height=0.03, evenness=0.6)
        >>> looks_adaptive([(signs, 0.03)] * 4), looks_adaptive([(signs, 0.3)] * 4)
        (True, False)
    """
    found = [(peak.height / far, peak.evenness) for peak, far in peaks if peak.height > 0 and far > 0]
    if len(found) < 2:
        return False
    heights, evenness = [height for height, _ in found], statistics.median(even for _, even in found)
    inside = sum(ANY[0] <= height <= ANY[1] for height in heights)
    return USUAL[0] <= statistics.median(heights) <= USUAL[1] and inside >= MOST * len(found) and evenness >= EVEN


def looks_compressed(peaks: Sequence[Peak], weights: int) -> bool:
    """Whether these are updates of signs alone.

    Args:
        peaks: the shape of each.
        weights: of the model.

    Example:
        >>> looks_compressed([Peak(0.1, 1.0)] * 4, 1000), looks_compressed([Peak(0.1, 0.6)] * 4, 1000)
        (True, False)
    """
    even = [peak.evenness for peak in peaks if peak.height > 0]
    return len(even) > 1 and weights >= MANY and statistics.median(even) >= SIGNS
