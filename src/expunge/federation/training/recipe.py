"""How a federation trains, as recursions: what a client's optimiser and the server's rule make of a displaced model.

Those who stay do not train blindly: from a model that is displaced along a direction of curvature e they send another
update. On a quadratic every optimiser is a recursion in numbers, so each rule here runs its own steps on curvature e:

    client   ``left(curvature, rate, steps)``     what one round of local training leaves of a displacement of 1
    server   ``apply(moved, momentum, change)``   what the server makes of a change in the mean update

Adam is linear once its second moments are held as they were: one number for each parameter tensor and round, which the
client sends with its update (`second_moments`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from expunge.errors import RequestError
from expunge.federation.training.recursions import powers, pulled_back, run, stable


class ClientRule(Protocol):
    """A client's optimiser, begun anew in every round; your own needs a name, whether it is adaptive, and ``left``."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def adaptive(self) -> bool:
        """Whether a step is divided by the root of second moments, which then have to be recorded."""

    def left(self, curvature: Tensor, rate: float, steps: float, moment: float = 0.0) -> Tensor:
        """What so many steps leave of a displacement of 1 along directions of this curvature."""


Numbers = float | Tensor
"""A number, or several in a tensor that fits the curvature's."""


@runtime_checkable
class BatchedRule(Protocol):
    """A client's optimiser whose recursions for several rates, moments and numbers of steps run side by side."""

    def lefts(
        self, curvature: Tensor, rate: Numbers, steps: Sequence[float], moment: Numbers = 0.0
    ) -> Iterator[Tensor]:
        """What is left after each of these numbers of steps, which rise; rates and moments fit the curvature."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as torch has it, with FedProx's pull back to the round's beginning.

    Attributes:
        momentum: of the heavy ball.
        dampening: of the gradient that enters the momentum.
        nesterov: look ahead by one step of momentum.
        weight_decay: the optimiser's; what is in the loss is not here.
        proximal_mu: FedProx's factor of half the squared distance to the model that the round began with.

    Example:
        >>> SGD().left(torch.tensor([0.0, 1.0], dtype=torch.float64), rate=0.1, steps=2)
        tensor([1.0000, 0.8100], dtype=torch.float64)
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    proximal_mu: float = 0.0

    adaptive = False

    def __post_init__(self) -> None:
        _require_between(self, 0.0, 1.0, "momentum", "dampening")
        _require_at_least_zero(self, "weight_decay", "proximal_mu")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise RequestError("Nesterov needs a momentum above 0 and no dampening, as in torch.")

    @property
    def name(self) -> str:
        """For a reader."""
        return "SGD with momentum" if self.momentum else "SGD"

    def left(self, curvature: Tensor, rate: float, steps: float, moment: float = 0.0) -> Tensor:
        """What so many steps leave of a displacement of 1."""
        return next(self.lefts(curvature, rate, (steps,), moment))

    def lefts(
        self,
        curvature: Tensor,
        rate: Numbers,
        steps: Sequence[float],
        moment: Numbers = 0.0,  # noqa: ARG002
    ) -> Iterator[Tensor]:
        """The same after each of several numbers of steps; they are divided by no moment."""
        rigid = curvature + self.weight_decay
        if not self.momentum and not self.proximal_mu:
            yield from powers(rate * rigid, steps)
            return

        def step(x: Tensor, velocity: Tensor, number: int) -> tuple[Tensor, Tensor]:
            gradient = pulled_back(rigid * x, x, self.proximal_mu)
            fresh = 1.0 if number == 1 else 1.0 - self.dampening  # torch's first momentum is the gradient itself
            velocity = torch.add(fresh * gradient if fresh != 1 else gradient, velocity, alpha=self.momentum)
            way = torch.add(gradient, velocity, alpha=self.momentum) if self.nesterov else velocity
            return x - rate * way, velocity

        start = torch.ones_like(rate * rigid)
        yield from (stable(kept) for kept in run(step, start, steps))


@dataclass(frozen=True)
class Adam:
    """Adam and AdamW as torch has them, second moments held as they were.

    Attributes:
        betas: of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, or beside the step where it is decoupled.
        decoupled: AdamW.
        proximal_mu: FedProx's factor.

    Example:
        >>> Adam().left(torch.tensor([0.0, 1.0], dtype=torch.float64), rate=0.1, steps=1, moment=0.5)
        tensor([1.0000, 0.8000], dtype=torch.float64)
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    proximal_mu: float = 0.0

    adaptive = True

    def __post_init__(self) -> None:
        if isinstance(self.betas, str | Real) or not all(isinstance(beta, Real) for beta in self.betas):
            raise RequestError(f"Adam's betas are two numbers from 0 to below 1, not {self.betas!r}.")
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"Adam's betas are two numbers from 0 to below 1, not {self.betas}.")
        _require_at_least_zero(self, "weight_decay", "proximal_mu", "eps")

    @property
    def name(self) -> str:
        """For a reader."""
        return "AdamW" if self.decoupled else "Adam"

    def left(self, curvature: Tensor, rate: float, steps: float, moment: float = 0.0) -> Tensor:
        """What so many steps leave of a displacement of 1, where ``moment`` is the root mean square of a gradient."""
        return next(self.lefts(curvature, rate, (steps,), moment))

    def lefts(
        self, curvature: Tensor, rate: Numbers, steps: Sequence[float], moment: Numbers = 0.0
    ) -> Iterator[Tensor]:
        """The same after each of several numbers of steps."""
        least = moment if isinstance(moment, float) else float(moment.min())
        if not least + self.eps > 0:
            raise RequestError(f"{self.name} was recorded without second moments: record them with every update.")
        first, length = self.betas[0], rate / (moment + self.eps)
        rigid = curvature if self.decoupled else curvature + self.weight_decay
        decay = self.weight_decay if self.decoupled else 0.0
        start = torch.ones_like(rigid * length)
        length = length if isinstance(length, Tensor) else start.new_tensor(length)

        def step(x: Tensor, mean: Tensor, number: int) -> tuple[Tensor, Tensor]:
            mean = torch.lerp(mean, pulled_back(rigid * x, x, self.proximal_mu), 1 - first)
            beside = x * (1 - rate * decay) if decay else x
            return torch.addcmul(beside, length, mean, value=-1 / (1 - first**number)), mean

        yield from (stable(kept) for kept in run(step, start, steps))


