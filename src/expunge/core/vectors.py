"""Model parameters as one flat vector, and back; buffers (batch norm) are kept apart.

All mathematics of expunge happens on flat vectors. Only parameters with ``requires_grad`` are in the
vector, each once even where two modules share it; frozen ones stay as they are in the model. It may hold fewer: those
that are named, as where a federation trains some layers together and others stay with the clients.

Wrappers change names: ``_orig_mod.`` of torch.compile, ``module.`` of DistributedDataParallel, ``.default.`` of PEFT,
which its own state dicts leave out. Names are the same here where they are without these.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from expunge.errors import ModelError

Chosen = Iterable[str] | Callable[[str], bool]
"""Some of a model's parameters: their names, the names of modules that hold them, or whether a name is one of them."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "default")


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    Example:
        >>> plain_name("module._orig_mod.base_model.model.q.lora_A.default.weight")
        'base_model.model.q.lora_A.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def named_as(wanted: Iterable[str], given: Iterable[str]) -> dict[str, str]:
    """For each wanted name the given one that means the same, where there is one: itself, or wrapped otherwise.

    Example:
        >>> named_as(["lora_A.default.weight", "bias"], ["lora_A.weight"])
        {'lora_A.default.weight': 'lora_A.weight'}
    """
    own, plain = set(given), dict[str, list[str]]()
    for name in own:
        plain.setdefault(plain_name(name), []).append(name)
    found = {}
    for name in wanted:
        alike = [name] if name in own else plain.get(plain_name(name), [])
        if len(alike) == 1:
            found[name] = alike[0]
    return found


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
    def of(cls, model: nn.Module, parameters: Chosen | None = None) -> Layout:
        """The layout of a model's trainable parameters, or of some of them."""
        _require_vectors(model)
        trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ModelError("The model has no trainable parameters: set requires_grad on those to update.")
        chosen = trained.keys() if parameters is None else _chosen(trained, parameters)
        return cls(tuple((name, shape) for name, shape in trained.items() if name in chosen))

    @cached_property
    def size(self) -> int:
        """Length d of the flat vector."""
        return sum(shape.numel() for _, shape in self.shapes)

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are among them, as PEFT names them."""
        return any("lora_" in name for name, _ in self.shapes)

    @property
    def is_one_layer(self) -> bool:
        """Whether one matrix or kernel is all there is, with a bias or without: logistic regression, a head alone.

        Example:
            >>> head, norm = nn.Linear(4, 2), nn.LayerNorm(4)
            >>> [Layout.of(nn.Sequential(*own)).is_one_layer for own in ((head,), (norm, head), (head, head))]
            [True, False, True]
        """
        matrices = sum(len(shape) > 1 for _, shape in self.shapes)
        return matrices == 1 and len(self.shapes) <= 2

    @property
    def apart_from_layers(self) -> float:
        """The share of all matrices' entries that no layer calls its weight, as recurrent ones and fused attention's.

        Example:
            >>> Layout.of(nn.GRU(4, 3)).apart_from_layers, Layout.of(nn.Linear(4, 3)).apart_from_layers
            (1.0, 0.0)
        """
        sizes = {name: shape.numel() for name, shape in self.shapes if len(shape) > 1}
        apart = sum(size for name, size in sizes.items() if name.rpartition(".")[2] != "weight")
        return apart / sum(sizes.values()) if apart else 0.0

    @property
    def convolves(self) -> bool:
        """Whether it is a convolutional network's: no fewer kernels among its weights than matrices.

        Example:
            >>> kernel, first, last = nn.Conv2d(1, 2, 3), nn.Linear(8, 2), nn.Linear(2, 2)
            >>> [Layout.of(nn.Sequential(*own)).convolves for own in ((kernel, first), (kernel, first, last))]
            [True, False]
        """
        kernels = sum(len(shape) > 2 for _, shape in self.shapes)
        return kernels > 0 and kernels >= sum(len(shape) == 2 for _, shape in self.shapes)

    def like(self, model: nn.Module) -> Tensor:
        """An empty vector of the type, and on the device, of a model's own."""
        own = dict(model.named_parameters())
        first, *rest = (own[name].detach().reshape(-1)[:0] for name, _ in self.shapes)
        return torch.cat([first, *(part.to(first.device) for part in rest)])

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector out of named tensors; names outside the layout (buffers, frozen) are passed over."""
        own = [name for name, _ in self.shapes]
        names = dict(zip(own, own, strict=True)) if tensors.keys() >= set(own) else named_as(own, tensors)
        for name, shape in self.shapes:
            if name not in names:
                raise ModelError(f"Parameter {name!r} is missing: is this of another architecture?")
            if tensors[names[name]].shape != shape:
                raise ModelError(
                    f"Parameter {name!r} has shape {tuple(tensors[names[name]].shape)} where the model has "
                    f"{tuple(shape)}: this is of another architecture."
                )
        device = tensors[names[own[0]]].device  # a large model may lie on several
        return torch.cat([tensors[names[name]].detach().reshape(-1).to(device) for name in own])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views into the vector."""
        if vector.shape != (self.size,):
            raise ModelError(f"A vector of shape {tuple(vector.shape)} does not fit {self.size} parameters.")
        parts = torch.split(vector, [shape.numel() for _, shape in self.shapes])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}

    def unflatten_rows(self, vectors: Tensor) -> dict[str, Tensor]:
        """The same of several vectors, the rows of a matrix: their number stands in front of each shape."""
        if vectors.shape[1:] != (self.size,):
            raise ModelError(f"A vector of shape {tuple(vectors.shape[1:])} does not fit {self.size} parameters.")
        parts = torch.split(vectors, [shape.numel() for _, shape in self.shapes], dim=1)
        return {name: part.view(len(part), *shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}


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


def length(vector: Tensor) -> Tensor:
    """The Euclidean length, in double precision: squares of diverging or half-precision numbers outgrow their own type.

    Example:
        >>> length(torch.tensor([3e30, 4e30]))
        tensor(5.0000e+30, dtype=torch.float64)
    """
    found: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return found


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing in them is NaN or infinite: looked at together, for a device to be waited for once.

    Example:
        >>> all_finite([torch.ones(2), torch.arange(3)]), all_finite([torch.ones(2), torch.tensor(float("nan"))])
        (True, False)
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().reshape(-1))
    joined = (own[0] if len(own) == 1 else torch.cat(own) for own in alike.values())
    return all(bool(torch.isfinite(own).all()) for own in joined)


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
    def of(cls, model: nn.Module, parameters: Chosen | None = None) -> Snapshot:
        """A copy of the model's parameters and buffers, refused where one is not finite.

        Where only some parameters are chosen, the buffers of layers that have others stay out, too (FedBN).
        """
        layout = Layout.of(model, parameters)
        left_out = set() if parameters is None else _apart(model, layout)
        buffers = {name: own.detach().clone() for name, own in model.named_buffers() if name not in left_out}
        snapshot = cls(layout.flatten(dict(model.named_parameters())), buffers, layout)
        snapshot.require_finite()
        return snapshot

    def require_finite(self) -> None:
        """Raise ModelError where a parameter or buffer is NaN or infinite."""
        own = {"parameters": self.parameters, **self.buffers}
        if not all_finite(own.values()):
            name = next(name for name, tensor in own.items() if not all_finite([tensor]))
            raise ModelError(f"The model has a NaN or infinite value in its {name}: load a sound checkpoint.")

    def moved(self, parameters: Tensor) -> Snapshot:
        """The same buffers with other parameters."""
        return replace(self, parameters=parameters)

    def towards(self, other: Snapshot, share: float) -> Snapshot:
        """So much of the way to another model's parameters; buffers stay the own ones.

        Example:
            >>> Snapshot(torch.zeros(2), {}).towards(Snapshot(torch.ones(2), {}), 0.25).parameters
            tensor([0.2500, 0.2500])
        """
        if self.parameters.shape != other.parameters.shape:
            raise ModelError("Models of different architectures cannot be mixed.")
        return self.moved((1 - share) * self.parameters + share * other.parameters)

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
        """Copy this snapshot into the model, in place; what it does not hold stays as it is there."""
        layout = self.layout if self.layout is not None else Layout.of(model)
        own = {**layout.unflatten(self.parameters), **self.buffers}
        theirs: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names = named_as(own, theirs)
        if any(name not in names or theirs[names[name]].shape != tensor.shape for name, tensor in own.items()):
            raise ModelError(
                "The snapshot's parameters and buffers are not the model's: it is of another architecture."
            )
        with torch.no_grad():
            torch._foreach_copy_([theirs[names[name]] for name in own], list(own.values()))

    def is_same(self, other: Snapshot) -> bool:
        """Whether it is the same model; quicker than digests where both are at hand.

        Example:
            >>> one, two = (Snapshot(torch.ones(2), {}) for _ in range(2))
            >>> one.is_same(two), one.is_same(one.moved(torch.zeros(2)))
            (True, False)
        """
        if self is other:
            return True
        own, others = {"": self.parameters, **self.buffers}, {"": other.parameters, **other.buffers}
        if own.keys() != others.keys():
            return False
        pairs = [(tensor, others[name]) for name, tensor in own.items()]
        alike = all(a.dtype == b.dtype and a.shape == b.shape and a.device == b.device for a, b in pairs)
        return alike and all(a is b or torch.equal(a, b) for a, b in pairs)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of parameters and buffers: two snapshots are the same model if and only if it agrees."""
        return tensors_digest([("", self.parameters), *sorted(self.buffers.items())])

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes to send or keep this snapshot."""
        return sum(t.numel() * t.element_size() for t in [self.parameters, *self.buffers.values()])


