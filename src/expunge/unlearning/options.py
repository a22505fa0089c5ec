"""What the options of hf-kcu and retrace have in common, and how options are checked: early, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from expunge.errors import RequestError
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.lengths import LENGTHS
from expunge.unlearning.recovery import Recovery

Missing = Literal["refuse", "leave-out"]


@dataclass(frozen=True)
class StepOptions:
    """Options of every step that those who stay must be able to bear.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: how many retained samples the curvature uses, spread by client size, and how many others the
            trust region looks at; ``auto`` is the method's own choice, None is all.
        tau: how much the retained loss may rise, in the loss's own unit (nats for cross-entropy): the step is the
            longest that keeps it; None takes the whole step, whatever it costs.
        lengths: step lengths that are tried, longest first.
        recovery: a round of the clients that stay afterwards, or None.
        missing: what to do when a client that stays cannot be reached: ``refuse``, or ``leave-out``, which solves the
            problem of those who can be and says so.
        seed: of the samples drawn.
    """

    damping: float | None = None
    curvature_samples: int | Literal["auto"] | None = "auto"
    tau: float | None = 0.05
    lengths: tuple[float, ...] = LENGTHS
    recovery: Recovery | None = None
    missing: Missing = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice(self, "missing", Missing)
        require_number(self, "damping", "tau")
        if not isinstance(self.seed, int):
            raise RequestError(f"The option seed must be a whole number, not {self.seed!r}.")
        if self.curvature_samples not in (None, "auto"):
            require_whole(self, "curvature_samples")
        require_lengths(self, "lengths")
        if self.tau is None:
            refuse_idle(self, ("lengths",), "tau=None takes the whole step")

    def auto_samples(self, left: int) -> int:
        """What ``curvature_samples="auto"`` is where so many samples are retained."""
        raise NotImplementedError(f"{type(self).__name__} does not draw samples; {left} are left.")

    def samples(self, left: int) -> int | None:
        """How many of the retained samples are drawn; None is all."""
        return self.auto_samples(left) if self.curvature_samples == "auto" else self.curvature_samples

    def damping_of(self, state: ServerState) -> float:
        """The damping that is given, or that of the training's schedule."""
        if self.damping is not None:
            return self.damping
        if state.schedule is None:
            raise RequestError(
                "Give a damping, or the training's learning rate, local steps and rounds to derive it from."
            )
        return state.schedule.damping


def require_choice(options: object, name: str, choice: object) -> None:
    """The option is one of a Literal's values."""
    if getattr(options, name) not in get_args(choice):
        known = ", ".join(get_args(choice))
        raise RequestError(f"The option {name} can be {known}, not {getattr(options, name)!r}.")


def require_whole(options: object, *names: str, least: int = 1) -> None:
    """These options are whole numbers of at least ``least``."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError(f"The option {name} must be at least {least}, a whole number, not {value!r}.")


def require_number(options: object, *names: str) -> None:
    """These options are None or finite numbers of at least 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (isinstance(value, int | float) and value >= 0 and math.isfinite(value)):
            raise RequestError(f"The option {name} must be a number of at least 0, not {value!r}.")


def require_lengths(options: object, *names: str) -> None:
    """These options are tuples of finite lengths, at least one."""
    for name in names:
        value = getattr(options, name)
        numbers = value if isinstance(value, tuple) else ()
        if not numbers or not all(isinstance(length, int | float) and math.isfinite(length) for length in numbers):
            raise RequestError(f"The option {name} takes one or more numbers, not {value!r}.")


def refuse_idle(options: Any, names: Iterable[str], reason: str) -> None:
    """Refuse options that would change nothing; ``reason`` says why they would not."""
    defaults = {part.name: part.default for part in fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise RequestError(f"The option {name} would change nothing: {reason}.")
