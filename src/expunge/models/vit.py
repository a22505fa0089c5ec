"""A small vision transformer."""

import torch
from torch import Tensor, nn

from expunge.errors import ModelError
from expunge.models.transformer import Block


class ViTLite(nn.Module):
    """A vision transformer for small images, after the ViT-Lite of Hassani et al. (2021).

    Patches of 4x4 pixels are embedded linearly and given a learned position; `depth` pre-norm blocks of
    attention and a GELU layer follow; the logits are a linear map of the mean over patches (instead of a
    class token, which would add a patch to every attention). No dropout. With the defaults it has
    3,391,626 parameters for 3x32x32 images of 10 classes.

    Args:
        channels: Of the images.
        classes: Outputs.
        size: Side of the images in pixels, a multiple of `patch`.
        patch: Side of a patch in pixels.
        width: Length of a patch's embedding, a multiple of `heads`.
        depth: How many blocks.
        heads: Of the attention.
        mlp_ratio: Hidden units of a block's GELU layer, in units of `width`.

    Raises:
        ModelError: When `size` or `width` do not divide.

    Example:
        >>> model = ViTLite(size=8, width=8, depth=1, heads=2)
        >>> tuple(model(torch.zeros(5, 3, 8, 8)).shape)
        (5, 10)
    """

    def __init__(
        self,
        channels: int = 3,
        classes: int = 10,
        size: int = 32,
        patch: int = 4,
        width: int = 256,
        depth: int = 6,
        heads: int = 4,
        mlp_ratio: float = 2.25,
    ) -> None:
        super().__init__()
        if size < patch or size % patch:
            raise ModelError(f"ViT-Lite cuts patches of {patch} pixels: give it a multiple of that, not {size}.")
        if width % heads:
            raise ModelError(f"ViT-Lite shares its width among heads: {width} is no multiple of {heads}.")
        self.embedding = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.position = nn.Parameter(torch.empty(1, (size // patch) ** 2, width))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, round(mlp_ratio * width)) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, channels, size, size)."""
        patches = self.embedding(inputs).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.classifier(self.norm(self.blocks(patches)).mean(dim=1))
        return logits
