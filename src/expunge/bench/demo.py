"""The demonstration: train a small federation with a poisoned client, forget it in several ways, compare.

Everything here happens on the digits that come with scikit-learn, so it needs no files and no network. The leaving
client and the seeds are none of those on which the method's settings were chosen (client 0, seeds below 10).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.results import Results, Row, environment
from expunge.bench.scenario import Scenario
from expunge.data import Backdoor
from expunge.federation.engine import Cost
from expunge.federation.fedavg import Progress, ServerState, TrainingPlan, derived_seed, train
from expunge.unlearning.hf_kcu import hf_kcu
from expunge.unlearning.hf_kcu_options import GRADIENT, PAPER, TRAJECTORY, HfKcuOptions
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain

SEEDS = (10, 11, 12)
RETRAINS = 5

SCENARIO = Scenario(
    dataset="digits",
    model="digits-net",
    clients=10,
    alpha=1.0,
    attacker="client-3",
    backdoor=Backdoor(target=7, size=3, fraction=0.5, boost=4.0),
    plan=TrainingPlan(rounds=20, epochs=5, batch_size=32, learning_rate=0.05),
)


def contenders() -> list[HfKcuOptions]:
    """The three presets, without and with recovery."""
    return [options for preset in (PAPER, GRADIENT, TRAJECTORY) for options in (preset, preset.with_recovery())]


def run_demo(
    seeds: Iterable[int] = SEEDS,
    *,
    scenario: Scenario = SCENARIO,
    retrains: int = RETRAINS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Results:
    """Train, retrain and forget for every seed.

    Args:
        seeds: each gives its own split, poisoning, initial weights and training.
        scenario: the federation.
        retrains: retrained models per seed, each from a fresh initialisation; they show the noise.
        workers: processes that train side by side; None takes one a core, at most four. All timings come from
            processes that have a core each, so their ratios are fair.
        progress: called with (what, done, total).
    """
    runs = [scenario.with_seed(seed) for seed in seeds]
    workers = workers or min(os.cpu_count() or 1, 4)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        trained = _all_trained(pool, runs, retrains, progress)
        jobs = {pool.submit(_forget_and_measure, run, *trained[run.seed]): run.seed for run in runs}
        for done, _ in enumerate(as_completed(jobs), start=1):
            _say(progress, "forgetting and measuring", done, len(jobs))
    measured = [job.result() for job in jobs]
    rows = [row for part in measured for row in part.rows]
    noise = noise_ranges([part.noise for part in measured])
    described = {**scenario.as_dict(), "seeds": [run.seed for run in runs], "retrains_per_seed": retrains}
    return Results("demo", described, environment(), rows, noise)


@dataclass(frozen=True)
class _Part:
    """What one seed gave."""

    rows: list[Row]
    noise: dict[str, list[float]]


def _all_trained(
    pool: Executor, runs: list[Scenario], retrains: int, progress: Progress | None
) -> dict[int, tuple[ServerState, list[tuple[ServerState, Cost]]]]:
    """For each seed the trained state and the retrained ones, one job of the pool each."""
    first = {run.seed: pool.submit(_train, run) for run in runs}
    again: dict[int, list[Future[tuple[ServerState, Cost]]]] = {
        run.seed: [pool.submit(_retrain, run, number) for number in range(retrains)] for run in runs
    }
    jobs: list[Future[Any]] = [*first.values(), *(job for several in again.values() for job in several)]
    for done, job in enumerate(as_completed(jobs), start=1):
        job.result()
        _say(progress, "training and retraining", done, len(jobs))
    return {seed: (first[seed].result(), [job.result() for job in again[seed]]) for seed in first}


def _train(scenario: Scenario) -> ServerState:
    federation = scenario.build()
    return train(federation.engine(), federation.initial(), scenario.plan)


def _retrain(scenario: Scenario, number: int) -> tuple[ServerState, Cost]:
    federation = scenario.build()
    seed = derived_seed(scenario.seed, "retrain", number)
    fresh, plan = federation.initial(seed), dataclasses.replace(scenario.plan, seed=seed)
    options = RetrainOptions(fresh, plan, remember=False)
    outcome = retrain(federation.engine(), ServerState(fresh), Request.of(scenario.attacker), options)
    return outcome.state, outcome.cost


def _forget_and_measure(scenario: Scenario, trained: ServerState, retrained: list[tuple[ServerState, Cost]]) -> _Part:
    federation, request = scenario.build(), Request.of(scenario.attacker)
    evaluation = Evaluation(federation, request)
    before = evaluation.measure(trained.model)
    references = [evaluation.measure(state.model) for state, _ in retrained]
    costs = [cost for _, cost in retrained]
    rows = [evaluation.row("trained", before, before, references)]
    for reference, cost in zip(references, costs, strict=True):
        rows.append(evaluation.row("retrain", reference, before, references, cost, costs))
    for options in contenders():
        # The trajectory source must do without the leaver: its engine does not reach that client at all.
        gone = request.clients if options.source == "trajectory" else ()
        # Once for warming up torch, on an engine of its own: the timed one builds its graphs like any first request.
        hf_kcu(federation.engine().without(gone), trained, request, options)
        outcome = hf_kcu(federation.engine().without(gone), trained, request, options)
        stored = trained.memory.stored_bytes if options.source == "trajectory" and trained.memory else 0
        after = evaluation.measure(outcome.state.model)
        rows.append(evaluation.row(outcome.method, after, before, references, outcome.cost, costs, stored))
    return _Part(rows, retrain_noise(references))


def _one_thread() -> None:
    """Each worker has one core; more threads would take turns with the other workers."""
    torch.set_num_threads(1)


def _say(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)
