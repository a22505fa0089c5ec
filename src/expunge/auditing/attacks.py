"""Membership attacks on one model, with retrained models as shadows: none of them saw the forgotten samples.

A retrained model is attacked with the help of the others only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from expunge.auditing.comparison import Scores
from expunge.auditing.lira import lira
from expunge.auditing.measured import Measured
from expunge.auditing.rmia import rmia
from expunge.auditing.shadows import shadow_model_attack

FEWEST_SHADOWS = 4
"""LiRA needs a spread over shadows, and one of them is the target when a retrained model is attacked."""


class Questions(Protocol):
    """What the attacks need of an exam."""

    @property
    def forgotten(self) -> tuple[Tensor, Tensor]:
        """The samples to forget: inputs and labels."""

    @property
    def retained(self) -> tuple[Tensor, Tensor] | None:
        """Samples that stay."""

    @property
    def other_labels(self) -> Tensor:
        """Labels of the non-members."""

    def scores(self, measured: Measured, signal: str) -> Scores:
        """A membership signal of members and non-members."""


def attack_scores(exam: Questions, model: Measured, retrained: Sequence[Measured]) -> dict[str, Scores]:
    """By the attack's name, the scores of the forgotten samples and of the non-members, large for members.

    The loss and the modified entropy need no shadows; Shokri's classifiers learn from what the shadows answer for the
    retained samples, which they know, and for unseen ones; RMIA and LiRA are offline.

    Args:
        exam: what the models were asked.
        model: to be attacked; it may be one of the retrained.
        retrained: models that never saw the forgotten samples.
    """
    shadows = [other for other in retrained if other is not model]
    signals = {signal: exam.scores(model, signal) for signal in ("loss", "modified_entropy", "confidence")}
    found = {"loss": signals["loss"], "modified entropy": signals["modified_entropy"]}
    if len(retrained) < FEWEST_SHADOWS:
        return found
    if exam.retained is not None and bool(torch.isin(exam.forgotten[1], _shadow_labels(exam)).all()):
        found["shadow models"] = _shadow_models(exam, model, shadows)
    found["RMIA"] = _rmia(signals["loss"], [exam.scores(shadow, "loss") for shadow in shadows])
    found["LiRA"] = by_lira(signals["confidence"], [exam.scores(shadow, "confidence") for shadow in shadows])
    return found


def by_lira(target: Scores, shadows: Sequence[Scores]) -> Scores:
    """Offline: how far above what models without the sample give, in standard deviations."""
    return _both(target, shadows, lambda own, table, masks: lira(own, table, masks, online=False))


def _shadow_models(exam: Questions, model: Measured, shadows: Sequence[Measured]) -> Scores:
    """Every shadow was trained on the retained samples and on none of the unseen."""
    labels, others, forgotten = _shadow_labels(exam), exam.other_labels, exam.forgotten[1]
    members = np.arange(len(labels)) < len(labels) - len(others)
    outputs = [torch.cat([own, s.other_logits]) for s in shadows if (own := s.retained_logits) is not None]
    asked = torch.cat([model.forget_logits, model.other_logits]), torch.cat([forgotten, others])
    scores = shadow_model_attack(torch.stack(outputs), np.tile(members, (len(shadows), 1)), labels, *asked)
    return Scores(scores[: len(forgotten)], scores[len(forgotten) :])


def _shadow_labels(exam: Questions) -> Tensor:
    """Of what the shadows answered for: the retained samples, then the non-members."""
    return exam.other_labels if exam.retained is None else torch.cat([exam.retained[1], exam.other_labels])


def _rmia(target: Scores, shadows: Sequence[Scores]) -> Scores:
    """Offline, beside the non-members as population."""
    population, table = np.asarray(target.others), np.stack([np.asarray(shadow.others) for shadow in shadows])
    return _both(target, shadows, lambda own, rows, masks: rmia(own, rows, masks, population, table, online=False))


def _both(target: Scores, shadows: Sequence[Scores], attack: Callable[..., np.ndarray]) -> Scores:
    """An attack on members and non-members alike: no shadow was trained on either."""
    scored = []
    for part in ("members", "others"):
        table = np.stack([np.asarray(getattr(shadow, part)) for shadow in shadows])
        scored.append(attack(np.asarray(getattr(target, part)), table, np.zeros(table.shape, dtype=bool)))
    return Scores(*scored)
