"""What torch's optimisers did in this process between two recorded rounds, whoever they worked for.

Who states momentum, a rate or steps wrongly takes a wrong step back, and nothing in the vectors tells. Where clients
train in this process nobody has to be asked: torch's own hooks see every step, and a client's training is known by the
weights that it begins with. Whose it is is not known (watching.py knows), so only what all of them did together is
compared with what is stated, and only what is so in most rounds counts: other models are trained on the side.

Where it fails: it sees nothing of clients in other processes, nor of steps that a CUDA graph makes again, so where one
was recorded it tells nothing. So it warns, and refuses nothing.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from expunge.core.vectors import length
from expunge.federation.training.notes import written
from expunge.federation.training.recipe import SGD, Adam, ClientRule
from expunge.federation.training.steps import listen
from expunge.federation.training.watching import has_state, is_recorded, rule_of
from expunge.federation.training.works import Work

CLOSE = 0.02
"""Rates and steps that differ by no more than this part are the same."""

LOOKED_AT, SAME = 64, 1e-5
"""A parameter is known again by its first so many numbers, where they differ by no more than this part."""

KEPT, ANEW = " that keeps its state from round to round", " that is made anew within a round"
"""Behind a rule: those who stay are taken to begin every round with no state, and to keep it until its end."""

MISSTATED = (
    "Torch's optimisers trained models like this one otherwise than is stated: {seen}, where {stated} (round {number} "
    "and others). What was stated was followed, so something may be left, or too much taken out: let all of a client's "
    "training be inside `with memory.watching(name, model):`, which reads it."
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
        optimisers: how many models were trained; 0 where only parts of them were seen.

    Example:
        >>> seen = Glimpse(("SGD(momentum=0.9)",), 0.1, 8, 2)
        >>> seen.unlike(SGD(), {"ada": Work(0.5, 0.1, 4), "bob": Work(0.5, 0.1, 4)})
        ('SGD(momentum=0.9)', 'SGD() is stated')
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
        if not (0 <= rate < math.inf and steps > 0 and optimisers >= 0):
            raise ValueError("what was seen of a round cannot have been")
        return cls(tuple(str(name) for name in written["rules"]), rate, steps, optimisers)

    def unlike(
        self, rule: ClientRule, works: Mapping[str, Work] | None, told: str = "is stated"
    ) -> tuple[str, str] | None:
        """What was seen and what is stated, where they differ; None where they do not, or it cannot be told.

        Args:
            rule: the clients', as it is stated.
            works: of every participant; None where rates or steps are not stated.
            told: how they are known.
        """
        if isinstance(rule, SGD | Adam):
            stated = _apart_from_decay(rule)
            strange = [name for name in self.rules if name != stated]
            if strange:
                return strange[0], f"{stated} {told}"
        if not works or self.optimisers > len(works):  # not all of them were clients, and whose rates these are is open
            return None
        total = sum(work.steps for work in works.values())
        rates = [work.learning_rate for work in works.values()]
        rate = sum(work.learning_rate * work.steps for work in works.values()) / total
        everybody = self.optimisers == len(works)
        if (everybody or max(rates) - min(rates) <= CLOSE * max(rates)) and _differ(self.rate, rate):
            return f"a learning rate of {self.rate:g}", f"{rate:g} {told}"
        if everybody and _differ(self.steps, total):
            return f"{self.steps / self.optimisers:g} steps of a client", f"{total / len(works):g} {told}"
        return None


@dataclass
class _Training:
    """The steps of one model in a round.

    Attributes:
        apart: behind rules that keep a state, where they did not begin with none, or did so more than once.
        rules: of its optimisers, weight decay apart.
        steps: how many.
        travel: the sum of their rates.
    """

    apart: str = ""
    rules: set[str] = field(default_factory=set)
    steps: int = 0
    travel: float | Tensor = 0.0

    def add(self, optimiser: Optimizer, groups: list[dict[str, Any]]) -> None:
        """One step of these groups."""
        for settings in groups:
            rule = rule_of(optimiser, settings)
            is_apart = isinstance(rule, Adam) or (isinstance(rule, SGD) and rule.momentum > 0)
            name = rule if isinstance(rule, str) else _apart_from_decay(rule)
            self.rules.add(name + self.apart if is_apart else name)
        self.steps += 1
        rates = [settings.get("lr", 0.0) for settings in groups]
        self.travel = self.travel + sum(rates) / len(rates)  # a rate that lies on a GPU is not waited for


class _Looked(NamedTuple):
    """What an optimiser trains, in this round."""

    training: _Training
    parts: frozenset[int]
    groups: list[dict[str, Any]]


class Onlooker:
    """Looks at all steps of torch's optimisers on models with these parameters, as long as somebody holds it.

    A client's training is known by the weights that it begins with: those that the server has sent. A part of the
    parameters is known by nothing else, since parts of other models have such shapes, too. Where no training begins
    with these weights, as with clients that change what they receive, those count that have all parameters' shapes.

    Args:
        shapes: of the parameters that are trained.
        weights: those that a round's training begins with, as one vector, where they are known.

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

    def __init__(self, shapes: Iterable[torch.Size], weights: Tensor | None = None) -> None:
        self._shapes, self._weights = tuple(shapes), weights
        self._parts = Parts(self._shapes, weights)
        self._known: weakref.WeakKeyDictionary[Optimizer, _Looked | None] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._begun: dict[frozenset[int], list[_Training]] = {}  # with the server's weights, by which parts they train
        self._alike: list[_Training] = []  # with others
        self._owners: dict[int, tuple[weakref.ref[Tensor], _Looked]] = {}
        listen(self)

    def __reduce__(self) -> tuple[type[Onlooker], tuple[Any, ...]]:
        return Onlooker, (self._shapes, self._weights)

    def expect(self, weights: Tensor | None) -> None:
        """From now on trainings begin with these weights."""
        self._weights, self._parts = weights, Parts(self._shapes, weights)

    def glimpse(self, participants: int = 1) -> Glimpse | None:
        """What was seen since it was asked last; None if nothing, or not all that such optimisers did.

        Where more models were trained than clients took part, something else was trained beside them: what no more
        than so many did may be its doing. Parts count only where so many were trained as clients took part.
        """
        whole = self._begun.get(self._parts.all, [])
        parts = [own for key, own in self._begun.items() if key != self._parts.all and len(own) >= participants]
        seen = [whole] if whole else parts or [self._alike]
        rules = dict.fromkeys(name for own in seen for name in _rules(own, participants))
        trainings = [training for own in seen for training in own]
        steps = sum(training.steps for training in trainings)
        found = None
        if steps >= participants and not self._recorded:
            rate = sum(float(training.travel) for training in trainings) / steps
            found = Glimpse(tuple(rules), rate, steps, 0 if seen is parts else len(trainings))
        self._known.clear()
        self._begun, self._alike, self._owners = {}, [], {}
        return found

    def before_step(self, optimiser: Optimizer) -> None:
        """Whose training begins."""
        if optimiser not in self._known:
            self._known[optimiser] = self._looked_at(optimiser)

    def after_step(self, optimiser: Optimizer) -> None:
        """Which optimiser it was, with what rate."""
        looked = self._known.get(optimiser)
        if looked is None:
            return
        if is_recorded():  # nothing on the GPU may be read now, and the graph's steps are not seen
            self._recorded.add(optimiser)
            return
        looked.training.add(optimiser, looked.groups)

    def _looked_at(self, optimiser: Optimizer) -> _Looked | None:
        """What it trains; None where that is nothing of a model like this one."""
        own = [each for group in optimiser.param_groups for each in group["params"] if each.requires_grad]
        is_alike = Counter(each.shape for each in own) == Counter(self._shapes)
        found = {} if is_recorded() else self._parts.found(own)
        parts = frozenset(found.values())
        if parts == self._parts.all or (parts and not is_alike):
            training = _Training(KEPT if has_state(optimiser) else "")
            self._begun.setdefault(parts, []).append(training)
            looked = _Looked(training, parts, [each for each in optimiser.param_groups if _has(each, found)])
            self._owners |= {id(each): (weakref.ref(each), looked) for each in own if id(each) in found}
            return looked
        earlier = self._goes_on(own)
        if earlier is not None and (is_alike or earlier.parts != self._parts.all):
            earlier.training.apart = earlier.training.apart or ANEW
            return earlier._replace(groups=[each for each in optimiser.param_groups if _has(each, self._owners)])
        if not is_alike:
            return None
        self._alike.append(_Training())
        return _Looked(self._alike[-1], self._parts.all, optimiser.param_groups)

    def _goes_on(self, own: list[Tensor]) -> _Looked | None:
        """What began with the server's weights in this round, and now goes on with another optimiser."""
        for each in own:
            of, looked = self._owners.get(id(each), (None, None))
            if of is not None and of() is each:
                return looked
        return None


