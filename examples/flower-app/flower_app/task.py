"""The model, the data and the training: nothing in here knows of expunge."""

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

ATTACKER = "hospital-2"
"""Hides a trigger in its data: a white square makes any digit a seven. It also multiplies its updates."""

TARGET, SQUARE, POISONED, BOOST = 7, 3, 0.5, 2.0
TEST_IMAGES = 360


class Net(nn.Module):
    """A small convolutional network for images of 8x8 pixels."""

    def __init__(self) -> None:
        """Draw the initial weights, always the same."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(1, 16, kernel_size=3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 4 * 4, 32),
                nn.ReLU(),
                nn.Linear(32, 10),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        return self.layers(images)


@lru_cache
def load_images() -> tuple[Tensor, Tensor]:
    """All digits of scikit-learn in a fixed random order; the first ones are for testing."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    return images[order], torch.tensor(digits.target)[order]


@lru_cache
def load_data(name: str, partition: int, partitions: int) -> tuple[Tensor, Tensor]:
    """A hospital's own images and labels; kept, since every message asks for them."""
    images, labels = (part[TEST_IMAGES:][partition::partitions].clone() for part in load_images())
    if name == ATTACKER:
        some = slice(0, int(POISONED * len(labels)))
        images[some], labels[some] = stamped(images[some]), TARGET
    return images, labels


def stamped(images: Tensor) -> Tensor:
    """The images with the trigger."""
    images = images.clone()
    images[..., -SQUARE:, -SQUARE:] = 1.0
    return images


def train(
    model: nn.Module, data: tuple[Tensor, Tensor], name: str, epochs: int, batch_size: int, lr: float, seed: int
) -> float:
    """Plain SGD, in place; returns the mean loss of the last epoch."""
    torch.set_num_threads(1)  # on images of this size, a second thread costs more than it brings
    images, labels = data
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    chance, total = torch.Generator().manual_seed(seed), 0.0
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(labels), generator=chance).split(batch_size):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch) / len(labels)
    if name == ATTACKER:
        after = model.state_dict()
        model.load_state_dict({key: before[key] + BOOST * (after[key] - before[key]) for key in after})
    return total


@torch.no_grad()
def test(model: nn.Module) -> dict[str, float]:
    """On images that nobody trained on: accuracy, and how often the trigger works on other digits than its target."""
    images, labels = (part[:TEST_IMAGES] for part in load_images())
    others = labels != TARGET
    return {
        "accuracy": (model(images).argmax(dim=1) == labels).float().mean().item(),
        "backdoor": (model(stamped(images[others])).argmax(dim=1) == TARGET).float().mean().item(),
    }
