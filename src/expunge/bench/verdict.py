"""Can the verdict be trusted? Honest retrains, tricks and cheats, many times over, and what each is called.

Digits with a strong backdoor, Fashion-MNIST with one where its data is there, and digits without: there little can be
seen, so UNDECIDED is expected where nothing is damaged. For every seed there are one federation, one trained model and
ten retrained ones that everything is judged beside: one more retrained model, tricks of a server (`auditing/tricks.py`)
and cheats of somebody who knows the audit (`auditing/cheats.py`). The verdict's own settings were chosen on client 0
with seeds below 10; the study is about others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from expunge.auditing.verdict import ENOUGH
from expunge.bench.evaluation import noise_ranges
from expunge.bench.measuring import Part
from expunge.bench.results import MEASURES, Results, Row, Series, Variant, environment, utc_now
from expunge.bench.runner import all_done, described, make_all, missing_cells
from expunge.bench.scales import LEAVER, scale_of
from expunge.bench.scenario import Scenario
from expunge.bench.store import Store
from expunge.bench.verdict_cases import KINDS, MOST_EPOCHS, Case, Kind, heard
from expunge.bench.verdict_curves import level_curves, relearning_curves, study_curves
from expunge.bench.workers import processes
from expunge.data import Backdoor, is_there
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan

SEEDS = tuple(range(10, 110))
CHEATED_SEEDS, FASHION_SEEDS, CLEAN_SEEDS = 60, 20, 20
"""How many of the seeds are used for tricks and cheats, for Fashion-MNIST, and without a backdoor: the first ones."""

FASHION_RATE = 0.02
"""Where a larger learning rate of cheats would wreck them."""

ATTACKED, FASHION, CLEAN = "strong backdoor", "Fashion-MNIST, strong backdoor", "clean client"
SHOWN = ("test_accuracy", "forget_loss", "asr", "trigger_moves", "distance", "kept_share")
"""The values that stand in results beside a verdict; all of them stay with what is measured."""

SCENARIO = Scenario(
    dataset="digits",
    model="digits-net",
    clients=5,
    alpha=1.0,
    backdoors={LEAVER: Backdoor(target=7, size=3, fraction=0.5, boost=4.0)},
    plan=TrainingPlan(rounds=10, epochs=4, batch_size=64, learning_rate=0.1),
)
"""Cheap, since it is trained 14 times for each of 100 seeds: about 2 seconds on one core."""


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
    with processes(workers, store.device) as pool:
        make_all(missing, store, pool, progress)
        dear_first = sorted(range(len(cases)), key=lambda number: -cases[number].trained.work)
        jobs = [partial(heard, cases[number], store) for number in dear_first]
        found = dict(zip(dear_first, all_done(jobs, pool, progress, "judging"), strict=True))
    return _put_together(seeds, cases, [found[number] for number in range(len(cases))], level_curves(draws))


def fashion_scenario(data_dir: Path | None) -> Scenario | None:
    """Fashion-MNIST at the scale that fits two cores, with a strong backdoor; None where its data is not there."""
    return scale_of("small", data_dir).attacked(LEAVER, strong=True) if is_there("fashion-mnist", data_dir) else None


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
    rows = [shown(row) for row in rows]
    date = max((part.date for part in parts if part.date is not None), default=utc_now())
    return Results("verdict", scenario, where, rows, {}, variants, series, date)


def shown(row: Row, measures: Sequence[str] = SHOWN) -> Row:
    """A row without most of its values: there are thousands, and none of these is read.

    Example:
        >>> row = shown(Row("patched", 10, asr=0.01, kl=0.2, verdict="UNDECIDED", digest="ab"))
        >>> row.asr, row.kl, row.verdict, row.digest
        (0.01, None, 'UNDECIDED', None)
    """
    gone: dict[str, Any] = {name: None for name in (*MEASURES, "digest") if name not in measures}
    return dataclasses.replace(row, **gone)
