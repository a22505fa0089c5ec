"""Models in made-up outputs: where the truth is known, since nothing was trained."""

from __future__ import annotations

import torch

from expunge.auditing.measures import Observed

CLASSES, FORGOTTEN, TEST = 5, 80, 120


def _generator(seed):
    return torch.Generator().manual_seed(seed)


FORGET_LABELS = torch.randint(CLASSES, (FORGOTTEN,), generator=_generator(1))
TEST_LABELS = torch.randint(CLASSES, (TEST,), generator=_generator(2))


def _answers(labels, wrong):
    """Logits in favour of the label, or of the next class for the samples below ``wrong``."""
    chosen = torch.where(torch.arange(len(labels)) < wrong, (labels + 1) % CLASSES, labels)
    return 4.0 * torch.nn.functional.one_hot(chosen, CLASSES).double()


KNOWS_IT = _answers(FORGET_LABELS, wrong=0)
NEVER_SAW_IT = _answers(FORGET_LABELS, wrong=FORGOTTEN // 2)
GOOD = _answers(TEST_LABELS, wrong=6)
BAD = _answers(TEST_LABELS, wrong=60)


def observed(seed, *, kept=0.0, damage=0.0, trace=1.0, beyond=0.0, noise=0.8, **changes):
    """A model that kept a share of what the trained one knows, lost a share of its use, and has its own noise.

    ``trace`` is how much there was to know: 0 is a client that left none. ``beyond`` pushes the right answers for the
    forgotten data down.
    """
    chance = _generator(1000 + seed)

    def drawn(scale):
        return scale * float(torch.randn((), generator=chance))

    right = torch.nn.functional.one_hot(FORGET_LABELS, CLASSES).double()
    forget = NEVER_SAW_IT + kept * trace * (KNOWS_IT - NEVER_SAW_IT) - 4.0 * beyond * right
    test = GOOD + damage * (BAD - GOOD)
    values = {
        "test_logits": test + noise * torch.randn(test.shape, generator=chance, dtype=torch.float64),
        "test_labels": TEST_LABELS,
        "forget_logits": forget + noise * torch.randn(forget.shape, generator=chance, dtype=torch.float64),
        "forget_labels": FORGET_LABELS,
        "asr": min(max(0.03 + 0.9 * kept * trace + drawn(0.005), 0.0), 1.0),
        "forget_auc": 0.5 + 0.1 * kept * trace + drawn(0.005),
        "retained_auc": 0.55 + drawn(0.005),
    }
    return Observed(**{**values, **changes})


def retrained(count=5, first=0, **how):
    return [observed(seed, **how) for seed in range(first, first + count)]


def trained(**how):
    return observed(500, kept=1.0, **how)
