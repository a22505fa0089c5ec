"""torch's own losses, read attribute by attribute; what is no sum over samples is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from expunge.core.cross_entropy import CrossEntropy
from expunge.core.elementwise import BinaryCrossEntropy, MeanSquaredError
from expunge.errors import RequestError

_BY_ELEMENT = (nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)
"""Modules whose mean is one over all outputs."""

_BY_SAMPLE = (nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
"""Modules that give one number a sample without their reduction."""

_FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
}


def from_torch(loss: object) -> object:
    """What a torch loss is here: a loss, or a function that gives one number a sample; anything else as it is.

    Example:
        >>> from_torch(nn.MSELoss())
        MeanSquaredError(l2=0.0)
        >>> from_torch(nn.TripletMarginLoss())
        Traceback (most recent call last):
        expunge.errors.RequestError: The loss TripletMarginLoss is no sum of a loss of each sample's outputs...
    """
    try:
        loss = _FUNCTIONS[loss]() if loss in _FUNCTIONS else loss
    except TypeError:  # what cannot be looked up is none of them
        return loss
    if not isinstance(loss, nn.modules.loss._Loss):
        return loss
    name = type(loss).__name__
    if type(loss).forward is not getattr(getattr(nn, name, None), "forward", None):
        return loss  # a loss of the user's own, made of one of torch's
    if loss.reduction != "mean":
        raise RequestError(
            f"{name}(reduction={loss.reduction!r}) is not the mean over a batch, so its steps are as much longer as "
            "the batches are large: train with reduction='mean', the learning rate times the batch size."
        )
    return _read(loss, name)


def _read(loss: nn.modules.loss._Loss, name: str) -> object:
    if isinstance(loss, nn.CrossEntropyLoss):
        return CrossEntropy(0.0, _own(loss.weight), loss.label_smoothing, loss.ignore_index)
    if isinstance(loss, nn.NLLLoss):  # of log-probabilities, cross-entropy is the same, and so is its curvature
        return CrossEntropy(0.0, _own(loss.weight), ignore_index=loss.ignore_index)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return BinaryCrossEntropy(0.0, _own(loss.weight), _own(loss.pos_weight))
    if isinstance(loss, nn.MSELoss):
        return MeanSquaredError()
    if isinstance(loss, nn.BCELoss):
        raise RequestError(
            "BCELoss is of probabilities: leave the sigmoid out of the model, or take it back with "
            "forward=lambda model, batch: torch.logit(model(*batch.inputs)), and use nn.BCEWithLogitsLoss()."
        )
    if isinstance(loss, _BY_ELEMENT + _BY_SAMPLE):
        single = copy.copy(loss)
        single.reduction = "none"
        return partial(_mean_of_outputs, single)
    raise RequestError(
        f"The loss {name} is no sum of a loss of each sample's outputs: give a function that tells one number a "
        "sample from outputs and targets, or a model that is trained with such a loss."
    )


def _mean_of_outputs(loss: nn.Module, outputs: Tensor, targets: Any) -> Tensor:
    losses: Tensor = loss(outputs, targets)
    return losses.reshape(len(outputs), -1).mean(dim=1)


def _own(values: Tensor | None) -> Any:
    return None if values is None else values.detach().cpu()
