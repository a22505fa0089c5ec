"""Blocks of transformers, for images and for text."""

import math

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        width: length of a token's vector, a multiple of `heads`.
        heads: of the attention.
        hidden: units of the GELU layer.
        causal: whether a token sees only itself and those before it.

    Example:
        >>> tuple(Block(8, 2, 16)(torch.zeros(3, 5, 8)).shape)
        (3, 5, 8)
    """

    def __init__(self, width: int, heads: int, hidden: int, *, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, causal=causal))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """As many tokens, mixed."""
        tokens = tokens + self.attention(tokens)
        outputs: Tensor = tokens + self.mlp(tokens)
        return outputs


class Attention(nn.Module):
    """softmax(Q K' / sqrt(width / heads)) V, written out.

    The fused kernels have no second derivative, which curvature products need.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Each token's mix of what it sees."""
        batch, length, width = tokens.shape
        joint = self.project_in(tokens).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, length, width)
        outputs: Tensor = self.project_out(mixed)
        return outputs
