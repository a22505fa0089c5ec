"""Networks that know their samples by heart: digits, few samples, three labels in ten drawn at random.

All networks are trained at once, as one batch of matrices; each counts only its own half of the samples. The targets'
halves are drawn apart from the shadows': a target taken out of balanced halves would leave its members one shadow
less on that side, which alone moves the AUC of samples that nobody saw to 0.486.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from expunge.auditing.shadows import half_splits
from expunge.auditing.signals import membership_scores

SHADOWS, TARGETS, SAMPLES, HIDDEN, CLASSES = 16, 8, 400, 64, 10


@dataclass(frozen=True, eq=False)
class World:
    """Outputs of shadows and targets on the samples that half of them were trained on, and on unseen samples."""

    masks: np.ndarray
    labels: Tensor
    logits: Tensor
    unseen_labels: Tensor
    unseen_logits: Tensor

    def signals(self, signal: str, unseen: bool = False) -> np.ndarray:
        logits, labels = (self.unseen_logits, self.unseen_labels) if unseen else (self.logits, self.labels)
        return np.stack([membership_scores(one, labels, signal) for one in logits])


@cache
def world(seed: int = 0, steps: int = 60) -> World:
    random = np.random.default_rng(seed)
    inputs, truth = load_digits(return_X_y=True)
    order = random.permutation(len(inputs))
    noisy = np.where(random.random(len(order)) < 0.3, random.integers(CLASSES, size=len(order)), truth[order])
    images, labels = torch.tensor(inputs[order] / 16, dtype=torch.float32), torch.tensor(noisy)
    masks = np.concatenate([half_splits(SHADOWS, SAMPLES, seed), random.random((TARGETS, SAMPLES)) < 0.5])
    network = _trained(images[:SAMPLES], labels[:SAMPLES], torch.tensor(masks), seed, steps)
    with torch.no_grad():
        seen, unseen = _outputs(network, images[:SAMPLES]), _outputs(network, images[SAMPLES:])
    return World(masks, labels[:SAMPLES], seen, labels[SAMPLES:], unseen)


def _trained(images: Tensor, labels: Tensor, masks: Tensor, seed: int, steps: int) -> list[Tensor]:
    source, count = torch.Generator().manual_seed(seed), len(masks)
    network = [
        torch.randn(count, images.shape[1], HIDDEN, generator=source) / images.shape[1] ** 0.5,
        torch.zeros(count, 1, HIDDEN),
        torch.randn(count, HIDDEN, CLASSES, generator=source) / HIDDEN**0.5,
        torch.zeros(count, 1, CLASSES),
    ]
    optimizer = torch.optim.Adam([tensor.requires_grad_() for tensor in network], lr=0.01)
    weights = masks / masks.sum(dim=1, keepdim=True)
    for _ in range(steps):
        logits = _outputs(network, images)
        losses = F.cross_entropy(logits.transpose(1, 2), labels.expand(count, -1), reduction="none")
        optimizer.zero_grad()
        (losses * weights).sum().backward()
        optimizer.step()
    return network


def _outputs(network: list[Tensor], images: Tensor) -> Tensor:
    first, first_bias, second, second_bias = network
    return torch.relu(images @ first + first_bias) @ second + second_bias
