"""What a client's torch optimisers do while it trains, seen through torch's own hooks: its code has to say nothing.

Every step of every torch optimiser in the same thread, and of the watched model's in any, is looked at: which
optimiser, its settings, its rate, how much clipping left of its gradients (gradients.py), in the end Adam's second
moments. Only what the client sends counts: personal heads and other parts that stay with it may train as they like.
What is sent is known again by its values, or, where they were changed on the way (clipped, boosted), by its shapes in
their order.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from expunge.errors import RequestError
from expunge.federation.training.gradients import Gradients
from expunge.federation.training.notes import SEVERAL, Note, Rule
from expunge.federation.training.recipe import SGD, Adam, second_moments
from expunge.federation.training.steps import leave, listen

Arrays = Mapping[str, np.ndarray[Any, Any]]
"""What a site sends."""

ROUNDED = 1e-5
"""Values that differ by no more than this part are the same, moved there and back (SAM) before the first step."""

RECORDED = (
    "Steps that a CUDA graph makes again cannot be watched: train without memory.watching, and state learning_rate=, "
    "steps= and, under Adam, moments= with memory.record."
)


CYCLED = " (an optimiser's settings change from step to step; of OneCycleLR, cycle_momentum=False leaves them)"
"""Behind the problem where one optimiser changes more than its rate."""


@dataclass
class _Steps:
    """Steps in which the same parameters of one optimiser had a gradient."""

    optimiser: Optimizer
    parameters: list[Tensor]
    rules: set[Rule | str] = field(default_factory=set)
    count: int = 0
    rates: tuple[float, float, float] = (math.inf, 0.0, 0.0)  # lowest, highest, sum

    def add(self, rate: float, rule: Rule | str) -> None:
        """One more."""
        self.count, (low, high, total) = self.count + 1, self.rates
        self.rates = min(low, rate), max(high, rate), total + rate
        self.rules.add(rule)


@dataclass
class _Trained:
    """All steps of one parameter."""

    parameter: Tensor
    steps: list[_Steps] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many."""
        return sum(each.count for each in self.steps)

    @property
    def rate(self) -> float:
        """The mean over them; of equal rates it is the rate itself, not a rounded mean."""
        low, high = min(each.rates[0] for each in self.steps), max(each.rates[1] for each in self.steps)
        return low if low == high else sum(each.rates[2] for each in self.steps) / self.count


class Optimisers(WeakSet[Optimizer]):
    """Some optimisers, as long as somebody else holds them; they do not travel to other processes."""

    def __reduce__(self) -> tuple[type[Optimisers], tuple[()]]:
        return Optimisers, ()


