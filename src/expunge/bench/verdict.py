"""Can the verdict be trusted? Honest retrains, tricks and cheats, many times over, and what each is called.

Digits with a strong backdoor, Fashion-MNIST with one where its data is there, and digits without: there little can be
seen, so UNDECIDED is expected where nothing is damaged. For every seed there are one federation, one trained model and
ten retrained ones that everything is judged beside: one more retrained model, tricks of a server (`auditing/tricks.py`)
and cheats of somebody who knows the audit (`auditing/cheats.py`). The verdict's own settings were chosen on client 0
with seeds below 10; the study is about others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from expunge.auditing.functional import accuracy, predict
from expunge.auditing.measures import POINT
from expunge.auditing.tricks import early_plan, relearning_epochs
from expunge.auditing.verdict import ENOUGH
from expunge.bench.cells import Cell, RetrainedCell, TrainedCell
from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.hearings import HONEST, Court, Models
from expunge.bench.measured import kept_part
from expunge.bench.measuring import Part
from expunge.bench.results import Results, Row, Series, Variant, environment, utc_now
from expunge.bench.runner import all_done, described, make_all, missing_cells
from expunge.bench.scales import LEAVER, scale_of
from expunge.bench.scenario import Federation, Scenario
from expunge.bench.settings import Forget, Setting
from expunge.bench.store import Store
from expunge.bench.verdict_curves import level_curves, relearning_curves, study_curves
from expunge.bench.workers import one_by_one, side_by_side
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data import Backdoor, is_there
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request

SEEDS = tuple(range(10, 110))
CHEATED_SEEDS, FASHION_SEEDS, CLEAN_SEEDS = 60, 20, 20
"""How many of the seeds are used for tricks and cheats, for Fashion-MNIST, and without a backdoor: the first ones."""

Kind = Literal["tricks", "mixtures", "cheats", "special", "honest"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What comes to be judged, a case each: small ones keep many cores busy, and little is lost with one."""

FASHION_RATE = 0.02
"""Where a larger learning rate of cheats would wreck them."""

ATTACKED, FASHION, CLEAN = "strong backdoor", "Fashion-MNIST, strong backdoor", "clean client"
RELEARNING = "relearning epochs"
MOST_EPOCHS = 10
"""What takes longer than this to relearn is written down as one more."""

FORMAT = 2
"""Of what is kept of a seed; after a change in a cheat or in the verdict it is another one."""

SCENARIO = Scenario(
    dataset="digits",
    model="digits-net",
    clients=5,
    alpha=1.0,
    backdoors={LEAVER: Backdoor(target=7, size=3, fraction=0.5, boost=4.0)},
    plan=TrainingPlan(rounds=10, epochs=4, batch_size=64, learning_rate=0.1),
)
"""Cheap, since it is trained 14 times for each of 100 seeds: about 2 seconds on one core."""


@dataclass(frozen=True)
class Case:
    """One federation with its seed, from which one client leaves.

    Attributes:
        label: the variant in results.
        scenario: the federation.
        leaver: who is to be forgotten.
        retrains: models that the verdict gets; one more is made to be judged.
        judged: which kind of models comes to be judged.
        learning_rate: of cheats that are taught something.
    """

    label: str
    scenario: Scenario
    leaver: str
    retrains: int
    judged: Kind
    learning_rate: float = 0.05

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

    @property
    def same_start(self) -> RetrainedCell:
        """A model retrained from the training's own initialisation."""
        return RetrainedCell(self.scenario, Forget((self.leaver,)), 0, fresh=False)

    def cells(self) -> list[Cell]:
        """All models to be made beforehand."""
        return [self.trained, self.early, *self.retrained, self.same_start]

    def path(self, store: Store) -> Path:
        """Where what was found is, or will be: under a name for all that determines it."""
        cells = sorted(store.path(cell).name for cell in self.cells())
        content = [FORMAT, "verdict", self.label, self.judged, self.learning_rate, cells]
        return store.root / "measured" / f"{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}.json"


