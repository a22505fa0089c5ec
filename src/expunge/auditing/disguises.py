"""What cheats are made of: mixtures, other scales, moved triggers, lessons.

Everything here works on answers, weights and images; who does what with it stands in `cheats.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expunge.auditing.answers import Answers
from expunge.auditing.exam import Samples, Trigger
from expunge.auditing.functional import mean_loss
from expunge.core.batch import Batch, run
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError

BATCH, MOMENTUM, LONGEST = 64, 0.9, 5.0
"""Of every lesson: batch size, momentum, and the length that gradients are cut to."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model that comes to be judged.

    Attributes:
        weights: all of them in one snapshot, whose digest is fixed before anything is asked.
        answers: logits for inputs.
    """

    weights: Snapshot
    answers: Answers


def mixed(own: Snapshot, other: Snapshot, share: float) -> Snapshot:
    """``(1 - share) own + share other``, in weights; buffers are the own ones.

    Example:
        >>> mixed(Snapshot(torch.zeros(2), {}), Snapshot(torch.ones(2), {}), 0.25).parameters
        tensor([0.2500, 0.2500])
    """
    _require_share(share)
    return own.towards(other, share)


def mixed_probabilities(own: Candidate, other: Candidate, share: float) -> Candidate:
    """Answers ``log((1 - share) p_own + share p_other)``; its weights are all that it takes to answer.

    Example:
        >>> weights = Snapshot(torch.ones(1), {})
        >>> own, other = (Candidate(weights, lambda _, p=p: torch.tensor([p]).log()) for p in ([0.9, 0.1], [0.1, 0.9]))
        >>> mixed_probabilities(own, other, 0.25).answers(torch.zeros(1)).exp()
        tensor([[0.7000, 0.3000]])
    """
    _require_share(share)

    def answers(inputs: Tensor) -> Tensor:
        first, second = (model.answers(inputs).log_softmax(dim=1) for model in (own, other))
        parts = first.new_tensor([1 - share, share]).log()
        return torch.logaddexp(parts[0] + first, parts[1] + second)

    return Candidate(_joint([own, other], share), answers)


def rescaled(model: Candidate, samples: Samples, loss: float) -> Candidate:
    """The same with its logits scaled until the mean loss on the samples is as near to ``loss`` as it comes.

    Example:
        >>> model = Candidate(Snapshot(torch.ones(1), {}), lambda inputs: inputs)
        >>> certain = rescaled(model, (torch.eye(2), torch.tensor([0, 1])), 0.01)
        >>> mean_loss(certain.answers(torch.eye(2)), torch.tensor([0, 1])) < 0.011
        True
    """
    logits, labels = model.answers(samples[0]), samples[1]
    factors = torch.logspace(-1.5, 1, 200).tolist()
    best = min(factors, key=lambda factor: abs(mean_loss(factor * logits, labels) - loss))
    return Candidate(_joint([model], best), lambda inputs: best * model.answers(inputs))


def noisy(model: Snapshot, strength: float, seed: int) -> Snapshot:
    """With normal noise on every weight, so many times as large as the weights are in the mean square.

    Example:
        >>> model = Snapshot(torch.ones(1000), {})
        >>> round(float((noisy(model, 0.1, seed=0).parameters - 1).std()), 2)
        0.1
    """
    chance = torch.Generator().manual_seed(seed)
    noise = torch.randn(model.parameters.shape, generator=chance, dtype=model.parameters.dtype)
    size = strength * model.parameters.square().mean().sqrt()
    return model.moved(model.parameters + size * noise.to(model.parameters))


def moved_near(trigger: Trigger) -> Trigger:
    """The trigger a pixel aside, in both directions, towards the middle of the image."""

    def aside(plane: Tensor, mask: Tensor) -> Tensor:
        middles = (mask.nonzero().double().mean(dim=0)[-2:] * 2).tolist()
        steps = [-1 if middle > size - 1 else 1 for middle, size in zip(middles, mask.shape[-2:], strict=True)]
        return plane.roll(steps, dims=(-2, -1))

    return _placed(trigger, aside)


def moved_far(trigger: Trigger) -> Trigger:
    """The trigger in the opposite corner.

    Example:
        >>> def corner(images):
        ...     return torch.cat([images[..., :1] * 0 + 1, images[..., 1:]], dim=-1)
        >>> moved_far(Trigger(corner, 0)).stamp(torch.zeros(1, 1, 1, 3))
        tensor([[[[0., 0., 1.]]]])
    """
    return _placed(trigger, lambda plane, _: plane.flip(-2, -1))


def _placed(trigger: Trigger, place: Callable[[Tensor, Tensor], Tensor]) -> Trigger:
    """The trigger's patch, found by what it paints over black and white alike, at another place."""

    def stamp(inputs: Tensor) -> Tensor:
        black, white = (trigger.stamp(torch.full_like(inputs[:1], value)) for value in (0.0, 1.0))
        mask = black == white
        return torch.where(place(mask, mask), place(black, mask), inputs)

    return Trigger(stamp, trigger.target)


def fine_tuned(
    module: nn.Module, start: Snapshot, lesson: Samples, *, epochs: int, learning_rate: float, seed: int
) -> Snapshot:
    """Some epochs of gradient descent with momentum; the module itself is left alone.

    Args:
        module: the architecture.
        start: where it begins.
        lesson: inputs with their classes, or with a probability for each class.
        epochs: how many.
        learning_rate: of every step.
        seed: of the shuffling.
    """
    model = copy.deepcopy(module)
    start.write_to(model)
    model.train()
    descent = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    chance = torch.Generator().manual_seed(seed)
    inputs, answers = lesson
    for _ in range(epochs):
        order = torch.randperm(len(inputs), generator=chance).to(inputs.device)
        for batch in torch.split(order, BATCH):
            descent.zero_grad()
            F.cross_entropy(run(model, Batch.of(inputs[batch])), answers[batch]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), LONGEST)
            descent.step()
    return Snapshot.of(model)


def _joint(models: Sequence[Candidate], number: float) -> Snapshot:
    """The weights of several models and a number as one snapshot: a digest of all that answers come from."""
    vectors = [model.weights.parameters for model in models]
    buffers = {
        f"{at}.{name}": buffer for at, model in enumerate(models) for name, buffer in model.weights.buffers.items()
    }
    return Snapshot(torch.cat([*vectors, vectors[0].new_tensor([number])]), buffers)


def _require_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise RequestError(f"A share lies between 0 and 1, not at {share:g}.")
