"""Model parameters as one flat vector, and back; buffers (batch norm) are kept apart.

All mathematics of expunge happens on flat vectors. Only parameters with ``requires_grad`` are in the
vector, each once even where two modules share it; frozen ones stay as they are in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from expunge.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trainable parameters, in the order in which the flat vector holds them.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> layout = Layout.of(model)
        >>> layout.size
        3
        >>> torch.equal(layout.flatten(layout.unflatten(torch.arange(3.0))), torch.arange(3.0))
        True
    """

    shapes: tuple[tuple[str, torch.Size], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a model's trainable parameters."""
        shapes = tuple((name, p.shape) for name, p in model.named_parameters() if p.requires_grad)
        if not shapes:
            raise ModelError("The model has no trainable parameters: set requires_grad on those to update.")
        return cls(shapes)

    @cached_property
    def size(self) -> int:
        """Length d of the flat vector."""
        return sum(shape.numel() for _, shape in self.shapes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector out of named tensors; names outside the layout (buffers, frozen) are passed over."""
        for name, shape in self.shapes:
            if name not in tensors:
                raise ModelError(f"Parameter {name!r} is missing: is this of another architecture?")
            if tensors[name].shape != shape:
                raise ModelError(
                    f"Parameter {name!r} has shape {tuple(tensors[name].shape)} where the model has "
                    f"{tuple(shape)}: this is of another architecture."
                )
        return torch.cat([tensors[name].detach().reshape(-1) for name, _ in self.shapes])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views into the vector."""
        if vector.shape != (self.size,):
            raise ModelError(f"A vector of shape {tuple(vector.shape)} does not fit {self.size} parameters.")
        parts = torch.split(vector, [shape.numel() for _, shape in self.shapes])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}


def weighted_sum(vectors: Iterable[Tensor], weights: Iterable[float]) -> Tensor:
    """``sum_i w_i v_i`` with one vector of extra memory, however many there are.

    Example:
        >>> weighted_sum([torch.tensor([1.0]), torch.tensor([4.0])], [2.0, 0.5])
        tensor([4.])
    """
    total: Tensor | None = None
    for vector, weight in zip(vectors, weights, strict=True):
        total = weight * vector if total is None else total.add_(vector, alpha=weight)
    assert total is not None
    return total


def tensors_digest(named: Iterable[tuple[str, Tensor]], text: str = "") -> str:
    """SHA-256 of a text and of named tensors: their names, types, shapes and bytes, in this order.

    Example:
        >>> ones = [("a", torch.ones(2))]
        >>> tensors_digest(ones) == tensors_digest([("a", torch.ones(2))])
        True
        >>> tensors_digest(ones) in (tensors_digest(ones, "text"), tensors_digest([("b", torch.ones(2))]))
        False
    """
    state = hashlib.sha256(text.encode())
    for name, tensor in named:
        state.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a federation's model is at one moment: the flat parameters, and the buffers apart.

    ``layout`` says where in the flat vector each layer lies; methods that work layer by layer need it.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> snapshot = Snapshot.of(model)
        >>> snapshot.parameters.shape, sorted(snapshot.buffers)
        (torch.Size([4]), ['num_batches_tracked', 'running_mean', 'running_var'])
    """

    parameters: Tensor
    buffers: Mapping[str, Tensor]
    layout: Layout | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        """A copy of the model's parameters and buffers, refused where one is not finite."""
        layout = Layout.of(model)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        snapshot = cls(layout.flatten(dict(model.named_parameters())), buffers, layout)
        snapshot.require_finite()
        return snapshot

    def require_finite(self) -> None:
        """Raise ModelError where a parameter or buffer is NaN or infinite."""
        for name, tensor in {"parameters": self.parameters, **self.buffers}.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(f"The model has a NaN or infinite value in its {name}: load a sound checkpoint.")

    def moved(self, parameters: Tensor) -> Snapshot:
        """The same buffers with other parameters."""
        return replace(self, parameters=parameters)

    def on(self, device: torch.device) -> Snapshot:
        """The same snapshot on that device."""
        buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        return replace(self, parameters=self.parameters.to(device), buffers=buffers)

    def layers(self) -> Layout:
        """Where each layer lies; refused where the snapshot was made without."""
        if self.layout is None:
            raise ModelError("This method works layer by layer: make the snapshot with Snapshot.of(model).")
        return self.layout

    def write_to(self, model: nn.Module) -> None:
        """Copy this snapshot into the model, in place."""
        tensors = Layout.of(model).unflatten(self.parameters)
        own_buffers = dict(model.named_buffers())
        if {name: b.shape for name, b in own_buffers.items()} != {name: b.shape for name, b in self.buffers.items()}:
            raise ModelError("The snapshot's buffers are not the model's: this is of another architecture.")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
            for name, buffer in own_buffers.items():
                buffer.copy_(self.buffers[name])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of parameters and buffers: two snapshots are the same model if and only if it agrees."""
        return tensors_digest([("", self.parameters), *sorted(self.buffers.items())])

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes to send or keep this snapshot."""
        return sum(t.numel() * t.element_size() for t in [self.parameters, *self.buffers.values()])
