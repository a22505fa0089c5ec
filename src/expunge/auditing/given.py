"""What a user gives to an audit, models and samples, read and checked before the work starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from expunge.auditing.exam import Samples
from expunge.auditing.way_back import OnTheWay
from expunge.core.batch import Batch, run
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ModelError, RequestError
from expunge.federation.engines.local_data import Data, MapStyleDataset
from expunge.unlearning.registry import Outcome

Model = nn.Module | Mapping[str, Tensor] | Outcome
"""A model, its state dict, or what ``expunge.forget`` returned."""

BATCH = 1024
TRIED = 64
"""So many samples of each set are tried on every model first."""


def as_module(model: Model, before: nn.Module, name: str) -> nn.Module:
    """The model as a module that answers the same every time."""
    module = before
    if isinstance(model, nn.Module):
        module = model
    elif isinstance(model, Outcome | Mapping):
        module = deepcopy(before)
        try:
            model.write_to(module) if isinstance(model, Outcome) else module.load_state_dict(dict(model))
        except (RuntimeError, ModelError) as problem:
            raise ModelError(f"What is given as {name} does not fit the architecture of before.") from problem
    else:
        raise RequestError(f"A model is a module, a state dict or an Outcome; {name} is a {type(model).__name__}.")
    for part in module.modules():
        random = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
        if part.training and (random or isinstance(part, nn.modules.batchnorm._BatchNorm)):
            raise ModelError(f"The model given as {name} is in training mode ({type(part).__name__}): call .eval().")
    return module


def weights_of(module: nn.Module, name: str) -> Snapshot:
    """All its weights, frozen ones too; refused where one is not finite."""
    weights = [parameter.detach().reshape(-1) for parameter in module.parameters()]
    if not weights:
        raise ModelError(f"The model given as {name} has no parameters: there is nothing that could have forgotten.")
    snapshot = Snapshot(torch.cat(weights), {key: buffer.detach() for key, buffer in module.named_buffers()})
    try:
        snapshot.require_finite()
    except ModelError as problem:
        raise ModelError(
            f"The model given as {name} has a NaN or infinite weight: load a sound checkpoint."
        ) from problem
    return snapshot


def require_different(weights: Mapping[str, Snapshot]) -> None:
    """Doing nothing may be judged; but no other model is one of the rest.

    Example:
        >>> one = Snapshot(torch.zeros(1), {})
        >>> require_different({"before": one, "after": one})
    """
    seen: dict[str, str] = {}
    for name, own in weights.items():
        twin = seen.setdefault(own.digest, name)
        if twin != name and name != "after":
            raise RequestError(f"{name} and {twin} are the same model: a model is not compared with itself.")


def read_samples(source: Data, what: str, device: torch.device) -> Samples:
    """Inputs and labels as tensors on a device; what cannot be used is refused.

    Example:
        >>> read_samples([(torch.zeros(2), 1)], "unseen", torch.device("cpu"))
        (tensor([[0., 0.]]), tensor([1]))
    """
    if isinstance(source, tuple) and len(source) == 2 and all(isinstance(part, Tensor) for part in source):
        inputs, labels = source
    elif isinstance(source, tuple | str | Mapping) or not _is_map_style(source):
        raise DataError(f"The {what} samples must be a pair of tensors or a map-style dataset.")
    elif len(source) == 0:
        raise DataError(f"There are no {what} samples: give at least one.")
    else:
        inputs, labels = _stacked(source, what)
    if len(inputs) != len(labels) or len(labels) == 0:
        raise DataError(f"There are {len(inputs)} {what} inputs for {len(labels)} labels: give as many, at least one.")
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"The {what} samples need one class label each: use whole numbers, labels.long().")
    if not bool(torch.isfinite(inputs).all()):
        raise DataError(f"The {what} samples have a NaN or infinite value: clean them first.")
    return inputs.to(device), labels.long().to(device)


def _is_map_style(source: Data) -> TypeGuard[MapStyleDataset]:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _stacked(source: MapStyleDataset, what: str) -> Samples:
    try:
        pairs = [
            (torch.as_tensor(own), torch.as_tensor(label)) for own, label in (source[i] for i in range(len(source)))
        ]
        return torch.stack([own for own, _ in pairs]), torch.stack([label for _, label in pairs])
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(f"The {what} dataset must give (input, label) pairs of one shape.") from problem


def count_classes(module: nn.Module, name: str, tried: Mapping[str, Tensor]) -> int:
    """How many classes the model tells apart; a few samples of every set are tried twice."""
    found = set()
    for what, inputs in tried.items():
        try:
            once, again = answers_of(module, inputs), answers_of(module, inputs)
        except (RuntimeError, IndexError, TypeError, ValueError) as problem:
            reason = str(problem).splitlines()[0]
            raise DataError(f"The model given as {name} cannot take the {what} samples: {reason}") from problem
        if once.dim() != 2 or once.shape[1] < 2:
            raise ModelError(f"The model given as {name} must give a row of class scores a sample, at least two.")
        if not torch.allclose(once, again, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ModelError(f"The model given as {name} answers the same question differently: call .eval() on it.")
        found.add(once.shape[1])
    return max(found)


UNSURE = 0.05
"""Outputs for a sample that differ by more than this part of what is usual are not rounded alone."""


FEW = 8
"""So many samples of all sets together are asked about at once."""


def require_alone(module: nn.Module, name: str, tried: Mapping[str, Tensor]) -> None:
    """Refuse a model whose answer to a sample depends on those beside it: it is asked in batches, and used one by one.

    So do layers that normalise by the batch in evaluation mode, too; and a model can tell an audit's batches, all of
    them stamped, from what comes to it later. Each sample's answer is compared with that among a few samples of all
    sets, and that of one alone.

    Example:
        >>> module = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)).eval()
        >>> require_alone(module, "after", {"unseen": torch.arange(20.0).reshape(10, 2)})
        Traceback (most recent call last):
        expunge.errors.ModelError: The model given as after answers a sample otherwise when other ones are beside it...
    """
    alike = [inputs for inputs in tried.values() if inputs.shape[1:] == next(iter(tried.values())).shape[1:]]
    known = torch.cat([answers_of(module, inputs) for inputs in alike]).double()
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(len(known))).to(known.device)
    among = torch.empty_like(known)
    mixed = torch.cat(alike)[order]
    among[order] = torch.cat([answers_of(module, few) for few in torch.split(mixed, FEW)]).double()
    heads = [sum(map(len, alike[:number])) for number in range(len(alike))]
    with suppress(RuntimeError, IndexError, ValueError):  # of one sample, which not every model takes
        for place, inputs in zip(heads, alike, strict=True):
            among[place] = answers_of(module, inputs[:1])[0].double()
    usual = known.norm() / len(known) ** 0.5
    if bool(((among - known).norm(dim=1) > UNSURE * usual).any()):
        raise ModelError(
            f"The model given as {name} answers a sample otherwise when other ones are beside it, in evaluation mode: "
            "no statistics of the batch may be in what it gives for one sample."
        )


def on_the_way_to(module: nn.Module, before: nn.Module) -> OnTheWay | None:
    """How a module answers on its way to the trained one; None where their weights are not alike in name and shape.

    Example:
        >>> zero, one = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)
        >>> zero.weight.data.zero_(), one.weight.data.fill_(1.0)[0]
        (tensor([[0.],
                [0.]]), tensor([1.]))
        >>> on_the_way_to(zero, one)(0.25)(torch.ones(1, 1)).tolist()
        [[0.25, 0.25]]
    """
    moved = moved_towards(module, before)
    return (lambda share: partial(answers_of, moved(share))) if moved is not None else None


def moved_towards(module: nn.Module, before: nn.Module) -> Callable[[float], nn.Module] | None:
    """A copy of a module that went so much of the way to the trained one; None where their weights are not alike."""
    own, theirs = (dict(each.named_parameters()) for each in (module, before))
    if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in theirs.items()}:
        return None

    def moved(share: float) -> nn.Module:
        other = deepcopy(module)
        with torch.no_grad():
            for name, weights in other.named_parameters():
                weights.copy_((1 - share) * weights + share * theirs[name].to(weights))
        return other

    return moved


def is_alike(module: nn.Module, before: nn.Module, inputs: Tensor) -> bool:
    """Whether a module is of the trained one's architecture: with all of its weights it answers like it.

    Whoever brings code may keep weights where nobody looks, and have others beside them that do nothing.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> is_alike(one, other, torch.eye(2)), is_alike(nn.Sequential(one), other, torch.eye(2))
        (True, False)
    """
    copy = deepcopy(module)
    try:
        copy.load_state_dict(before.state_dict())
    except RuntimeError:
        return False
    expected, found = (answers_of(own, inputs).double() for own in (before, copy))
    return expected.shape == found.shape and bool((found - expected).norm() <= UNSURE * expected.norm())


def answers_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Class scores, without gradients, a batch at a time; the module's own mode is kept.

    Example:
        >>> answers_of(nn.Flatten(), torch.ones(2, 1, 3)).shape
        torch.Size([2, 3])
    """
    with torch.no_grad():
        return torch.cat([run(module, Batch.of(part)) for part in torch.split(inputs, BATCH)])