def shared_copy(model: nn.Module, layout: Layout | None = None) -> nn.Module:
    """A model of its own in what is trained; what is frozen is the same memory as the given model's.

    Args:
        model: left as it is.
        layout: what is to be trained in the copy; by default what is trained in the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> copied = shared_copy(model)
        >>> copied[0].weight is model[0].weight, copied[1].weight is model[1].weight
        (True, False)
    """
    trained = {name for name, _ in (layout if layout is not None else Layout.of(model)).shapes}
    memo: dict[int, object] = {}
    for name, own in model.named_parameters():
        if name not in trained:  # one that is frozen here alone has the same numbers, but is another parameter
            memo[id(own)] = nn.Parameter(own.detach(), requires_grad=False) if own.requires_grad else own
    for layer in model.modules():  # such as old weight norm's: what the last call left, which the next one makes anew
        memo.update({id(own): own.detach() for own in vars(layer).values() if isinstance(own, Tensor) and own.grad_fn})
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as problem:
        raise ModelError(
            f"The model cannot be copied: {str(problem).splitlines()[0]}; take what is no weight or buffer (locks, "
            "files, results of earlier calls) out of its attributes."
        ) from problem


def _require_vectors(model: nn.Module) -> None:
    """Refuse trainable parameters that a vector of numbers cannot hold, and calls that change them."""
    for name, own in model.named_parameters():
        if not own.requires_grad:
            continue
        if own.is_meta or isinstance(own, nn.UninitializedParameter):
            raise ModelError(f"Parameter {name!r} has no numbers yet: call the model on a batch, or load its weights.")
        if own.is_complex():
            raise ModelError(f"Parameter {name!r} is complex: keep it as a real one, torch.view_as_real(parameter).")
        if own.layout != torch.strided:
            raise ModelError(f"Parameter {name!r} is sparse: keep it dense.")
    for name, layer in model.named_modules():
        if (
            isinstance(layer, nn.Embedding | nn.EmbeddingBag)
            and layer.max_norm is not None
            and layer.weight.requires_grad
        ):
            raise ModelError(
                f"Layer {name or 'model'!r} has max_norm, by which every call changes its weights, evaluation too: "
                "leave max_norm out, or shorten the rows after each optimiser step of the training."
            )


