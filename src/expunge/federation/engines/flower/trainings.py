"""How the sites of a Flower federation train: what the app's author states, beside what the sites' replies show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from expunge.errors import RequestError
from expunge.federation.engines.client import local_steps
from expunge.federation.training.notes import Note, Rule, written
from expunge.federation.training.plan import Schedule
from expunge.federation.training.recipe import SGD, Adam

STATE = "Recorder(optimiser=SGD(...), learning_rate=..., batch_size=..., local_epochs=...)"
"""What an author writes where the sites do not show it."""


@dataclass(frozen=True)
class Training:
    """How one site trained in one round."""

    rule: Rule
    learning_rate: float
    steps: float
    altered: bool = False


@dataclass(frozen=True)
class Statement:
    """What the app's author says; None is read from the sites.

    Attributes:
        optimiser: of the sites.
        learning_rate: one number, or a function of the round's number.
        batch_size: of the sites.
        local_epochs: epochs that a site trains in one round.
        proximal_mu: FedProx's factor, from the strategy.

    Example:
        >>> Statement(SGD(), lambda number: 0.1 / number).of("ada", 10, Note(SGD(), 0.05, 20), 2)
        Training(rule=SGD(...), learning_rate=0.05, steps=20, altered=False)
    """

    optimiser: Rule | None = None
    learning_rate: float | Callable[[int], float] | None = None
    batch_size: int | None = None
    local_epochs: int | None = None
    proximal_mu: float = 0.0

    def __post_init__(self) -> None:
        if self.optimiser is not None and not isinstance(self.optimiser, SGD | Adam):
            raise RequestError(
                f"A Recorder can keep SGD, Adam and AdamW of expunge.flower, not {self.optimiser!r}: "
                "train without a Recorder, and forget by hf-kcu."
            )
        if self.proximal_mu and self.optimiser is not None and self.optimiser.proximal_mu not in (0, self.proximal_mu):
            raise RequestError(
                f"The strategy's proximal_mu is {self.proximal_mu:g}, where {self.optimiser.proximal_mu:g} is stated: "
                "leave it out of the optimiser."
            )
        numbers = [number for number in (self.batch_size, self.local_epochs) if number is not None]
        rate = 1.0 if self.learning_rate is None or callable(self.learning_rate) else self.learning_rate
        if not all(number >= 1 for number in numbers) or not 0 < rate < math.inf:
            raise RequestError("Batch size and local epochs must be at least 1, the learning rate above 0.")

    def of(self, name: str, samples: int, note: Note | None, number: int) -> Training:
        """How this site trained in this round: as stated and seen, which must agree."""
        rule = self._rule(name, note)
        rate, steps = self._rate(name, note, number), self._steps(samples, note)
        if rule is None or rate is None or steps is None:
            raise RequestError(
                f"How site {name!r} trains is not known, since no torch optimiser made a step in its train handler: "
                f"state it, {STATE}."
            )
        if not rate > 0:
            raise RequestError(f"Site {name!r} trained with a learning rate of 0: leave it out of such rounds.")
        mu = self.proximal_mu or (self.optimiser.proximal_mu if self.optimiser is not None else 0.0)
        altered = note is not None and note.altered
        return Training(replace(rule, proximal_mu=mu), rate, steps, altered)

    def _rule(self, name: str, note: Note | None) -> Rule | None:
        if note is None or note.rule is None:
            if self.optimiser is None and note is not None:
                raise RequestError(
                    f"Site {name!r} {note.problem}: train with one SGD, Adam or AdamW of torch that is made anew in "
                    "every round, or state what comes nearest, Recorder(optimiser=SGD(...)); rates and steps are read."
                )
            return self.optimiser
        if self.optimiser is not None and replace(self.optimiser, proximal_mu=0.0) != note.rule:
            raise RequestError(
                f"Site {name!r} trains with {written(note.rule)}, where {written(self.optimiser)} is stated: "
                "leave optimiser out, then it is read from the sites."
            )
        return note.rule

    def _rate(self, name: str, note: Note | None, number: int) -> float | None:
        stated = self.learning_rate(number) if callable(self.learning_rate) else self.learning_rate
        if note is None:
            return stated
        if stated is not None and not math.isclose(stated, note.learning_rate, rel_tol=1e-4):
            raise RequestError(
                f"Site {name!r} trained round {number} with a learning rate of {note.learning_rate:g}, where "
                f"{stated:g} is stated: leave learning_rate out, then it is read from the sites."
            )
        return note.rate

    def _steps(self, samples: int, note: Note | None) -> float | None:
        if note is not None:
            return note.steps
        if self.batch_size is None or self.local_epochs is None:
            return None
        return local_steps(samples, self.local_epochs, self.batch_size)


def scheduled(
    past: Schedule | None, rounds: int, works: Sequence[tuple[float, Training]], stated: Statement
) -> Schedule:
    """The schedule with one more round: mean rate and steps, for where nothing else is known of a round.

    Args:
        past: of the rounds before.
        rounds: how many there are with this one.
        works: weight and training of each site in this one.
        stated: by the app's author.

    Example:
        >>> scheduled(None, 1, [(1, Training(SGD(), 0.1, 4)), (3, Training(SGD(), 0.1, 8))], Statement())
        Schedule(learning_rate=0.1, local_steps=7.0, rounds=1, batch_size=64, epochs=None)
    """
    total = sum(weight for weight, _ in works)
    steps = sum(weight * own.steps for weight, own in works) / total
    travel = sum(weight * own.steps * own.learning_rate for weight, own in works) / total
    earlier = rounds - 1 if past is not None else 0
    if past is not None and earlier:
        travel += past.learning_rate * past.local_steps * earlier
        steps += past.local_steps * earlier
    size = stated.batch_size or (past.batch_size if past is not None else 64)
    return Schedule(travel / steps, steps / (earlier + 1), rounds, size, stated.local_epochs)
