"""Softmax regression, the model whose loss is convex."""

from torch import Tensor, nn


class SoftmaxRegression(nn.Module):
    """One linear layer on the flattened input; with cross-entropy, a convex problem.

    Here the assumptions of influence-function theory hold, so it is the model to test them on.

    Args:
        features: Length of the flattened input.
        classes: Outputs.
        bias: Whether each class has a bias.

    Example:
        >>> import torch
        >>> tuple(SoftmaxRegression(features=64, classes=10)(torch.zeros(5, 1, 8, 8)).shape)
        (5, 10)
    """

    def __init__(self, features: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(features, classes, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) of inputs (n, ...) with `features` numbers a sample."""
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits
