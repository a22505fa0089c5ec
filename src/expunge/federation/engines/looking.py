"""Losses of several clients in one pass: small networks on a GPU wait for launches, not for arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, alike, joined
from expunge.core.factored import samples_at_once
from expunge.core.vectors import Snapshot
from expunge.federation.messages.tasks import FORWARD_COST, Indices, Losses, Sum

CHUNK = 256
SMALL_MODEL, MANY = 10_000_000, 2048
"""Samples in one pass: more of them through a model of fewer parameters."""

Part = tuple[str, Batch]


class Looking(Protocol):
    """What a client tells of its samples."""

    @property
    def model(self) -> nn.Module:
        """What it works with."""

    @property
    def l2(self) -> float:
        """Of its loss."""

    def count(self, exclude: Indices) -> int:
        """How many samples it has but these."""

    def looked_at(self, task: Losses, size: int) -> Iterator[Batch]:
        """The samples whose losses are asked for, so many at a time."""

    def sample_losses(self, model: Snapshot, batch: Batch) -> Tensor:
        """One loss for each sample, without the L2 term."""

    def amount(self, batch: Batch) -> float:
        """What the samples count together."""

    def required(self, counted: float) -> float:
        """What the samples count; refused where none does."""


def may_look_together(tasks: Iterable[Losses]) -> bool:
    """Whether all ask for the same losses.

    Example:
        >>> may_look_together([])
        False
    """
    asked = {(id(task.model), id(task.direction), task.lengths) for task in tasks}
    return len(asked) == 1


def losses_of(clients: Mapping[str, Looking], tasks: Mapping[str, Losses]) -> dict[str, Sum]:
    """Each client's sum of losses at each length; their samples go through the model together.

    Args:
        clients: who is asked; their model and loss are the same.
        tasks: what each is asked, which are the same but for the samples.
    """
    anyone, task = clients[next(iter(tasks))], next(iter(tasks.values()))
    theta = task.model.parameters
    limit = CHUNK
    if theta.is_cuda:  # of a large frozen model few parameters are trained, so its own memory counts, too
        limit = MANY if theta.numel() <= SMALL_MODEL else CHUNK
        limit = min(limit, samples_at_once(anyone.model, unknown=limit))
    totals = {name: theta.new_zeros(len(task.lengths)) for name in tasks}
    counted, seen = dict.fromkeys(tasks, 0.0), dict.fromkeys(tasks, 0)
    parts = ((name, part) for name, own in tasks.items() for part in clients[name].looked_at(own, limit))
    for group in _merged(parts, limit):
        batch, sizes = joined([part for _, part in group]), [len(part) for _, part in group]
        moved = (task.model.moved(theta - length * task.direction) for length in task.lengths)
        losses = torch.stack([anyone.sample_losses(model, batch) for model in moved])
        for (name, part), losses_there in zip(group, torch.split(losses, sizes, dim=1), strict=True):
            totals[name] += losses_there.sum(dim=1)
            counted[name], seen[name] = counted[name] + clients[name].amount(part), seen[name] + len(part)
    norms = _norms(task, anyone.l2)
    found = {}
    for name, own in tasks.items():
        count = clients[name].count(own.exclude)
        mean = totals[name] / clients[name].required(counted[name]) + norms
        found[name] = Sum(mean * count, count, FORWARD_COST * seen[name] * len(task.lengths))
    return found


def _norms(task: Losses, l2: float) -> Tensor:
    """The L2 term at each length."""
    if not l2:
        return task.model.parameters.new_zeros(len(task.lengths))
    moved = (task.model.parameters - length * task.direction for length in task.lengths)
    return torch.stack([0.5 * l2 * torch.dot(own, own) for own in moved])


def _merged(parts: Iterable[Part], limit: int) -> Iterator[list[Part]]:
    """Parts one after another in groups that fit together, of at most so many samples unless one alone has more."""
    group: list[Part] = []
    for name, part in parts:
        if group and (sum(len(own) for _, own in group) + len(part) > limit or not alike(group[0][1], part)):
            yield group
            group = []
        group.append((name, part))
    if group:
        yield group
