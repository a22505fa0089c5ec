"""TOFU: whoever knows some authors leaves a language model whose adapters were fine-tuned together.

A small GPT is pre-trained on plays and on TOFU's first authors, and frozen. Clients with some of the other authors each
fine-tune LoRA adapters together by AdamW, as FlowerTune does. After a client has left, does the model still know its
authors? Measured as TOFU does (answering.py), beside models whose adapters were trained again on the same base. What is
trained how long at scale `small` was chosen on the first leaver with seed 0; `paper` is larger by guess, not by trial.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from expunge.bench.adapters import Library, Size, Stage
from expunge.bench.bases import Pretraining
from expunge.bench.leaving import Departure, leaver_of
from expunge.bench.results import Results
from expunge.bench.settings import Contender
from expunge.bench.store import Store
from expunge.data.plays import made_up_plays, read_plays
from expunge.data.tofu import made_up_authors, read_tofu
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import AdamW, Recipe

_FEWER = {"curvature_samples": 100}
"""Fewer samples than methods take by themselves: at scale `paper` a step may take a fiftieth of a retraining."""
CONTENDERS = (
    Contender("fine-tuning"),
    Contender("hf-kcu", _FEWER),
    Contender("retrace", _FEWER),
    Contender("retrace", {**_FEWER, "coupled": False}, "retrace, uncoupled"),
)
SEEDS = {"smoke": (10,), "small": (20, 21), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
LEAVING = Departure(
    "tofu",
    "Who knows some authors leaves a language model's adapters",
    "clients that leave",
    CONTENDERS,
    (
        *("forget_probability", "forget_rouge", "forget_truth_ratio"),
        *("others_probability", "others_rouge", "others_truth_ratio", "mia_auc"),
    ),
    version=1,
)
_PLAN = TrainingPlan(rounds=20, epochs=4, batch_size=16, learning_rate=0.001, recipe=Recipe(AdamW()))
SIZES = {
    "smoke": Size(
        clients=5,
        authors=1,
        known=3,
        length=32,
        tokens=300,
        model={"width": 16, "depth": 1, "heads": 2},
        base=Pretraining(steps=20, batch_size=8, learning_rate=0.01),
        rank=2,
        plan=dataclasses.replace(_PLAN, rounds=2, epochs=1, batch_size=2, learning_rate=0.01),
        asked=4,
        retrains=2,
    ),
    "small": Size(
        clients=8,
        authors=2,
        known=100,
        length=64,
        tokens=1024,
        model={"width": 96, "depth": 2, "heads": 4},
        base=Pretraining(steps=500, batch_size=16, learning_rate=0.003),
        rank=32,
        plan=dataclasses.replace(_PLAN, rounds=15, epochs=4, batch_size=8, learning_rate=0.003),
        asked=48,
        retrains=5,
    ),
    "paper": Size(
        clients=20,
        authors=5,
        known=100,
        length=128,
        tokens=4096,
        model={"width": 256, "depth": 4, "heads": 4},
        base=Pretraining(steps=3000, batch_size=64, learning_rate=0.001),
        rank=32,
        plan=dataclasses.replace(_PLAN, batch_size=8, learning_rate=0.002),
        asked=200,
        retrains=5,
    ),
}


def tofu_scale(name: str, data_dir: Path | None) -> tuple[Size, Library]:
    """The size of that scale and what there is to read; to see that it runs, it is made up."""
    if name == "smoke":
        return SIZES[name], Library(made_up_plays(4, 60, seed=0), made_up_authors(8, seed=0))
    return SIZES[name], Library(read_plays(data_dir), read_tofu(data_dir))


def run_tofu(
    seeds: Sequence[int], size: Size, library: Library, store: Store, progress: Progress | None = None
) -> Results:
    """Who knows some authors leaves, for every seed somebody else.

    Args:
        seeds: each gives its own base, adapters and training.
        size: how large the federation is.
        library: what there is to read.
        store: where bases and what was measured are kept.
        progress: called with (what, done, total).
    """
    stages = [
        Stage(size, library, seed, leaver_of(seed, size.clients), store.root / "bases", store.device) for seed in seeds
    ]
    return LEAVING.run(stages, library.digest, store, progress)