class Parts:
    """A model's parameters, each known again by its first numbers.

    Args:
        shapes: of the parameters.
        weights: all of them in one vector; None where they are not known, and nothing is found.

    Example:
        >>> parts = Parts([torch.Size([2]), torch.Size([1])], torch.tensor([1.0, 2.0, 3.0]))
        >>> own = [torch.tensor([3.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])]
        >>> list(parts.found(own).values()) == [1, 0], parts.found(own[2:]), parts.found(own[:1])
        (True, {}, {})
    """

    def __init__(self, shapes: Sequence[torch.Size], weights: Tensor | None) -> None:
        self.all = frozenset(range(len(shapes)))
        self._shapes, self._weights = shapes, weights

    def found(self, own: Iterable[Tensor]) -> dict[int, int]:
        """By the id of each tensor that has a parameter's shape and numbers, the parameter's place.

        Nothing where all that was found is of equal numbers, as zeros at the beginning are, unless that is everything.
        """
        kinds = (Tensor, nn.Parameter)  # of others, which lie on several machines, nothing is read
        own = [each for each in own if each.shape in self._heads and type(each) in kinds and each.is_floating_point()]
        left, found, is_clear = {shape: list(heads) for shape, heads in self._heads.items()}, dict[int, int](), False
        for each, head in zip(own, _heads(own), strict=True):
            close = max(SAME, 4 * torch.finfo(each.dtype).eps)
            for at, (place, theirs) in enumerate(left[each.shape]):
                if float(length(head - theirs)) <= close * float(length(theirs)):
                    found[id(each)] = place
                    is_clear = is_clear or bool((theirs != theirs[0]).any())
                    del left[each.shape][at]
                    break
        return found if is_clear or frozenset(found.values()) == self.all else {}

    @cached_property
    def _heads(self) -> dict[torch.Size, list[tuple[int, Tensor]]]:
        """The place and the first numbers of all parameters, by shape."""
        found: dict[torch.Size, list[tuple[int, Tensor]]] = {}
        if self._weights is not None:
            parts = torch.split(self._weights.detach(), [shape.numel() for shape in self._shapes])
            for place, (shape, head) in enumerate(zip(self._shapes, _heads(parts), strict=True)):
                found.setdefault(shape, []).append((place, head))
        return found


def _heads(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The first numbers of each, on the CPU: a device is waited for once."""
    if not tensors:
        return ()
    heads = [each.detach().reshape(-1)[:LOOKED_AT].double() for each in tensors]
    joined = torch.cat([head.to(heads[0].device) for head in heads]).cpu()
    return torch.split(joined, [len(head) for head in heads])


def _has(settings: Mapping[str, Any], found: Collection[int]) -> bool:
    return any(id(each) in found for each in settings["params"])


def _rules(trainings: Sequence[_Training], participants: int) -> Iterable[str]:
    """Those that more models were trained by than may have been trained beside the clients."""
    counts = Counter(name for training in trainings for name in sorted(training.rules))
    return (name for name, count in counts.items() if count > max(len(trainings) - participants, 0))


def _apart_from_decay(rule: SGD | Adam) -> str:
    """Weight decay may be a loss's L2 term, and a proximal term is nowhere to be seen."""
    plain = replace(rule, weight_decay=0.0, proximal_mu=0.0)
    return written(replace(plain, decoupled=False) if isinstance(plain, Adam) else plain)


def _differ(one: float, other: float) -> bool:
    return not math.isclose(one, other, rel_tol=CLOSE)
