"""The rule of a Flower strategy's server, read from the strategy, and the momentum that it goes on with.

Flower's FedAvgM (flwr 1.41) keeps a ``momentum_vector`` with the sign of a gradient, ``V <- beta V - mean update``, and
takes a step of ``-rate x V``: with ``V = -M`` that is our FedAvgM. A momentum of 0 leaves the mean times the rate. In
the old API it forgets its momentum in round 1 of every run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.server.strategy import FedOpt as OldFedOpt
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.fedopt import FedOpt
from torch import Tensor

from expunge.errors import RequestError
from expunge.federation.engines.flower.legacy import Modern
from expunge.federation.keeping.place import Place
from expunge.federation.training.recipe import FedAvg, FedAvgM

ServerRule = FedAvg | FedAvgM
"""The rules that can be followed."""


def server_rule(strategy: Strategy) -> ServerRule:
    """What the strategy says that it does with the mean; whether it does so is checked in every round.

    FedAdam and its like are refused, before anybody trains.

    Example:
        >>> from flwr.serverapp import strategy
        >>> server_rule(strategy.FedAvgM(server_momentum=0.9))
        FedAvgM(learning_rate=1.0, momentum=0.9)
    """
    own = _inside(strategy)
    if isinstance(own, FedOpt | OldFedOpt):
        raise RequestError(
            f"{type(own).__name__} divides by moments that hold the leaver's updates, and a pull cannot be followed "
            "through them: use FedAvg or FedAvgM, or train without a Recorder and forget by hf-kcu (docs/flower.md)."
        )
    rate, momentum = getattr(own, "server_learning_rate", 1.0), getattr(own, "server_momentum", 0.0)
    if not getattr(own, "server_opt", True):  # what FedAvgM has settled when it was made
        rate, momentum = 1.0, 0.0
    return FedAvgM(float(rate), float(momentum)) if momentum > 0 else FedAvg(float(rate))


def require_followed(name: str, rule: ServerRule, before: Place, mean: Tensor, after: Tensor, sites: int) -> None:
    """Refuse a strategy whose result is not, up to rounding, what its rule makes of the sites' mean update."""
    momentum = torch.zeros_like(mean) if before.momentum is None else before.momentum.to(mean)
    expected, _ = rule.apply(before.now.to(mean), momentum, mean)
    size = float(after.norm()) + float((after - before.now).norm())
    if float((expected - after).norm()) <= (100 + sites) * torch.finfo(after.dtype).eps * size:
        return
    rest = "and only then can their parts be told apart: use FedAvg or FedAvgM, or train without a Recorder."
    if rule == FedAvg():
        raise RequestError(f"{name} does not take the plain weighted mean of the sites' models, {rest}")
    raise RequestError(f"{name} does not do what {rule} does with the sites' weighted mean, {rest}")


def proximal_mu(strategy: Strategy) -> float:
    """FedProx's factor, which its clients must use."""
    return float(getattr(_inside(strategy), "proximal_mu", 0.0))


def go_on_with(strategy: Strategy, momentum: Mapping[str, Tensor] | None, arrays: ArrayRecord) -> None:
    """Give the strategy the model and the momentum that the store has: its own may be older, or hold somebody who left.

    Args:
        strategy: any; only those with a momentum are touched.
        momentum: the server's, by names of arrays; of what it does not name (buffers) the momentum begins anew.
        arrays: the model that the run begins with.
    """
    own = _inside(strategy)
    if not hasattr(own, "momentum_vector"):
        if momentum is not None:
            raise RequestError(
                f"{type(own).__name__} has no momentum_vector to go on with: go on with "
                "flwr.serverapp.strategy.FedAvgM, or choose a new folder."
            )
        return
    if isinstance(strategy, Modern) and momentum is not None:
        raise RequestError(
            f"{type(own).__name__} of flwr.server.strategy forgets its momentum in round 1 of every run, and the store "
            "goes on with one: go on with flwr.serverapp.strategy.FedAvgM, or choose a new folder."
        )
    own.momentum_vector = None if momentum is None else [_opposite(momentum.get(name), arrays[name]) for name in arrays]
    if hasattr(own, "current_arrays"):
        own.current_arrays = None  # the next round's take its place


def _opposite(momentum: Tensor | None, array: object) -> object:
    like = array.numpy()  # type: ignore[attr-defined]
    return np.zeros_like(like) if momentum is None else (-momentum).cpu().numpy().astype(like.dtype).reshape(like.shape)


def _inside(strategy: Strategy) -> object:
    return strategy.legacy if isinstance(strategy, Modern) else strategy
