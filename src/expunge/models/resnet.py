"""ResNet-18 in its form for small images."""

from torch import Tensor, nn

from expunge.errors import ModelError

_SMALLEST = 8


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) for 32x32 images; 11,173,962 parameters for 3 channels and 10 classes.

    The stem is one 3x3 convolution without max-pooling, since a small image has nothing to spare; then
    come four stages of two basic blocks, with `width`, 2, 4 and 8 `width` channels, each after the first
    halving the image, and the mean over pixels. Batch norm makes the training-mode loss depend on the
    batch: gradients and curvature products are only well defined in eval mode.

    Args:
        channels: Of the images.
        classes: Outputs.
        size: Side of the images in pixels, at least 8; decides nothing else.
        width: Channels of the first stage.

    Raises:
        ModelError: When the images are too small.

    Example:
        >>> sum(parameter.numel() for parameter in ResNet18().parameters())
        11173962
    """

    def __init__(self, channels: int = 3, classes: int = 10, size: int = 32, width: int = 64) -> None:
        super().__init__()
        if size < _SMALLEST:
            raise ModelError(f"ResNet-18 halves its images three times: give it 8 pixels or more, not {size}.")
        self.stem = _convolution(channels, width, kernel=3)
        self.activation = nn.ReLU()
        self.stages = nn.Sequential(
            _Block(width, width),
            _Block(width, width),
            _Block(width, 2 * width, stride=2),
            _Block(2 * width, 2 * width),
            _Block(2 * width, 4 * width, stride=2),
            _Block(4 * width, 4 * width),
            _Block(4 * width, 8 * width, stride=2),
            _Block(8 * width, 8 * width),
        )
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, channels, h, w)."""
        features = self.stages(self.activation(self.stem(inputs)))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _convolution(channels, width, kernel=3, stride=stride)
        self.second = _convolution(width, width, kernel=3)
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else _convolution(channels, width, kernel=1, stride=stride)
        self.activation = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.second(self.activation(self.first(inputs)))
        outputs: Tensor = self.activation(inner + self.shortcut(inputs))
        return outputs


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    # No bias: the batch norm behind would take it away again.
    convolution = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))
