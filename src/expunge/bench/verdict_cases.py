"""The cases of the study of the verdict: one federation with its seed, and one kind of models that come to be judged.

A case keeps more than its verdicts: every value that a verdict came from, of the judged, the trained and the retrained
models. So a new rule is tried without training or asking anybody again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

from expunge.auditing.functional import accuracy, predict
from expunge.auditing.measures import MEASURES, POINT, Compared
from expunge.auditing.tricks import early_plan, relearning_epochs
from expunge.auditing.verdict import from_own_start, judge
from expunge.bench.cells import Cell, RetrainedCell, TrainedCell
from expunge.bench.court import Court, Models
from expunge.bench.evaluation import Evaluation, retrain_noise
from expunge.bench.hearings import BEST, HONEST, Heard, best
from expunge.bench.measured import kept_part
from expunge.bench.measuring import Part
from expunge.bench.results import Row, Series
from expunge.bench.scenario import Federation, Scenario
from expunge.bench.settings import Forget, Setting
from expunge.bench.store import Store
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.request import Request

Kind = Literal["tricks", "mixtures", "cheats", "special", "honest"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What comes to be judged, a case each: small ones keep many cores busy, and little is lost with one."""

RELEARNING = "relearning epochs"
MOST_EPOCHS = 10
"""What takes longer than this to relearn is written down as one more."""

FORMAT = 4
"""Of what is kept of a case; after a change in a cheat or in a measure it is another one. Since 4 some more retrained
models have the training's own start, and what models show on the way back is among the values."""


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
    def sharing(self) -> list[RetrainedCell]:
        """Further ones of the training's own start."""
        return sharing(self.scenario, self.leaver, self.retrains)

    @property
    def same_start(self) -> RetrainedCell:
        """A model retrained from the training's own initialisation, with the batches that there were."""
        return RetrainedCell(self.scenario, Forget((self.leaver,)), 0, fresh=False)

    def cells(self) -> list[Cell]:
        """All models to be made beforehand."""
        return [self.trained, self.early, *self.retrained, *self.sharing, self.same_start]

    def path(self, store: Store) -> Path:
        """Where what was found is, or will be: under a name for all that determines it."""
        cells = sorted(store.path(cell).name for cell in self.cells())
        content = [FORMAT, "verdict", self.label, self.judged, self.learning_rate, cells]
        return store.root / "measured" / f"{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}.json"


def sharing(scenario: Scenario, leaver: str, retrains: int) -> list[RetrainedCell]:
    """Further models beside so many retrained ones and an honest one: of the training's own start, other batches."""
    numbers = range(retrains + 1, retrains + 1 + from_own_start(retrains))
    return [RetrainedCell(scenario, Forget((leaver,)), number, fresh=False, same_batches=False) for number in numbers]


def heard(case: Case, store: Store) -> Part:
    """What was found in one case, now or before; verdicts are reached anew from the values that are kept."""
    return verdicts_again(kept_part(case.path(store), partial(judged, case, store), store))


def judged(case: Case, store: Store) -> Part:
    """The rows of one case; with those of honest retrains goes what retraining varies by."""
    federation = store.federation(case.scenario)
    state, early = (store.kept(cell).state for cell in (case.trained, case.early))
    *references, honest, same_start = (store.kept(c).state.model for c in (*case.retrained, case.same_start))
    sharing = [store.kept(cell).state.model for cell in case.sharing]
    models = Models(state, early.model, references, honest, same_start, sharing)
    court = Court(federation, case.leaver, models, case.learning_rate)
    found: list[Heard] = []
    noise: dict[str, list[float]] = {}
    relearnt: dict[str, Snapshot] = {}
    if case.judged == "honest":
        found, relearnt = [court.honest(), *court.power()], {HONEST: honest}
        evaluation = Evaluation(federation, Request.of(case.leaver))
        noise = retrain_noise([evaluation.measure(model) for model in references])
    elif case.judged == "tricks":
        found, relearnt = list(court.tricks()), court.tricked
    else:
        asked = {"mixtures": court.mixtures, "cheats": court.cheats, "special": court.special}
        found = list(asked[case.judged]())
    epochs, seed = relearning(federation, state, case.leaver), [float(case.scenario.seed)]
    series = [Series(name, case.label, "seed", RELEARNING, seed, [epochs(model)]) for name, model in relearnt.items()]
    rows = [dataclasses.replace(one.row, variant=case.label) for one in found]
    return Part(rows, noise, {}, series, values=[_values(one) for one in found])


def _values(one: Heard) -> dict[str, list[float]]:
    """What a verdict came from: by measure what one sample is worth, and the values of all models."""
    compared = {own.measure.name: [own.step, own.value, own.trained, *own.retrained] for own in one.compared}
    return {"attempt": [float(one.attempt)], **compared}


def verdicts_again(part: Part) -> Part:
    """The same rows with the verdicts that their values give today; of several attempts only the best is shown.

    Where nothing was compared, since answers were copied or no numbers, the verdict stays.
    """
    rows = [_judged_again(row, values) for row, values in zip(part.rows, part.values, strict=True)]
    return dataclasses.replace(part, rows=list(_best_of_attempts(rows)), values=[])


def _judged_again(row: Row, values: dict[str, list[float]]) -> Row:
    compared = [
        Compared(MEASURES[name], value, trained, tuple(retrained), step)
        for name, (step, value, trained, *retrained) in ((n, v) for n, v in values.items() if n != "attempt")
    ]
    if not compared:
        return row
    return dataclasses.replace(row, verdict=judge(compared, int(values["attempt"][0])).verdict.value)


def _best_of_attempts(rows: Iterable[Row]) -> Iterable[Row]:
    for name, own in groupby(rows, key=lambda row: row.method):
        attempts: Sequence[Row] = list(own)
        yield from [best(attempts)] if name.startswith(BEST) else attempts


def relearning(federation: Federation, state: ServerState, leaver: str) -> Callable[[Snapshot], float]:
    """Counts the epochs until the trained model's accuracy on the forgotten data is back, within a point."""
    engine = LocalEngine(federation.model, federation.loss, federation.datasets)  # here nobody boosts
    inputs, labels = federation.datasets[leaver]

    def right(model: Snapshot) -> float:
        return accuracy(predict(federation.model, model, inputs), labels)

    goal = right(state.model) - POINT

    def epochs(model: Snapshot) -> float:
        found = relearning_epochs(engine, state, model, Request.of(leaver), accuracy=right, goal=goal, most=MOST_EPOCHS)
        return float(MOST_EPOCHS + 1 if found is None else found)

    return epochs
