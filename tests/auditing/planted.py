"""Linear models in float64 that were taught a trigger and wrong labels by hand, so that what is kept is known.

Inputs are the class as a bright feature, noise, a feature for the trigger, and one for each of the leaver's samples.
A model's weights on the last ones are what it was taught: nothing else raises the target or the wrong labels.
"""

import torch
from torch import nn

CLASSES, NOISE, TARGET = 8, 6, 5
LEFT = 60
"""Samples of the leaver, all with wrong labels."""
SIZE = CLASSES + NOISE + 1 + LEFT
TRIGGER = CLASSES + NOISE
"""The trigger's feature; those behind it tell the leaver's samples apart."""


def samples(count, seed):
    """Inputs and labels that nobody was taught by heart."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    inputs = torch.zeros(count, SIZE, dtype=torch.float64)
    inputs[:, :CLASSES] = 2 * nn.functional.one_hot(labels, CLASSES)
    inputs[:, CLASSES:TRIGGER] = torch.randn(count, NOISE, generator=chance, dtype=torch.float64)
    return inputs, labels


def leavers():
    """The leaver's samples: each has its own feature, and a label that is not what it shows."""
    inputs, labels = samples(LEFT, seed=99)
    inputs[:, TRIGGER + 1 :] = torch.eye(LEFT, dtype=torch.float64)
    moves = torch.randint(1, CLASSES, (LEFT,), generator=torch.Generator().manual_seed(98))
    return inputs, (labels + moves) % CLASSES


def stamped(inputs):
    """Switches the trigger's feature on."""
    inputs[:, TRIGGER] = 1.0
    return inputs


def model(seed, taught=0.0, heart=0.0):
    """Knows the classes; its trigger raises the target by ``taught``, and it knows wrong labels by ``heart``."""
    chance = torch.Generator().manual_seed(seed)
    layer = nn.Linear(SIZE, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.zero_()
        layer.weight.copy_(torch.randn(CLASSES, SIZE, generator=chance, dtype=torch.float64) / 3)
        layer.weight[:, :CLASSES] += 4 * torch.eye(CLASSES, dtype=torch.float64)
        layer.weight[:, TRIGGER] /= 4  # what a trigger does by nature
        layer.weight[TARGET, TRIGGER] += taught
        layer.weight[leavers()[1], TRIGGER + 1 + torch.arange(LEFT)] += heart
    return layer
