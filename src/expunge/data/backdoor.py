"""Backdoor triggers: a white square that makes a poisoned model answer the attacker's class.

Data poisoning after Gu, Dolan-Gavitt and Garg, "BadNets: Identifying Vulnerabilities in the Machine
Learning Model Supply Chain" (2017). In a federation the attacker may also boost, multiply, its update so
that the average does not wash it out: Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How To Backdoor
Federated Learning" (AISTATS 2020).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from expunge.errors import RequestError

Corner = Literal["bottom-right", "bottom-left", "top-right", "top-left"]

_SMALLEST_WITH_MARGIN = 16


@dataclass(frozen=True)
class Backdoor:
    """What the attacker does.

    Attributes:
        target: The class that stamped images shall be taken for.
        size: Side of the white square in pixels.
        fraction: Share of the attacker's samples that it poisons, in (0, 1].
        boost: Factor on the attacker's update; kept here, applied by the federation.
        corner: Where the square sits: several attackers can each have a place of their own.
        share: Least weight of the attacker's update in the mean: one that has few samples boosts it the more.

    Raises:
        RequestError: When a value is out of range.

    Example:
        >>> Backdoor(target=3).size
        4
    """

    target: int = 7
    size: int = 4
    fraction: float = 0.5
    boost: float = 1.0
    corner: Corner = "bottom-right"
    share: float = 0.0

    def __post_init__(self) -> None:
        if self.target < 0:
            raise RequestError(f"Choose a backdoor target class of 0 or more, not {self.target}.")
        if self.size < 1:
            raise RequestError(f"Choose a backdoor trigger of at least one pixel, not {self.size}.")
        if not 0 < self.fraction <= 1:
            raise RequestError(f"Choose a poisoned fraction above 0 and at most 1, not {self.fraction}.")
        if not 0 < self.boost < math.inf:
            raise RequestError(f"Choose a finite boost above 0, not {self.boost}.")
        if not 0 <= self.share < math.inf:
            raise RequestError(f"Choose a finite share of 0 or more for the attacker's update, not {self.share}.")
        if self.corner not in get_args(Corner):
            raise RequestError(f"Choose a corner of {', '.join(get_args(Corner))}, not {self.corner!r}.")

    def boost_for(self, weight: float) -> float:
        """The factor on the update of an attacker that has this weight in the mean.

        Example:
            >>> Backdoor(boost=4.0, share=0.5).boost_for(0.05), Backdoor(boost=4.0, share=0.5).boost_for(0.2)
            (10.0, 4.0)
        """
        return max(self.boost, self.share / weight)


def stamp(inputs: Tensor, backdoor: Backdoor, white: Tensor) -> Tensor:
    """Return a copy of the images with the trigger painted into its corner.

    The square keeps one pixel off the border, except on images smaller than 16 pixels, where there is no
    room to lose.

    Args:
        inputs: Images, (n, c, h, w).
        backdoor: Gives the size of the square and its corner.
        white: Value of a white pixel, (c,).

    Raises:
        RequestError: When the shapes do not fit, or the square is larger than the image.

    Example:
        >>> stamp(torch.zeros(1, 1, 8, 8), Backdoor(size=2), torch.ones(1))[0, 0, 5:, 5:]
        tensor([[0., 0., 0.],
                [0., 1., 1.],
                [0., 1., 1.]])
    """
    if inputs.dim() != 4 or white.shape != inputs.shape[1:2]:
        raise RequestError(
            f"A trigger needs images (n, c, h, w) and white (c,), not {tuple(inputs.shape)} and {tuple(white.shape)}."
        )
    height, width = inputs.shape[-2:]
    margin = 1 if min(height, width) >= _SMALLEST_WITH_MARGIN else 0
    if backdoor.size + margin > min(height, width):
        raise RequestError(
            f"A trigger of {backdoor.size} pixels does not fit into {height}x{width}: choose a smaller size."
        )
    top = margin if backdoor.corner.startswith("top") else height - margin - backdoor.size
    left = margin if backdoor.corner.endswith("left") else width - margin - backdoor.size
    stamped = inputs.clone()
    stamped[..., top : top + backdoor.size, left : left + backdoor.size] = white.to(inputs)[:, None, None]
    return stamped


def poison(
    inputs: Tensor, labels: Tensor, backdoor: Backdoor, white: Tensor, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Stamp and relabel a random part of a client's samples; the originals stay untouched.

    `fraction * n` samples, rounded, are drawn from those that are not of the target class already (an
    image of the target would teach nothing), or all of these where there are fewer.

    Args:
        inputs: Images, (n, c, h, w).
        labels: Their classes, (n,).
        backdoor: The attack.
        white: Value of a white pixel, (c,).
        seed: Equal seeds poison the same samples.

    Returns:
        Poisoned inputs, poisoned labels and a boolean mask (n,) of the samples that were changed.

    Raises:
        RequestError: As `stamp`, or when there is not one label an image.

    Example:
        >>> inputs, labels = torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 7, 2])
        >>> _, poisoned_labels, mask = poison(inputs, labels, Backdoor(fraction=1.0), torch.ones(1), seed=0)
        >>> poisoned_labels.tolist(), mask.tolist()
        ([7, 7, 7, 7], [True, True, False, True])
    """
    if labels.shape != inputs.shape[:1]:
        raise RequestError(f"Poisoning needs one label an image, not {len(labels)} for {len(inputs)}.")
    candidates = (labels != backdoor.target).nonzero().flatten()
    # On the CPU whatever the device of the data, so that a seed means the same samples everywhere.
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    chosen = candidates[order[: round(backdoor.fraction * len(labels))].to(candidates.device)]
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[chosen] = True
    stamped = stamp(inputs, backdoor, white)
    poisoned_inputs = torch.where(mask[:, None, None, None], stamped, inputs)
    return poisoned_inputs, labels.masked_fill(mask, backdoor.target), mask
