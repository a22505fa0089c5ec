"""Can the verdict be trusted? Tricks and honest retrains, many times over, and what each is called.

Digits with a strong backdoor, and the same client without one: there little can be seen, so UNDECIDED is expected where
nothing is damaged. For every seed there are one trained model, M retrained ones, one more retrained one to judge, and
the tricks. The verdict's own settings were chosen on client 0 with seeds below 10; the study is about others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from expunge.auditing.functional import accuracy, predict
from expunge.auditing.measures import POINT
from expunge.auditing.tricks import early_plan, most_frequent, relearning_epochs, tricks
from expunge.auditing.verdict import RETRAINS
from expunge.bench.cells import Cell, RetrainedCell, TrainedCell
from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.measuring import Part
from expunge.bench.results import Results, Row, Series, Variant, environment, utc_now
from expunge.bench.runner import all_done, described, make_all, missing_cells
from expunge.bench.scales import LEAVER
from expunge.bench.scenario import Federation, Scenario
from expunge.bench.settings import Forget, Setting
from expunge.bench.store import Store
from expunge.bench.workers import one_by_one, side_by_side
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data import Backdoor
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request

SEEDS = tuple(range(10, 110))
CLEAN_SEEDS = 20
"""How many of the seeds are used for the client without a backdoor, the first ones."""

ATTACKED, CLEAN = "strong backdoor", "clean client"
HONEST = "retrain"
RELEARNING = "relearning epochs"
MOST_EPOCHS = 10
"""What takes longer than this to relearn is written down as one more."""

SCENARIO = Scenario(
    dataset="digits",
    model="digits-net",
    clients=5,
    alpha=1.0,
    backdoors={LEAVER: Backdoor(target=7, size=3, fraction=0.5, boost=4.0)},
    plan=TrainingPlan(rounds=10, epochs=4, batch_size=64, learning_rate=0.1),
)
"""Cheap, since it is trained 7 times for each of 100 seeds: about 2 seconds on one core."""


def run_verdicts(
    seeds: Sequence[int] = SEEDS,
    *,
    scenario: Scenario = SCENARIO,
    leaver: str = LEAVER,
    retrains: int = RETRAINS,
    clean_seeds: int = CLEAN_SEEDS,
    workers: int | None = None,
    progress: Progress | None = None,
    store: Store,
) -> Results:
    """Judge every trick and one honest retrain for every seed.

    Args:
        seeds: each gives its own split, poisoning, initial weights and training.
        scenario: the federation, with the leaver's backdoor.
        leaver: who is to be forgotten.
        retrains: retrained models that the verdict gets; one more is made to be judged.
        clean_seeds: for so many of the seeds the leaver is judged without its backdoor, too.
        workers: processes side by side, each on one core; None takes one a core, at most four.
        progress: called with (what, done, total).
        store: where finished models are.
    """
    clean = dataclasses.replace(scenario, backdoors={})
    cases = [Case(ATTACKED, scenario.with_seed(seed), leaver, retrains) for seed in seeds]
    cases += [Case(CLEAN, clean.with_seed(seed), leaver, retrains) for seed in seeds[:clean_seeds]]
    missing = missing_cells([cell for case in cases for cell in case.cells()], store)
    with one_by_one() if store.device != "cpu" or workers == 1 else side_by_side(workers) as pool:
        make_all(missing, store, pool, progress)
        parts = all_done([partial(judged, case, store) for case in cases], pool, progress, "judging")
    return _put_together(seeds, cases, parts)


@dataclass(frozen=True)
class Case:
    """One federation with its seed, from which one client leaves."""

    label: str
    scenario: Scenario
    leaver: str
    retrains: int

    @property
    def setting(self) -> Setting:
        """For a reader."""
        return Setting(self.label, self.scenario, (Forget((self.leaver,)),), (), self.retrains, same_init=0)

    @property
    def trained(self) -> TrainedCell:
        """The model before forgetting."""
        return TrainedCell(self.scenario)

    @property
    def early(self) -> TrainedCell:
        """The same training after its first rounds."""
        return TrainedCell(dataclasses.replace(self.scenario, plan=early_plan(self.scenario.plan)))

    @property
    def retrained(self) -> list[RetrainedCell]:
        """The models that the verdict gets, and the honest one behind them."""
        return [RetrainedCell(self.scenario, Forget((self.leaver,)), number) for number in range(self.retrains + 1)]

    def cells(self) -> list[Cell]:
        """All models to be made beforehand."""
        return [self.trained, self.early, *self.retrained]


def judged(case: Case, store: Store) -> Part:
    """The rows of one case: its trained model, the honest retrain, and every trick."""
    federation, request = store.federation(case.scenario), Request.of(case.leaver)
    evaluation = Evaluation(federation, request)
    state = store.kept(case.trained).state
    *models, honest = [store.kept(cell).state.model for cell in case.retrained]
    references = [evaluation.measure(model) for model in models]
    before = evaluation.measure(state.model)
    backdoor = case.scenario.backdoors.get(case.leaver)
    label = backdoor.target if backdoor is not None else most_frequent(federation.datasets[case.leaver][1])
    candidates = {HONEST: honest}
    for name, trick in tricks(store.kept(case.early).state.model, label).items():
        candidates[name] = trick(federation.engine(), state, request)
    epochs = relearning(federation, state, case.leaver)
    rows, series = [], []
    for name, model in candidates.items():
        own = evaluation.measure(model)
        verdict = evaluation.judgement(own, before, references).verdict.value
        row = evaluation.row(name, own, before, references)
        rows.append(dataclasses.replace(row, verdict=verdict, variant=case.label))
        series.append(Series(name, case.label, "seed", RELEARNING, [float(case.scenario.seed)], [epochs(model)]))
    return Part(rows, retrain_noise(references), {}, series)


def relearning(federation: Federation, state: ServerState, leaver: str) -> Callable[[Snapshot], float]:
    """Counts the epochs until the trained model's accuracy on the forgotten data is back, within a point."""
    engine = LocalEngine(federation.model, CrossEntropy(), federation.datasets)  # here nobody boosts
    inputs, labels = federation.datasets[leaver]

    def right(model: Snapshot) -> float:
        return accuracy(predict(federation.model, model, inputs), labels)

    goal = right(state.model) - POINT

    def epochs(model: Snapshot) -> float:
        found = relearning_epochs(engine, state, model, Request.of(leaver), accuracy=right, goal=goal, most=MOST_EPOCHS)
        return float(MOST_EPOCHS + 1 if found is None else found)

    return epochs