def AdamW(  # noqa: N802 - torch's name
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01, proximal_mu: float = 0.0
) -> Adam:
    """Adam with decoupled weight decay, torch's default of it.

    Example:
        >>> AdamW().name, AdamW().weight_decay
        ('AdamW', 0.01)
    """
    return Adam(betas, eps, weight_decay, decoupled=True, proximal_mu=proximal_mu)


@dataclass(frozen=True)
class Measured:
    """An optimiser of your own whose recursion nobody has written down: how it answers is measured when it is needed.

    A few of those who stay train one round from the model and one from a displaced one, and each layer gets the rate
    with which SGD would explain the difference (unlearning/rates.py). Only where clients train in this process.

    Attributes:
        train: ``train(model, name)`` trains the model in place for one local round of that client, as it did in the
            last round. What is random in it should come from torch's own generator, which is the same both times.

    Example:
        >>> Measured(lambda model, name: None).name
        'an optimiser that is measured'
    """

    train: Callable[[torch.nn.Module, str], object]

    adaptive = False
    name = "an optimiser that is measured"

    def __post_init__(self) -> None:
        if not callable(self.train):
            raise RequestError(f"Measured takes a function, train(model, name), not {_named(self.train)}.")

    def left(self, curvature: Tensor, rate: float, steps: float, moment: float = 0.0) -> Tensor:
        """As SGD with the stated rate; it stands in until it has been measured."""
        return SGD().left(curvature, rate, steps, moment)

    def lefts(
        self, curvature: Tensor, rate: Numbers, steps: Sequence[float], moment: Numbers = 0.0
    ) -> Iterator[Tensor]:
        """The same after each of several numbers of steps."""
        return SGD().lefts(curvature, rate, steps, moment)


