"""Sums over clients in one pass: where only the sum of their replies is asked for, all samples go through together.

A gradient, a curvature product and Kronecker factors are sums over samples. Client c, with ``n_c`` samples of which
those that are drawn count ``m_c``, replies ``n_c / m_c`` times the sum over them; so the sum of all replies is one sum
over all drawn samples with these weights. A small network on a GPU waits for launches, not for arithmetic: so it does
not take as many times as long as there are clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.batch import Batch, alike, joined
from expunge.core.curvature import Curvature
from expunge.core.factored import samples_at_once
from expunge.core.factors import Share
from expunge.core.vectors import Snapshot
from expunge.federation.engines.client import Client
from expunge.federation.messages.tasks import PRODUCT_COST, CurvatureFactors, CurvatureProduct, Gradient, Sum, Task

MOST = 1 << 14
"""Of more samples each client looks up its own, a few at a time."""

Summed = Gradient | CurvatureProduct | CurvatureFactors


@dataclass(frozen=True, eq=False)
class _Shown:
    """What all clients look at: samples one client after another, how many each has, and what its drawn ones count."""

    parts: list[Batch]
    counts: list[int]
    counted: list[float]

    @property
    def weights(self) -> Tensor:
        """Of each sample."""
        told = zip(self.parts, self.counts, self.counted, strict=True)
        return torch.cat([torch.full((len(part),), count / own, dtype=torch.float64) for part, count, own in told])


class Summing:
    """Sums the replies of clients that have one model and one loss; graphs are kept from one product to the next.

    Args:
        budget_bytes: what may be kept between curvature products.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._kept: tuple[Snapshot, object, Curvature, int] | None = None

    def of(self, clients: Mapping[str, Client], tasks: Mapping[str, Task]) -> Sum | None:
        """The sum of all replies; None where it cannot be had in one, or is not finite: each is asked then."""
        first = next(iter(tasks.values()))
        own = {name: task for name, task in tasks.items() if isinstance(task, Summed) and _is_like(first, task)}
        if len(own) < max(2, len(tasks)) or sum(clients[name].looks_at(task) for name, task in own.items()) > MOST:
            return None
        found: Sum | None
        if isinstance(first, CurvatureProduct):
            found = self._product(clients, own, first)
        elif isinstance(first, Gradient):
            found = _gradient(clients, own, first)
        else:
            found = _factors(clients, own)
        return found if found is not None and bool(torch.isfinite(found.total).all()) else None

    def _product(
        self, clients: Mapping[str, Client], tasks: Mapping[str, Summed], first: CurvatureProduct
    ) -> Sum | None:
        """The operator is built once, and reused as long as model, samples and kind stay the same."""
        key = (first.kind, *((name, task.draw, task.exclude) for name, task in tasks.items()))
        if self._kept is None or self._kept[0] is not first.model or self._kept[1] != key:
            self._kept = None  # free the old graphs before building new ones
            shown = _shown(clients, tasks)
            if shown is None:
                return None
            total, batch = sum(shown.counts), joined(shown.parts)
            anyone = clients[next(iter(tasks))]
            curvature = anyone.curvature_of(first.model, first.kind, batch, self._budget_bytes, shown.weights / total)
            self._kept = (first.model, key, curvature, total)
        _, _, curvature, count = self._kept
        total_product = torch.stack([curvature @ vector for vector in first.vectors]) * count
        return Sum(total_product, count, PRODUCT_COST * curvature.count * len(first.vectors))


def _is_like(first: Task, task: Summed) -> bool:
    """Whether two tasks are the same but for the samples."""
    if type(task) is not type(first) or task.model is not first.model:
        return False
    if isinstance(task, Gradient):
        return task.only is None
    if isinstance(task, CurvatureProduct) and isinstance(first, CurvatureProduct):
        return task.vectors is first.vectors and task.kind == first.kind
    return True


def _shown(clients: Mapping[str, Client], tasks: Mapping[str, Summed]) -> _Shown | None:
    """Their samples; None where these are of several forms."""
    parts = [clients[name].shown(task.draw, task.exclude) for name, task in tasks.items()]
    if not all(alike(parts[0], part) for part in parts):
        return None
    counts = [clients[name].count(task.exclude) for name, task in tasks.items()]
    counted = [clients[name].required(clients[name].amount(part)) for name, part in zip(tasks, parts, strict=True)]
    return _Shown(parts, counts, counted)


def _gradient(clients: Mapping[str, Client], tasks: Mapping[str, Summed], first: Gradient) -> Sum | None:
    shown, anyone, theta = _shown(clients, tasks), clients[next(iter(tasks))], first.model.parameters
    if shown is None:
        return None
    batch, total = joined(shown.parts), torch.zeros_like(theta)
    size = samples_at_once(anyone.model)
    weights = shown.weights.to(theta)
    for part, own in zip(batch.split(size), torch.split(weights, size), strict=True):
        total += anyone.summed_gradient(first.model, part, own)
    count = sum(shown.counts)
    return Sum(total + anyone.l2 * count * theta, count, float(len(batch)))


def _factors(clients: Mapping[str, Client], tasks: Mapping[str, Summed]) -> Sum | None:
    shown, anyone = _shown(clients, tasks), clients[next(iter(tasks))]
    if shown is None:
        return None
    shares = [
        Share(part, task.seed, float(count))
        for part, count, task in zip(shown.parts, shown.counts, tasks.values(), strict=True)
        if isinstance(task, CurvatureFactors)
    ]
    found = anyone.factors_of(next(iter(tasks.values())).model, shares)
    return Sum(found.values, sum(shown.counts), float(sum(map(len, shown.parts))), found.blocks)
