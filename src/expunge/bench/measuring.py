"""Measure the finished models of one setting and seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from expunge.auditing.measured import Measured, kept_share
from expunge.bench.cells import Cell, ForgottenCell, Kept, RetrainedCell, ShardedCell, TrainedCell, after
from expunge.bench.evaluation import Evaluation, retrain_noise
from expunge.bench.results import Row, Series
from expunge.bench.scenario import Federation
from expunge.bench.settings import Contender, Setting, together
from expunge.bench.store import Store
from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Cost
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

Curves = Callable[[Setting, dict[str, Kept], Store], list[Series]]
"""Curves of one setting and seed, out of its finished contenders by label, and of all that the store has."""

SAME_INIT = "retrain-same-start"
SHARDED = "trained-sisa"
REFERENCES = ("trained", "retrain", SAME_INIT)
"""The models that every method is compared with."""
FAILED = "FAILED"
"""In place of a verdict where a method gave up: the row is that of the model as it was."""


@dataclass(frozen=True)
class Part:
    """What one setting and seed gave; ``values`` are what each row's verdict came from, where that is kept."""

    rows: list[Row]
    noise: dict[str, list[float]]
    noise_same_init: dict[str, list[float]]
    series: list[Series]
    environment: dict[str, Any] = field(default_factory=dict)
    date: str | None = None
    values: list[dict[str, list[float]]] = field(default_factory=list)


