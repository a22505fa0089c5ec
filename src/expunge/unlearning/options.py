"""What the options of hf-kcu and retrace have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from expunge.errors import RequestError
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.checks import refuse_idle, require_choice, require_falling, require_number, require_whole
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

    auto_samples: ClassVar[tuple[int, int, int]] = (10, 100, 1000)
    """What ``curvature_samples="auto"`` is: one in so many of the retained, but at least and at most."""

    def __post_init__(self) -> None:
        require_choice(self, "missing", Missing)
        require_number(self, "damping", "tau", may_be_none=True)
        require_whole(self, "seed", least=0)
        if self.curvature_samples not in (None, "auto"):
            require_whole(self, "curvature_samples")
        require_falling(self, "lengths")
        if self.tau is None:
            refuse_idle(self, ("lengths",), "tau=None takes the whole step")

    def samples(self, left: int) -> int | None:
        """How many of so many retained samples are drawn; None is all."""
        if self.curvature_samples != "auto":
            return self.curvature_samples
        share, least, most = self.auto_samples
        return min(max(left // share, least), most)

    def damping_of(self, state: ServerState) -> float:
        """The damping that is given, or that of the training's schedule."""
        if self.damping is not None:
            return self.damping
        if state.schedule is None:
            raise RequestError(
                "Give a damping, or the training's learning rate, local steps and rounds to derive it from."
            )
        return state.schedule.damping
