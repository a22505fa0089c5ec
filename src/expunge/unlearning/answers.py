"""How stiff those who stay are under Adam: how fast they correct a displaced model, beside what the response tells.

The response takes one rate for all of a layer, and layers one by one. Neither holds: Adam's rates differ between
coordinates, layers over tokens curve together, and a large displacement is corrected more slowly. Those who stay can
show what comes of it all. Some of them train a few steps from the model and, on the same batches, from one displaced
against what the response takes for worn down, ``d = -(A - f(G) A) / 5``. Stiffness is how many times the curvature
explains what is left of d,

    < d, (1 - rate k G)^s d >  =  < d, d + update(theta + d) - update(theta) >

and the median over those asked is taken, so that one of three who lies does not choose it; of fewer, the value that
departs least from the response. On client 0 it was 3.4 and 3.8 for a
small GPT-2, whose retrained models want about 3, and 1.3 for a clean client of a CNN. Where it fails: a few steps at
the end of the training stand for all of it, and k is no constant. It falls with the steps and with the displacement,
under SGD too: on one CIFAR-10 federation of AdamW from 0.43 to 0.18 between the five ways that were tried, of which
this was chosen. Directions that factors take for alike are not, and the stiff ones among them answer first: adapters
that had learnt by heart told 1.6 in 4 steps and 0.7 in 32, so these are not asked (at_work.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature, Spectrum
from expunge.core.seeds import derived_seed
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Draw
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, Recipe
from expunge.federation.training.response import Response
from expunge.unlearning.estimate import ASKED, SMALLER, STEPS
from expunge.unlearning.pulls import Pull
from expunge.unlearning.retained import BATCH_SIZE, Retained

FEWEST, WORK = 4, 300
"""Steps of each from either start are so many at least, and no more than one in so many samples of the training."""

SETTLED = 8
"""Adam begins every round anew, and its first steps are about as long however steep the loss is: that they are less
stiff, fewer steps than these tell in part."""

SEEN = 1e-3
"""Where less than this share of the pull is worn down by what the response tells, nobody can tell how fast."""

DISPLACED = 0.2
"""The part of what the response takes for worn down by which the model is displaced."""

LEAST, MOST = 0.1, 8.0
"""Nobody is taken for less stiff than the first, or stiffer than the second."""


@dataclass(frozen=True, eq=False)
class Contraction:
    """``(1 - rate k e)^s``: what s steps leave of a displacement, by the mean rate of each layer.

    Attributes:
        response: of the training.
        steps: s.
        stiffness: k.
    """

    response: Response
    steps: float
    stiffness: float

    def __call__(self, curvature: Tensor, names: Sequence[str]) -> Tensor:
        """For one layer."""
        return self.at_once([(curvature, names)])[0]

    def at_once(self, spectra: Sequence[Spectrum]) -> list[Tensor]:
        """For all layers, by how far each travels in a step."""
        travels, all_steps = self.response.travels([names for _, names in spectra]), _steps(self.response)
        pairs = zip(spectra, travels, strict=True)
        return [SGD().left(values, self.stiffness * travel / all_steps, self.steps) for (values, _), travel in pairs]


@dataclass(frozen=True)
class Answer:
    """What those who stay answered.

    Attributes:
        stiffness: how many times as fast as the response tells they correct what it takes for worn down.
        beyond: whether what explains their answer lies at one of the bounds or beyond.
        spread: the stiffness's variance over its mean's square, where it differs between directions.
    """

    stiffness: float
    beyond: bool = False
    spread: float = 0.0


def answered(stay: Retained, state: ServerState, pull: Pull, curvature: KroneckerCurvature) -> Answer:
    """Ask some of those who stay how they answer a displaced model.

    Args:
        stay: those who stay, of whom a few are asked to train twice.
        state: the model and its schedule.
        pull: of those who leave, under Adam.
        curvature: of those who stay.
    """
    response = pull.response
    assert response is not None
    assert isinstance(response.recipe.client, Adam)
    response = replace(response, recipe=Recipe(response.recipe.client))  # of a round, whatever the server makes of it
    way = -DISPLACED * (pull.total - pull.left(curvature.apply))
    if float(way.norm()) <= SEEN * DISPLACED * float(pull.total.norm()):
        return Answer(1.0)
    plan, draws = _asked(stay, state, response)
    starts = (state.model, state.model.moved(state.model.parameters + way))
    plain, displaced = (stay.train(start, plan, draws=draws) for start in starts)
    found = {}
    for name, reply in plain.items():
        left = way + displaced[name].update - reply.update
        found[name] = _explaining(curvature, response, way, float(way @ left), reply.steps)
    if not found:
        return Answer(1.0)
    name = _typical(found)
    told, settled = found[name], min(1.0, plain[name].steps / SETTLED)
    return Answer(told**settled if told < 1 else told, beyond=not 1.05 * LEAST < told < MOST / 1.05)


def _typical(found: Mapping[str, float]) -> str:
    """Whose answer is taken: the median's (of an even number, of the two that which departs less from 1)."""
    ordered = sorted(found, key=lambda name: (found[name], name))
    if len(ordered) < 3:
        return min(ordered, key=lambda name: abs(math.log(found[name])))
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return min(middle, key=lambda name: abs(math.log(found[name])))


def _asked(stay: Retained, state: ServerState, response: Response) -> tuple[TrainingPlan, dict[str, Draw]]:
    """How they train, and on how many of their samples: those that no loss is looked at on come first."""
    names = sorted(stay.left, key=lambda name: (-stay.left[name], name))[:ASKED]
    works = [work for each in response.rounds for work in each.works]
    total = sum(work.share * work.steps for work in works)
    rate = sum(work.share * work.steps * work.learning_rate for work in works) / total
    whole = state.schedule.batch_size if state.schedule is not None else BATCH_SIZE
    trained, batch = response.steps * whole, max(1, whole // SMALLER)
    steps = min(max(FEWEST, int(trained / WORK / (2 * len(names) * batch))), STEPS)
    seed = derived_seed(stay.seed, "answers")
    plan = TrainingPlan(1, 1, batch, rate, recipe=Recipe(response.recipe.client), seed=seed)
    return plan, {name: Draw(min(stay.left[name], steps * batch), stay.seed) for name in names}


def _explaining(curvature: KroneckerCurvature, response: Response, way: Tensor, left: float, steps: float) -> float:
    """The stiffness that explains how much is left, between the least and the most, by halving its logarithm."""
    along = curvature.along(way)

    def kept(tried: float) -> float:
        return along(Contraction(response, steps, tried))

    low, high = math.log(LEAST), math.log(MOST)
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(math.exp(middle)) > left else (low, middle)
    return math.exp((low + high) / 2)


def _steps(response: Response) -> float:
    """Steps of a client in all rounds, on average over those who stay."""
    return sum(
        sum(work.share * work.steps for work in each.works) / each.total for each in response.rounds if each.total > 0
    )