def _chosen(trained: Iterable[str], parameters: Chosen) -> set[str]:
    """The names that are meant; a name that means nothing is refused."""
    trained = list(trained)
    if callable(parameters):
        found = {name for name in trained if parameters(name)}
    else:
        if not isinstance(parameters, Iterable):
            raise ModelError(f"Parameters are chosen by their names or by a function of a name, not by {parameters!r}.")
        wanted, found = [parameters] if isinstance(parameters, str) else list(parameters), set[str]()
        for name in wanted:
            plain = plain_name(name)
            meant = {own for own in trained if plain_name(own) == plain or plain_name(own).startswith(f"{plain}.")}
            if not meant:
                raise ModelError(f"The model trains no parameter {name!r}: it trains {', '.join(trained[:5])}, ...")
            found |= meant
    if not found:
        raise ModelError("None of the model's trainable parameters is chosen: name at least one.")
    return found


def _apart(model: nn.Module, layout: Layout) -> set[str]:
    """Buffers of layers that have parameters, but none in the layout."""
    kept, found = {name for name, _ in layout.shapes}, set[str]()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        parameters = {f"{prefix}{own}" for own, _ in module.named_parameters(recurse=False)}
        if parameters and not parameters & kept:
            found |= {f"{prefix}{own}" for own, _ in module.named_buffers(recurse=False)}
    return found
