"""Rates of an optimiser that nobody has described, measured by those who stay.

From the model and from one displaced by d along the pull they train a round each. To first order the two updates differ
by ``(c(G) - 1) d``, c being what a round leaves of a displacement. In each layer the rate is taken with which SGD would
leave as much along d,

    < d, (1 - rate G)^s d >  =  < d, d + update(theta + d) - update(theta) >

with the s steps that were recorded. Where it fails: curvature between layers is in what is measured and not in G, and
a rule whose answer depends on how far the model is displaced has no one rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Layout
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import OwnRound, Task, Trained
from expunge.federation.training.fedavg import mean_update
from expunge.federation.training.recipe import SGD, Measured, Recipe, Scaled
from expunge.federation.training.response import Response
from expunge.unlearning.pulls import Pull
from expunge.unlearning.request import Parties

ASKED = 4
"""At most so many of those who stay are asked, those with most samples."""

DISPLACED = 0.3
"""The model is displaced by the pull, but by no more than this share of its own length: rules that look at signs alone
do not answer a small displacement at all."""

APART = 100.0
"""A layer's rate is taken for nonsense where it is so many times another than the model's as a whole."""


def with_measured_rates(
    engine: Engine, state: ServerState, parties: Parties, pull: Pull, curvature: KroneckerCurvature, seed: int
) -> Pull:
    """The pull with the response of an optimiser that is measured now; any other pull as it is."""
    response = pull.response
    if response is None or not isinstance(response.recipe.client, Measured):
        return pull
    if not isinstance(engine, LocalEngine):
        raise RequestError("An optimiser can be measured only where clients train in this process: use hf-kcu.")
    names = sorted(parties.retained, key=lambda name: (-parties.counts[name], name))[:ASKED]
    works = [work for each in response.rounds for work in each.works]
    steps = sum(work.share * work.steps for work in works) / sum(work.share for work in works)
    stated = _last_rate(response)
    way = _way(state, pull)
    left = way + _answer(engine, state, response.recipe.client, names, way, seed)
    whole, rates = solved(curvature, state.model.layers(), way, left, steps)
    moments = tuple(stated / rates.get(name, whole) for name, _ in state.model.layers().shapes)
    rounds = tuple(
        replace(each, works=tuple(replace(work, moments=moments) for work in each.works)) for each in response.rounds
    )
    found = replace(response, recipe=Recipe(Scaled(), response.recipe.server), rounds=rounds)
    spread = ", ".join(f"{rate:.3g}" for rate in sorted({*rates.values()})) or f"{whole:.3g}"
    note = (
        f"How the clients' optimiser answers was measured by {', '.join(names)}: as SGD with a learning rate of "
        f"{whole:.3g} in the last round, layer by layer {spread}, where {stated:.3g} was recorded."
    )
    return replace(pull, response=found, notes=(*pull.notes, note))


def solved(
    curvature: KroneckerCurvature, layout: Layout, way: Tensor, left: Tensor, steps: float
) -> tuple[float, dict[str, float]]:
    """The rate that explains what was left of a displacement: of the model as a whole, and by parameter of each layer.

    Args:
        curvature: of those who stay.
        layout: of the model.
        way: the displacement.
        left: of it, after a round.
        steps: of that round.
    """
    groups = dict[tuple[str, ...], None]()

    def look(values: Tensor, names: Sequence[str]) -> Tensor:
        groups[tuple(names)] = None
        return values

    top = float((way @ curvature.apply(look, way)) / (way @ way))
    parts = {
        names: torch.cat([torch.full(shape, float(name in names)).flatten() for name, shape in layout.shapes]).to(way)
        for names in groups
    }
    whole = _rate(partial(_kept, curvature, way, way, steps), way @ left, way @ way, top)
    if whole is None:
        raise RequestError(
            "Those who stay did not correct a displaced model, so no rate explains how their optimiser answers: "
            "check that train(model, name) trains the model that it is given, or use hf-kcu."
        )
    rates = dict[str, float]()
    for names, part in parts.items():
        own = part * way
        found = _rate(partial(_kept, curvature, way, own, steps), own @ left, own @ way, top)
        sound = found is not None and whole / APART <= found <= whole * APART
        rates |= dict.fromkeys(names, found if sound and found is not None else whole)
    return whole, rates


def _kept(curvature: KroneckerCurvature, way: Tensor, own: Tensor, steps: float, rate: float) -> Tensor:
    return own @ curvature.apply(lambda values, _: SGD().left(values, rate, steps), way)


def _rate(kept: Callable[[float], Tensor], left: Tensor, whole: Tensor, top: float) -> float | None:
    """The rate at which just so much is left, by halving its logarithm; None where nothing was corrected."""
    if not float(whole) > 0 or not float(left) < float(whole) * (1 - 1e-9) or not top > 0:
        return None
    low, high = math.log(1e-12 / top), math.log(2.0 / top)
    for _ in range(50):
        middle = (low + high) / 2
        above = float(kept(math.exp(middle))) > float(left)
        low, high = (middle, high) if above else (low, middle)
    return math.exp((low + high) / 2)


def _way(state: ServerState, pull: Pull) -> Tensor:
    """How the model is displaced: along the pull."""
    length, own = float(pull.total.norm()), float(state.model.parameters.norm())
    return pull.total * min(1.0, DISPLACED * own / length if length > 0 else 1.0)


def _answer(engine: Engine, state: ServerState, rule: Measured, names: list[str], way: Tensor, seed: int) -> Tensor:
    """By how much the mean update of these clients changes."""
    model = state.model
    found = []
    for start in (model, model.moved(model.parameters + way)):
        tasks = {name: OwnRound(start, rule, derived_seed(seed, "rates", name)) for name in names}
        found.append(mean_update(ask_each(engine, cast("Mapping[str, Task]", tasks), Trained)))
    return found[1] - found[0]


def _last_rate(response: Response) -> float:
    """The mean learning rate of the last round in which somebody who stays took part."""
    works = next(each.works for each in reversed(response.rounds) if each.works and not each.plain)
    total = sum(work.share for work in works)
    return sum(work.share * work.learning_rate for work in works) / total
