"""Run an experiment: make the cells that it lacks, measure their models, put the results together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from expunge.bench.cells import Cell, ForgottenCell, RetrainedCell, ShardedCell, TrainedCell, after
from expunge.bench.evaluation import noise_ranges
from expunge.bench.measured import alone, measured_part, part_path
from expunge.bench.measuring import Curves, Part, compared_steps
from expunge.bench.results import Results, Series, Variant, environment, utc_now
from expunge.bench.scales import Scale
from expunge.bench.settings import Setting, together
from expunge.bench.store import Store
from expunge.bench.workers import Workers, processes
from expunge.data import is_there, load
from expunge.errors import NumericalError, RequestError
from expunge.federation.training.fedavg import Progress
from expunge.unlearning.registry import method


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: of its folder.
        title: what it asks.
        settings: its variants at a scale.
        curves: what is drawn from the methods' own records and from the models, or None.
        apart: whether each seed's curves are kept, not their mean.
        study: curves that need no federation, for one seed at a scale, or None.
        whole: runs the experiment where it is not made of settings, or None.
        seeds: its own default seeds by scale, where the scale's are not enough.
    """

    name: str
    title: str
    settings: Callable[[Scale], list[Setting]]
    curves: Curves | None = None
    apart: bool = False
    study: Callable[[bool, int], list[Series]] | None = None
    whole: Callable[[Scale, Sequence[int], Store, int | None, Progress | None], Results] | None = None
    seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def seeded(self, scale: Scale, seeds: Sequence[int]) -> list[Setting]:
        """Its variants one after another, each for all seeds, or for as many as it takes."""
        by_seed = [[s.with_seed(seed) for s in self.settings(scale.for_seed(seed))] for seed in seeds]
        return [setting for variant in zip(*by_seed, strict=True) for setting in variant[: variant[0].seeds]]

    def default_seeds(self, scale: Scale) -> tuple[int, ...]:
        """The seeds where none are asked for."""
        return self.seeds.get(scale.name, scale.seeds)


def run(
    experiment: Experiment,
    scale: Scale,
    seeds: Sequence[int],
    store: Store,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Results:
    """Make what is missing, measure, and return the results.

    Args:
        experiment: what to run.
        scale: how large.
        seeds: each gives its own split, poisoning, initial weights and training.
        store: where finished cells are.
        workers: processes side by side; None takes one a core, at most four, and on a GPU this one alone.
        progress: called with (what, done, total).
    """
    if experiment.whole is not None:
        _require_gpu(store, "This experiment is measured anew")
        return experiment.whole(scale, seeds, store, workers, progress)
    settings = experiment.seeded(scale, seeds)
    parts_of = [_parts(experiment, setting, store) for setting in settings]
    to_do = unmeasured(experiment, scale, seeds, store)
    missing = missing_cells([cell for own in to_do for cell in cells(own)], store)
    if to_do:
        _require_gpu(store, f"{len(to_do)} of {sum(map(len, parts_of))} parts are not measured yet")
    with processes(workers, store.device) as pool:
        make_all(missing, store, pool, progress)
        jobs: list[Callable[[], Part]] = [
            partial(measured_part, setting, experiment.curves, store, [path for _, path in own])
            for setting, own in zip(settings, parts_of, strict=True)
        ]
        if experiment.study is not None:
            jobs += [partial(_studied, experiment.study, scale.is_smoke, seed) for seed in seeds]
        parts = all_done(jobs, pool, progress, "measuring")
        return _put_together(experiment, scale.name, seeds, settings, parts)


def unmeasured(experiment: Experiment, scale: Scale, seeds: Sequence[int], store: Store) -> list[Setting]:
    """What is still to be done, a method at a time: what is measured needs neither data nor models any more."""
    every = [part for setting in experiment.seeded(scale, seeds) for part in _parts(experiment, setting, store)]
    return [own for own, path in every if not path.exists()]


def _parts(experiment: Experiment, setting: Setting, store: Store) -> list[tuple[Setting, Path]]:
    """The setting's methods, each alone, and where each one is, or will be, measured."""
    parts = [alone(setting, contender) for contender in setting.contenders]
    return [(own, part_path(own, cells(own), experiment.name, store)) for own in parts]


def _require_gpu(store: Store, why: str) -> None:
    if store.device == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"{why}, and there is no GPU here.")


def require_data(settings: Sequence[Setting], data_dir: Path | None) -> None:
    """Refuse before any work where a dataset is missing."""
    for name in {setting.scenario.dataset for setting in settings}:
        if not is_there(name, data_dir):
            load(name, data_dir)  # says which file is missing, and how to get it


def cells(setting: Setting) -> list[Cell]:
    """All models that one setting with its seed needs."""
    scenario, steps = setting.scenario, len(setting.forgets)
    wanted = {method(contender.method).needs for contender in setting.contenders}
    found: list[Cell] = [TrainedCell(scenario, updates="updates" in wanted)]
    if "shards" in wanted:
        found.append(ShardedCell(scenario))
    gone = together(setting.forgets)
    found += [RetrainedCell(scenario, gone, number) for number in range(setting.retrains)]
    found += [RetrainedCell(scenario, gone, number, fresh=False) for number in range(setting.same_init)]
    found += [RetrainedCell(scenario, together(setting.forgets[:step]), 0) for step in compared_steps(steps)]
    for contender in setting.contenders:
        for step in range(1, steps + 1):
            found.append(ForgottenCell(scenario, contender, setting.forgets[:step], setting.tamper))
    return found + [after(cell, gone, setting.more_rounds) for cell in found if setting.more_rounds]


