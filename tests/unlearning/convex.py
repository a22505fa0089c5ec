"""Convex federations whose retrained optimum is known: by closed form (ridge) or by Newton's method (softmax)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from expunge.core.losses import CrossEntropy, Loss, SquaredError, objective
from expunge.core.vectors import Layout, Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule


@dataclass
class ConvexFederation:
    """Clients of a linear model with a strictly convex loss."""

    loss: Loss
    datasets: dict[str, tuple[Tensor, Tensor]]
    outputs: int
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        features = next(iter(self.datasets.values()))[0].shape[1]
        self.model = nn.Linear(features, self.outputs, bias=False).double()

    def engine(self) -> LocalEngine:
        return LocalEngine(self.model, self.loss, self.datasets)

    def state(self, parameters: Tensor, **more: object) -> ServerState:
        return ServerState(Snapshot(parameters, {}), **more)  # type: ignore[arg-type]

    def pooled(self, leave_out: dict[str, list[int] | None] | None = None) -> tuple[Tensor, Tensor]:
        """All samples but the left out ones (None: the whole client)."""
        leave_out = leave_out or {}
        parts = []
        for name, (inputs, targets) in self.datasets.items():
            keep = torch.ones(len(inputs), dtype=torch.bool)
            if name in leave_out:
                chosen = leave_out[name]
                keep[slice(None) if chosen is None else chosen] = False
            parts.append((inputs[keep], targets[keep]))
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def value(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = inputs @ Layout.of(self.model).unflatten(parameters)["weight"].T
        return objective(self.loss, logits, targets, parameters)

    def optimum(self, leave_out: dict[str, list[int] | None] | None = None) -> Tensor:
        """The minimiser of the mean loss over what is left, by damped-free Newton iterations (one for ridge)."""
        inputs, targets = self.pooled(leave_out)
        theta = torch.zeros(Layout.of(self.model).size, dtype=torch.float64)
        for _ in range(30):
            gradient = torch.func.grad(self.value)(theta, inputs, targets)
            if gradient.norm() < 1e-13:
                break
            hessian = torch.autograd.functional.hessian(lambda t: self.value(t, inputs, targets), theta)
            theta = theta - torch.linalg.solve(hessian, gradient)
        assert torch.func.grad(self.value)(theta, inputs, targets).norm() < 1e-10
        return theta


def ridge(seed: int = 0, clients: int = 5) -> ConvexFederation:
    """Random regression, clients of unequal size with maps of their own."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    datasets = {}
    for number in range(clients):
        inputs = normal(12 + 5 * number, 6)
        datasets[f"client-{number}"] = (inputs, inputs @ normal(6, 3) + normal(len(inputs), 3))
    return ConvexFederation(SquaredError(l2=0.05), datasets, outputs=3)


def ridge_closed_form(federation: ConvexFederation, leave_out: dict[str, list[int] | None]) -> Tensor:
    """``(X'X/n + l2)^-1 X'Y/n``: no Newton, no autograd."""
    inputs, targets = federation.pooled(leave_out)
    gram = inputs.T @ inputs / len(inputs) + federation.loss.l2 * torch.eye(inputs.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram, inputs.T @ targets / len(inputs)).T.reshape(-1)


def digits_softmax(l2: float, others: int = 3, components: int = 16) -> ConvexFederation:
    """Softmax regression on digits (principal components); client-0 has 10% of the data, of two classes only."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float64)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    images = images - images.mean(dim=0)
    basis = torch.linalg.svd(images, full_matrices=False).Vh[:components]
    features = torch.cat([images @ basis.T, torch.ones(len(images), 1, dtype=torch.float64)], dim=1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    one_sided = order[labels[order] <= 1][: len(labels) // 10]
    rest = order[~torch.isin(order, one_sided)]
    parts = [one_sided, *rest.chunk(others)]
    datasets = {f"client-{number}": (features[part], labels[part]) for number, part in enumerate(parts)}
    return ConvexFederation(CrossEntropy(l2=l2), datasets, outputs=10)


def gradient_descent(
    federation: ConvexFederation,
    rounds: Sequence[int],
    local_steps: int,
    learning_rate: float,
    *,
    leave_out: tuple[str, ...] = (),
) -> Iterator[tuple[Tensor, Memory, Schedule]]:
    """FedAvg with full-batch gradient descent on the clients, written down plainly; a state at each of ``rounds``."""
    classes = federation.outputs
    clients = {
        name: (inputs, torch.nn.functional.one_hot(targets, classes).double())
        for name, (inputs, targets) in federation.datasets.items()
        if name not in leave_out
    }
    counts = {name: len(inputs) for name, (inputs, _) in clients.items()}
    total = sum(counts.values())
    features = next(iter(clients.values()))[0].shape[1]
    theta = torch.zeros(classes, features, dtype=torch.float64)
    memory = Memory()
    for number in range(1, max(rounds) + 1):
        updates = {}
        for name, (inputs, one_hot) in clients.items():
            local = theta
            for _ in range(local_steps):
                error = (inputs @ local.T).softmax(dim=1) - one_hot
                local = local - learning_rate * (error.T @ inputs / len(inputs) + federation.loss.l2 * local)
            updates[name] = (local - theta).reshape(-1)
        memory.record(updates, counts)
        theta = theta + sum(counts[name] / total * update for name, update in updates.items()).view_as(theta)
        if number in rounds:
            yield theta.reshape(-1), memory.copy(), Schedule(learning_rate, local_steps, number)
