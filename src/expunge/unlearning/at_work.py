"""Curvature where those who stay train: at each one's own model, half way through its round, and how it is spread.

A round's answer to a displaced model is given on the clients' ways through it, not at the mean that the server has. On
its way a client fits its own data, which then curves less. The middle stands for the way (the midpoint rule):

    theta + d_u / 2,        d_u the client drift: how far u led from the mean in a round, on average

which u's own vector tells, so nobody is asked for more. Beside a training from the same start without the leaver
(adapters that had learnt by heart; docs/method.md) factors there told what those who stay answered within a tenth, and
those at the mean half as much again, or nearly twice as much.

Factors also take directions for alike that are not: what a pull lost were the stiff ones among them, and what is left
of it are the others. One exact product along the pull tells how stiff these are on average and how that is spread
(`KroneckerCurvature.spread`); the filter is the mean over a gamma distribution with both moments (filters.py).

That is for adapters under Adam. Of convolutional networks under Adam the factors come from there, too, and those who
stay are asked beside them (answers.py): what they answer is then nearer to what factors tell (0.97, 0.91 and 0.34 times
it on three federations of client 0; 0.70, 0.62 and 0.17 with factors at the mean), and so is the result to retraining.

Where it fails: a drift is a mean over rounds, so it does not tell of one in which a client went elsewhere. On an
encoder trained whole a few unsure samples had most of the spread, and far too much was taken out, with factors at the
clients' own models, too; such models are looked at the mean. So are all where the drifts would not fit (`ROOM`).
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.recipe import Adam
from expunge.unlearning.answers import Answer
from expunge.unlearning.estimate import LOUD
from expunge.unlearning.retained import Retained, has_statistics

ROOM = 1 << 28
"""So many numbers may the drifts of those who stay be together: everybody is sent a model of its own."""

MOST = 4.0
"""No more spread is believed: it was about 1 on adapters that had learnt by heart, and a single client can claim it."""


def is_at_work(state: ServerState) -> bool:
    """Whether curvature is looked at where those who stay train: of adapters and convolutions under Adam."""
    layout = state.model.layout
    fits = layout is not None and (layout.has_adapters or (layout.convolves and not has_statistics(state.model)))
    return fits and state.memory is not None and isinstance(state.trained_by.client, Adam)


def is_adapted(state: ServerState) -> bool:
    """Whether it is adapters whose curvature is looked at there."""
    return is_at_work(state) and state.model.layout is not None and state.model.layout.has_adapters


def at_work(stay: Retained, memory: Memory) -> Retained:
    """The same, whose curvature is that of their own models half way through a round.

    Who is much louder than others was not where its updates led: it is looked at the mean.
    """
    if len(stay.clients) * (memory.size or 0) > ROOM:
        return stay
    known = {name: memory.drift(name) for name in stay.clients}
    drifts = {name: drift for name, drift in known.items() if drift is not None}
    lengths = {name: float(drift.norm()) for name, drift in drifts.items()}
    most = LOUD * statistics.median(lengths.values()) if lengths else 0.0
    return replace(stay, drifts={name: drift / 2 for name, drift in drifts.items() if lengths[name] <= most})


def told(curvature: KroneckerCurvature, vector: Tensor, product: Tensor) -> Answer:
    """How stiff those who stay are along a vector, and how that is spread, given the exact product with it."""
    spread = curvature.spread(vector, product)
    return Answer(curvature.coupling(vector, product), beyond=spread > MOST, spread=min(spread, MOST))