def _put_together(seeds: Sequence[int], cases: list[Case], parts: list[Part]) -> Results:
    variants: dict[str, Variant] = {}
    for label in dict.fromkeys(case.label for case in cases):
        own = [(case, part) for case, part in zip(cases, parts, strict=True) if case.label == label]
        noise = noise_ranges([part.noise for _, part in own])
        variants[label] = Variant(
            {**described(own[0][0].setting), "seeds": [case.scenario.seed for case, _ in own]}, noise, {}
        )
    scenario: dict[str, Any] = {"title": "What a verdict catches", "seeds": list(seeds)}
    rows: list[Row] = [row for part in parts for row in part.rows]
    curves: dict[tuple[str, str], list[Series]] = {}
    for part in parts:
        for curve in part.series:
            curves.setdefault((curve.method, curve.variant), []).append(curve)
    series = [_relearned(name, label, [y for curve in own for y in curve.y]) for (name, label), own in curves.items()]
    return Results("verdict", scenario, {**environment(), "torch_threads": 1}, rows, {}, variants, series, utc_now())


def _relearned(name: str, label: str, epochs: list[float]) -> Series:
    """The share of runs in which so many epochs brought the trained model's accuracy on the forgotten data back."""
    x = [float(number) for number in range(MOST_EPOCHS + 1)]
    return Series(
        name, label, RELEARNING, "share of the runs", x, [sum(e <= n for e in epochs) / len(epochs) for n in x]
    )