def missing_cells(wanted: list[Cell], store: Store) -> list[Cell]:
    """Those that are not finished, each once; where one is asked for in two ways, the one that keeps more."""
    missing: dict[str, Cell] = {}
    for cell in wanted:
        path = str(store.path(cell))
        if not store.has(cell) and (path not in missing or cell.keeps_more):
            missing[path] = cell
    return list(missing.values())


def make_all(
    missing: list[Cell], store: Store, pool: Workers, progress: Progress | None, *, may_diverge: bool = False
) -> None:
    """Make cells, dear ones first, none before those that it needs; tells the share of the work that is done.

    Where they may diverge, one that does is left out, and what needs it.
    """
    work = {store.path(cell): cell.work for cell in missing}
    total, done = sum(work.values()), 0.0
    waiting = {store.path(cell): cell for cell in sorted(missing, key=lambda cell: -cell.work)}
    needs = {path: {store.path(need) for need in cell.needs} for path, cell in waiting.items()}  # once: names take time
    running: dict[Future[None], Path] = {}
    unfinished, diverged = set(waiting), set[Path]()
    while waiting or running:
        for path in [path for path in waiting if not needs[path].isdisjoint(diverged)]:
            diverged.add(path)
            del waiting[path]
        ready = [path for path in waiting if needs[path].isdisjoint(unfinished)]
        for path in ready[: pool.count - len(running)]:
            running[pool.submit(partial(store.make, waiting.pop(path)))] = path
        for job in wait(running, return_when=FIRST_COMPLETED).done:
            path = running.pop(job)
            try:
                job.result()
            except NumericalError:
                if not may_diverge:
                    raise
                diverged.add(path)
            unfinished.remove(path)
            done += work[path]
        if progress is not None:
            progress("training and forgetting, percent of the work", min(100, int(100 * done / total)), 100)


def all_done(jobs: Sequence[Callable[[], Part]], pool: Workers, progress: Progress | None, what: str) -> list[Part]:
    """Everything that the jobs give, in their order; they are begun in it, and none waits for a slow one before it."""
    parts: dict[int, Part] = {}
    running: dict[Future[Part], int] = {}
    waiting = list(enumerate(jobs))
    while waiting or running:
        while waiting and len(running) < pool.count:
            number, job = waiting.pop(0)
            running[pool.submit(job)] = number
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            parts[running.pop(done)] = done.result()
        if progress is not None:
            progress(what, len(parts), len(jobs))
    return [parts[number] for number in range(len(jobs))]


def _studied(study: Callable[[bool, int], list[Series]], smoke: bool, seed: int) -> Part:
    return Part([], {}, {}, study(smoke, seed), date=utc_now())


def _put_together(
    experiment: Experiment,
    scale: str,
    seeds: Sequence[int],
    settings: list[Setting],
    parts: list[Part],
) -> Results:
    by_label: dict[str, list[tuple[Setting, Part]]] = {}
    for setting, part in zip(settings, parts, strict=False):  # what is left over are studies
        by_label.setdefault(setting.label, []).append((setting, part))
    variants = {
        label: Variant(
            {**described(*(setting for setting, _ in own)), "scale": scale},
            noise_ranges([part.noise for _, part in own]),
            noise_ranges([part.noise_same_init for _, part in own]),
        )
        for label, own in by_label.items()
    }
    noise = next(iter(variants.values())).noise if len(variants) == 1 else {}
    scenario: dict[str, Any] = {"title": experiment.title, "scale": scale, "seeds": list(seeds)}
    if len(variants) == 1:
        scenario |= next(iter(variants.values())).scenario
    rows = [row for part in parts for row in part.rows]
    every = [curve for part in parts for curve in part.series]
    series = every if experiment.apart else averaged(every)
    where = {**_joined([part.environment for part in parts if part.environment]), "torch_threads": 1}
    date = max((part.date for part in parts if part.date is not None), default=None)
    return Results(experiment.name, scenario, where, rows, noise, variants, series, date)


def _joined(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """One environment for all parts; what differs between them is listed."""
    if not environments:
        return environment()
    found = {name: list(dict.fromkeys(each[name] for each in environments)) for name in environments[0]}
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def described(setting: Setting, *others: Setting) -> dict[str, Any]:
    """What a variant was, for a reader; the others are the same for other seeds, where somebody else may leave."""
    scenario = {name: value for name, value in setting.scenario.as_dict().items() if name != "seed"}
    scenario["plan"] = {name: value for name, value in scenario["plan"].items() if name != "seed"}
    steps = [dataclasses.asdict(forget) for forget in setting.forgets]
    owners = [name for each in (setting, *others) for forget in each.forgets for name in forget.owners]
    attackers = [name for each in (setting, *others) for name in each.scenario.backdoors]
    more = {"forgotten": list(dict.fromkeys(owners)), "steps": steps, "attackers": list(dict.fromkeys(attackers))}
    counts: dict[str, Any] = {
        "seeds": [each.scenario.seed for each in (setting, *others)],
        "retrains_per_seed": setting.retrains,
        "same_init_retrains_per_seed": setting.same_init,
    }
    if setting.more_rounds:
        counts["more_rounds"] = setting.more_rounds
    return {**scenario, **more, **counts, **({"lie": setting.tamper} if setting.tamper else {})}


def averaged(series: list[Series]) -> list[Series]:
    """One curve for all seeds: the mean at every x."""
    groups: dict[tuple[str, str, str, str], dict[float, list[float]]] = {}
    for curve in series:
        values = groups.setdefault((curve.method, curve.variant, curve.x_name, curve.y_name), {})
        for x, y in zip(curve.x, curve.y, strict=True):
            values.setdefault(x, []).append(y)
    return [
        Series(*names, list(values), [sum(ys) / len(ys) for ys in values.values()]) for names, values in groups.items()
    ]
