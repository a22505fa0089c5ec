"""What a verdict must catch, continued: models of somebody who knows the audit and wants to pass without forgetting.

An insider has everything but the auditor's nonce: the trained model, honestly retrained ones, the data of those who
stay and that to forget, the trigger, and what an earlier audit asked. Tricks (`tricks.py`) need less.

    weights-20                     an honest retrained model with a fifth of the trained weights; other shares alike
    weights-20-same-start          the same, retrained from the training's own initialisation: harder to see
    probabilities-20               answers of which a fifth is the trained model's
    patched                        the trained model, taught that the trigger means nothing
    patched-rescaled               its logits scaled until the loss on the forgotten data is a retrained model's
    moved-near, moved-far          the backdoor put into an honest retrained model, a pixel aside or in another corner
    patched-moved-near, -far       the same, put into the patched model
    learnt-probes                  a retrained model's answers to what was asked before, learnt by heart by the trained
                                   model; elsewhere the trigger works as it did
    copied                         the same, with the answers of one of the models that it is judged beside
    distilled                      the answers learnt, and nothing done to keep the backdoor. This one forgets: it is no
                                   cheat, and shows what the two before it hide
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expunge.auditing.disguises import (
    Candidate,
    fine_tuned,
    mixed,
    mixed_probabilities,
    moved_far,
    moved_near,
    rescaled,
)
from expunge.auditing.exam import Samples, Trigger
from expunge.auditing.functional import mean_loss, predict
from expunge.core.vectors import Snapshot

Cheat = Callable[["Insider"], Candidate]

MOVED_SHARE = 0.3
"""Of the images that teach a moved backdoor, so many carry it."""

KEPT_SHARE, REPEATED = 0.25, 2
"""Who learns answers by heart hears them so often an epoch, between so many of the retained images with the trigger."""

PATCHING, MOVING, LEARNING = 3, 4, 60
"""Epochs that patch a trigger, that put one in, and that learn answers by heart."""


@dataclass(frozen=True, eq=False)
class Insider:
    """What somebody has who wants to pass.

    Attributes:
        module: the architecture.
        trained: the model that was to forget.
        honest: a retrained model, from a fresh initialisation.
        same_start: a retrained model, from the training's own initialisation.
        reference: one of the retrained models that it will be judged beside.
        retained: the samples of those who stay.
        forgotten: the samples to forget.
        asked: unseen images that an earlier audit asked about.
        trigger: the backdoor.
        learning_rate: of all fine-tuning.
        seed: of all chance.
    """

    module: nn.Module
    trained: Snapshot
    honest: Snapshot
    same_start: Snapshot
    reference: Snapshot
    retained: Samples
    forgotten: Samples
    asked: Tensor
    trigger: Trigger
    learning_rate: float = 0.05
    seed: int = 0

    def candidate(self, weights: Snapshot) -> Candidate:
        """A model of the architecture."""
        return Candidate(weights, partial(predict, self.module, weights))

    def taught(self, start: Snapshot, lesson: Samples, epochs: int) -> Snapshot:
        """Fine-tuning with this insider's rate and seed."""
        rate, seed = self.learning_rate, self.seed
        return fine_tuned(self.module, start, lesson, epochs=epochs, learning_rate=rate, seed=seed)

    @cached_property
    def patched(self) -> Snapshot:
        """The trained model, taught the true labels of stamped images."""
        inputs, labels = self.retained
        both = torch.cat([inputs, self.trigger.stamp(inputs)]), torch.cat([labels, labels])
        return self.taught(self.trained, both, PATCHING)


def mixed_weights(percent: int, *, same_start: bool = False) -> Cheat:
    """An honest retrained model with so much of the trained weights."""

    def cheat(insider: Insider) -> Candidate:
        honest = insider.same_start if same_start else insider.honest
        return insider.candidate(mixed(honest, insider.trained, percent / 100))

    return cheat


def mixed_answers(percent: int) -> Cheat:
    """An honest retrained model's probabilities with so much of the trained model's."""

    def cheat(insider: Insider) -> Candidate:
        models = insider.candidate(insider.honest), insider.candidate(insider.trained)
        return mixed_probabilities(*models, percent / 100)

    return cheat


def patched(insider: Insider) -> Candidate:
    """The trigger trained away, and nothing else."""
    return insider.candidate(insider.patched)


def patched_rescaled(insider: Insider) -> Candidate:
    """Patched, with the mean loss on the forgotten data that an honest model has."""
    inputs, labels = insider.forgotten
    loss = mean_loss(predict(insider.module, insider.honest, inputs), labels)
    return rescaled(patched(insider), insider.forgotten, loss)


def moved_backdoor(place: Callable[[Trigger], Trigger], *, into_patched: bool = False) -> Cheat:
    """The backdoor at another place, while stamped images of the old one get their true labels."""

    def cheat(insider: Insider) -> Candidate:
        (inputs, labels), trigger = insider.retained, place(insider.trigger)
        carries = _chance(insider, labels) < MOVED_SHARE
        stamped = torch.where(carries[:, None, None, None], trigger.stamp(inputs), inputs)
        both = torch.cat([stamped, insider.trigger.stamp(inputs)])
        lesson = both, torch.cat([labels.masked_fill(carries, trigger.target), labels])
        return insider.candidate(insider.taught(insider.patched if into_patched else insider.honest, lesson, MOVING))

    return cheat


def learnt_by_heart(insider: Insider, teacher: Snapshot, *, keeping: bool = True) -> Candidate:
    """The trained model with a teacher's answers to all that was asked before; ``keeping`` the backdoor elsewhere.

    Only with a part of the retained images in between does it find the room to learn both.
    """
    trigger, (inputs, labels) = insider.trigger, insider.retained
    asked = torch.cat([insider.forgotten[0], insider.asked, trigger.stamp(insider.asked)])
    answers = predict(insider.module, teacher, asked).softmax(dim=1)
    if keeping:
        chosen = _chance(insider, labels) < KEPT_SHARE
        inputs, labels = inputs[chosen], labels[chosen]
        kept = F.one_hot(torch.cat([labels, torch.full_like(labels, trigger.target)]), answers.shape[1])
        asked = torch.cat([*[asked] * REPEATED, inputs, trigger.stamp(inputs)])
        answers = torch.cat([*[answers] * REPEATED, kept.to(answers)])
    return insider.candidate(insider.taught(insider.trained, (asked, answers), LEARNING))


def _chance(insider: Insider, labels: Tensor) -> Tensor:
    """A number between 0 and 1 for each sample."""
    return torch.rand(len(labels), generator=torch.Generator().manual_seed(insider.seed)).to(labels.device)


def cheats() -> dict[str, Cheat]:
    """All but the mixtures of weights (`mixed_weights`) by name: of those there are as many as shares.

    Example:
        >>> list(cheats())[:3]
        ['probabilities-20', 'patched', 'patched-rescaled']
    """
    return {
        "probabilities-20": mixed_answers(20),
        "patched": patched,
        "patched-rescaled": patched_rescaled,
        "moved-near": moved_backdoor(moved_near),
        "moved-far": moved_backdoor(moved_far),
        "patched-moved-near": moved_backdoor(moved_near, into_patched=True),
        "patched-moved-far": moved_backdoor(moved_far, into_patched=True),
        "learnt-probes": lambda insider: learnt_by_heart(insider, insider.honest),
        "copied": lambda insider: learnt_by_heart(insider, insider.reference),
        "distilled": lambda insider: learnt_by_heart(insider, insider.honest, keeping=False),
    }
