"""How often is evidence without retrained models right? What it says of models that forgot, and of those that did not.

Two kinds of clients leave: one with a backdoor, and one with wrong labels, which a model knows by heart. Every model is
judged twice: by the verdict, beside ten retrained models and five of the training's own start, as an audit makes them,
and by `expunge.evidence`, which gets none of these, but three models of short trainings. One that only knows the
trigger is asked, too. Limits and checks were settled on client 0 with seeds below 10; the study is about others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from expunge.auditing.statement import Word, evidence
from expunge.auditing.tricks import early_plan
from expunge.bench.cells import Cell, ForgottenCell, RetrainedCell, TrainedCell
from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.measured import kept_part
from expunge.bench.measuring import Part
from expunge.bench.results import Results, Row, Variant, environment, utc_now
from expunge.bench.runner import all_done, described, make_all, missing_cells
from expunge.bench.scales import LEAVER
from expunge.bench.scenario import Federation, Scenario
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.bench.verdict import SCENARIO, shown
from expunge.bench.verdict_cases import sharing
from expunge.bench.workers import processes
from expunge.core.vectors import Snapshot
from expunge.data import Mislabelling, stamp
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Progress
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request

POISONED, TRIGGER_ONLY, MEMORISING = "poisoned client", "poisoned client, only the trigger known", "memorising client"
RETRAINS, SHORT = 10, 3
"""Models that the verdict gets, and models of short trainings that the evidence gets."""

SEEDS = tuple(range(10, 116))
"""A few more than a hundred: with some of them a training of the memorising kind diverges."""

FORMAT = 2
"""Of what is kept of a case; after a change in a check or in the verdict it is another one."""

MEMORISED = dataclasses.replace(
    SCENARIO,
    backdoors={},
    mislabelled={LEAVER: Mislabelling(share=0.2, boost=4.0)},
    plan=dataclasses.replace(SCENARIO.plan, batch_size=32, learning_rate=0.3),
)
"""Smaller batches and longer steps, or nothing is learnt by heart in ten rounds: about half of the wrong labels are."""

HONEST, NOTHING, FORGED = "retrain", "do-nothing", "do-nothing, record forged"
CLAIMED = Contender("retrace")
"""The method whose record is put beside a model that did nothing."""
CONTENDERS = (
    Contender("hf-kcu-paper"),
    Contender("fine-tuning"),  # one epoch
    CLAIMED,
    Contender("retrace+recovery"),
    Contender("hf-kcu"),
    Contender("fed-osd"),
    Contender("fed-eraser"),
)
REMEMBERING = (NOTHING, FORGED, "hf-kcu-paper", "fine-tuning")
"""What forgets nothing, and must not be supported."""


def run_evidence(
    seeds: Sequence[int] = SEEDS,
    *,
    poisoned: Scenario = SCENARIO,
    memorised: Scenario = MEMORISED,
    leaver: str = LEAVER,
    retrains: int = RETRAINS,
    workers: int | None = None,
    progress: Progress | None = None,
    store: Store,
) -> Results:
    """What evidence and verdict say of every candidate, for every seed and both kinds of clients.

    Where one of a seed's trainings diverges, its kind of client is left out for that seed.

    Args:
        seeds: each gives its own split, deeds of the leaver, initial weights and training.
        poisoned: the federation where the leaver has a backdoor.
        memorised: the federation where the leaver has wrong labels.
        leaver: who is to be forgotten.
        retrains: models that the verdict gets; one more is made to be judged.
        workers: processes side by side, each on one core; None takes one a core, at most four.
        progress: called with (what, done, total).
        store: where finished models are.
    """
    cases = [
        Case(label, scenario.with_seed(seed), leaver, retrains)
        for label, scenario in ((POISONED, poisoned), (MEMORISING, memorised))
        for seed in seeds
    ]
    to_do = [case for case in cases if not case.path(store).exists()]
    missing = missing_cells([cell for case in to_do for cell in case.cells()], store)
    with processes(workers, store.device) as pool:
        make_all(missing, store, pool, progress, may_diverge=True)
        cases = [case for case in cases if case.path(store).exists() or not missing_cells(case.cells(), store)]
        parts = all_done([partial(heard, case, store) for case in cases], pool, progress, "judging")
    return _put_together(seeds, cases, parts)


@dataclass(frozen=True)
class Case:
    """One federation with its seed, from which one client leaves."""

    label: str
    scenario: Scenario
    leaver: str
    retrains: int

    @property
    def variants(self) -> tuple[str, ...]:
        """What may be known: the trigger and the leaver's data, or one of them."""
        return (POISONED, TRIGGER_ONLY) if self.leaver in self.scenario.backdoors else (self.label,)

    @property
    def setting(self) -> Setting:
        """For a reader."""
        gone = (Forget((self.leaver,)),)
        return Setting(self.label, self.scenario, gone, CONTENDERS, self.retrains, same_init=0)

    @property
    def trained(self) -> TrainedCell:
        """The model before forgetting, with the updates that one of the methods needs."""
        return TrainedCell(self.scenario, updates=True)

    @property
    def retrained(self) -> list[RetrainedCell]:
        """The models that the verdict gets, and the honest one behind them."""
        return [RetrainedCell(self.scenario, Forget((self.leaver,)), number) for number in range(self.retrains + 1)]

    @property
    def sharing(self) -> list[RetrainedCell]:
        """Further ones of the training's own start, which tell whether trained weights are mixed into a model."""
        return sharing(self.scenario, self.leaver, self.retrains)

    @property
    def short(self) -> list[RetrainedCell]:
        """Retrained for the first rounds only; none begins as the honest one does, which has a later number."""
        early = dataclasses.replace(self.scenario, plan=early_plan(self.scenario.plan))
        return [RetrainedCell(early, Forget((self.leaver,)), number) for number in range(min(SHORT, self.retrains))]

    def forgotten(self, contender: Contender) -> ForgottenCell:
        """A method's model."""
        return ForgottenCell(self.scenario, contender, (Forget((self.leaver,)),))

    def cells(self) -> list[Cell]:
        """All models to be made beforehand."""
        return [self.trained, *self.retrained, *self.sharing, *self.short, *map(self.forgotten, CONTENDERS)]

    def path(self, store: Store) -> Path:
        """Where what was found is, or will be: under a name for all that determines it."""
        content = [FORMAT, "evidence", self.label, sorted(store.path(cell).name for cell in self.cells())]
        return store.root / "measured" / f"{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}.json"


