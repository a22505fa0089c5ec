"""Layers whose curvature can be read from what goes in and what gradients come back: products, tables, scales.

A layer is ``Any`` in here: what it is decides which attributes it has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shape(NamedTuple):
    """A layer as ``z = W a``: how long a and z are, 1 appended to a where there is a bias.

    ``transposed`` says that the weight is kept as W', as in Hugging Face's Conv1D and in embeddings.
    """

    inputs: int
    outputs: int
    bias: bool
    transposed: bool = False


def product_shape(layer: Any) -> Shape | None:
    """What a layer is that multiplies by one matrix at every position, and nothing else; None for all others.

    One that has a forward of its own has to show it by its gradients (uses.py).

    Example:
        >>> product_shape(nn.Linear(3, 2)), product_shape(nn.Conv1d(1, 2, 3, bias=False))
        (Shape(inputs=4, outputs=2, bias=True, transposed=False), Shape(inputs=3, outputs=2, bias=False, ...))
        >>> product_shape(nn.LayerNorm(3))
    """
    if isinstance(layer, nn.Linear):
        return Shape(layer.in_features + (layer.bias is not None), layer.out_features, layer.bias is not None)
    if _is_convolution(layer):
        bias = layer.bias is not None
        return Shape(layer.weight[0].numel() + bias, len(layer.weight), bias)
    if _is_hugging_face_conv1d(layer):
        inputs, outputs = layer.weight.shape
        return Shape(int(inputs) + 1, int(outputs), True, True)
    if is_table(layer):
        return Shape(layer.num_embeddings, layer.embedding_dim, False, True)
    return None


def is_table(layer: Any) -> bool:
    """Whether the layer looks up rows by number: what goes in is one-hot, so ``a a'`` is a diagonal of counts."""
    return (
        isinstance(layer, nn.Embedding)
        and type(layer).forward is nn.Embedding.forward
        and layer.max_norm is None
        and not layer.scale_grad_by_freq
        and not layer.sparse
    )


def is_over_tokens(layer: Any, inputs: Tensor, count: int) -> bool:
    """Whether a linear layer sees samples along the first dimension and tokens of theirs along others."""
    linear = isinstance(layer, nn.Linear) or _is_hugging_face_conv1d(layer)
    return linear and inputs.dim() > 2 and len(inputs) == count


def rows_of(layer: Any, inputs: Tensor) -> Tensor:
    """One row for each sample and position: what the weights are multiplied with, 1 appended where there is a bias."""
    if isinstance(layer, nn.Conv2d | nn.Conv1d):
        return _patches(layer, inputs)
    rows = inputs.reshape(-1, inputs.shape[-1])
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1) if layer.bias is not None else rows