def run_verdicts(
    seeds: Sequence[int] = SEEDS,
    *,
    scenario: Scenario = SCENARIO,
    fashion: Scenario | None = None,
    leaver: str = LEAVER,
    retrains: int = ENOUGH,
    cheated_seeds: int = CHEATED_SEEDS,
    clean_seeds: int = CLEAN_SEEDS,
    draws: int = 1000,
    workers: int | None = None,
    progress: Progress | None = None,
    store: Store,
) -> Results:
    """Judge honest retrains, tricks and cheats for every seed.

    Args:
        seeds: each gives its own split, poisoning, initial weights and training.
        scenario: the federation, with the leaver's backdoor.
        fashion: one more, for the first seeds; None leaves it out.
        leaver: who is to be forgotten.
        retrains: retrained models that the verdict gets; one more is made to be judged.
        cheated_seeds: tricks and cheats are judged for so many of the seeds, the first ones.
        clean_seeds: for so many of the seeds the leaver is judged without its backdoor, too.
        draws: of simulated measures at the edge of their margin.
        workers: processes side by side, each on one core; None takes one a core, at most four.
        progress: called with (what, done, total).
        store: where finished models are.
    """
    clean = dataclasses.replace(scenario, backdoors={})
    kinds = {kind: seeds if kind == "honest" else seeds[:cheated_seeds] for kind in KINDS}
    cases = [Case(ATTACKED, scenario.with_seed(s), leaver, retrains, k) for k, own in kinds.items() for s in own]
    few: tuple[Kind, ...] = ("tricks", "honest")
    cases += [Case(CLEAN, clean.with_seed(s), leaver, retrains, k) for k in few for s in seeds[:clean_seeds]]
    if fashion is not None:
        some = [fashion.with_seed(seed) for seed in seeds[:FASHION_SEEDS]]
        cases += [Case(FASHION, own, leaver, retrains, kind, FASHION_RATE) for kind in KINDS for own in some]
    to_do = [case for case in cases if not case.path(store).exists()]
    missing = missing_cells([cell for case in to_do for cell in case.cells()], store)
    with one_by_one() if store.device != "cpu" or workers == 1 else side_by_side(workers) as pool:
        make_all(missing, store, pool, progress)
        dear_first = sorted(range(len(cases)), key=lambda number: -cases[number].trained.work)
        jobs = [partial(heard, cases[number], store) for number in dear_first]
        found = dict(zip(dear_first, all_done(jobs, pool, progress, "judging"), strict=True))
    return _put_together(seeds, cases, [found[number] for number in range(len(cases))], level_curves(draws))


def fashion_scenario(data_dir: Path | None) -> Scenario | None:
    """Fashion-MNIST at the scale that fits two cores, with a strong backdoor; None where its data is not there."""
    return scale_of("small", data_dir).attacked(LEAVER, strong=True) if is_there("fashion-mnist", data_dir) else None


def heard(case: Case, store: Store) -> Part:
    """What was found in one case, now or before."""
    return kept_part(case.path(store), partial(judged, case, store), store)


def judged(case: Case, store: Store) -> Part:
    """The rows of one case; with those of honest retrains goes what retraining varies by."""
    federation = store.federation(case.scenario)
    state, early = (store.kept(cell).state for cell in (case.trained, case.early))
    *references, honest, same_start = (store.kept(c).state.model for c in (*case.retrained, case.same_start))
    models = Models(state, early.model, references, honest, same_start)
    court = Court(federation, case.leaver, models, case.learning_rate)
    rows: list[Row] = []
    noise: dict[str, list[float]] = {}
    relearnt: dict[str, Snapshot] = {}
    if case.judged == "honest":
        rows, relearnt = [court.honest_row(), *court.power_rows()], {HONEST: honest}
        evaluation = Evaluation(federation, Request.of(case.leaver))
        noise = retrain_noise([evaluation.measure(model) for model in references])
    elif case.judged == "tricks":
        rows, relearnt = list(court.trick_rows()), court.tricked
    else:
        asked = {"mixtures": court.mixture_rows, "cheats": court.cheat_rows, "special": court.special_rows}
        rows = list(asked[case.judged]())
    epochs, seed = relearning(federation, state, case.leaver), [float(case.scenario.seed)]
    series = [Series(name, case.label, "seed", RELEARNING, seed, [epochs(model)]) for name, model in relearnt.items()]
    return Part([dataclasses.replace(row, variant=case.label) for row in rows], noise, {}, series)


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


def _put_together(seeds: Sequence[int], cases: list[Case], parts: list[Part], levels: list[Series]) -> Results:
    variants: dict[str, Variant] = {}
    for label in dict.fromkeys(case.label for case in cases):
        own = [(case, part) for case, part in zip(cases, parts, strict=True) if case.label == label]
        noise = noise_ranges([part.noise for _, part in own if part.noise])
        numbers = list(dict.fromkeys(case.scenario.seed for case, _ in own))
        variants[label] = Variant({**described(own[0][0].setting), "seeds": sorted(numbers)}, noise, {})
    scenario: dict[str, Any] = {"title": "What a verdict catches", "seeds": list(seeds)}
    rows = [row for part in parts for row in part.rows]
    series = [
        *(curve for label in variants for curve in study_curves(rows, label, cases[0].retrains)),
        *relearning_curves([curve for part in parts for curve in part.series], MOST_EPOCHS),
        *levels,
    ]
    where = {**environment(), "torch_threads": 1}
    date = max((part.date for part in parts if part.date is not None), default=utc_now())
    return Results("verdict", scenario, where, rows, {}, variants, series, date)