class Watch:
    """Looks at the steps of torch's optimisers inside a with block, in this thread or of a model that is known.

    Args:
        received: gives what the site got to train from, to tell what it trains from values of its own.
        model: what is trained, where it is known beforehand; else it is what runs.
        begun: the optimisers of the block that this one goes on from, in the same round; None where the round begins.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> with Watch() as watch:
        ...     optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ...     for _ in range(3):
        ...         model(torch.ones(4, 2)).sum().backward()
        ...         optimiser.step()
        >>> note = watch.note(lambda: {name: tensor.numpy() for name, tensor in model.state_dict().items()})
        >>> note.rule.name, note.learning_rate, note.steps
        ('SGD with momentum', 0.1, 3.0)
    """

    def __init__(
        self,
        received: Callable[[], Arrays] = dict,
        model: nn.Module | None = None,
        begun: Collection[Optimizer] | None = None,
    ) -> None:
        self._received, self._begun = received, begun
        self._model = model
        self._followed = () if model is None else tuple(model.parameters())
        self._samples = 0
        self._gradients = Gradients()
        self._known: dict[torch.dtype, set[str]] = {}
        self._apart: dict[Tensor, bool] = {}  # of each parameter: whether it began with values that were not received
        self._carried: dict[int, bool] = {}  # of each optimiser: whether it had a state before its first step here
        self._steps: dict[tuple[int, int, bytes], _Steps] = {}
        self._thread, self._own = 0, WeakKeyDictionary[Optimizer, bool]()
        self._running: RemovableHandle | None = None

    def __enter__(self) -> Watch:
        self._thread = threading.get_ident()
        self._gradients.follow(self._followed)
        listen(self)
        self._running = register_module_forward_pre_hook(self._runs)
        return self

    def __exit__(self, *problem: object) -> None:
        leave(self)
        if self._running is not None:
            self._running.remove()
        self._gradients.leave()

    def note(self, sent: Callable[[], Arrays], l2: float = 0.0) -> Note | None:
        """What was seen of the parameters that are sent; None where no optimiser made a step.

        Args:
            sent: gives what the site sends after training.
            l2: of the site's loss: weight decay that is in the loss already does not count twice.
        """
        if not self._steps:
            return None
        trained, moments = self._trained(sent), self._moments()
        named = _names(moments, sent()) if moments else {}
        rule, problem = self._rule(trained)
        if rule is not None and l2 and rule.weight_decay == l2 and not (isinstance(rule, Adam) and rule.decoupled):
            rule = replace(rule, weight_decay=0.0)
        steps = _mean((each.parameter, each.count) for each in trained)
        rates = {each.rate for each in trained}
        travel = _mean((each.parameter, each.count * each.rate) for each in trained)
        rate = rates.pop() if len(rates) == 1 else travel / steps
        apart = [each.parameter for each in trained if self._apart.get(each.parameter)]
        kept, unlike = self._gradients.factor({each.parameter for each in trained})
        told = {name: moments[parameter] / kept for name, parameter in named.items()}
        named_apart = tuple(_names(apart, sent())) if apart else ()
        numbers = sum(each.parameter.numel() for each in trained)
        return Note(rule, rate, steps, told, problem, named_apart, kept, unlike, numbers, self._samples / steps)

    def kept_back(self, sent: Arrays) -> list[Tensor]:
        """What was trained and is in none of these arrays; nothing where none of it is known again by its values."""
        trained = {parameter for steps in self._steps.values() for parameter in steps.parameters}
        known = {_digest(array) for array in sent.values()}
        back = [parameter for parameter in trained if _digest(_plain(parameter)) not in known]
        return back if len(back) < len(trained) else []

    @property
    def optimisers(self) -> Optimisers:
        """Those that made a step."""
        return Optimisers(steps.optimiser for steps in self._steps.values())

    def _runs(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        """A module runs, perhaps for the first step, which no optimiser has announced yet."""
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return
        if module is self._model:
            batch = next((own for own in inputs if isinstance(own, Tensor) and own.dim()), ())
            self._samples += len(batch)
        if not self._carried:
            self._gradients.follow(module.parameters())

    def before_step(self, optimiser: Optimizer) -> None:
        """What the first step of an optimiser begins with."""
        if not self._is_own(optimiser):
            return
        if is_recorded():
            raise RequestError(RECORDED)
        own = [each for group in optimiser.param_groups for each in group["params"] if each.requires_grad]
        self._gradients.taken(own)
        if id(optimiser) not in self._carried:
            is_new = self._begun is None or optimiser not in self._begun
            self._carried[id(optimiser)] = is_new and has_state(optimiser)
            self._gradients.follow(own)
            for parameter in own:
                if parameter not in self._apart:
                    self._apart[parameter] = self._is_apart(parameter)

    def _is_own(self, optimiser: Optimizer) -> bool:
        """Whether it works in this thread, or for the model that is watched in another one."""
        if threading.get_ident() == self._thread:
            return True
        if optimiser not in self._own:
            followed = {id(each) for each in self._followed}
            own = (each for group in optimiser.param_groups for each in group["params"])
            self._own[optimiser] = any(id(each) in followed for each in own)
        return self._own[optimiser]

    def _is_apart(self, parameter: Tensor) -> bool:
        """Whether none of what was received has its values, in its own precision."""
        kind, own = parameter.dtype, _plain(parameter)
        if kind not in self._known:
            arrays = self._received().values()
            self._known[kind] = {_digest(torch.tensor(array).to(kind).float().numpy()) for array in arrays}
        if not self._known[kind] or _digest(own) in self._known[kind]:
            return False
        alike = (each for each in self._received().values() if each.shape == own.shape)
        return not any(np.linalg.norm(own - each) <= ROUNDED * np.linalg.norm(each) for each in alike)

    def after_step(self, optimiser: Optimizer) -> None:
        """Its rule and rate, and which parameters it moved."""
        if not self._is_own(optimiser):
            return
        for number, settings in enumerate(optimiser.param_groups):
            moving = bytes(parameter.grad is not None for parameter in settings["params"])
            if not any(moving):
                continue
            key = (id(optimiser), number, moving)  # the optimiser is kept in the value, so its id stays its own
            if key not in self._steps:
                own = [each for each, moves in zip(settings["params"], moving, strict=True) if moves]
                self._steps[key] = _Steps(optimiser, own)
            self._steps[key].add(float(settings.get("lr", 0.0)), rule_of(optimiser, settings))

    def _trained(self, sent: Callable[[], Arrays]) -> list[_Trained]:
        """The parameters that are sent; all, where they have trained alike, or none is known again."""
        found: dict[Tensor, _Trained] = {}
        for steps in self._steps.values():
            for parameter in steps.parameters:
                found.setdefault(parameter, _Trained(parameter)).steps.append(steps)
        if len(self._steps) > 1:
            known = set(_names(found, sent()).values())
            found = {parameter: each for parameter, each in found.items() if parameter in known} or found
        return list(found.values())

    def _rule(self, trained: list[_Trained]) -> tuple[Rule | None, str]:
        """The one rule of these parameters, or why there is none; weight decay may differ, its mean is taken."""
        rules, names = set[Rule](), set[str]()
        for each in trained:
            for rule in set().union(*(steps.rules for steps in each.steps)):
                names |= {rule} if isinstance(rule, str) else set()
                rules |= set() if isinstance(rule, str) else {rule}
        if names:
            return None, f"trains with {min(names)}, whose recursion is not known here"
        ways = {(each.rate, each.count) for each in trained}
        changing = any(len(steps.rules) > 1 for each in trained for steps in each.steps)
        if len({replace(rule, weight_decay=0.0) for rule in rules}) > 1 or len(ways) > 1 or changing:
            return None, SEVERAL + (CYCLED if changing and len(ways) == 1 else "")
        rule = next(iter(rules))
        optimisers = [{id(steps.optimiser) for steps in each.steps} for each in trained]
        if isinstance(rule, Adam) or rule.momentum > 0:
            if any(self._carried[own] for each in optimisers for own in each):
                return None, f"carries the state of its {rule.name} from one round to the next"
            begun = None if self._begun is None else {id(own) for own in self._begun}
            if any(len(each) > 1 or (begun is not None and not each <= begun) for each in optimisers):
                return None, f"begins anew with {rule.name} within a round"
        if len(rules) == 1:
            return rule, ""
        decays = ((each.parameter, r.weight_decay) for each in trained for r in each.steps[0].rules if r in rules)
        return replace(rule, weight_decay=_mean(decays)), ""

    def _moments(self) -> dict[Tensor, float]:
        """Second moments, where the optimisers have them."""
        found: dict[Tensor, float] = {}
        for optimiser in {id(steps.optimiser): steps.optimiser for steps in self._steps.values()}.values():
            own = [each for group in optimiser.param_groups for each in group["params"] if each.requires_grad]
            with suppress(RequestError, KeyError):  # it has none
                found |= dict(zip(own, second_moments(optimiser), strict=True))
        return found


def is_recorded() -> bool:
    """Whether what runs on a GPU now is recorded as a CUDA graph, which makes it again without torch's hooks."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_state(optimiser: Optimizer) -> bool:
    """Whether it remembers steps: a state of zeros is none."""
    kept = (value for state in optimiser.state.values() for value in state.values())
    return any(bool(value.any()) if isinstance(value, Tensor) else value is not None for value in kept)


def _mean(values: Iterable[tuple[Tensor, float]]) -> float:
    """The mean over numbers of parameters."""
    pairs = [(parameter.numel(), value) for parameter, value in values]
    return sum(size * value for size, value in pairs) / sum(size for size, _ in pairs)


def rule_of(optimiser: Optimizer, settings: Mapping[str, Any]) -> Rule | str:
    """What torch's optimiser is in our words, or its name where we have none."""
    kind = type(optimiser)
    odd = [name for name in ("amsgrad", "maximize") if settings.get(name)]
    try:
        if kind is torch.optim.SGD and not odd:
            momentum = float(settings["momentum"])
            dampening = float(settings["dampening"]) if momentum else 0.0
            return SGD(momentum, dampening, bool(settings["nesterov"]), float(settings["weight_decay"]))
        if kind in (torch.optim.Adam, torch.optim.AdamW) and not odd:
            first, second = (float(beta) for beta in settings["betas"])
            decoupled = bool(settings.get("decoupled_weight_decay", kind is torch.optim.AdamW))
            return Adam((first, second), float(settings["eps"]), float(settings["weight_decay"]), decoupled)
    except RequestError:  # settings that torch takes and we do not
        pass
    return " with ".join([kind.__name__, *odd])


def _names(parameters: Iterable[Tensor], arrays: Arrays) -> dict[str, Tensor]:
    """Under which name each parameter is sent: known by its values, else by the shapes in their order."""
    parameters, by_value = list(parameters), dict[str, list[str]]()
    for name, array in arrays.items():
        by_value.setdefault(_digest(array), []).append(name)
    found = {}
    for parameter in parameters:
        names = by_value.get(_digest(_plain(parameter)))
        if names:
            found[names.pop(0)] = parameter
    if found:
        return found
    rest = iter(arrays.items())
    for parameter in parameters:
        match = next((name for name, array in rest if tuple(array.shape) == tuple(parameter.shape)), None)
        if match is None:
            return {}
        found[match] = parameter
    return found


def _plain(parameter: Tensor) -> np.ndarray[Any, Any]:
    return parameter.detach().to("cpu", torch.float32).numpy()


def _digest(array: np.ndarray[Any, Any]) -> str:
    """In single precision: an app may train in another one than it sends."""
    own = np.ascontiguousarray(array, dtype=np.float32)
    return hashlib.sha256(f"{own.shape}".encode() + own.tobytes()).hexdigest()
