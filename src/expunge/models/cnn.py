"""The paper's convolutional network."""

from torch import Tensor, nn

from expunge.errors import ModelError

_POOLINGS = 3


class CNN(nn.Module):
    """Three convolutions and two linear layers; 188,810 parameters for 3x32x32 images of 10 classes.

    Each convolution (3x3, padding 1) is followed by ReLU and 2x2 max-pooling, with `width`, `2 width` and
    `2 width` channels; `hidden` units with ReLU lie between the features and the classes. There is
    neither batch norm nor dropout, so the loss is a deterministic function of parameters and data.

    Args:
        channels: Of the images.
        classes: Outputs.
        size: Side of the images in pixels, at least 8.
        width: Channels of the first convolution.
        hidden: Units before the last layer.

    Raises:
        ModelError: When the images are too small to be halved three times.

    Example:
        >>> sum(parameter.numel() for parameter in CNN().parameters())
        188810
    """

    def __init__(
        self, channels: int = 3, classes: int = 10, size: int = 32, width: int = 32, hidden: int = 128
    ) -> None:
        super().__init__()
        side = size // 2**_POOLINGS
        if side < 1:
            raise ModelError(f"The CNN halves its images three times: give it 8 pixels or more, not {size}.")
        self.features = nn.Sequential(
            *_block(channels, width), *_block(width, 2 * width), *_block(2 * width, 2 * width)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(2 * width * side * side, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, channels, size, size)."""
        logits: Tensor = self.classifier(self.features(inputs))
        return logits


def _block(channels: int, width: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
