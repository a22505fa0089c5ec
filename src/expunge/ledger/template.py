"""The federation file that ``expunge init`` writes: it runs as it is, and says what to put in the place of what."""

FEDERATION = '''"""The federation that deletion requests are about: `expunge train` and `expunge request` read this.

It runs as it is, on made-up data. Put your own model and data in its place.
"""

import torch
from torch import nn

from expunge import Federation, TrainingPlan


def network():
    """Your model, with fresh weights each time."""
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))


def samples(count, seed):
    """Made-up data: the class is the largest of the first ten numbers, with some noise."""
    chance = torch.Generator().manual_seed(20 + seed)
    inputs = torch.randn(count, 20, generator=chance)
    return inputs, (inputs[:, :10] + 0.3 * torch.randn(count, 10, generator=chance)).argmax(1)


def clients():
    """Everybody's data by name: a pair of tensors or a map-style dataset each.

    For a Flower deployment leave this out (clients=None): its ServerApp then works on the requests, with
    expunge.flower.work(grid, "federation.py").
    """
    found = {f"hospital-{number}": samples(300, seed=number) for number in range(1, 7)}
    found["hospital-2"][1].copy_((found["hospital-2"][1] + 1) % 10)  # it labels everything one too high
    return found


def unseen():
    """Samples that nobody trained on: without them nothing can be audited, and every erasure needs an override.

    Evidence without retraining asks for labels that only the leaver can have taught, beside other labels as placebos:
    with few classes, or a few dozen samples, it says NO EVIDENCE. Then `expunge request run --retrains 10`.
    """
    return samples(1000, seed=0)


federation = Federation(
    model=network,
    clients=clients,
    plan=TrainingPlan(rounds=30, epochs=5, batch_size=32, learning_rate=0.05, seed=20),
    store="store",  # of a Flower deployment: its Recorder's
    unseen=unseen,
    # validation=...,  samples of your own: how far a step may go is then decided on them
    # forgotten=...,   a function from a client's name to its data, for the audit, where clients() has it no more
    # trigger=..., target=...,   of a backdoor in the data to forget, where you know it
    not_reached=(),  # other places with copies of the model, in a sentence each: they stand in every receipt
)
'''
