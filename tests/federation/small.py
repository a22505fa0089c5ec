"""Federations small enough to follow by hand: float64, few parameters, unequal clients."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import Reply, Task

FEATURES, CLASSES = 3, 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, FEATURES, generator=generator(seed), dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator(seed + 1))


def clients(**counts: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Clients by name and sample count, each with its own data."""
    return {name: samples(count, seed=10 * number) for number, (name, count) in enumerate(counts.items())}


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 with weights (and norm scales) of a seed, none of them zero or one."""
    source = generator(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return model


def linear(seed: int = 0) -> nn.Module:
    return seeded(nn.Linear(FEATURES, CLASSES), seed)


def mlp(seed: int = 0) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)), seed)


def norm_net(seed: int = 0) -> nn.Module:
    """Batch norm and dropout: both behave otherwise while training."""
    layers = (nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, CLASSES))
    return seeded(nn.Sequential(*layers), seed)


class Pairs:
    """A map-style dataset of one's own: no tensors, no torch base class, plain Python labels."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self._rows = [(inputs.numpy(), int(label)) for inputs, label in zip(*data, strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[object, int]:
        return self._rows[index]


def scalar_line(slope: float, intercept: float) -> nn.Module:
    """``slope x + intercept``: two parameters."""
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(slope)
        model.bias.fill_(intercept)
    return model


def line_data(*pairs: tuple[float, float]) -> tuple[Tensor, Tensor]:
    points = torch.tensor(pairs, dtype=torch.float64)
    return points[:, :1], points[:, 1:]


LINES = {"ada": line_data((1, 3)), "bob": line_data((2, 0), (0, 4)), "cyd": line_data((1, 1), (2, 2), (0, 3))}
"""Three clients of a scalar line: one, two and three points."""


class Watching(LocalEngine):
    """The real engine, and what went through it."""

    def ask(self, tasks: dict[str, Task]) -> dict[str, Reply]:
        self.asked = [*getattr(self, "asked", []), dict(tasks)]
        replies = super().ask(tasks)
        self.replied = [*getattr(self, "replied", []), replies]
        return replies


def theta(model: nn.Module) -> Tensor:
    return Snapshot.of(model).parameters


def digest(*tensors: Tensor) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().numpy().tobytes())
    return state.hexdigest()


def digest_of(model: nn.Module) -> str:
    return digest(*model.state_dict().values()) + str([module.training for module in model.modules()])
