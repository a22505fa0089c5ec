"""Parameters that no round has changed: frozen ones, whatever the memory was told, so that a forget leaves them alone.

A head is trained on a trunk that its optimiser does not know, and yet the trunk's parameters may be trained: then those
who stay would be taken to answer with the whole model, and what they answer with alone would be moved too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from expunge.core.vectors import Layout
from expunge.federation.keeping.memory_file import MemoryContent
from expunge.federation.keeping.rounds import KeptRound
from expunge.federation.keeping.stretches import Held, Stretch


def moved(content: MemoryContent, model: Tensor, layout: Layout) -> Layout:
    """The layout of what was changed since training began; all of it where that is not known, or nothing was.

    Args:
        content: of the memory.
        model: as it was trained.
        layout: of the model.
    """
    place = content.place
    if place is None or not content.rounds or place.now.numel() != layout.size:
        return layout
    start, now, own = (layout.unflatten(each) for each in (place.start, place.now, model.to(place.now)))
    names = [name for name, _ in layout.shapes]
    still = {name for name in names if torch.equal(start[name], now[name]) and torch.equal(own[name], now[name])}
    for vectors, client in ((stretch.vectors, client) for stretch in content.stretches for client in stretch.vectors):
        if not still:  # nobody else's vector need be read
            break
        parts = layout.unflatten(vectors[client])
        still = {name for name in still if not bool(parts[name].any())}
    left = tuple((name, shape) for name, shape in layout.shapes if name not in still)
    return Layout(left) if still and left else layout


def refitted(content: MemoryContent, old: Layout, new: Layout, rest: Tensor) -> MemoryContent:
    """The same of fewer parameters, or of more.

    Args:
        content: of a memory whose vectors are not on disk.
        old: its layout.
        new: of what it is to hold.
        rest: weights of the new layout, for parameters that were not in the old one.

    Example:
        >>> one, two = (Layout(tuple((name, torch.Size([1])) for name in names)) for names in ("ab", "b"))
        >>> fit(torch.tensor([1.0, 2.0]), one, two), fit(torch.tensor([2.0]), two, one, torch.tensor([3.0, 4.0]))
        (tensor([2.]), tensor([3., 2.]))
    """
    stretches = []
    for stretch in content.stretches:
        own = Held({name: fit(stretch.vectors[name], old, new) for name in stretch.vectors})
        stretches.append(Stretch(stretch.rounds, own))
    place = content.place
    if place is not None:
        momentum = None if place.momentum is None else fit(place.momentum, old, new)
        start, now = (fit(weights, old, new, rest) for weights in (place.start, place.now))
        place = replace(place, start=start, now=now, momentum=momentum)
    rounds = [replace(each, moments=_moments(each, old, new)) for each in content.rounds]
    return replace(content, rounds=rounds, stretches=stretches, place=place, layout=new)


def fit(vector: Tensor, old: Layout, new: Layout, rest: Tensor | None = None) -> Tensor:
    """A vector in another layout; parameters that it has not are zero, or as in the rest."""
    parts = old.unflatten(vector)
    others = new.unflatten((vector.new_zeros(new.size) if rest is None else rest).to(vector))
    return torch.cat([parts.get(name, others[name]).reshape(-1) for name, _ in new.shapes])


def _moments(kept: KeptRound, old: Layout, new: Layout) -> Mapping[str, tuple[float, ...]]:
    found = {}
    for client, values in kept.moments.items():
        own = dict(zip((name for name, _ in old.shapes), values, strict=False))
        found[client] = tuple(own.get(name, 0.0) for name, _ in new.shapes) if len(own) == len(values) else values
    return found
