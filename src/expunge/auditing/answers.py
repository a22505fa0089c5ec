"""What a model's class scores say: how strongly a class is meant, and how far from other models' answers they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Answers = Callable[[Tensor], Tensor]
"""A model as it is asked: logits for inputs."""

SURE = 20.0
"""Log-odds beyond this are rounding."""

COPY = 0.25
"""Nearer to one retrained model than this share of what two of them are apart: its answers were copied."""


def log_odds(logits: Tensor) -> Tensor:
    """``log p - log(1 - p)`` of every class, a row a sample.

    Example:
        >>> log_odds(torch.tensor([[0.0, 1.0]])).tolist()
        [[-1.0, 1.0]]
    """
    logs = logits.double().log_softmax(dim=1)
    best = logs.argmax(dim=1, keepdim=True)
    # Of the likeliest class 1 - p may be lost in rounding, so it is summed from the others.
    rest = logs.scatter(1, best, -torch.inf).logsumexp(dim=1, keepdim=True)
    return logs - (-logs.exp()).log1p().scatter(1, best, rest)


def directions(logits: Tensor) -> Tensor:
    """Where each row of class scores points: without its mean, at length one. No scale of the outputs is left.

    Example:
        >>> directions(torch.tensor([[2.0, 0.0], [0.0, 30.0], [1.0, 1.0]])).tolist()
        [[0.7071067811865475, -0.7071067811865475], [-0.7071067811865475, 0.7071067811865475], [0.0, 0.0]]
    """
    centred = logits.double() - logits.double().mean(dim=1, keepdim=True)
    return torch.nn.functional.normalize(centred, dim=1)


def mean_place(logits: Tensor, target: int) -> float:
    """The number of classes whose score the target's beats, mean over samples: it knows no scale.

    Example:
        >>> mean_place(torch.tensor([[0.0, 1.0, 2.0], [0.0, 9.0, 3.0]]), target=1)
        1.5
    """
    return float((logits < logits[:, target : target + 1]).double().sum(dim=1).mean())


def margins_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of each sample's own label, cut off where a model is sure either way.

    Example:
        >>> margins_of(torch.tensor([[0.0, 1.0], [0.0, 99.0]]), torch.tensor([0, 1])).tolist()
        [-1.0, 20.0]
    """
    return log_odds(logits).gather(1, labels[:, None])[:, 0].clamp(-SURE, SURE)


def margin_distance(margins: Tensor, others: Sequence[Tensor]) -> float:
    """How far a model's margins lie from the other models' mean margin of the same sample, mean over samples.

    Example:
        >>> margin_distance(torch.tensor([1.0, 5.0]), [torch.tensor([0.0, 4.0]), torch.tensor([2.0, 4.0])])
        0.5
    """
    return float((margins - torch.stack(list(others)).mean(dim=0)).abs().mean())


def mean_variation(logits: Tensor, others: Sequence[Tensor]) -> float:
    """Total variation between a model's probabilities and the other models' mean ones, mean over samples.

    Example:
        >>> sure = torch.tensor([[99.0, 0.0]])
        >>> mean_variation(sure, [sure, -sure])
        0.5
    """
    mean = torch.stack([other.double().softmax(dim=1) for other in others]).mean(dim=0)
    return variation(logits.double().softmax(dim=1), mean)


def copied(answers: Tensor, retrained: Sequence[Tensor]) -> int | None:
    """The number of the retrained model whose answers these repeat; None where they are an answer of their own.

    Two models that were trained apart differ by what training draws. One that is much nearer to a retrained model than
    any two of those are to each other was made from it, and its answers say nothing about itself.

    Example:
        >>> chance = torch.Generator().manual_seed(0)
        >>> models = [torch.randn(50, 3, generator=chance) for _ in range(4)]
        >>> copied(models[2] + 0.01, models[:3]), copied(models[3], models[:3])
        (2, None)
    """
    return repeated(answers.double().softmax(dim=1), [one.double().softmax(dim=1) for one in retrained])


def repeated(own: Tensor, others: Sequence[Tensor]) -> int | None:
    """The same of any numbers, a row a sample, that models answer with.

    Example:
        >>> repeated(torch.tensor([1.0, 2.1]), [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])])
        0
    """
    pairs = [variation(one, other) for number, one in enumerate(others) for other in others[:number]]
    if not pairs:
        return None
    apart = [variation(own, other) for other in others]
    nearest = min(range(len(apart)), key=lambda number: apart[number])
    return nearest if apart[nearest] < COPY * min(pairs) else None


def variation(first: Tensor, second: Tensor) -> float:
    """Total variation between two models' probabilities, mean over samples."""
    return float((first - second).abs().reshape(len(first), -1).sum(dim=1).mean()) / 2
