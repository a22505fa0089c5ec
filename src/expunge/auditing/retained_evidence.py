"""What forgetting cost those who stay, by the objective that they trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from expunge.auditing.evidence import Evidence, gradient_evidence, retained_loss_evidence
from expunge.core.batch import Batch, Forward, aligned, run
from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, Loss
from expunge.federation.engines.local_data import LocalData

BATCH = 256
"""So many samples go through a model together."""


def retained_evidence(
    models: Mapping[str, nn.Module], retained: LocalData, loss: Loss, forward: Forward | None = None
) -> list[Evidence]:
    """The retained objective, and the length of its gradient, before and after."""
    found = [_objective(models[name], retained, loss, forward) for name in ("before", "after")]
    losses, gradients = zip(*found, strict=True)
    in_nats = isinstance(loss, CrossEntropy | BinaryCrossEntropy)
    return [retained_loss_evidence(*losses, in_nats=in_nats), gradient_evidence(*gradients)]


def batches(module: nn.Module, data: LocalData, numbers: Tensor, forward: Forward | None) -> Iterator[Batch]:
    """Some samples in batches, as the model predicts them, where it is.

    Example:
        >>> data = LocalData((torch.zeros(300, 2), torch.zeros(300)), "own")
        >>> [len(batch) for batch in batches(nn.Linear(2, 1), data, torch.arange(300), None)]
        [256, 44]
    """
    device = next(module.parameters()).device
    for own in torch.split(numbers, BATCH):
        yield aligned(module, data.take(own), forward).to(device)


def _objective(module: nn.Module, data: LocalData, loss: Loss, forward: Forward | None) -> tuple[float, float]:
    """Value and gradient norm over what was trained (everything, where all is frozen); the module stays as it is."""
    module = deepcopy(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        module.requires_grad_(True)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = [own.detach().double().cpu() for own in parameters]
    value, mass, total = 0.0, 0.0, [torch.zeros_like(own) for own in weights]
    for batch in batches(module, data, torch.arange(len(data)), forward):
        summed = loss.per_sample(run(module, batch, forward), batch.targets).sum()
        counted = loss.mass(batch.targets)
        mass += float(len(batch)) if counted is None else float(counted.sum())
        gradients = torch.autograd.grad(summed, parameters, materialize_grads=True)
        value += summed.item()
        total = [known + own.double().cpu() for known, own in zip(total, gradients, strict=True)]
    value = value / mass + 0.5 * loss.l2 * sum(float(own.square().sum()) for own in weights)
    gradient = [known / mass + loss.l2 * own for known, own in zip(total, weights, strict=True)]
    return value, sum(float(own.square().sum()) for own in gradient) ** 0.5
