"""What torch's optimisers did in this process between two recorded rounds, whoever they worked for.

Who states momentum, a rate or steps wrongly takes a wrong step back, and nothing in the vectors tells. Where clients
train in this process nobody has to be asked: torch's own hooks see every step of a model with the same parameters. For
whom a step was made is not known (watching.py knows), so only what all of them did together is compared with what is
stated, and only what is so in most rounds counts: other models are trained on the side.

Where it fails: it sees nothing of clients in other processes, nor of steps that a CUDA graph makes again, so where one
was recorded it tells nothing. So it warns, and refuses nothing.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from expunge.federation.training.notes import written
from expunge.federation.training.recipe import SGD, Adam, ClientRule
from expunge.federation.training.steps import listen
from expunge.federation.training.watching import is_recorded, rule_of
from expunge.federation.training.works import Work

CLOSE = 0.02
"""Rates and steps that differ by no more than this part are the same."""

MISSTATED = (
    "Torch's optimisers trained models like this one otherwise than is stated: {seen}, where {stated} is stated (round "
    "{number} and others). What was stated was followed, so something may be left, or too much taken out: train inside "
    "`with memory.watching(name, model):`, which reads it."
)


def misstated(unlike: tuple[str, str], number: int) -> str:
    """The sentence for somebody who stated something else than was seen, first in this round."""
    return MISSTATED.format(seen=unlike[0], stated=unlike[1], number=number)


@dataclass(frozen=True)
class Glimpse:
    """What was seen in one round.

    Attributes:
        rules: the optimisers, weight decay apart.
        rate: the mean learning rate of all steps.
        steps: how many, of all optimisers together.
        optimisers: how many there were.

    Example:
        >>> seen = Glimpse(("SGD(momentum=0.9)",), 0.1, 8, 2)
        >>> seen.unlike(SGD(), {"ada": Work(0.5, 0.1, 4), "bob": Work(0.5, 0.1, 4)})
        ('SGD(momentum=0.9)', 'SGD()')
        >>> seen.unlike(SGD(momentum=0.9), {"ada": Work(0.5, 0.1, 4), "bob": Work(0.5, 0.1, 4)})
    """

    rules: tuple[str, ...]
    rate: float
    steps: int
    optimisers: int

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Glimpse:
        """As it was written to JSON, checked."""
        rate, steps, optimisers = float(written["rate"]), int(written["steps"]), int(written["optimisers"])
        if not (0 <= rate < math.inf and steps > 0 and optimisers > 0):
            raise ValueError("what was seen of a round cannot have been")
        return cls(tuple(str(name) for name in written["rules"]), rate, steps, optimisers)

    def unlike(self, rule: ClientRule, works: Mapping[str, Work] | None) -> tuple[str, str] | None:
        """What was seen and what is stated, where they differ; None where they do not, or it cannot be told.

        Args:
            rule: the clients', as it is stated.
            works: of every participant; None where rates or steps are not stated.
        """
        if isinstance(rule, SGD | Adam):
            stated = _apart_from_decay(rule)
            strange = [name for name in self.rules if name != stated]
            if strange:
                return strange[0], stated
        if not works:
            return None
        total = sum(work.steps for work in works.values())
        rates = [work.learning_rate for work in works.values()]
        rate = sum(work.learning_rate * work.steps for work in works.values()) / total
        everybody = self.optimisers >= len(works)
        if (everybody or max(rates) - min(rates) <= CLOSE * max(rates)) and _differ(self.rate, rate):
            return f"a learning rate of {self.rate:g}", f"{rate:g}"
        each = self.steps / self.optimisers
        if everybody and _differ(each, total / len(works)):
            return f"{each:g} steps of a client", f"{total / len(works):g}"
        return None


class Onlooker:
    """Looks at all steps of torch's optimisers on models with these parameters, as long as somebody holds it.

    Args:
        shapes: of the parameters that are trained.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> onlooker = Onlooker([parameter.shape for parameter in model.parameters()])
        >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> for _ in range(3):
        ...     model(torch.ones(4, 2)).sum().backward()
        ...     optimiser.step()
        >>> seen = onlooker.glimpse()
        >>> seen.rules, round(seen.rate, 9), seen.steps, seen.optimisers
        (('SGD(momentum=0.9)',), 0.1, 3, 1)
        >>> onlooker.glimpse() is None
        True
    """

    def __init__(self, shapes: Iterable[torch.Size]) -> None:
        self._shapes = Counter(shapes)
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._rules: dict[str, int] = {}
        self._recorded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._travel: float | Tensor = 0.0
        self._steps, self._optimisers = 0, 0
        listen(self)

    def __reduce__(self) -> tuple[type[Onlooker], tuple[list[torch.Size]]]:
        return Onlooker, (list(self._shapes.elements()),)

    def glimpse(self) -> Glimpse | None:
        """What was seen since it was asked last; None if nothing, or not all that such optimisers did."""
        found = None
        if self._steps and not self._recorded:
            found = Glimpse(tuple(self._rules), float(self._travel) / self._steps, self._steps, self._optimisers)
        self._known.clear()
        self._rules, self._travel, self._steps, self._optimisers = {}, 0.0, 0, 0
        return found

    def before_step(self, optimiser: Optimizer) -> None:
        """Nothing is looked at before a step."""

    def after_step(self, optimiser: Optimizer) -> None:
        """Which optimiser it was, with what rate."""
        if optimiser not in self._known:
            own = [each for group in optimiser.param_groups for each in group["params"] if each.requires_grad]
            self._known[optimiser] = Counter(each.shape for each in own) == self._shapes
            self._optimisers += self._known[optimiser]
        if not self._known[optimiser]:
            return
        if is_recorded():  # nothing on the GPU may be read now, and the graph's steps are not seen
            self._recorded.add(optimiser)
            return
        for settings in optimiser.param_groups:
            self._rules[_name(optimiser, settings)] = 1
        rates = [settings.get("lr", 0.0) for settings in optimiser.param_groups]
        self._steps += 1
        self._travel = self._travel + sum(rates) / len(rates)  # a rate that lies on a GPU is not waited for


def _name(optimiser: Optimizer, settings: Mapping[str, Any]) -> str:
    rule = rule_of(optimiser, settings)
    return rule if isinstance(rule, str) else _apart_from_decay(rule)


def _apart_from_decay(rule: SGD | Adam) -> str:
    """Weight decay may be a loss's L2 term, and a proximal term is nowhere to be seen."""
    plain = replace(rule, weight_decay=0.0, proximal_mu=0.0)
    return written(replace(plain, decoupled=False) if isinstance(plain, Adam) else plain)


def _differ(one: float, other: float) -> bool:
    return not math.isclose(one, other, rel_tol=CLOSE)
