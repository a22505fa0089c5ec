"""A network for 8x8 digits that trains in seconds on a CPU."""

from torch import Tensor, nn

from expunge.errors import ModelError

_SIZE = 8


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers for 8x8 images; 38,282 parameters for one channel.

    Args:
        channels: Of the images.
        classes: Outputs.
        size: Side of the images in pixels; 8 and nothing else.

    Raises:
        ModelError: When `size` is not 8.

    Example:
        >>> sum(parameter.numel() for parameter in DigitsNet().parameters())
        38282
    """

    def __init__(self, channels: int = 1, classes: int = 10, size: int = _SIZE) -> None:
        super().__init__()
        if size != _SIZE:
            raise ModelError(f"DigitsNet takes 8x8 images, not {size}x{size}: use cnn for larger ones.")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, channels, 8, 8)."""
        logits: Tensor = self.classifier(self.features(inputs))
        return logits