def _patches(layer: Any, inputs: Tensor) -> Tensor:
    """The rows of a convolution, kept column by column: one copy, along which positions lie side by side.

    Not by F.unfold, which on a GPU launches a kernel for every sample.
    """
    flat = isinstance(layer, nn.Conv1d)
    images = inputs.unsqueeze(2) if flat else inputs
    kernel, dilation, stride = ((1, *p) if flat else p for p in (layer.kernel_size, layer.dilation, layer.stride))
    around = (0, *layer.padding) if flat else layer.padding
    images = F.pad(images, (around[1], around[1], around[0], around[0])).contiguous()
    count, channels, *sides = images.shape
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    places = [(side - own) // s + 1 for side, own, s in zip(sides, reach, stride, strict=True)]
    by_sample, by_channel, down, right = images.stride()
    views = images.as_strided(
        (channels, *kernel, count, *places),
        (by_channel, dilation[0] * down, dilation[1] * right, by_sample, stride[0] * down, stride[1] * right),
        images.storage_offset(),
    )
    size = channels * kernel[0] * kernel[1]
    columns = images.new_empty(size + (layer.bias is not None), count * places[0] * places[1])
    columns[:size].view(views.shape).copy_(views)
    columns[size:] = 1.0
    return columns.T


def counts_of(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """How often each row was looked up; one that is padding does not count."""
    counts = torch.bincount(tokens.flatten(), minlength=layer.num_embeddings)
    if layer.padding_idx is not None:
        counts[layer.padding_idx] = 0
    return counts.to(layer.weight.dtype)


def columns_of(layer: Any, gradient: Tensor, inputs: Tensor) -> Tensor:
    """One row for each sample and position: the gradient of what the layer gave there."""
    if isinstance(layer, nn.Conv2d | nn.Conv1d):
        gradient = gradient.movedim(1, -1)
    elif isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        gradient = gradient * (inputs != layer.padding_idx)[..., None]
    return gradient.reshape(-1, gradient.shape[-1])


def scaled_by(layer: Any, inputs: Tensor) -> Tensor | None:
    """What a norm scales, with the statistics that it has now: to be asked for in the forward pass; None of a bias."""
    return None if product_shape(layer) is not None else _normed(layer, inputs)[0]


def scale_gradients(layer: Any, gradient: Tensor, normed: Tensor | None) -> dict[str, Tensor]:
    """Of each sample the gradients of a norm's scale and shift, or of a product's bias, summed over positions.

    Samples are along the first dimension; ``normed`` is what ``scaled_by`` said.
    """
    if normed is None:
        columns = gradient.movedim(1, -1) if isinstance(layer, nn.Conv1d | nn.Conv2d) else gradient
        return {"bias": columns.reshape(len(columns), -1, columns.shape[-1]).sum(dim=1)}
    first = isinstance(layer, nn.GroupNorm | nn.modules.batchnorm._BatchNorm)
    positions = tuple(range(2, gradient.dim())) if first else tuple(range(1, gradient.dim() - layer.weight.dim()))
    found = {"weight": gradient * normed}
    if getattr(layer, "bias", None) is not None:
        found["bias"] = gradient
    return {name: part.sum(dim=positions) if positions else part for name, part in found.items()}


def scale_parameters(layer: Any, inputs: Tensor | None = None, outputs: Tensor | None = None) -> tuple[str, ...]:
    """Which of a layer's own parameters are scales and shifts whose gradient of a sample is cheap to tell.

    A norm that is not torch's own (RMSNorm of Hugging Face's) has to show it by what it gives for some inputs.
    """
    if product_shape(layer) is not None and not isinstance(layer, nn.Embedding):
        return ("bias",) if layer.bias is not None else ()
    if type(layer) in _NORMS and layer.weight is not None:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            return ()
        return ("weight", "bias") if getattr(layer, "bias", None) is not None else ("weight",)
    if not _may_be_root_mean_square(layer):
        return ()
    if inputs is None or outputs is None:
        return ("weight",)
    return ("weight",) if torch.allclose(_normed(layer, inputs)[0] * layer.weight, outputs, 1e-3, 1e-5) else ()


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.RMSNorm)


def _normed(layer: Any, inputs: Tensor) -> tuple[Tensor, bool]:
    """What a norm scales, and whether channels are the second dimension; else they are the last."""
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps), False
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(inputs, layer.num_groups, eps=layer.eps), True
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps), True
    eps = layer.eps if isinstance(layer, nn.RMSNorm) else getattr(layer, "variance_epsilon", getattr(layer, "eps", 0.0))
    eps = torch.finfo(inputs.dtype).eps if eps is None else eps
    sides = tuple(range(-layer.weight.dim(), 0))
    return inputs * torch.rsqrt(inputs.square().mean(dim=sides, keepdim=True) + eps), False


def _may_be_root_mean_square(layer: nn.Module) -> bool:
    own = dict(layer.named_parameters(recurse=False))
    return type(layer).__name__.endswith("RMSNorm") and set(own) == {"weight"} and own["weight"].dim() == 1


def _is_convolution(layer: Any) -> bool:
    return (
        isinstance(layer, nn.Conv1d | nn.Conv2d)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _is_hugging_face_conv1d(layer: Any) -> bool:
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
