"""The cost of ten curvature products, set-up included, in gradients of the same samples: ours beside curvlinops.

One thread, the paper's CNN, 512 random 3x32x32 images in chunks of 128. Every repetition times each operator and,
next to it, one full gradient, so that a busy machine slows both; medians over the repetitions are shown.

    python benchmarks/curvature.py [--repetitions 7] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from expunge.core.batch import Batch
from expunge.core.curvature import Curvature
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.models import build

try:
    import curvlinops
except ImportError:
    curvlinops = None

SAMPLES, CHUNK, PRODUCTS = 512, 128, 10
TARGETS = {"expunge GGN": 15.0, "expunge Hessian": 16.0}

Run = Callable[[], Tensor]


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """One full gradient by plain backward passes: the unit of cost."""
    model.zero_grad(set_to_none=True)
    for images, labels in zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True):
        (F.cross_entropy(model(images), labels, reduction="sum") / len(inputs)).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def ours(kind: str, model: nn.Module, inputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
    snapshot = Snapshot.of(model)
    curvature = Curvature(model, snapshot, Batch.of(inputs, targets), CrossEntropy(), kind=kind, chunk_size=CHUNK)
    return torch.stack([curvature @ vector for vector in vectors])


def theirs(name: str, model: nn.Module, inputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
    data = list(zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True))
    parameters = list(model.parameters())
    # Without the check of determinism, which would cost it several gradients more.
    operator = getattr(curvlinops, name)(model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False)
    return torch.stack([operator @ vector for vector in vectors])


def contestants(problem: tuple[nn.Module, Tensor, Tensor, Tensor]) -> Iterator[tuple[str, Run]]:
    yield "expunge GGN", lambda: ours("ggn", *problem)
    yield "expunge Hessian", lambda: ours("hessian", *problem)
    if curvlinops is not None:
        yield "curvlinops GGN", lambda: theirs("GGNLinearOperator", *problem)
        yield "curvlinops Hessian", lambda: theirs("HessianLinearOperator", *problem)


def timed(run: Run) -> tuple[float, Tensor]:
    begun = time.perf_counter()
    value = run()
    return time.perf_counter() - begun, value


def check_agreement(products: dict[str, Tensor]) -> None:
    """Two operators that claim to be the same matrix must give the same products."""
    for kind in ("GGN", "Hessian"):
        reference = products.get(f"curvlinops {kind}", products[f"expunge {kind}"])
        gap = torch.linalg.matrix_norm(products[f"expunge {kind}"] - reference) / torch.linalg.matrix_norm(reference)
        if gap > 1e-4:
            raise SystemExit(f"The {kind} products of expunge and curvlinops differ by {gap:.1e}: time means nothing.")


def measure(repetitions: int) -> dict[str, dict[str, float]]:
    """Median seconds, and median cost in gradients that were timed in the same repetition, by operator."""
    torch.set_num_threads(1)
    model = build("cnn", channels=3, size=32, classes=10, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (SAMPLES,), generator=generator)
    count = sum(parameter.numel() for parameter in model.parameters())
    problem = (model, inputs, targets, torch.randn(PRODUCTS, count, generator=generator))
    runs = dict(contestants(problem))
    check_agreement({name: run() for name, run in runs.items()})  # and warms everything up
    seconds: dict[str, list[float]] = {name: [] for name in ("gradient", *runs)}
    gradients: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            before, _ = timed(lambda: gradient(model, inputs, targets))
            own, _ = timed(run)
            after, _ = timed(lambda: gradient(model, inputs, targets))
            seconds["gradient"] += [before, after]
            seconds[name].append(own)
            gradients[name].append(2 * own / (before + after))
    gradients["gradient"] = [1.0]
    return {
        name: {"seconds": statistics.median(times), "gradients": statistics.median(gradients[name])}
        for name, times in seconds.items()
    }


def show(results: dict[str, dict[str, float]], repetitions: int) -> None:
    title = f"{PRODUCTS} products with set-up, {SAMPLES} images, one thread, medians of {repetitions}"
    table = Table("operator", title=title)
    for heading in ("seconds", "gradients", "target"):
        table.add_column(heading, justify="right")
    for name, cost in results.items():
        target = f"≤ {TARGETS[name]:g}" if name in TARGETS else ""
        table.add_row(name, f"{cost['seconds']:.2f}", f"{cost['gradients']:.1f}", target)
    console = Console()
    console.print(table)
    if curvlinops is None:
        console.print("curvlinops is not installed, so there is nothing to compare with: run `make benchmark`.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    arguments = parser.parse_args()
    results = measure(arguments.repetitions)
    show(results, arguments.repetitions)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
