"""How a model behaves, and how far its behaviour is from a retrained model's.

Everything is computed from logits, so it holds for any classifier and is blind to permutations of hidden units, which
distances between parameters are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expunge.core.batch import Batch, run
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError


def predict(model: nn.Module, snapshot: Snapshot, inputs: Tensor, batch_size: int = 1024) -> Tensor:
    """Logits of a snapshot in evaluation mode; the model's own weights are not used or changed."""
    modes = {module: module.training for module in model.modules()}  # a user may have frozen only a part
    tensors = {**Layout.of(model).unflatten(snapshot.parameters), **snapshot.buffers}
    model.eval()
    try:
        with torch.no_grad():
            parts = [run(model, Batch.of(part), tensors=tensors) for part in torch.split(inputs, batch_size)]
    finally:
        for module, training in modes.items():
            module.training = training
    return torch.cat(parts)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of right answers.

    Example:
        >>> accuracy(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        0.5
    """
    _same_length(logits, labels)
    return float((logits.argmax(dim=1) == labels).double().mean())


def mean_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy, in nats.

    Example:
        >>> round(mean_loss(torch.zeros(1, 2), torch.tensor([0])), 4)
        0.6931
    """
    _same_length(logits, labels)
    return float(F.cross_entropy(logits.double(), labels))


def kl_divergence(retrained: Tensor, unlearned: Tensor) -> float:
    """``E_x KL(p_retrained(x) || p_unlearned(x))`` in nats, from logits.

    Example:
        >>> kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2))
        0.0
    """
    _same_shape(retrained, unlearned)
    p, q = retrained.double().log_softmax(dim=1), unlearned.double().log_softmax(dim=1)
    # Rounding may leave -1e-17; a NaN must stay one, and max(0.0, nan) is 0.0: a broken model would look perfect.
    return float((p.exp() * (p - q)).sum(dim=1).mean().clamp(min=0.0))


def logit_mse(retrained: Tensor, unlearned: Tensor) -> float:
    """``E_x ||z_retrained(x) - z_unlearned(x)||^2``.

    Example:
        >>> logit_mse(torch.zeros(1, 2), torch.ones(1, 2))
        2.0
    """
    _same_shape(retrained, unlearned)
    return float((retrained.double() - unlearned.double()).square().sum(dim=1).mean())


def agreement(retrained: Tensor, unlearned: Tensor) -> float:
    """Share of inputs on which both give the same answer.

    Example:
        >>> agreement(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 2.0]]))
        1.0
    """
    _same_shape(retrained, unlearned)
    return float((retrained.argmax(dim=1) == unlearned.argmax(dim=1)).double().mean())


def parameter_gap(retrained: Tensor, unlearned: Tensor) -> float:
    """``||theta_unlearned - theta_retrained|| / ||theta_retrained||``; misleading, since permutations change it.

    Example:
        >>> parameter_gap(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 9.0]))
        1.0
    """
    if retrained.shape != unlearned.shape:
        raise ModelError("The parameter gap needs two models of the same architecture.")
    return float((unlearned - retrained).double().norm() / retrained.double().norm())


def accuracy_gap(retrained: float, unlearned: float) -> float:
    """``|Acc_retrained - Acc_unlearned|``.

    Example:
        >>> accuracy_gap(0.75, 0.5)
        0.25
    """
    return abs(retrained - unlearned)


@dataclass(frozen=True)
class CausalFaithfulness:
    """The paper's CF, with a flag where it says nothing."""

    value: float | None
    flag: str | None


def causal_faithfulness(trained: float, retrained: float, unlearned: float, least: float = 0.01) -> CausalFaithfulness:
    """``1 - |Acc_unlearned - Acc_retrained| / |Acc_trained - Acc_retrained|``.

    1 is at the retrained accuracy, 0 no better than doing nothing, below 0 worse. Undefined where training and
    retraining give the same accuracy, and flagged where they differ by less than ``least``: there it measures noise.

    Example:
        >>> causal_faithfulness(trained=0.75, retrained=0.25, unlearned=0.5)
        CausalFaithfulness(value=0.5, flag=None)
        >>> causal_faithfulness(trained=0.5, retrained=0.5, unlearned=0.5).flag
        'undefined: trained and retrained accuracy are equal'
    """
    apart = abs(trained - retrained)
    if apart == 0:
        return CausalFaithfulness(None, "undefined: trained and retrained accuracy are equal")
    flag = f"unreliable: trained and retrained accuracy differ by {apart:.2%} only" if apart < least else None
    return CausalFaithfulness(1 - abs(unlearned - retrained) / apart, flag)


def _same_length(logits: Tensor, labels: Tensor) -> None:
    if len(logits) != len(labels) or len(labels) == 0:
        raise DataError(
            f"There are {len(logits)} outputs for {len(labels)} labels: give as many of both, at least one."
        )


def _same_shape(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape or len(first) == 0:
        raise DataError(f"Outputs of shapes {tuple(first.shape)} and {tuple(second.shape)} cannot be compared.")
