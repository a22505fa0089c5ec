"""What one vector per cohort instead of one per client would lose, on digits.

    python benchmarks/cohorts.py

Softmax regression in float64 by FedAvg, 120 clients of scikit-learn's digits, the training loop of `expunge.flower`'s
kind written out. One vector per cohort of k is the sum of theirs; a member's part of it is guessed by its weight. Told
for each k: the cosine of the guess with the client's own vector beside 1/sqrt(k), which it is where clients pull apart
from each other, and the length of what the guess misses in units of the vector's.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.federation.keeping.memory import Memory

CLIENTS, ROUNDS, STEPS, RATE = 120, 20, 5, 0.5
SIZES = (1, 2, 5, 10, 40, 120)


def main() -> None:
    """Print a line for each size of cohorts, for clients alike and for clients of two classes each."""
    inputs, targets = (torch.tensor(part) for part in load_digits(return_X_y=True))
    shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    by_class = torch.argsort(targets, stable=True)
    for kind, order in (("alike", shuffled), ("sorted by class", by_class)):
        parts = torch.chunk(order, CLIENTS)
        vectors = trained({f"client-{n}": (inputs[own] / 16, targets[own]) for n, own in enumerate(parts)})
        print(f"clients {kind}\n  cohort   cosine  1/sqrt(k)  missed")
        for size in SIZES:
            cosine, missed = guessed(vectors, size)
            print(f"{size:>8} {cosine:>8.2f} {1 / math.sqrt(size):>10.2f} {missed:>7.2f}")


def trained(data: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Each client's vector after the training."""
    weights = torch.zeros(65, 10, dtype=torch.float64)
    memory = Memory(Snapshot(weights.reshape(-1), {}))
    for _ in range(ROUNDS):
        updates = {name: (_local(weights, *own) - weights).reshape(-1) for name, own in data.items()}
        counts = {name: len(targets) for name, (_, targets) in data.items()}
        memory.record(updates, counts, learning_rate=RATE, steps=STEPS)
        mean = sum(counts[name] * update for name, update in updates.items()) / sum(counts.values())
        weights = weights + mean.view_as(weights)
    return [memory.vectors[name] for name in data]


def guessed(vectors: list[Tensor], size: int) -> tuple[float, float]:
    """Cosine with a client's own vector, and what is missed, where only sums over cohorts of this size are kept."""
    mixed = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(1)).tolist()
    cosines, missed = [], []
    for start in range(0, len(mixed), size):
        own = torch.stack([vectors[at] for at in mixed[start : start + size]])
        guess = own.mean(dim=0)  # clients are of one size here
        if float(guess.norm()) < 1e-9 * float(own.norm()):  # all vectors add up to zero: nothing is known
            guess = torch.zeros_like(guess)
        cosines += torch.cosine_similarity(own, guess[None]).tolist()
        missed += ((own - guess).norm(dim=1) / own.norm(dim=1)).tolist()
    return sum(cosines) / len(cosines), sum(missed) / len(missed)


def _local(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """A few steps of gradient descent on the client's own loss."""
    features = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], dim=1)
    wanted = torch.nn.functional.one_hot(targets, 10).to(features)
    for _ in range(STEPS):
        weights = weights - RATE * features.T @ ((features @ weights).softmax(dim=1) - wanted) / len(inputs)
    return weights


if __name__ == "__main__":
    main()
