"""Forgetting for somebody's own model and data: the one function that most users need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from expunge.auditing.functional import predict
from expunge.core.losses import CrossEntropy, Loss, as_loss
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.local_data import LocalData, MapStyleDataset
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule
from expunge.progress import progress_bars, watch_rounds
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import Outcome, method
from expunge.unlearning.request import Request


def forget(
    model: nn.Module,
    clients: Mapping[str, tuple[Tensor, Tensor] | MapStyleDataset],
    leaving: str | Sequence[str] = (),
    *,
    samples: Mapping[str, Sequence[int]] | None = None,
    loss: object = "cross_entropy",
    l2: float = 0.0,
    memory: Memory | None = None,
    learning_rate: float | None = None,
    local_steps: float | None = None,
    rounds: int | None = None,
    batch_size: int = 64,
    validation: tuple[Tensor, Tensor] | MapStyleDataset | None = None,
    use: str = "hf-kcu",
    progress: bool = True,
    **options: Any,
) -> Outcome:
    """Take clients (or samples inside clients) out of a trained model.

    Args:
        model: the trained model; it is not changed (``outcome.write_to(model)`` does that).
        clients: names and data: a pair of tensors or a map-style dataset. A client that leaves may be missing where
            ``memory`` remembers it.
        leaving: clients to forget as a whole.
        samples: indices to forget inside clients that stay.
        loss: ``"cross_entropy"``, ``"squared_error"`` or a plain ``nn.CrossEntropyLoss()``.
        l2: the training's L2 factor (weight decay).
        memory: what was recorded while training, for the trajectory source.
        learning_rate: of the clients' SGD in the training.
        local_steps: SGD steps that a client made in one round, on average.
        rounds: of the training; by default as many as the memory recorded.
        batch_size: of the training, for a recovery round or a short one after a long step.
        validation: samples of your own: how long a step may be is then decided on them, not on the clients' word.
        use: the method's name.
        progress: show a bar while it works, on a terminal.
        options: any option of that method, such as ``iterations=20`` or ``recovery=True``.

    Returns:
        What was done: the new weights, the memory for the next request, the cost, and the details.

    Example:
        >>> import torch
        >>> data = {name: (torch.randn(20, 2), torch.randint(0, 2, (20,))) for name in ("ada", "bob", "cyd")}
        >>> outcome = forget(nn.Linear(2, 2), data, leaving="ada", damping=0.1, iterations=3)
        >>> outcome.method, outcome.succeeded
        ('hf-kcu', True)
    """
    if options.get("recovery") is True:
        options["recovery"] = Recovery()
    chosen = method(use).configured(**options)
    rounds = rounds or (memory.rounds if memory is not None else None)
    schedule = _schedule(learning_rate, local_steps, rounds, batch_size)
    state = ServerState(Snapshot.of(model), schedule, memory)
    trained_with = as_loss(loss, l2)
    engine = LocalEngine(model, trained_with, clients, validation=validation)
    request = Request.of(leaving, samples)
    request.parties(engine.clients(), memory.clients if memory is not None else ())  # a bad request is told first
    own = {} if validation is None else {"validation": validation}
    _require_fitting(model, state.model, {**clients, **own}, trained_with)
    with progress_bars() if progress else nullcontext() as bars:
        if bars is not None:
            watch_rounds(engine, chosen.options, bars)
        return chosen(engine, state, request)


def _schedule(
    learning_rate: float | None, local_steps: float | None, rounds: int | None, batch_size: int
) -> Schedule | None:
    """The training's schedule, where it is given: whole, or not at all."""
    given = {"learning_rate": learning_rate, "local_steps": local_steps, "rounds": rounds}
    missing = [name for name, value in given.items() if value is None]
    if learning_rate is None and local_steps is None:
        return None
    if learning_rate is None or local_steps is None or rounds is None:
        raise RequestError(f"To know how the model was trained, {missing[0]} is missing beside what you gave.")
    return Schedule(learning_rate, local_steps, rounds, batch_size)


def _require_fitting(
    model: nn.Module,
    snapshot: Snapshot,
    clients: Mapping[str, tuple[Tensor, Tensor] | MapStyleDataset],
    loss: Loss,
) -> None:
    """One sample of every client through the model: what does not fit is told in a sentence, before the work."""
    for name, source in clients.items():
        inputs, targets = LocalData(source, name).take([0])
        inputs = inputs.to(snapshot.parameters.device)
        try:
            outputs = predict(model, snapshot, inputs)
        except (RuntimeError, IndexError, TypeError) as problem:
            reason = str(problem).splitlines()[0]
            raise DataError(f"The model cannot take the data of client {name!r}: {reason}") from problem
        labels = source[1] if isinstance(source, tuple) else targets
        if not isinstance(loss, CrossEntropy):
            continue
        if labels.is_floating_point():
            raise DataError(
                f"Client {name!r} has numbers where cross-entropy needs class labels: "
                "use loss='squared_error' for regression, or labels.long()."
            )
        if outputs.dim() == 2:
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= outputs.shape[1]:
                raise DataError(
                    f"Client {name!r} has labels {low} to {high}, but the model tells {outputs.shape[1]} classes apart."
                )
