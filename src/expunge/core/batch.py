"""Samples that a model sees together, and the one place where a model is run on them.

A batch has positional inputs, inputs by name, and targets: tensors, or tuples, lists and dicts of tensors. What has as
many rows as the batch has samples goes with the samples; what else is in it (a constant, a flag) is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from expunge.core.recomputing import without_checkpoints
from expunge.errors import DataError, ModelError


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples: what the model is called with, and what it should have said.

    Attributes:
        inputs: given to the model by position.
        targets: a tensor as a rule; a loss of your own may want more.
        named: given to the model by name.
        size: how many samples.

    Example:
        >>> batch = Batch((torch.ones(3, 2),), torch.tensor([0, 1, 1]), size=3)
        >>> [len(part) for part in batch.split(2)], batch.take(torch.tensor([2])).targets
        ([2, 1], tensor([1]))
    """

    inputs: tuple[Any, ...] = ()
    targets: Any = None
    named: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor | None = None) -> Batch:
        """A tensor of inputs, a row each, and one of targets."""
        if targets is not None and len(targets) != len(inputs):
            raise DataError(f"A batch needs as many targets as inputs, not {len(targets)} for {len(inputs)}.")
        return cls((inputs,), targets, size=len(inputs))

    def __len__(self) -> int:
        return self.size

    @property
    def pair(self) -> tuple[Tensor, Tensor] | None:
        """The two tensors of a plain batch: one of inputs, one of targets; None where there is more."""
        if len(self.inputs) == 1 and not self.named and isinstance(self.targets, Tensor):
            return (self.inputs[0], self.targets) if isinstance(self.inputs[0], Tensor) else None
        return None

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in it."""
        yield from _leaves((self.inputs, dict(self.named), self.targets))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same with a function of every tensor in the place of it."""
        return replace(
            self,
            inputs=_mapped(function, self.inputs),
            named=_mapped(function, dict(self.named)),
            targets=_mapped(function, self.targets),
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same on that device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def take(self, indices: Tensor) -> Batch:
        """Some of its samples, in this order."""
        return replace(
            self.mapped(lambda own: own[indices.to(own.device)] if self._rows(own) else own), size=len(indices)
        )

    def split(self, sizes: int | Sequence[int]) -> list[Batch]:
        """Parts one after another: of one size, the last may be smaller, or of these sizes."""
        if isinstance(sizes, int):
            sizes = [min(sizes, self.size - at) for at in range(0, self.size, sizes)]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [self._between(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def _between(self, start: int, stop: int) -> Batch:
        return replace(self.mapped(lambda own: own[start:stop] if self._rows(own) else own), size=stop - start)

    def _rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == self.size


def alike(one: Batch, other: Batch) -> bool:
    """Whether two batches may be one: plain ones, of samples of one shape and type.

    Example:
        >>> pairs = [Batch.of(torch.ones(2, width), torch.ones(2)) for width in (3, 3, 4)]
        >>> alike(pairs[0], pairs[1]), alike(pairs[0], pairs[2])
        (True, False)
    """
    own, others = one.pair, other.pair
    if own is None or others is None:
        return False
    return all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in zip(own, others, strict=True))


def joined(batches: Sequence[Batch]) -> Batch:
    """Plain batches as one.

    Example:
        >>> len(joined([Batch.of(torch.ones(2, 3), torch.ones(2)), Batch.of(torch.ones(1, 3), torch.ones(1))]))
        3
    """
    if len(batches) == 1:
        return batches[0]
    inputs = torch.cat([batch.inputs[0] for batch in batches])
    return Batch.of(inputs, torch.cat([batch.targets for batch in batches]))


Forward = Callable[[nn.Module, Batch], Tensor]
"""How a model is run on a batch, where calling it with the inputs is not enough."""


def run(
    model: nn.Module,
    batch: Batch,
    forward: Forward | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    twice: bool = False,
) -> Tensor:
    """The model's outputs for a batch.

    Args:
        model: any module; called with the batch's inputs, and where it returns an object with ``logits``, those count.
        batch: the samples; see ``aligned`` for language models.
        forward: does it in the place of a plain call.
        tensors: parameters and buffers by name that stand in for the model's own.
        twice: whether it will be differentiated twice: fused attention then runs as plain matrix products.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> run(layer, Batch.of(torch.ones(1, 2)), tensors={"weight": torch.ones(1, 2)})
        tensor([[2.]])
    """
    with differentiable_attention() if twice else nullcontext(), _differentiable_recurrence(model, twice=twice):
        if tensors is None:
            return _outputs(model, batch, forward)
        own = {name for name, _ in model.named_buffers() if "running_" not in name}  # a forward may count in them
        fitted = _fitted(model, tensors).items()
        within = {f"model.{name}": tensor.clone() if name in own else tensor for name, tensor in fitted}
        with without_checkpoints():
            outputs: Tensor = functional_call(_Running(model, forward), within, (batch,))
        return outputs


def differentiable_attention() -> AbstractContextManager[Any]:
    """Inside it, fused attention runs as plain matrix products, which can be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH)


def _differentiable_recurrence(model: nn.Module, *, twice: bool) -> AbstractContextManager[Any]:
    """Inside it, recurrent layers on a GPU can be differentiated twice, and in evaluation mode: not by cuDNN."""
    recurrent = twice and any(isinstance(layer, nn.RNNBase) for layer in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


def aligned(model: nn.Module, batch: Batch, forward: Forward | None = None) -> Batch:
    """The batch with targets that are for what the model predicts.

    A causal language model of Hugging Face's predicts the next token, and its labels are the tokens themselves: the
    labels of each sequence are then its tokens but the first. Labels that are shifted already stay. With a ``forward``
    of your own nothing is done.

    Example:
        >>> batch = Batch.of(torch.ones(2, 2), torch.tensor([0, 1]))
        >>> aligned(nn.Linear(2, 2), batch) is batch
        True
    """
    tokens = batch.named.get("input_ids", batch.inputs[0] if batch.inputs else None)
    targets = batch.targets
    if forward is not None or not isinstance(tokens, Tensor) or not isinstance(targets, Tensor):
        return batch
    if targets.shape != tokens.shape or targets.dim() != 2 or not is_causal(model):
        return batch
    counts = targets >= 0
    if bool(((targets == tokens) | ~counts).all()):
        return replace(batch, targets=targets[:, 1:])
    if bool(((targets[:, :-1] == tokens[:, 1:]) | ~counts[:, :-1]).all()):
        return batch
    raise DataError(
        "The labels of a causal language model are neither its tokens nor the next ones: give "
        "forward=lambda model, batch: model(**batch.named).logits and labels of the same shape, one a position."
    )


def is_causal(model: nn.Module) -> bool:
    """Whether it is a language model of Hugging Face's that predicts the next token, inside whatever wrapper.

    Example:
        >>> is_causal(nn.Linear(2, 2))
        False
    """
    inner = unwrapped(model)
    if not any(each.__module__.startswith("transformers.") for each in type(inner).__mro__):
        return False
    kind = getattr(inner, "loss_type", None) or ""
    return kind == "ForCausalLM" or type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, of DistributedDataParallel and of PEFT.

    Example:
        >>> unwrapped(nn.DataParallel(nn.Linear(2, 2)))
        Linear(in_features=2, out_features=2, bias=True)
    """
    while True:
        if type(model).__module__.startswith("peft."):
            model = model.get_base_model()  # type: ignore[operator]
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def _fitted(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors, each in the type and on the device of the model's own where these are several."""
    own = {name: parameter for name, parameter in model.named_parameters() if name in tensors}
    if len({(parameter.dtype, parameter.device) for parameter in own.values()}) <= 1:
        return tensors
    return {name: tensor.to(own[name]) if name in own else tensor for name, tensor in tensors.items()}


class _Running(nn.Module):
    """A model inside a module that takes a batch: what a ``forward`` does is then done with the given tensors."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Batch) -> Tensor:
        """The outputs."""
        return _outputs(self.model, batch, self._forward)


def _outputs(model: nn.Module, batch: Batch, forward: Forward | None) -> Tensor:
    given: Any = model(*batch.inputs, **batch.named) if forward is None else forward(model, batch)
    if isinstance(given, Tensor):
        return given
    logits = given.get("logits") if isinstance(given, Mapping) else getattr(given, "logits", None)
    if forward is not None or not isinstance(logits, Tensor):
        where = "forward" if forward is not None else "The model"
        raise ModelError(
            f"{where} returns a {type(given).__name__} where one tensor of outputs is needed: say which part of it "
            "counts, forward=lambda model, batch: model(*batch.inputs, **batch.named)[0]."
        )
    next_one = isinstance(batch.targets, Tensor) and batch.targets.dim() == 2 and logits.dim() == 3
    if next_one and batch.targets.shape[1] == logits.shape[1] - 1 and is_causal(model):
        return logits[:, :-1]
    return logits


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(function, value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_mapped(function, value) for value in tree)
    return tree
