"""What a server may ask of a client, and what comes back: small frozen messages.

Replies that are averaged over clients come as plain sums (a total and a count), so that an aggregator that only
ever sees sums suffices. Nothing per-sample is in any reply. Each reply says what it cost in sample-gradients:
a forward pass counts 1/3, a gradient 1, a curvature product 2, whatever the implementation does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from expunge.core.curvature import Kind
from expunge.core.kronecker import Block
from expunge.core.krylov import NegativeCurvature, Solution
from expunge.core.vectors import Snapshot
from expunge.federation.training.recipe import SGD, Adam, Measured

FORWARD_COST = 1 / 3
PRODUCT_COST = 2.0

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """Which of its samples a client uses: ``size`` of them in a seeded random order, from the front or the back.

    Front and back of one order overlap only where the client has fewer than both together, so the length of a step
    can be checked on samples that did not choose its direction.
    """

    size: int
    seed: int
    from_back: bool = False


@dataclass(frozen=True, eq=False)
class Train:
    """Train the model on local data (or a draw of it) by SGD or Adam, begun anew, and send back the update.

    ``averaged`` asks for the mean of the models after each step of the later half (with the middle one) instead of the
    last model: where SGD has come to, without the noise of its last steps. Buffers are those of the last step. Whoever
    is thrown off by its steps stays where it was.
    """

    model: Snapshot
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    exclude: Indices = ()
    draw: Draw | None = None
    averaged: bool = False
    optimiser: SGD | Adam = field(default_factory=SGD)


@dataclass(frozen=True, eq=False)
class OwnRound:
    """One local round by the user's own function; for clients in this process, since no message can hold a function."""

    model: Snapshot
    rule: Measured
    seed: int


@dataclass(frozen=True, eq=False)
class Ascend:
    """Walk away from samples: SGD that raises their loss, in evaluation mode, without the L2 term.

    Attributes:
        model: where to start.
        epochs: passes over the samples.
        batch_size: of SGD.
        learning_rate: of SGD.
        seed: of the shuffling.
        only: these samples; None is all of them.
        bounded: lower ``-log(1 - exp(-l)/2)`` instead of raising ``l``; under cross-entropy ``exp(-l)`` is the
            probability of the true class.
        max_norm: a longer gradient is scaled down to this norm.
        radius: after every step, project back into the ball of this radius around the start.
        stop_accuracy: stop at the first batch, before its step, of which a smaller share is classified right.
    """

    model: Snapshot
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    only: Indices | None = None
    bounded: bool = False
    max_norm: float | None = None
    radius: float | None = None
    stop_accuracy: float | None = None


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of the mean local loss: ``only`` of these samples, or of (a draw of) all but the excluded ones."""

    model: Snapshot
    only: Indices | None = None
    exclude: Indices = ()
    draw: Draw | None = None


@dataclass(frozen=True, eq=False)
class CurvatureProduct:
    """Products of the local curvature (on a draw of samples) with the rows of ``vectors``."""

    model: Snapshot
    vectors: Tensor
    kind: Kind
    draw: Draw | None = None
    exclude: Indices = ()


@dataclass(frozen=True, eq=False)
class CurvatureFactors:
    """Kronecker factors of the local curvature (on a draw of samples), in one flat vector; ``seed`` draws targets."""

    model: Snapshot
    seed: int
    draw: Draw | None = None
    exclude: Indices = ()


@dataclass(frozen=True, eq=False)
class LocalSolve:
    """Algorithm 1, lines 4 to 14: ``(H_i + damping) v = grad l_i(theta; D_u)`` with the client's own curvature."""

    model: Snapshot
    iterations: int
    damping: float
    kind: Kind
    negative_curvature: NegativeCurvature
    only: Indices | None = None


@dataclass(frozen=True, eq=False)
class Losses:
    """The mean local loss at ``theta - t direction`` for every t in ``lengths``: a line search in one message."""

    model: Snapshot
    direction: Tensor
    lengths: tuple[float, ...]
    draw: Draw | None = None
    exclude: Indices = ()


@dataclass(frozen=True, eq=False)
class NormStatistics:
    """Batch-norm statistics of the local data (or a draw of it) under the model."""

    model: Snapshot
    batch_size: int
    exclude: Indices = ()
    draw: Draw | None = None


Task = Train | Ascend | Gradient | CurvatureProduct | CurvatureFactors | LocalSolve | Losses | NormStatistics


@dataclass(frozen=True, eq=False)
class Trained:
    """A client's update ``theta_i - theta``, its buffers, and how many samples and steps stand behind it.

    ``count`` is the update's weight: all available samples, also where it was made on a draw of them. ``moments`` are
    the optimiser's second moments (training/recipe.py), where it is Adam.
    """

    update: Tensor
    buffers: Mapping[str, Tensor]
    count: int
    steps: int
    sample_gradients: float
    moments: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Sum:
    """``count`` times a local mean: adding these up over clients and dividing by the counts gives the mean.

    ``blocks`` says which layers' factors the total holds, where it holds factors: the same for all clients.
    """

    total: Tensor
    count: int
    sample_gradients: float
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, eq=False)
class Solved:
    """A client's own solve: the solution with its diagnostics, and the norm of the gradient it started from."""

    solution: Solution
    gradient_norm: float
    sample_gradients: float


@dataclass(frozen=True, eq=False)
class Buffers:
    """A client's buffers, re-estimated, and its sample count."""

    buffers: Mapping[str, Tensor]
    count: int
    sample_gradients: float


Reply = Trained | Sum | Solved | Buffers


def payload_bytes(message: Task | Reply | Solution, *, model_is_known: bool = False) -> int:
    """Bytes of all tensors in a message; a model that the receiver knows already is only named.

    Example:
        >>> import torch
        >>> payload_bytes(Sum(torch.zeros(10), 1, 0.0))
        40
    """
    total = 0
    for part in fields(message):
        total += _value_bytes(getattr(message, part.name), model_is_known)
    return total


def _value_bytes(value: Any, model_is_known: bool) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Snapshot):
        return 0 if model_is_known else value.stored_bytes
    if isinstance(value, Solution):
        return payload_bytes(value)
    if isinstance(value, Mapping):
        return sum(_value_bytes(entry, model_is_known) for entry in value.values())
    return 0
