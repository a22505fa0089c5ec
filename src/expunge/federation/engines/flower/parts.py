"""Whether a site answers with the parts of a model that it trains with: a head of its own, its norms, a frozen trunk.

What is trained together comes with every task. The rest does not: ``site(context)`` has to put it into the model, from
``context.state`` or wherever the app keeps it. A model that was only just made has random numbers there, and curvature
and losses would be those of a model that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expunge.errors import ModelError
from expunge.federation.engines.flower.replies import Names

OTHER = 0.01
"""Values are others where they differ by more than this part of their length: apps may send half precision."""

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Parts:
    """The parameters of a site's model that are not trained together.

    Attributes:
        own: those that the site trains for itself.
        strange: those that have other values in the site's model than where it trains.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
        >>> _ = model[0].requires_grad_(True)
        >>> sent = {name: each.numpy() for name, each in model[0].state_dict(prefix="0.").items()}
        >>> Parts.of(model, sent, sent, kept=lambda: [torch.ones(1, 2)])
        Parts(own=('1.weight',), strange=('1.weight',))
        >>> Parts.of(model, sent, sent, kept=lambda: [model[1].weight.clone()])
        Parts(own=('1.weight',), strange=())
    """

    own: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        received: Arrays,
        sent: Arrays,
        kept: Callable[[], Iterable[Tensor]],
        apart: Iterable[str] = (),
    ) -> Parts:
        """Look at a site after it has trained.

        Args:
            model: of its ``Site``.
            received: what it got to train from.
            sent: what it sends.
            kept: gives what it trained and does not send.
            apart: the arrays among those sent that it trained from values of its own.
        """
        frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
        if not frozen:
            return cls()
        came, goes = (_named(model, arrays) for arrays in (received, sent))
        alone, here = {name for name, key in _keys(model, sent).items() if key in set(apart)}, list(kept())
        own, strange = list[str](), list[str]()
        for name, values in frozen.items():
            known = [arrays[name] for arrays in (goes, {} if name in alone else came) if name in arrays]
            stays = [] if known else [each.detach() for each in here if each.shape == values.shape]
            if name in alone or stays:
                own.append(name)
            if (known or stays) and not any(_alike(values, each) for each in (*known, *stays)):
                strange.append(name)
        return cls(tuple(own), tuple(strange))


def _keys(model: nn.Module, arrays: Arrays) -> dict[str, str]:
    """For each of the model's names the array; nothing where they are those of another model."""
    with suppress(ModelError):
        return {name: key for key, name in Names(model).of(arrays).items()}
    return {}


def _named(model: nn.Module, arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(arrays[key])) for name, key in _keys(model, arrays).items()}


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    own, others = (each.detach().to("cpu", torch.float64) for each in (one, other))
    return float((own - others).norm()) <= OTHER * float(others.norm())