def heard(case: Case, store: Store) -> Part:
    """What was found in one case, now or before."""
    return kept_part(case.path(store), partial(stated, case, store), store)


def stated(case: Case, store: Store) -> Part:
    """The rows of one case: every candidate under everything that may be known."""
    federation, request = store.federation(case.scenario), Request.of(case.leaver)
    evaluation, trained = Evaluation(federation, request), store.kept(case.trained).state.model
    *models, honest = [store.kept(cell).state.model for cell in case.retrained]
    references = [evaluation.measure(model, trained) for model in models]
    of_own_start = [store.kept(cell).state.model for cell in case.sharing]
    beside = [*references, *(evaluation.measure(model, trained, same_start=True) for model in of_own_start)]
    before = evaluation.measure(trained, trained)
    ask = _asking(case, federation, trained, [store.kept(cell).state.model for cell in case.short])
    rows: list[Row] = []
    for name, outcome in candidates(case, store, trained, honest).items():
        own = evaluation.measure(outcome.state.model, trained)
        row = dataclasses.replace(
            evaluation.row(name, own, before, references),
            verdict=evaluation.judgement(own, before, beside).verdict.value,
        )
        rows += [dataclasses.replace(row, variant=label, evidence=ask(outcome, label)) for label in case.variants]
    rows.sort(key=lambda row: case.variants.index(row.variant or ""))
    return Part(rows, retrain_noise(references), {}, [])


def candidates(case: Case, store: Store, trained: Snapshot, honest: Snapshot) -> dict[str, Outcome]:
    """Every model with its record, which for one that did nothing is that of a method that forgets."""
    kept = {contender.label: store.kept(case.forgotten(contender)) for contender in CONTENDERS}
    claim = kept[CLAIMED.label]
    found = {
        HONEST: Outcome(HONEST, ServerState(honest), Cost()),
        NOTHING: Outcome(NOTHING, ServerState(trained), Cost()),
        FORGED: Outcome(CLAIMED.method, ServerState(trained), claim.cost, details=claim.record["details"]),
    }
    for label, own in kept.items():
        found[label] = Outcome(label, own.state, own.cost, details=own.record["details"])
    return found


def _asking(
    case: Case, federation: Federation, trained: Snapshot, short: Sequence[Snapshot]
) -> Callable[[Outcome, str], str]:
    """Asks for the evidence on an outcome, with what is known in a variant."""
    before = _module(federation, trained)
    unseen = federation.dataset.test_inputs, federation.dataset.test_labels
    others = [_module(federation, model) for model in short]
    known: dict[str, Any] = {"forgotten": federation.datasets[case.leaver], "short": others}
    backdoor = case.scenario.backdoors.get(case.leaver)
    if backdoor is not None:
        white = federation.dataset.white
        trigger = {"trigger": partial(stamp, backdoor=backdoor, white=white), "target": backdoor.target}
    given = {MEMORISING: known} if backdoor is None else {POISONED: {**known, **trigger}, TRIGGER_ONLY: trigger}

    def ask(outcome: Outcome, label: str) -> str:
        word: Word = evidence(before, outcome, unseen, **given[label]).word
        return word.value

    return ask


def _module(federation: Federation, model: Snapshot) -> nn.Module:
    module = deepcopy(federation.model)
    model.write_to(module)
    return module.eval()


def _put_together(seeds: Sequence[int], cases: list[Case], parts: list[Part]) -> Results:
    variants: dict[str, Variant] = {}
    for label in dict.fromkeys(label for case in cases for label in case.variants):
        own = [(case, part) for case, part in zip(cases, parts, strict=True) if label in case.variants]
        scenario = {**described(own[0][0].setting), "seeds": [case.scenario.seed for case, _ in own]}
        variants[label] = Variant(scenario, noise_ranges([part.noise for _, part in own]), {})
    title: dict[str, Any] = {"title": "What evidence without retrained models says", "seeds": list(seeds)}
    rows = [shown(row) for part in parts for row in part.rows]
    return Results("evidence", title, {**environment(), "torch_threads": 1}, rows, {}, variants, [], utc_now())
