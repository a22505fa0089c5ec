"""The demonstration: train a small federation with a poisoned client, forget it in several ways, compare.

Everything here happens on the digits that come with scikit-learn, so it needs no files and no network. The leaving
client and the seeds are none of those on which the method's settings were chosen (client 0, seeds below 10).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from expunge.bench.results import Results
from expunge.bench.runner import Experiment, cells, make_all, missing_cells, run
from expunge.bench.scales import LEAVER, Scale
from expunge.bench.scenario import Scenario
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store, built
from expunge.bench.workers import one_by_one
from expunge.data import Backdoor
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import RECOVERY

if TYPE_CHECKING:  # Flower is installed on request only
    from expunge.federation.engines.flower.engine import FlowerEngine
    from expunge.federation.engines.flower.site import Site

EngineName = Literal["local", "flower-simulation"]

SEEDS = (10, 11, 12)
RETRAINS = 5

SCENARIO = Scenario(
    dataset="digits",
    model="digits-net",
    clients=10,
    alpha=1.0,
    backdoors={LEAVER: Backdoor(target=7, size=3, fraction=0.5, boost=4.0)},
    plan=TrainingPlan(rounds=20, epochs=5, batch_size=32, learning_rate=0.05),
)

CONTENDERS = tuple(
    Contender(name + more, {"seed": 0} if name != "hf-kcu-paper" else {})  # as `expunge.forget` runs it by default
    for name in ("hf-kcu-paper", "hf-kcu", "retrace-krylov", "retrace")
    for more in ("", RECOVERY)
)
"""The presets and the default, without and with recovery."""


def run_demo(
    seeds: Sequence[int] = SEEDS,
    *,
    engine: EngineName = "local",
    scenario: Scenario = SCENARIO,
    retrains: int = RETRAINS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Results:
    """Train, retrain and forget for every seed.

    Args:
        seeds: each gives its own split, poisoning, initial weights and training.
        engine: where the clients are: in this process, or nodes of Flower's simulation.
        scenario: the federation.
        retrains: retrained models per seed, each from a fresh initialisation; they show the noise.
        workers: processes that train side by side; None takes one a core, at most four. All timings come from
            processes that have a core each, so their ratios are fair.
        progress: called with (what, done, total).
    """
    setting = Setting(scenario.dataset, scenario, (Forget((LEAVER,)),), CONTENDERS, retrains, same_init=0)
    experiment = Experiment("demo", "A poisoned client leaves", lambda _scale: [setting])
    scale = Scale("small", scenario, tuple(seeds), retrains, retrains, same_init=0)
    with tempfile.TemporaryDirectory() as folder:
        if engine == "flower-simulation":
            for seed in seeds:
                _make_in_flower(setting.with_seed(seed), Path(folder), progress)
        return run(experiment, scale, seeds, Store(Path(folder)), workers=workers, progress=progress)


def flower_site(scenario: str, number: int) -> Site:
    """One client of a scenario as a site of a Flower federation."""
    from expunge.federation.engines.flower.site import Site

    federation = built(scenario)
    name = federation.scenario.names[number]
    boost = federation.boosts().get(name, 1.0)
    return Site(name, federation.model, federation.datasets[name], l2=federation.scenario.l2, boost=boost)


def _make_in_flower(setting: Setting, folder: Path, progress: Progress | None) -> None:
    """Train, retrain and forget for one seed on simulated nodes; what is made waits in the folder to be measured."""
    from expunge.federation.engines.flower.simulation import simulated

    def work(engine: FlowerEngine) -> None:
        store = Store(folder, connect=lambda _: engine.without(()))
        with one_by_one() as pool:
            make_all(missing_cells(cells(setting), store), store, pool, progress)

    site = partial(flower_site, json.dumps(setting.scenario.as_dict()))
    simulated(site, setting.scenario.clients, work)
