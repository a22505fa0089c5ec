"""The models that experiments use, by name."""

from collections.abc import Callable

import torch
from torch import nn

from expunge.errors import ModelError, RequestError
from expunge.models.bfloat16 import InBfloat16
from expunge.models.cnn import CNN
from expunge.models.digits import DigitsNet
from expunge.models.gpt import GPT
from expunge.models.linear import SoftmaxRegression
from expunge.models.resnet import ResNet18
from expunge.models.vit import ViTLite

__all__ = ["CNN", "GPT", "MODELS", "DigitsNet", "InBfloat16", "ResNet18", "SoftmaxRegression", "ViTLite", "build"]

HIDDEN = 32
"""Units of the small network for tables."""


def _softmax(channels: int, classes: int, size: int) -> nn.Module:
    return SoftmaxRegression(channels * size * size, classes)


def _mlp(channels: int, classes: int, size: int) -> nn.Module:
    """One hidden layer, for tables."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))


def _narrow(channels: int, classes: int, size: int) -> nn.Module:
    """The paper's network with a quarter of its channels, for machines without a GPU."""
    return CNN(channels, classes, size, width=8, hidden=64)


def _resnet_in_bfloat16(channels: int, classes: int, size: int) -> nn.Module:
    return InBfloat16(ResNet18(channels, classes, size))


def _vit_in_bfloat16(channels: int, classes: int, size: int) -> nn.Module:
    return InBfloat16(ViTLite(channels, classes, size))


_REGISTRY: dict[str, Callable[[int, int, int], nn.Module]] = {
    "cnn": CNN,
    "cnn-narrow": _narrow,
    "resnet18": ResNet18,
    "vit-lite": ViTLite,
    "resnet18-bf16": _resnet_in_bfloat16,
    "vit-lite-bf16": _vit_in_bfloat16,
    "softmax": _softmax,
    "digits-net": DigitsNet,
    "mlp": _mlp,
}

MODELS: tuple[str, ...] = tuple(_REGISTRY)
"""The names that `build` knows."""


def build(name: str, channels: int, size: int, classes: int, seed: int) -> nn.Module:
    """Make a model with freshly drawn weights.

    The weights depend on the seed alone, and the global random state is left as it was.

    Args:
        name: One of `MODELS`.
        channels: Of the images.
        size: Side of the images in pixels.
        classes: Outputs.
        seed: Equal seeds give equal weights.

    Returns:
        The model, on the CPU and in training mode.

    Raises:
        RequestError: When there is no model of that name.
        ModelError: When the model cannot take images of that size.

    Example:
        >>> model = build("digits-net", channels=1, size=8, classes=10, seed=0)
        >>> tuple(model(torch.zeros(2, 1, 8, 8)).shape)
        (2, 10)
    """
    if name not in _REGISTRY:
        raise RequestError(f"There is no model '{name}': choose one of {', '.join(MODELS)}.")
    if min(channels, size, classes) < 1:
        raise ModelError(f"A model needs at least one channel, pixel and class, not {channels}, {size} and {classes}.")
    # Only the CPU's generator is forked and seeded: torch.manual_seed would reseed the accelerators too.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _REGISTRY[name](channels, classes, size)
