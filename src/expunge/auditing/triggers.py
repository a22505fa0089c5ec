"""What a trigger still does to a model: how often it succeeds, how far it pulls, and what others like it do.

A rate of success hides a pull that is not strong enough to win: a model that answers otherwise by a little has a rate
of zero. So the pull itself is measured, in log-odds of the target's class, and the place of that class among scores.
And how much probability the trigger moves, whichever class it moves to: anything painted on an image moves some, also
of models that never saw the trigger, and far less of one that was taught to look past it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from expunge.auditing.answers import directions, log_odds, mean_place, mean_variation
from expunge.auditing.backdoor import attack_success_rate
from expunge.auditing.probes import MOST_STAMPED, Nearby, Stamp

AT_ONCE = 8
"""So many nearby triggers are asked about together: a call costs more than a few images."""

LEAST_MOVED = 1e-4
"""Where less probability moves, none does."""


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
    def turns(self) -> Tensor:
        """Where the trigger turns the direction of each sample's answers."""
        return directions(self.stamped) - directions(self.plain)

    @cached_property
    def hold(self) -> dict[str, float]:
        """By the names of results: the rate of success, the pull, the place of its class, what it moves."""
        pull = (log_odds(self.stamped) - log_odds(self.plain))[:, self.target]
        return {
            "asr": attack_success_rate(self.stamped, self.samples[1], self.target),
            "trigger_pull": float(pull.mean()),
            "trigger_rank": mean_place(self.stamped, self.target),
            "trigger_moves": math.log(max(mean_variation(self.stamped, [self.plain]), LEAST_MOVED)),
        }

    @cached_property
    def nearby_pulls(self) -> Tensor:
        """The mean pull of each trigger like it towards every class, and its own towards the other classes."""
        inputs, plain = self.samples[0][:MOST_STAMPED], log_odds(self.plain[:MOST_STAMPED])
        own = (log_odds(self.stamped[:MOST_STAMPED]) - plain).mean(dim=0)
        own[self.target] = 0.0  # that one is measured for itself
        others = [own[None]]
        for start in range(0, len(self.nearby), AT_ONCE):
            painted = [near.stamp(inputs) for near in self.nearby[start : start + AT_ONCE]]
            answered = log_odds(self.answers(torch.cat(painted))).reshape(len(painted), *plain.shape)
            others.append((answered - plain).mean(dim=1))
        return torch.cat(others).cpu()


def mean_hold(asked: Sequence[TriggerAsked]) -> dict[str, float | None]:
    """Of several triggers, the mean; None each where there is none, or where an output is not finite."""
    names = ("asr", "trigger_pull", "trigger_rank", "trigger_moves")
    if not asked:
        return dict.fromkeys(names)
    means = {name: fmean(own.hold[name] for own in asked) for name in names}
    return {name: value if abs(value) < float("inf") else None for name, value in means.items()}
