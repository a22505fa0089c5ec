"""Several models of one architecture that answer together, as SISA's shards do."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError


class Ensemble(nn.Module):
    """Members of one architecture; the answer is the log of their mean probabilities.

    The output can be used as logits: its softmax is the mean of the members' softmaxes. The flat vector of an ensemble
    is that of its members one after another, which ``joined`` makes out of their snapshots.

    Args:
        member: the architecture; every member begins as a copy of it.
        count: how many members.

    Example:
        >>> ensemble = Ensemble(nn.Linear(2, 3), count=2)
        >>> round(ensemble(torch.zeros(1, 2)).exp().sum().item(), 4)  # probabilities
        1.0
        >>> Layout.of(ensemble).size
        18
    """

    def __init__(self, member: nn.Module, count: int) -> None:
        super().__init__()
        if count < 1:
            raise ModelError(f"An ensemble needs at least 1 member, not {count}.")
        self.members = nn.ModuleList(copy.deepcopy(member) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        """``log (1/n sum_i softmax(z_i))``, row by row."""
        answers = torch.stack([member(inputs).log_softmax(dim=-1) for member in self.members])
        return answers.logsumexp(dim=0) - math.log(len(self.members))


def joined(members: Sequence[Snapshot]) -> Snapshot:
    """The snapshot of the ensemble that has these members.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> both = joined([Snapshot.of(model), Snapshot.of(model)])
        >>> both.layout == Layout.of(Ensemble(model, count=2))
        True
    """
    if not members:
        raise ModelError("An ensemble needs at least 1 member.")
    parameters = torch.cat([member.parameters for member in members])
    buffers: dict[str, Tensor] = {}
    shapes: list[tuple[str, torch.Size]] = []
    for index, member in enumerate(members):  # named as in Ensemble.members
        buffers |= {f"members.{index}.{name}": buffer for name, buffer in member.buffers.items()}
        shapes += [(f"members.{index}.{name}", shape) for name, shape in member.layers().shapes]
    return Snapshot(parameters, buffers, Layout(tuple(shapes)))