@dataclass(frozen=True)
class Scaled:
    """SGD with a rate of its own for each layer: what a measured optimiser comes to; ``moment`` divides the rate."""

    adaptive = True
    name = "a measured optimiser"

    def left(self, curvature: Tensor, rate: float, steps: float, moment: float = 0.0) -> Tensor:
        """What so many steps leave of a displacement of 1."""
        return next(self.lefts(curvature, rate, (steps,), moment))

    def lefts(
        self, curvature: Tensor, rate: Numbers, steps: Sequence[float], moment: Numbers = 0.0
    ) -> Iterator[Tensor]:
        """The same after each of several numbers of steps."""
        moments = torch.as_tensor(moment, dtype=curvature.dtype, device=curvature.device)
        return SGD().lefts(curvature, torch.where(moments > 0, rate / moments, 0.0), steps)


@dataclass(frozen=True)
class FedAvg:
    """The server adds the mean update, times its rate: 1 in plain FedAvg."""

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "learning_rate")

    @property
    def name(self) -> str:
        """For a reader."""
        return "FedAvg"

    def apply(self, moved: Tensor, momentum: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """The displacement and the momentum after a round whose mean update changed so."""
        return torch.add(moved, change, alpha=self.learning_rate), momentum


@dataclass(frozen=True)
class FedAvgM:
    """Momentum on the server, as Flower has it: ``M <- beta M + mean update``, then a step of rate x M."""

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_positive(self, "learning_rate")
        _require_between(self, 0.0, 1.0, "momentum")

    @property
    def name(self) -> str:
        """For a reader."""
        return "FedAvgM"

    def apply(self, moved: Tensor, momentum: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """The displacement and the momentum after a round whose mean update changed so."""
        momentum = self.momentum * momentum + change
        return moved + self.learning_rate * momentum, momentum


@dataclass(frozen=True)
class AdaptiveServer:
    """FedAdam, FedYogi or FedAdagrad: known by name, so that they can be refused by name.

    Their rate differs from coordinate to coordinate and holds the leaver's updates in its second moments.
    """

    name: str


ServerRule = FedAvg | FedAvgM | AdaptiveServer

FedAdam, FedYogi, FedAdagrad = (AdaptiveServer(name) for name in ("FedAdam", "FedYogi", "FedAdagrad"))


def refusal(server: ServerRule) -> str:
    """Why a client cannot be taken back out of what this server rule has trained, and what can be done."""
    return (
        f"{server.name} divides by moments that hold the leaver's updates, and a pull cannot be followed through them: "
        "choose method='hf-kcu', which looks at the end only, or retrain; FedAvg and FedAvgM can be followed."
    )


@dataclass(frozen=True)
class Recipe:
    """How a federation trains: the rule on the clients and the rule on the server.

    Example:
        >>> str(Recipe(AdamW(), FedAvgM(momentum=0.5)))
        'AdamW on the clients, FedAvgM on the server'
    """

    client: ClientRule = field(default_factory=SGD)
    server: ServerRule = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        _require_rules(self.client, self.server)

    def __str__(self) -> str:
        return f"{self.client.name} on the clients, {self.server.name} on the server"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a rule of your own is only named."""
        return {"client": _written(self.client), "server": _written(self.server)}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], client: ClientRule | None = None) -> Recipe:
        """Read it back; a client rule of your own has to be given again.

        Example:
            >>> Recipe.from_dict(Recipe(Adam(), FedAvgM()).as_dict()) == Recipe(Adam(), FedAvgM())
            True
        """
        kinds: dict[str, Callable[..., Any]] = {
            rule.__name__: rule for rule in (SGD, Adam, FedAvg, FedAvgM, AdaptiveServer)
        }
        parts: dict[str, Any] = {}
        for role in ("client", "server"):
            if role == "client" and client is not None and written[role]["rule"] == type(client).__name__:
                parts[role] = client
                continue
            kind, values = written[role]["rule"], {k: v for k, v in written[role].items() if k != "rule"}
            if kind not in kinds:
                raise RequestError(f"The training's {role} rule was {kind}, which is not one of ours: give it again.")
            parts[role] = kinds[kind](**values)
        return cls(**parts)


def as_recipe(given: object) -> Recipe:
    """What is given as a recipe; plain SGD and averaging where nothing is.

    Example:
        >>> as_recipe(SGD(momentum=0.9))
        Traceback (most recent call last):
        expunge.errors.RequestError: How a federation trains is stated as a Recipe, such as ...
    """
    if given is None:
        return Recipe()
    if not isinstance(given, Recipe):
        raise RequestError(
            "How a federation trains is stated as a Recipe, such as Recipe(SGD(momentum=0.9)), of expunge's own rules, "
            f"not as {_named(given)}; clients that are watched (memory.watching) need none."
        )
    return given


def second_moments(optimiser: torch.optim.Optimizer) -> list[float]:
    """The root mean square gradient of each parameter as Adam has it at a round's end: what a client sends beside it.

    Args:
        optimiser: ``torch.optim.Adam`` or ``AdamW`` after the round's last step.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimiser = torch.optim.Adam([weight], lr=0.1)
        >>> (3 * weight).sum().backward()
        >>> optimiser.step()
        >>> [round(moment, 4) for moment in second_moments(optimiser)]
        [3.0]
    """
    means: list[Tensor] = []
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            state = optimiser.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                if state or parameter.grad is not None:
                    raise RequestError(
                        f"{type(optimiser).__name__} keeps no second moments that can be read: describe its recursion."
                    )
                means.append(torch.zeros((), dtype=torch.float64, device=parameter.device))  # never touched
                continue
            squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])  # AMSGrad divides by the largest so far
            made = torch.as_tensor(state["step"], device=squares.device).double()
            means.append(squares.double().mean() / (1 - group["betas"][1] ** made))
    if not means:
        return []
    told: list[float] = torch.stack([mean.to(means[0].device) for mean in means]).sqrt().tolist()  # one transfer
    return told


def _written(rule: Any) -> dict[str, Any]:
    known = isinstance(rule, SGD | Adam | FedAvg | FedAvgM | AdaptiveServer)
    return {"rule": type(rule).__name__, **(asdict(rule) if known else {})}


def _named(given: object) -> str:
    """For a sentence, in one line."""
    kind = given if isinstance(given, type) else type(given)
    return repr(given) if isinstance(given, str | int | float | None) else f"{kind.__module__}.{kind.__qualname__}"


def _require_rules(client: object, server: object) -> None:
    if isinstance(client, type) or not all(hasattr(client, own) for own in ("name", "adaptive", "left")):
        raise RequestError(
            f"The clients' rule of a Recipe is one of expunge's, made with its settings, such as SGD(momentum=0.9), or "
            f"one of your own with name, adaptive and left; not {_named(client)}."
        )
    if not isinstance(server, ServerRule):
        raise RequestError(
            "The server's rule of a Recipe is one of expunge's, made with its settings, such as FedAvgM(momentum=0.9), "
            f"not {_named(server)}."
        )


def _require_numbers(rule: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(rule, name), Real):
            raise RequestError(
                f"The {name} of {type(rule).__name__} must be a number, not {_named(getattr(rule, name))}."
            )


def _require_positive(rule: Any, *names: str) -> None:
    _require_numbers(rule, *names)
    for name in names:
        if not 0 < getattr(rule, name) < math.inf:
            raise RequestError(f"The {name} of {type(rule).__name__} must be above 0, not {getattr(rule, name)}.")


def _require_at_least_zero(rule: Any, *names: str) -> None:
    _require_numbers(rule, *names)
    for name in names:
        if not 0 <= getattr(rule, name) < math.inf:
            raise RequestError(f"The {name} of {type(rule).__name__} must be at least 0, not {getattr(rule, name)}.")


def _require_between(rule: Any, low: float, high: float, *names: str) -> None:
    _require_numbers(rule, *names)
    for name in names:
        if not low <= getattr(rule, name) < high:
            value = getattr(rule, name)
            raise RequestError(f"The {name} of {type(rule).__name__} lies from {low:g} to below {high:g}, not {value}.")
