"""What one output tells about membership: signals of a sample under a model, from logits, in float64.

Float32 would not do: a sample fitted to ``1 - p_y = 1e-9`` has ``p_y = 1.0`` there, and all such samples look alike
just where an attack tells members apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expunge.errors import DataError, RequestError

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Values = Tensor | npt.NDArray[Any] | Sequence[float]


def loss(logits: Tensor, labels: Tensor) -> Floats:
    """Cross-entropy ``-log p_y`` of each sample; small for members (Yeom et al. 2018).

    Example:
        >>> loss(torch.zeros(1, 2), torch.tensor([0])).round(4)
        array([0.6931])
    """
    log_probabilities, chosen = _checked(logits, labels)
    return _numpy(-log_probabilities.gather(1, chosen).squeeze(1))


def modified_entropy(logits: Tensor, labels: Tensor) -> Floats:
    """``-(1 - p_y) log p_y - sum_{i != y} p_i log(1 - p_i)``; small for members (Song & Mittal 2021, eq. 8).

    Unlike the entropy it is large for a sample that is wrong and sure of it.

    Example:
        >>> sure = torch.tensor([[9.0, 0.0]])
        >>> bool(modified_entropy(sure, torch.tensor([0])) < modified_entropy(sure, torch.tensor([1])))
        True
    """
    log_probabilities, chosen = _checked(logits, labels)
    log_rest = _log_of_the_rest(log_probabilities)
    terms = log_probabilities.exp() * log_rest
    own = log_rest.exp() * log_probabilities
    return _numpy(-terms.scatter(1, chosen, own.gather(1, chosen)).sum(dim=1))


def scaled_confidence(logits: Tensor, labels: Tensor) -> Floats:
    """``log p_y - log(1 - p_y)``; large for members, and close to normal over models (Carlini et al. 2022, eq. 2).

    Computed as ``z_y - logsumexp_{i != y} z_i``, so that neither ``p_y`` near 0 nor near 1 is rounded.

    Example:
        >>> scaled_confidence(torch.tensor([[60.0, 0.0], [0.0, 60.0]]), torch.tensor([0, 0]))
        array([ 60., -60.])
    """
    _, chosen = _checked(logits, labels)
    exact = logits.detach().double()
    others = exact.scatter(1, chosen, -torch.inf).logsumexp(dim=1)
    return _numpy(exact.gather(1, chosen).squeeze(1) - others)


SIGNALS = ("confidence", "loss", "modified_entropy")


def membership_scores(logits: Tensor, labels: Tensor, signal: str = "confidence") -> Floats:
    """A signal turned so that large means member, as every attack here expects.

    Args:
        logits: samples x classes.
        labels: the samples' classes.
        signal: one of ``SIGNALS``: the scaled confidence as it is, minus the loss (which is ``log p_y``), or minus
            the modified entropy.

    Example:
        >>> membership_scores(torch.zeros(1, 2), torch.tensor([0]), signal="loss").round(4)
        array([-0.6931])
    """
    if signal == "confidence":
        return scaled_confidence(logits, labels)
    if signal == "loss":
        return -loss(logits, labels)
    if signal == "modified_entropy":
        return -modified_entropy(logits, labels)
    raise RequestError(f"There is no membership signal '{signal}': choose one of {', '.join(SIGNALS)}.")


def as_floats(values: Values, name: str, dimensions: int = 1) -> Floats:
    """The values as a float64 array of so many dimensions, none of them empty and no number missing.

    Example:
        >>> as_floats(torch.tensor([1, 2]), "scores")
        array([1., 2.])
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions:
        raise DataError(f"The {name} have {array.ndim} dimensions where {dimensions} are needed.")
    if array.size == 0:
        raise DataError(f"There are no {name}: give at least one.")
    if not np.isfinite(array).all():
        raise DataError(f"Some {name} are NaN or infinite: check the model they come from.")
    return array


def as_masks(masks: Values, shape: tuple[int, ...], name: str = "masks") -> Booleans:
    """The masks as booleans, of the shape of the signals they belong to.

    Example:
        >>> as_masks(torch.tensor([[True], [False]]), shape=(2, 1)).tolist()
        [[True], [False]]
    """
    array = np.asarray(masks.detach().cpu().numpy() if isinstance(masks, Tensor) else masks)
    if array.dtype != np.bool_ or array.shape != shape:
        raise DataError(f"The {name} must be booleans, one for each signal: {shape}, not {array.dtype} {array.shape}.")
    return array


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the labels as a column."""
    if logits.ndim != 2 or logits.shape[1] < 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        raise DataError(
            f"Signals need logits of samples x classes (at least 2) and one label each, not {tuple(logits.shape)} "
            f"and {tuple(labels.shape)}."
        )
    if not bool(torch.isfinite(logits).all()):
        raise DataError("Some logits are NaN or infinite: check the model they come from.")
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise DataError(f"Labels must be 0 to {logits.shape[1] - 1}, as many classes as the model has outputs.")
    return logits.detach().double().log_softmax(dim=1), labels.long()[:, None]


def _log_of_the_rest(log_probabilities: Tensor) -> Tensor:
    """``log(1 - p_i)`` of every class; only the largest can be near 1, and there it is the sum of the others."""
    largest = log_probabilities.argmax(dim=1, keepdim=True)
    others = log_probabilities.scatter(1, largest, -torch.inf)
    return torch.log1p(-others.exp()).scatter(1, largest, others.logsumexp(dim=1, keepdim=True))


def _numpy(values: Tensor) -> Floats:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)