def compared_steps(steps: int) -> list[int]:
    """Where on a way of several departures a retrained model stands beside: after the first and in the middle.

    Example:
        >>> compared_steps(1), compared_steps(10)
        ([], [1, 5])
    """
    return sorted({1, steps // 2} - {0, steps}) if steps > 1 else []


def measure(setting: Setting, curves: Curves | None, store: Store) -> Part:
    """Rows, noise and curves of one setting with its seed."""
    scenario, gone = setting.scenario, together(setting.forgets)
    federation = store.federation(scenario)
    evaluation = Evaluation(federation, gone.request(federation))
    fresh = [RetrainedCell(scenario, gone, number) for number in range(setting.retrains)]
    same = [RetrainedCell(scenario, gone, number, fresh=False) for number in range(setting.same_init)]
    trained = store.kept(TrainedCell(scenario))

    def measured(cell: Cell) -> Measured:
        return evaluation.measure(store.kept(after(cell, gone, setting.more_rounds)).state.model)

    before = measured(TrainedCell(scenario))
    references, others = ([measured(cell) for cell in cells] for cells in (fresh, same))
    costs = [store.kept(cell).cost for cell in fresh]

    def row(name: str, own: Measured, *more: Any, start: Measured = before) -> Row:
        # After more rounds a verdict asks less (auditing/later.py): there are the measures alone.
        verdict = None if setting.more_rounds else evaluation.judgement(own, before, references).verdict.value
        share = kept_share(own, before, references)  # a verdict's own start is always the trained model
        return dataclasses.replace(
            evaluation.row(name, own, start, references, *more), verdict=verdict, kept_share=share
        )

    rows = [row("trained", before)]
    rows += [  # the yardstick is not judged by itself
        evaluation.row("retrain", own, before, references, cost, costs)
        for own, cost in zip(references, costs, strict=True)
    ]
    rows += [row(SAME_INIT, own, store.kept(cell).cost, costs) for own, cell in zip(others, same, strict=True)]
    finished = {contender.label: _steps(setting, contender, store) for contender in setting.contenders}
    sharded = before
    if any(method(contender.method).needs == "shards" for contender in setting.contenders):
        sharded = measured(ShardedCell(scenario))
        rows.append(row(SHARDED, sharded, start=sharded))
    for contender in setting.contenders:
        steps = finished[contender.label]
        own = measured(ForgottenCell(scenario, contender, setting.forgets, setting.tamper))
        cost, stored = _mean_cost(steps), steps[0].record["stored_bytes"]
        overhead = _overhead(contender, trained, store, setting)
        start = sharded if method(contender.method).needs == "shards" else before
        own_row = row(contender.label, own, cost, costs, stored, overhead, start=start)
        own_row = dataclasses.replace(own_row, warned=float(any(kept.record["warnings"] for kept in steps)))
        if not all(kept.record["succeeded"] for kept in steps):
            own_row = dataclasses.replace(own_row, verdict=FAILED, speedup=None, speedup_in_gradients=None)
        rows.append(own_row)
    rows = [dataclasses.replace(each, variant=setting.label) for each in rows]
    last = {label: steps[-1] for label, steps in finished.items()}
    series = curves(setting, last, store) if curves is not None else []
    if len(setting.forgets) > 1:
        watched, more = _departures(setting, federation, trained, finished, fresh[:1], store)
        rows, series = rows + watched, series + more
    return Part(rows, retrain_noise(references), retrain_noise(others) if len(others) > 1 else {}, series)


def _steps(setting: Setting, contender: Contender, store: Store) -> list[Kept]:
    steps = range(1, len(setting.forgets) + 1)
    return [
        store.kept(ForgottenCell(setting.scenario, contender, setting.forgets[:step], setting.tamper)) for step in steps
    ]


def _mean_cost(steps: list[Kept]) -> Cost:
    """The cost of one departure."""
    costs = [kept.cost for kept in steps]
    return Cost(
        fmean(cost.seconds for cost in costs),
        fmean(cost.sample_gradients for cost in costs),
        round(fmean(cost.rounds for cost in costs)),
        round(fmean(cost.bytes_down for cost in costs)),
        round(fmean(cost.bytes_up for cost in costs)),
    )


def _overhead(contender: Contender, trained: Kept, store: Store, setting: Setting) -> float:
    """What a method's needs cost while training: a share of its time; for SISA, which trains otherwise, of work."""
    wanted = method(contender.method).needs
    if wanted is None:
        return 0.0
    if wanted == "shards":
        sharded = store.kept(ShardedCell(setting.scenario))
        return sharded.cost.sample_gradients / trained.cost.sample_gradients - 1
    kept: dict[str, float] = trained.record["keeping_seconds"]
    return kept[wanted] / (trained.cost.seconds - sum(kept.values()))


def _departures(
    setting: Setting,
    federation: Federation,
    trained: Kept,
    finished: dict[str, list[Kept]],
    last: list[RetrainedCell],
    store: Store,
) -> tuple[list[Row], list[Series]]:
    """After each departure: test accuracy, and what is left of everybody who has left so far."""
    scenario, forgets = setting.scenario, setting.forgets
    way: dict[str, dict[int, Snapshot]] = {
        label: {0: trained.state.model, **{step: kept.state.model for step, kept in enumerate(steps, start=1)}}
        for label, steps in finished.items()
    }
    way["trained"] = dict.fromkeys(range(len(forgets) + 1), trained.state.model)
    middle: dict[int, Cell] = {
        step: RetrainedCell(scenario, together(forgets[:step]), 0) for step in compared_steps(len(forgets))
    }
    way["retrain"] = {step: store.kept(cell).state.model for step, cell in middle.items()}
    way["retrain"] |= {len(forgets): store.kept(cell).state.model for cell in last}
    rows, series = [], []
    for label, models in way.items():
        found = {step: _left_of(federation, setting, models[step], step) for step in models}
        for step, measured in found.items():
            for name, own in measured.items():
                place = f"{setting.label}, after {step}: {name}"
                alone = {key: own.alone[key] for key in ("test_accuracy", "forget_accuracy", "asr")}
                rows.append(Row(label, scenario.seed, variant=place, digest=own.model.digest, **alone))
        series += _watched_curves(label, setting, found)
    return rows, series


def _left_of(federation: Federation, setting: Setting, model: Snapshot, step: int) -> dict[str, Measured]:
    """What the model still knows of each one who has left; before anybody has, of the first who will."""
    names = [name for forget in setting.forgets[: max(step, 1)] for name in forget.clients]
    return {name: Evaluation(federation, Request.of(name)).measure(model) for name in names}


def _watched_curves(label: str, setting: Setting, found: dict[int, dict[str, Measured]]) -> list[Series]:
    curves: dict[str, dict[int, float]] = {}
    for step, measured in found.items():
        alone = [own.alone for own in measured.values()]
        rates = [own["asr"] for own in alone if own["asr"] is not None]
        curves.setdefault("test accuracy", {})[step] = alone[0]["test_accuracy"]
        if step:
            curves.setdefault("mean forget accuracy of the departed", {})[step] = fmean(
                own["forget_accuracy"] for own in alone
            )
        if step and rates:
            curves.setdefault("worst asr of the departed", {})[step] = max(rates)
    return [
        Series(label, setting.label, "clients that have left", name, [float(x) for x in values], list(values.values()))
        for name, values in curves.items()
    ]
