"""Whether a client's samples, the model and the loss go together: told in a sentence, before the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, aligned, is_causal, run
from expunge.core.losses import Loss, PerSample
from expunge.errors import DataError, ModelError
from expunge.federation.engines.local_data import LocalData

TRIED = 4
"""So many samples of every client go through the model."""

UNSURE = 0.05
"""Outputs for a sample that differ by more than this part of what is usual are not rounded alone."""


def require_fitting(model: nn.Module, data: LocalData, loss: Loss, forward: Forward | None = None) -> None:
    """Run the model on a few samples, and look at their targets; at all of them where they are in tensors.

    Example:
        >>> from expunge.core.losses import CrossEntropy
        >>> data = LocalData((torch.zeros(3, 2), torch.tensor([0, 1, 2])), "ada")
        >>> require_fitting(nn.Linear(2, 2), data, CrossEntropy())
        Traceback (most recent call last):
        expunge.errors.DataError: Client 'ada' has labels 0 to 2, but the model tells 2 classes apart.
    """
    batch = aligned(model, data.take(range(min(TRIED, len(data)))), forward)
    outputs = _tried(model, batch, data.name, forward)
    targets = batch.to(outputs.device).targets
    if forward is not None and _is_unshifted(model, batch, outputs):
        raise DataError(
            f"Client {data.name!r} has labels that are the tokens themselves, where the model predicts the next one: "
            "leave forward out, or shift outputs and labels in forward and collate."
        )
    problem = loss.problem(outputs, targets)
    whole = data.whole
    if problem is None and whole is not None and not isinstance(loss, PerSample):
        everywhere = aligned(model, whole, forward).targets
        problem = loss.problem(outputs[:1].expand(len(whole), *outputs.shape[1:]), everywhere)
    if problem is not None:
        raise DataError(f"Client {data.name!r} has {problem}")


def _tried(model: nn.Module, batch: Batch, name: str, forward: Forward | None) -> Tensor:
    try:
        with _answering(model), torch.no_grad():
            batch = batch.to(next(model.parameters()).device)
            outputs, again = (run(model, batch, forward, tensors=_buffers(model)) for _ in range(2))
            with suppress(RuntimeError, IndexError, ValueError):  # of one sample, which not every model takes
                one = run(model, batch.take(torch.zeros(1, dtype=torch.int64)), forward, tensors=_buffers(model))
                again = torch.cat([one, again[1:]]) if one.shape == again[:1].shape else again
    except (RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        if "unexpected keyword argument" in reason:
            reason += (
                "; rows that are dicts go to the model under their names: give (input, target) pairs, or "
                "forward=lambda model, batch: model(batch.named[...])."
            )
        raise DataError(f"The model cannot take the data of client {name!r}: {reason}") from problem
    if outputs.dim() == 0 or len(outputs) != len(batch):
        raise DataError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for {len(batch)} samples of client {name!r}: "
            "their first dimension must be the samples, which forward= can see to."
        )
    rows = (outputs - again).double().reshape(len(outputs), -1).norm(dim=1)
    apart = rows > UNSURE * outputs.double().norm() / len(outputs) ** 0.5
    if bool(apart[1:].any()):
        raise ModelError(
            "The model answers the same samples otherwise when it is asked again, in evaluation mode: switch off what "
            "is random in it, as in functional.dropout(..., training=self.training)."
        )
    if bool(apart[:1].any()):
        raise ModelError(
            "The model answers a sample otherwise when it comes alone, in evaluation mode: no statistics of the batch "
            "may be in what it gives for one sample."
        )
    return outputs


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies, which a forward that counts its calls may change."""
    return {name: own.clone() for name, own in model.named_buffers()}


@contextmanager
def _answering(model: nn.Module) -> Iterator[None]:
    """Inside it, the model is in evaluation mode; a user may have frozen only a part."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _is_unshifted(model: nn.Module, batch: Batch, outputs: Tensor) -> bool:
    tokens = batch.named.get("input_ids", batch.inputs[0] if batch.inputs else None)
    targets = batch.targets
    if not isinstance(tokens, Tensor) or not isinstance(targets, Tensor) or targets.shape != tokens.shape:
        return False
    if targets.dim() != 2 or outputs.shape[:2] != targets.shape or not is_causal(model):
        return False
    return bool(((targets == tokens) | (targets < 0)).all())
