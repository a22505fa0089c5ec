"""Replies are not believed: one that cannot be right is refused by the name of the client that sent it.

What can be seen from a single reply is its kind, its shapes and number type, its sample count, and whether it is
finite; beside the others' also its length. A lie that passes here can still send a step the wrong way, but not past
the trust region, which is the safety belt (unlearning/trust_region.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from expunge.core.vectors import all_finite
from expunge.errors import NumericalError
from expunge.federation.messages.tasks import (
    Buffers,
    CurvatureProduct,
    Gradient,
    Losses,
    Reply,
    Solved,
    Sum,
    Task,
    Trained,
)

ABSURD = 1e4
"""How many times as long as the others' a reply may be: see ``require_comparable``."""


def samples_behind(task: Task, count: int) -> int:
    """How many samples stand behind a reply of a client that has so many.

    Example:
        >>> from expunge.core.vectors import Snapshot
        >>> samples_behind(Gradient(Snapshot(torch.zeros(1), {}), exclude=(0, 3)), 10)
        8
    """
    only = getattr(task, "only", None)
    return len(only) if only is not None else count - len(set(getattr(task, "exclude", ())))


def require_sound(who: str, task: Task, reply: Reply, samples: int) -> None:
    """Refuse a reply of the wrong shape, number type or count, or with a NaN.

    Losses alone may be NaN or infinite: far along a step they are so in honesty.

    Args:
        who: whose reply it is, as an error message begins.
        task: what was asked.
        reply: what came.
        samples: how many samples have to stand behind it.
    """
    parts = list(_parts(who, task, reply))
    for found, like, shape in parts:
        if found.dtype != like.dtype or (shape is not None and found.shape != shape):
            wanted = "" if shape is None else f" of shape {tuple(shape)}"
            raise NumericalError(
                f"{who} replied {found.dtype} of shape {tuple(found.shape)} where {like.dtype}{wanted} was asked for: "
                "does it run the same model?"
            )
    if not isinstance(task, Losses) and not all_finite(found for found, _, _ in parts):
        raise NumericalError(f"{who} replied a NaN or infinite value: let it check its data; nothing was changed.")
    if not (math.isfinite(reply.sample_gradients) and reply.sample_gradients >= 0):
        raise NumericalError(
            f"{who} says that it spent {reply.sample_gradients} sample-gradients: let it check its clock."
        )
    moments = reply.moments if isinstance(reply, Trained) else ()
    if not all(0 <= moment < math.inf for moment in moments):
        raise NumericalError(f"{who} replied second moments that are no numbers of at least 0: let it check its data.")
    count = getattr(reply, "count", samples)
    if count != samples:
        raise NumericalError(
            f"{who} replied for {count} samples where {samples} were asked for: let it check its data."
        )


def require_comparable(replies: Mapping[str, Sum]) -> None:
    """Refuse a reply that is of another form than most, or, among three or more, absurdly long.

    Lengths are those of means over samples, and absurd is ``ABSURD`` times the longest of the others' but for a quarter
    of them, who may lie as well. Honest clients differ, the more the better a model fits: where most samples are fitted
    perfectly, a client with some that are not makes nearly all of the curvature. On digits, trained to the end, honest
    ones reached 100; where a single sample a client was drawn, 6500.
    """
    forms = {name: (reply.total.shape, reply.blocks) for name, reply in replies.items()}
    usual, votes = Counter(forms.values()).most_common(1)[0]
    odd = [name for name, form in forms.items() if form != usual]
    if odd and 2 * votes <= len(forms):
        raise NumericalError(f"The clients {', '.join(forms)} replied in several forms: do they run the same model?")
    if odd:
        raise NumericalError(f"Client {odd[0]!r} replied in another form than others: do they run the same model?")
    if len(replies) < 3:  # of two that differ nobody can tell which one is wrong
        return
    lengths = {
        name: float(torch.linalg.vector_norm(reply.total, dtype=torch.float64)) / reply.count
        for name, reply in replies.items()
    }
    for name, length in lengths.items():
        others = sorted(other for them, other in lengths.items() if them != name)
        usual_length = others[len(others) - 1 - len(others) // 4]
        if usual_length > 0 and length > ABSURD * usual_length:
            raise NumericalError(
                f"Client {name!r} replied a vector {length / usual_length:.0e} times as long as the others' are: "
                "let it check its data; nothing was changed."
            )


def _parts(who: str, task: Task, reply: Reply) -> Iterator[tuple[Tensor, Tensor, torch.Size | None]]:
    """Every tensor of a reply, with one of its number type, and the shape that it must have where that is known."""
    theta = task.model.parameters
    if isinstance(reply, Sum):
        yield reply.total, theta, _shape_of_sum(task)
    elif isinstance(reply, Trained):
        yield reply.update, theta, theta.shape
    elif isinstance(reply, Solved):
        yield reply.solution.vector, theta, theta.shape
    if isinstance(reply, Trained | Buffers):
        known = task.model.buffers
        if reply.buffers.keys() != known.keys():
            raise NumericalError(f"{who} replied buffers that are not the model's: does it run the same model?")
        for name, found in reply.buffers.items():
            yield found, known[name], known[name].shape


def _shape_of_sum(task: Task) -> torch.Size | None:
    if isinstance(task, CurvatureProduct):
        return task.vectors.shape
    if isinstance(task, Losses):
        return torch.Size([len(task.lengths)])
    return task.model.parameters.shape if isinstance(task, Gradient) else None
