"""How long training takes: FedAvg on random images of a dataset's shape, which take as long as real ones.

Usage: python benchmarks/training.py --device cuda       CIFAR-10's shape and number of images, the paper's protocol
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from expunge.bench.results import Results, Series, environment, utc_now
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.data import dirichlet
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.models import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/training/results.json"))
    asked = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(asked.samples, 3, 32, 32, generator=generator).to(asked.device)
    labels = torch.randint(10, (asked.samples,), generator=generator)
    parts = dirichlet(labels, asked.clients, 0.5, seed=0)
    labels = labels.to(asked.device)
    datasets = {
        f"client-{i}": (inputs[part.to(asked.device)], labels[part.to(asked.device)]) for i, part in enumerate(parts)
    }
    model = build(asked.model, 3, 32, 10, seed=0).to(asked.device)
    plan = TrainingPlan(asked.rounds, asked.epochs)
    seconds = []
    for _ in range(asked.repeats):
        engine = LocalEngine(model, CrossEntropy(), datasets)  # a new one: recording its steps is a part of the time
        started = time.perf_counter()
        train(engine, Snapshot.of(model), plan)
        if asked.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - started, 2))
    repeats = [float(number) for number in range(1, len(seconds) + 1)]
    label = f"{asked.model}, {asked.clients} clients, {asked.rounds} rounds of {asked.epochs} epochs"
    curve = Series(f"FedAvg on {environment()['device']}", label, "run", "seconds", repeats, seconds)
    results = Results(
        "training", vars(asked) | {"out": str(asked.out.name)}, environment(), [], {}, {}, [curve], utc_now()
    )
    results.save(asked.out)
    print(f"{label}: {seconds} s; written to {asked.out}")


if __name__ == "__main__":
    main()
