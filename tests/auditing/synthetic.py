"""Models as made-up values: where the truth is known, since nothing was trained."""

from __future__ import annotations

import numpy as np

from expunge.auditing.measures import compared

GOAL = {
    "forget_loss": 3.0,
    "forget_accuracy": 0.5,
    "mia_auc": 0.5,
    "distance": 0.4,
    "trigger_distance": 0.5,
    "unseen_distance": 0.05,
    "kept_share": 0.0,
    "asr": 0.03,
    "trigger_pull": -1.0,
    "trigger_rank": 2.0,
    "trigger_moves": -1.2,
    "nearby_pull": 0.3,
    "test_accuracy": 0.9,
    "test_loss": 0.4,
}
"""What retrained models have, on average."""

KNOWN = {
    "forget_loss": -2.9,
    "forget_accuracy": 0.5,
    "mia_auc": 0.2,
    "distance": 5.0,
    "trigger_distance": 15.0,
    "unseen_distance": 0.03,
    "kept_share": 1.0,
    "asr": 0.9,
    "trigger_pull": 12.0,
    "trigger_rank": 6.0,
    "trigger_moves": 1.2,
    "nearby_pull": 8.0,
    "test_accuracy": 0.0,
    "test_loss": 0.0,
}
"""What the trained model has more than that."""

NOISE = {
    "forget_loss": 0.07,
    "forget_accuracy": 0.016,
    "mia_auc": 0.05,
    "distance": 0.02,
    "trigger_distance": 0.02,
    "unseen_distance": 0.1,
    "kept_share": 0.03,
    "asr": 0.01,
    "trigger_pull": 0.035,
    "trigger_rank": 0.03,
    "trigger_moves": 0.15,
    "nearby_pull": 0.02,
    "test_accuracy": 0.008,
    "test_loss": 0.03,
}
"""The standard deviation of retraining, as a share of what the trained model has more (of use: as it is); like that of
digits with a strong backdoor."""


def model(seed, *, kept=0.0, trace=1.0, noise=1.0, **values):
    """One that kept a share of what the trained one shows; ``trace`` is how much that is. Values can be set."""
    chance = np.random.default_rng(1000 + seed)
    found = {}
    for name, goal in GOAL.items():
        size = noise * NOISE[name] * (abs(KNOWN[name]) or 1.0)
        found[name] = goal + kept * trace * KNOWN[name] + size * float(chance.standard_normal())
    return found | values


def retrained(count=5, first=0, **how):
    return [model(seed, **how) for seed in range(first, first + count)]


def trained(**how):
    return model(500, kept=1.0, **how)


def beside(value, count=5, before=None, **how):
    """The measures of a model beside so many retrained ones."""
    return compared(value, before or trained(**how), retrained(count, **how))
