"""Is the trigger still there? Attack success rate, without the images that are of the target class anyway."""

from __future__ import annotations

from torch import Tensor

from expunge.errors import DataError


def attack_success_rate(triggered_logits: Tensor, true_labels: Tensor, target: int) -> float:
    """Share of triggered images that go to the target class, among those of *other* classes.

    Counting the target's own images would show an innocent model at about one over the number of classes.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        >>> attack_success_rate(logits, true_labels=torch.tensor([0, 1, 0]), target=1)
        0.5
    """
    others = true_labels != target
    if len(triggered_logits) != len(true_labels) or not bool(others.any()):
        raise DataError("The attack success rate needs triggered images of other classes than the target.")
    return float((triggered_logits[others].argmax(dim=1) == target).double().mean())


def asr_reduction(before: float, after: float) -> float | None:
    """``(before - after) / before``; None where there was nothing to reduce.

    Example:
        >>> asr_reduction(before=0.5, after=0.125)
        0.75
    """
    return (before - after) / before if before > 0 else None
