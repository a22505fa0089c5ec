"""The goals that we set ourselves, as data: how near to retraining, and how much less work."""

from dataclasses import dataclass
from typing import Literal

Attack = Literal["clean", "weak", "strong"]
"""What the leaver had done: nothing, poisoned its data, or boosted its poisoned updates, too."""
WORK = "speedup_in_gradients"


@dataclass(frozen=True)
class Goal:
    """What is asked of one measure; met where any of the conditions that are set holds.

    Attributes:
        measure: of what.
        within: the distance to retrained is at most this.
        share: it is at most this share of the trained model's distance.
        nearer: it is smaller than the trained model's.
        in_range: it is at most the largest that a retrained model of the same seed has to the others.
        least: the value is at least this.

    Example:
        >>> Goal("asr", within=0.01).words()
        'within 1 point'
    """

    measure: str
    within: float | None = None
    share: float | None = None
    nearer: bool = False
    in_range: bool = False
    least: float | None = None

    def words(self) -> str:
        """The goal for a reader."""
        said = ["inside the range of retrained models"] if self.in_range else []
        if self.within is not None:
            points = 100 * self.within
            said.append(f"within {points:g} point{'s' * (points != 1)}")
        said += [f"at most {100 * self.share:g}% of the trained model's"] if self.share is not None else []
        said += ["below the trained model's"] if self.nearer else []
        said += [f"at least {self.least:g}×"] if self.least is not None else []
        return " or ".join(said)


def _poisoned(work: float) -> tuple[Goal, ...]:
    return (
        Goal("test_accuracy", within=0.01),
        Goal("forget_accuracy", within=0.03),
        Goal("asr", within=0.01),
        Goal("kl_forget", in_range=True, share=0.03),
        Goal(WORK, least=work),
    )


GOALS: dict[Attack, tuple[Goal, ...]] = {
    "weak": _poisoned(150.0),
    "strong": _poisoned(60.0),
    "clean": (
        Goal("forget_accuracy", share=0.5),
        Goal("kl_forget", nearer=True),
        Goal("mia_auc", nearer=True),
        Goal(WORK, least=100.0),
    ),
}
"""What we set out to reach, by what the leaver had done: poisoned its data, boosted its updates too, or nothing."""
