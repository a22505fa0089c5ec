"""Where a certificate is possible: outputs that are affine in the weights, under a convex loss with an L2 term.

Then ``F(theta) = mean_j l(W x_j + b, y_j) + l2/2 ||theta||^2`` is strongly convex with ``mu >= l2``, whatever the data.
This cannot be measured on a network (a Hessian that is positive here says nothing about there), so the model is read,
and what cannot be read is refused.
"""

from __future__ import annotations

import math

from torch import nn

from expunge.core.losses import CrossEntropy, Loss, SquaredError
from expunge.errors import ModelError
from expunge.models.linear import SoftmaxRegression


def no_certificate(model: nn.Module, loss: Loss) -> str | None:
    """Why there can be no certificate, in one sentence; None where there can be one.

    Accepted are an ``nn.Linear``, a ``SoftmaxRegression``, or either at the end of an ``nn.Sequential`` whose other
    layers are frozen, under cross-entropy or squared error with ``l2 > 0``.

    Example:
        >>> no_certificate(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), CrossEntropy(l2=0.1))
        >>> no_certificate(nn.Linear(4, 2), CrossEntropy())
        'No certificate: without an L2 term the loss is not strongly convex; train with l2 above 0.'
    """
    reason = _loss_reason(loss) or _model_reason(model)
    return f"No certificate: {reason}" if reason else None


def strong_convexity(model: nn.Module, loss: Loss) -> float:
    """A true lower bound mu on the curvature of the mean loss over any data; refused where there is none.

    Example:
        >>> strong_convexity(nn.Linear(4, 2), SquaredError(l2=0.1))
        0.1
    """
    if reason := no_certificate(model, loss):
        raise ModelError(reason)
    return loss.l2


def _loss_reason(loss: Loss) -> str | None:
    if type(loss) not in (CrossEntropy, SquaredError):
        return f"the loss {type(loss).__name__} is not known to be convex; use CrossEntropy or SquaredError."
    if not (loss.l2 > 0 and math.isfinite(loss.l2)):
        return "without an L2 term the loss is not strongly convex; train with l2 above 0."
    return None


def _model_reason(model: nn.Module) -> str | None:
    layers = list(model) if type(model) is nn.Sequential else [model]
    while layers and type(layers[-1]) is nn.Sequential:
        layers[-1:] = list(layers[-1])
    head = layers[-1] if layers else model
    if type(head) not in (nn.Linear, SoftmaxRegression):
        where = "ends in" if len(layers) > 1 else "is"
        return (
            f"the model {where} a {type(head).__name__}, so its loss is not known to be convex in its weights; "
            "only a linear layer on frozen features can be certified, as the last of an nn.Sequential."
        )
    for number, layer in enumerate(layers[:-1]):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return (
                f"layer {number} ({type(layer).__name__}) is trained, so the loss is not convex in all weights; "
                "freeze it (requires_grad_(False)) or certify a linear model."
            )
        for module in layer.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                return (
                    f"the statistics of layer {number} ({type(module).__name__}) follow the clients' data, "
                    "so the features are not frozen; replace it by a fixed affine layer."
                )
    return None
