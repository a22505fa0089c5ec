"""How much of a client's pull is left at the end of a training, measured, beside what the training's response tells.

Retraced is ``f(G) A``: the pull A, filtered along directions of curvature e by the training's own response f. What it
should be is known where one can afford to retrain: D, the trained model minus one retrained without the client from
the same start on the same batches. So along the eigenvectors of those who stay (K-FAC), over the coordinates whose
curvature lies between two bounds,

    measured   <D, A> / <A, A>            predicted   <f(G) A, A> / <A, A>

Curvature is told in units of the layer's own cut-off, 1 / (rate x steps x rounds) under plain SGD: at 1 the response
falls off, whichever the training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.bench.cells import ForgottenCell, Kept, RetrainedCell, TrainedCell
from expunge.bench.results import Series
from expunge.bench.scales import Scale
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.bench.trainings import plans
from expunge.core.kronecker import Filter, KroneckerCurvature
from expunge.errors import RequestError
from expunge.unlearning.pulls import Pull, recorded
from expunge.unlearning.retained import Retained

CONTENDERS = (Contender("retrace"),)
SEEDS = {"smoke": (10,), "small": (20, 21, 22, 23), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
TRAININGS = ("SGD", "Adam", "FedAvgM")
CLEAN, WEAK, STRONG = "clean", "weak backdoor", "strong backdoor"
RETRAINS = 3
"""Models of fresh initialisations: for the rows beside the curves, which need none."""
EDGES = tuple(10.0 ** (half / 2) for half in range(-8, 5))
"""Bounds of curvature in units of the cut-off, two a decade; what lies outside is in the first and the last bin."""
LEAST = 1e-4
"""A bin that holds less of the pull's squared length says nothing."""
X_NAME = "curvature, in units of the cut-off"
LEFT, LENGTH = "share of the pull that is left", "share of the pull's squared length"
MEASURED, PREDICTED = "measured", "predicted"


@dataclass(frozen=True)
class Bin:
    """The coordinates whose curvature lies between two bounds.

    Attributes:
        curvature: the middle of the bounds, in units of the cut-off.
        measured: how much of the pull is in the trained model and not in the retrained one.
        predicted: how much the training's response says.
        length: the share of the pull's squared length in these coordinates.
    """

    curvature: float
    measured: float
    predicted: float
    length: float


def response(scale: Scale) -> list[Setting]:
    """A client leaves three trainings: clean, with a weak backdoor, with a strong one."""
    own = scale.on("fashion-mnist") if scale.name == "paper" else scale
    leaver, retrains = scale.leaver, min(RETRAINS, scale.retrains)
    who = {
        CLEAN: own.base,
        WEAK: own.attacked(leaver),
        STRONG: own.attacked(leaver, strong=True),
    }
    ways = {name: plans(scale, 1 if scale.is_smoke else 2)[name] for name in TRAININGS}
    return [
        Setting(
            f"{name}, {kind}",
            dataclasses.replace(scenario, plan=plan),
            (Forget((leaver,)),),
            CONTENDERS,
            retrains,
            same_init=1,
        )
        for name, plan in ways.items()
        for kind, scenario in who.items()
    ]


def responses(setting: Setting, _finished: dict[str, Kept], store: Store) -> list[Series]:
    """What is left by curvature in one setting: measured, predicted, and where the pull lies."""
    scenario, (forget,) = setting.scenario, setting.forgets
    state = store.kept(TrainedCell(scenario)).state
    retrained = store.kept(RetrainedCell(scenario, forget, 0, fresh=False)).state
    federation, engine = store.engine(scenario)
    options = ForgottenCell(scenario, setting.contenders[0], setting.forgets).configured().options
    parties = forget.request(federation).parties(engine.clients())
    stay = Retained.of(engine, state, parties, seed=options.seed)
    stay = stay.looking_at(options.samples(sum(stay.left.values())))
    difference = state.model.parameters - retrained.model.parameters
    found = by_curvature(stay.factors(state.model), recorded(state, forget.clients), difference)
    x = [each.curvature for each in found]
    return [
        Series(MEASURED, setting.label, X_NAME, LEFT, x, [each.measured for each in found]),
        Series(PREDICTED, setting.label, X_NAME, LEFT, x, [each.predicted for each in found]),
        Series(MEASURED, setting.label, X_NAME, LENGTH, x, [each.length for each in found]),
    ]


def by_curvature(
    curvature: KroneckerCurvature, pull: Pull, difference: Tensor, edges: Sequence[float] = EDGES
) -> list[Bin]:
    """What is left of a pull, measured and predicted, bin by bin; bins that hold next to nothing of it are left out.

    Args:
        curvature: of those who stay.
        pull: of those who leave, with the training's response to it.
        difference: the trained model minus one retrained without them, from the same start on the same batches.
        edges: bounds between the bins, in units of the cut-off, from the lowest; outside are two bins more.

    Raises:
        RequestError: the response is not known.
    """
    response = pull.response
    if response is None:
        raise RequestError("How the clients trained is not known, so no response can be told: record rates and steps.")
    bounds = torch.tensor(edges, dtype=torch.float64)
    whole, told = pull.total, pull.left(curvature.apply)
    total = _dot(whole, whole)

    def within(number: int) -> Filter:
        def inside(values: Tensor, names: Sequence[str]) -> Tensor:
            places = torch.bucketize(response.travel(names) * values.double(), bounds.to(values.device))
            return (places == number).to(values)

        return inside

    found = []
    for number in range(len(edges) + 1):
        part = curvature.apply(within(number), whole)
        length = _dot(part, whole)
        if length > LEAST * total:
            measured, predicted = _dot(part, difference) / length, _dot(part, told) / length
            found.append(Bin(_middle(edges, number), measured, predicted, length / total))
    return found


def _dot(one: Tensor, other: Tensor) -> float:
    return float(one.double() @ other.double())


def _middle(edges: Sequence[float], number: int) -> float:
    """Of a bin; of one that is open to a side, half a bin beyond its bound."""
    step = math.sqrt(edges[1] / edges[0])
    return edges[number] / step if number < len(edges) else edges[-1] * step
