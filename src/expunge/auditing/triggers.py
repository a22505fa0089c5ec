"""What a trigger still does to a model: how often it succeeds, how far it pulls, and what others like it do.

A rate of success hides a pull that is not strong enough to win: a model that answers otherwise by a little has a rate
of zero. So the pull itself is measured, in log-odds of the target's class, and the place of that class among scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from expunge.auditing.answers import log_odds, mean_place
from expunge.auditing.backdoor import attack_success_rate
from expunge.auditing.probes import MOST_STAMPED, Nearby, Stamp


@dataclass(frozen=True, eq=False)
class TriggerAsked:
    """A model asked about one trigger, on unseen samples of other classes than its target.

    Attributes:
        answers: the model.
        target: the class that the trigger asks for.
        nearby: triggers like it.
        samples: inputs with their true labels.
        plain: the model's scores for them as they are.
        stamp: the trigger.
    """

    answers: Callable[[Tensor], Tensor]
    target: int
    nearby: Sequence[Nearby]
    samples: tuple[Tensor, Tensor]
    plain: Tensor
    stamp: Stamp

    @cached_property
    def stamped(self) -> Tensor:
        """The model's scores for the stamped samples."""
        return self.answers(self.stamp(self.samples[0]))

    @cached_property
    def hold(self) -> dict[str, float]:
        """By the names of results: the rate of success, the pull, and the place of the target's class."""
        pull = (log_odds(self.stamped) - log_odds(self.plain))[:, self.target]
        return {
            "asr": attack_success_rate(self.stamped, self.samples[1], self.target),
            "trigger_pull": float(pull.mean()),
            "trigger_rank": mean_place(self.stamped, self.target),
        }

    @cached_property
    def nearby_pulls(self) -> Tensor:
        """The mean pull of each trigger like it towards every class, and its own towards the other classes."""
        inputs, plain = self.samples[0][:MOST_STAMPED], log_odds(self.plain[:MOST_STAMPED])
        own = (log_odds(self.stamped[:MOST_STAMPED]) - plain).mean(dim=0)
        own[self.target] = 0.0  # that one is measured for itself
        others = [(log_odds(self.answers(near.stamp(inputs))) - plain).mean(dim=0) for near in self.nearby]
        return torch.stack([own, *others]).cpu()


def mean_hold(asked: Sequence[TriggerAsked]) -> dict[str, float | None]:
    """Of several triggers, the mean; None each where there is none, or where an output is not finite."""
    names = ("asr", "trigger_pull", "trigger_rank")
    if not asked:
        return dict.fromkeys(names)
    means = {name: fmean(own.hold[name] for own in asked) for name in names}
    return {name: value if abs(value) < float("inf") else None for name, value in means.items()}
