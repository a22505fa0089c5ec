"""What a model is measured by when it stands beside retrained ones, and the margins, fixed beforehand.

One point of a rate (accuracy, agreement, attack success, AUC), 0.02 nats of a loss or a divergence. On the data to
forget any deviation counts, on the rest only being worse than the retrained models. Divergence and agreement compare
with each retrained model, so their noise is that of pairs of retrained models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.auditing.functional import accuracy, agreement, kl_divergence, mean_loss
from expunge.auditing.prediction import Side
from expunge.errors import DataError, ModelError, RequestError

POINT = 0.01
"""The margin of rates."""

NATS = 0.02
"""The margin of losses and divergences."""


@dataclass(frozen=True, eq=False)
class Observed:
    """What one model does, and with which labels that is compared.

    Attributes:
        test_logits: outputs on test data.
        test_labels: its labels.
        forget_logits: outputs on the data to forget.
        forget_labels: its labels, as the leaver had them.
        asr: attack success rate, where there was an attack.
        forget_auc: membership AUC of the data to forget, against matched non-members.
        retained_auc: membership AUC of the retained data.
    """

    test_logits: Tensor
    test_labels: Tensor
    forget_logits: Tensor
    forget_labels: Tensor
    asr: float | None = None
    forget_auc: float | None = None
    retained_auc: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all outputs are numbers."""
        return bool(torch.isfinite(self.test_logits).all() and torch.isfinite(self.forget_logits).all())


Alone = Callable[[Observed], float | None]
Beside = Callable[[Observed, Observed], float]


@dataclass(frozen=True)
class Measure:
    """One thing to compare.

    Attributes:
        name: in results.
        label: for a reader.
        margin: deviations up to this are of no interest.
        side: on which side a deviation counts.
        alone: the value of one model; or
        beside: the value of a model (second) beside a retrained one (first).
        remembers: the side on which a model lies that still knows the forgotten data, +1 or -1; 0 for other measures.
        samples: how many samples a rate is out of, or None.
    """

    name: str
    label: str
    margin: float
    side: Side
    alone: Alone | None = None
    beside: Beside | None = None
    remembers: int = 0
    samples: Callable[[Observed], int] | None = None

    @property
    def about_forgetting(self) -> bool:
        """Whether it looks at what was to be forgotten."""
        return self.remembers != 0

    @property
    def is_divergence(self) -> bool:
        """Whether it is zero for equal models and grows with the square of their distance."""
        return self.beside is not None and self.side == "above"

    def shown(self, value: float) -> str:
        """For a sentence."""
        return f"{value:.3f}" if self.margin == NATS else f"{value:.1%}"

    def scaled(self, value: float) -> float:
        """Where its noise is about normal: distances between models on a log scale that is linear below the margin."""
        if self.beside is None:
            return value
        if self.side == "below":  # a rate of agreement; its distance is that of disagreement
            return -math.log1p(max(1 - value, 0.0) / self.margin)
        return math.log1p(max(value, 0.0) / self.margin)

    def natural(self, value: float) -> float:
        """Back from that scale."""
        if self.beside is None:
            return value
        return 1 - self.margin * math.expm1(-value) if self.side == "below" else self.margin * math.expm1(value)


def _test(model: Observed) -> int:
    return len(model.test_labels)


def _forget(model: Observed) -> int:
    return len(model.forget_labels)


MEASURES = (
    Measure(
        "test_accuracy",
        "test accuracy",
        POINT,
        "below",
        alone=lambda m: accuracy(m.test_logits, m.test_labels),
        samples=_test,
    ),
    Measure(
        "forget_accuracy",
        "accuracy on the forgotten data",
        POINT,
        "both",
        alone=lambda m: accuracy(m.forget_logits, m.forget_labels),
        remembers=1,
        samples=_forget,
    ),
    Measure(
        "forget_loss",
        "loss on the forgotten data",
        NATS,
        "both",
        alone=lambda m: mean_loss(m.forget_logits, m.forget_labels),
        remembers=-1,
    ),
    Measure("asr", "attack success", POINT, "both", alone=lambda m: m.asr, remembers=1, samples=_test),
    Measure(
        "forget_auc",
        "membership AUC of the forgotten data",
        POINT,
        "both",
        alone=lambda m: m.forget_auc,
        remembers=1,
        samples=_forget,
    ),
    Measure(
        "kl_forget",
        "divergence on the forgotten data",
        NATS,
        "above",
        beside=lambda r, m: kl_divergence(r.forget_logits, m.forget_logits),
        remembers=1,
    ),
    Measure(
        "kl", "divergence on test data", NATS, "above", beside=lambda r, m: kl_divergence(r.test_logits, m.test_logits)
    ),
    Measure(
        "agreement",
        "agreement on test data",
        POINT,
        "below",
        beside=lambda r, m: agreement(r.test_logits, m.test_logits),
        samples=_test,
    ),
    Measure(
        "retained_auc",
        "membership AUC of the retained data",
        POINT,
        "both",
        alone=lambda m: m.retained_auc,
        samples=_test,
    ),
)
"""Everything that is compared; a measure without values (no attack, no membership) is left out."""


def require_comparable(retrained: Sequence[Observed], trained: Observed, candidate: Observed) -> None:
    """Refuse what cannot be compared, with one line."""
    everyone = [trained, candidate, *retrained]
    for model in everyone:
        if not len(model.forget_labels) or not len(model.test_labels):
            raise DataError("There is no forgotten or no test sample to look at: give at least one of each.")
        for logits, labels in ((model.test_logits, model.test_labels), (model.forget_logits, model.forget_labels)):
            if logits.dim() != 2 or len(logits) != len(labels):
                raise DataError(
                    f"Outputs of shape {tuple(logits.shape)} do not belong to {len(labels)} labels: one row a sample."
                )
            if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
                raise DataError(f"A label is outside the model's {logits.shape[1]} classes.")
        if model.test_logits.shape != trained.test_logits.shape or (
            model.forget_logits.shape != trained.forget_logits.shape
        ):
            raise ModelError("The models give outputs of different shapes: compare models of one task on one data set.")
        if not torch.equal(model.test_labels, trained.test_labels) or not torch.equal(
            model.forget_labels, trained.forget_labels
        ):
            raise DataError("The models were measured with different labels: measure all of them on the same samples.")
    if not trained.is_finite or not all(model.is_finite for model in retrained):
        raise ModelError("The trained or a retrained model has outputs that are not finite: load sound checkpoints.")
    for model in retrained:
        for name, other in (("trained model", trained), ("candidate", candidate)):
            if torch.equal(model.forget_logits, other.forget_logits) and torch.equal(
                model.test_logits, other.test_logits
            ):
                raise RequestError(f"The {name} is one of the retrained models: it cannot be compared with itself.")
