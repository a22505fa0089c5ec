"""A small language model."""

import torch
from torch import Tensor, nn

from expunge.errors import ModelError
from expunge.models.transformer import Block


class GPT(nn.Module):
    """A decoder of characters: what comes next, after every character of a text.

    Characters and places are embedded; `depth` pre-norm blocks of causal attention and a GELU layer follow; the logits
    are a linear map of what comes out. No dropout, and no weights tied. With the defaults and 75 characters it has
    3,230,795 parameters.

    Args:
        characters: how many there are.
        length: of the longest text.
        width: length of a character's vector, a multiple of `heads`.
        depth: how many blocks.
        heads: of the attention.

    Raises:
        ModelError: where `width` does not divide, or a text is longer than `length`.

    Example:
        >>> model = GPT(characters=10, length=6, width=8, depth=1, heads=2)
        >>> tuple(model(torch.zeros(3, 5, dtype=torch.long)).shape)
        (3, 5, 10)
    """

    def __init__(
        self, characters: int = 75, length: int = 128, width: int = 256, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        if width % heads:
            raise ModelError(f"GPT shares its width among heads: {width} is no multiple of {heads}.")
        self.length = length
        self.character = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.empty(1, length, width))
        nn.init.trunc_normal_(self.place, std=0.02)
        nn.init.normal_(self.character.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, length, characters) of texts (n, length)."""
        if inputs.shape[1] > self.length:
            raise ModelError(f"GPT was made for texts of {self.length} characters, not of {inputs.shape[1]}.")
        embedded = self.character(inputs) + self.place[:, : inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits
