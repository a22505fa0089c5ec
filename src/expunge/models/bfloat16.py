"""Training in bfloat16, for networks that are too large to be trained in float32 in the time that there is."""

import torch
from torch import Tensor, nn


class InBfloat16(nn.Module):
    """A network whose products are computed in bfloat16 while it is trained; its parameters stay float32.

    In evaluation mode it is the network itself, in float32, and that is what unlearning and measuring see. Measured on
    small versions of our networks, in bfloat16 the mean gradient of 64 samples is off by 1 to 10% (single gradients
    cancel, their errors do not), a Gauss-Newton product by 0.2 to 0.4%, Kronecker factors by 0.1 to 0.2%.

    Args:
        network: what is trained; the logits are float32 either way.

    Example:
        >>> model = InBfloat16(nn.Linear(2, 3))
        >>> model(torch.zeros(1, 2)).dtype
        torch.float32
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's logits."""
        if not self.training:
            exact: Tensor = self.network(inputs)
            return exact
        # Each weight is cast once a pass, so a cache would save nothing, and a recorded step must not keep one.
        with torch.autocast(inputs.device.type, torch.bfloat16, cache_enabled=False):
            logits: Tensor = self.network(inputs)
        return logits.float()
