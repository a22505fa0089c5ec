"""Real clients: one of four hospitals leaves, by logistic regression with a certificate and by a small network.

Each hospital leaves in turn, and none is like another (`expunge.data.hospitals`). How the models train was chosen on
Cleveland and seeds below 10. Logistic regression trains by full gradients with an L2 term, so that all trainings end at
one optimum: there a certificate bounds the distance to it (auditing/certificate.py), and Newton steps of those who stay
make it as small as one likes, which is exact removal. Two settings of it were tried: with an L2 term of 0.01 and a rate
of 0.5 two hundred rounds do not reach the optimum, and retrained models differ by their starts.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from expunge.auditing.budget import Budget
from expunge.auditing.certificate import Certificate, certify
from expunge.auditing.residual import newton_reference
from expunge.bench.cells import Kept
from expunge.bench.results import Results, Series
from expunge.bench.runner import Experiment, run
from expunge.bench.scales import Scale
from expunge.bench.scenario import Federation, Scenario
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.core.vectors import Snapshot
from expunge.data import NATURAL
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request

HOSPITALS = NATURAL["hospitals"]
SEEDS = {"smoke": (10,), "small": (20, 21, 22), "paper": (20, 21, 22)}
"""Seeds that nothing was chosen on."""
LEAVER = "budapest"
"""Who leaves in the demonstration."""
RETRAINS = 5
LOGISTIC = Scenario(
    dataset="hospitals",
    model="softmax",
    clients=len(HOSPITALS),
    plan=TrainingPlan(rounds=200, epochs=1, batch_size=1000, learning_rate=1.0),
    l2=0.05,
)
NETWORK = dataclasses.replace(
    LOGISTIC, model="mlp", plan=TrainingPlan(rounds=20, epochs=5, batch_size=32, learning_rate=0.05), l2=0.0
)
MODELS = {"logistic regression": LOGISTIC, "a small network": NETWORK}
CONTENDERS = (Contender("fine-tuning"), Contender("hf-kcu"), Contender("retrace"))
BUDGET = Budget(sigma=0.02, epsilon=1.0, delta=1e-5)
"""The noise on a release and the claim about it, fixed before anybody leaves."""
NEWTON_STEPS = 3
STEPS, BOUND = "Newton steps after retrace", "certified distance to the retrained optimum"


def hospitals(scale: Scale) -> list[Setting]:
    """Every hospital leaves, from either model; to see that it runs, one."""
    names = HOSPITALS[-1:] if scale.is_smoke else HOSPITALS
    return leaving(names, 3 if scale.is_smoke else RETRAINS)


def leaving(names: Sequence[str], retrains: int = RETRAINS) -> list[Setting]:
    """The settings in which these hospitals leave, each alone."""
    return [
        Setting(f"{model}, {name} leaves", scenario, (Forget((name,)),), CONTENDERS, retrains)
        for model, scenario in MODELS.items()
        for name in names
    ]


def certified(setting: Setting, finished: dict[str, Kept], store: Store) -> list[Series]:
    """The certificate's bound on the distance after retrace, and after Newton steps from there; where there is one."""
    if "retrace" not in finished or not setting.scenario.l2:
        return []
    federation, forget = store.federation(setting.scenario), setting.forgets[-1]
    found = certificates(federation, finished["retrace"].state.model, forget.request(federation))
    bounds = [certificate.distance_bound for certificate in found]
    return [Series("retrace", setting.label, STEPS, BOUND, [float(step) for step in range(len(bounds))], bounds)]


def certificates(federation: Federation, model: Snapshot, request: Request) -> list[Certificate]:
    """Of the model, and of those that Newton steps of the retained clients lead to from it."""
    engine = federation.engine()
    retained = request.parties(engine.clients()).retained
    found = []
    for step in range(NEWTON_STEPS + 1):
        found.append(certify(engine, federation.model, federation.loss, model, retained, BUDGET))
        if step < NEWTON_STEPS:
            model = newton_reference(engine, model, retained, iterations=model.parameters.numel())
    return found


def run_hospitals(seeds: Sequence[int] = SEEDS["small"][:1], *, progress: Progress | None = None) -> Results:
    """One hospital leaves, from either model: what `expunge demo hospitals` shows."""
    experiment = dataclasses.replace(EXPERIMENT, settings=lambda _scale: leaving((LEAVER,)))
    scale = Scale("small", LOGISTIC, tuple(seeds), RETRAINS, RETRAINS, same_init=1)
    with tempfile.TemporaryDirectory() as folder:
        return run(experiment, scale, seeds, Store(Path(folder)), progress=progress)


def certificate_line(results: Results) -> str:
    """What the certificate says, for a person.

    Example:
        >>> curve = Series("retrace", "", STEPS, BOUND, [0.0, 1.0], [0.08, 0.0006])
        >>> said = certificate_line(Results("hospitals", {}, {}, [], {}, series=[curve]))
        >>> said.partition(', after')[2].partition(':')[0]
        ' 1 Newton step of those who stay at most 0.0006'
    """
    (curve,) = [own for own in results.series if own.y_name == BOUND]
    fitting = [int(step) for step, bound in zip(curve.x, curve.y, strict=True) if BUDGET.fits(bound)]
    line = (
        f"Logistic regression has a certificate: after retrace its weights are at most {curve.y[0]:.2g} from those of "
        "a model that never saw the hospital"
    )
    if not fitting:
        return line + ". That is too far for the noise that was fixed: retrain."
    if steps := fitting[0]:
        line += f", after {steps} Newton step{'s' * (steps > 1)} of those who stay at most {curve.y[steps]:.2g}"
    line += (
        f": released with noise of {BUDGET.sigma:g} a weight, it cannot be told from such a model beyond epsilon "
        f"{BUDGET.epsilon:g}, delta {BUDGET.delta:g}."
    )
    return line


EXPERIMENT = Experiment(
    "hospitals", "Real clients: one of four hospitals leaves", hospitals, curves=certified, seeds=SEEDS
)
