"""Forgetting for somebody's own model and data: the one function that most users need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from expunge.core.losses import as_loss
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.fedavg import Schedule, ServerState
from expunge.federation.local import LocalEngine
from expunge.federation.local_data import MapStyleDataset
from expunge.federation.memory import Memory
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
    use: str = "hf-kcu",
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
        batch_size: of the training, for a recovery round.
        use: the method's name.
        options: any option of that method, such as ``iterations=20`` or ``recovery=Recovery()``.

    Returns:
        What was done: the new weights, the memory for the next request, the cost, and the details.

    Example:
        >>> import torch
        >>> data = {name: (torch.randn(20, 2), torch.randint(0, 2, (20,))) for name in ("ada", "bob", "cyd")}
        >>> outcome = forget(nn.Linear(2, 2), data, leaving="ada", damping=0.1, iterations=3)
        >>> outcome.method, outcome.succeeded
        ('hf-kcu', True)
    """
    chosen = method(use)
    known = vars(chosen.options) if is_dataclass(chosen.options) else {}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise RequestError(f"The method {use!r} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    settings = replace(chosen.options, **options)
    rounds = rounds or (memory.rounds if memory is not None else None)
    schedule = None
    if learning_rate is not None and local_steps is not None and rounds:
        schedule = Schedule(learning_rate, local_steps, rounds, batch_size)
    state = ServerState(Snapshot.of(model), schedule, memory)
    engine = LocalEngine(model, as_loss(loss, l2), clients)
    outcome = chosen.function(engine, state, Request.of(leaving, samples), settings)
    return replace(outcome, method=use)
