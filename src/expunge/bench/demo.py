"""The demonstration: train a small federation with a poisoned client, forget it in several ways, compare.

Everything here happens on the digits that come with scikit-learn, so it needs no files and no network. The leaving
client and the seeds are none of those on which the method's settings were chosen (client 0, seeds below 10).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from expunge.bench.results import Results
from expunge.bench.runner import Experiment, run
from expunge.bench.scales import LEAVER, Scale
from expunge.bench.scenario import Scenario
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.data import Backdoor
from expunge.federation.fedavg import Progress, TrainingPlan
from expunge.unlearning.registry import RECOVERY

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
    Contender(name + more, {"seed": 0})  # as `expunge.forget` would run it, where nothing else is said
    for name in ("hf-kcu-paper", "hf-kcu-gradient", "hf-kcu-trajectory")
    for more in ("", RECOVERY)
)
"""The three presets, without and with recovery."""


def run_demo(
    seeds: Sequence[int] = SEEDS,
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
    setting = Setting(scenario.dataset, scenario, (Forget((LEAVER,)),), CONTENDERS, retrains, same_init=0)
    experiment = Experiment("demo", "A poisoned client leaves", lambda _scale: [setting])
    scale = Scale("small", scenario, tuple(seeds), retrains, same_init=0)
    with tempfile.TemporaryDirectory() as folder:
        return run(experiment, scale, seeds, Store(Path(folder)), workers=workers, progress=progress)
