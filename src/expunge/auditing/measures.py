"""What a model is measured by when it stands beside retrained ones.

Measures of forgetting look at what was to go: on the forgotten samples, and on unseen samples with the trigger. Each
model has a number; how far the trained model's lies from the retrained ones' is what there was to forget, and the
margin is a share of that (``margins``). Measures of use look at unseen samples, count on one side only, and have a
margin that is fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Side = Literal["both", "above", "below"]
"""On which side of the retrained models a deviation counts."""

LEAST = 3
"""With fewer retrained models there is no noise to speak of."""

POINT = 0.01
"""Of a rate."""

BACK_SHARE, BACK_PULL = "back_share", "back_pull"
ON_THE_WAY = (BACK_SHARE, BACK_PULL)
"""What is asked on the way back to the trained model, by name: those who share its start have values, others none."""


@dataclass(frozen=True)
class Measure:
    """One thing to compare.

    Attributes:
        name: in results.
        label: for a reader.
        remembers: the side on which a model lies that still knows the forgotten data, +1 or -1; 0 for use.
        side: on which side of the retrained models a deviation counts.
        margin: of a measure of use; None where it follows from the trained model's deviation.
        unit: the measure whose trained deviation counts in place of its own; or empty.
        rate: whether it is shown in percent.
    """

    name: str
    label: str
    remembers: int = 0
    side: Side = "both"
    margin: float | None = None
    unit: str = ""
    rate: bool = False

    @property
    def about_forgetting(self) -> bool:
        """Whether it looks at what was to be forgotten."""
        return self.remembers != 0

    def shown(self, value: float) -> str:
        """For a sentence.

        Example:
            >>> MEASURES["asr"].shown(0.125), MEASURES["forget_loss"].shown(0.125)
            ('12.5%', '0.125')
        """
        return f"{value:.1%}" if self.rate else f"{value:.3f}"


MEASURES = {
    own.name: own
    for own in (
        Measure("forget_loss", "loss on the forgotten data", remembers=-1),
        Measure("forget_accuracy", "accuracy on the forgotten data", remembers=1, rate=True),
        Measure("mia_auc", "membership AUC of the forgotten data", remembers=1, rate=True),
        Measure("distance", "distance to retrained answers on the forgotten data", remembers=1, side="above"),
        Measure("trigger_distance", "distance to retrained answers on the triggered data", remembers=1, side="above"),
        Measure("kl_forget", "divergence from retrained models on the forgotten data", remembers=1, side="above"),
        Measure("unseen_distance", "distance to retrained answers on unseen data", remembers=1, side="above"),
        Measure("kept_share", "share of the trained model's answers that is left", remembers=1, rate=True),
        Measure("asr", "attack success", remembers=1, rate=True),
        Measure("trigger_pull", "pull of the trigger towards its class", remembers=1),
        Measure("trigger_rank", "place of the trigger's class among the scores", remembers=1),
        Measure("trigger_moves", "probability that the trigger moves (logarithm)", remembers=1, side="below"),
        Measure("nearby_pull", "pull of moved and noisy triggers", remembers=1, side="above", unit="trigger_pull"),
        Measure(BACK_SHARE, "share of the trained model's answers on the way back", 1, side="above", rate=True),
        Measure(BACK_PULL, "pull of the trigger on the way back", remembers=1, side="above"),
        Measure("test_accuracy", "accuracy on unseen data", side="below", margin=0.04, rate=True),
        Measure("test_loss", "loss on unseen data", side="above", margin=0.15),
    )
}
"""Everything that is compared, by name; what has no value for all models is left out. Samples with and without the
trigger are apart: a patched trigger leaves what the model knows of the others as it was. ``trigger_rank`` counts the
classes that the target's score beats, ``kept_share`` looks at where answers point: no scaling of the outputs changes
these. ``trigger_moves`` counts below only: whoever was taught to look past the trigger lies there. What is asked on the
way back to the trained model (``way_back.py``) is compared with retrained models of its start alone."""

STAND_INS = ("mia_auc", "kl_forget")
"""Judged only where results were stored without the distances, which say the same sharper."""


@dataclass(frozen=True)
class Compared:
    """One measure of all models.

    Attributes:
        measure: what was measured.
        value: the model's that is to be judged.
        trained: the trained model's: doing nothing.
        retrained: each retrained model's; of a measure beside the others, as one more beside them. Of a measure of the
            way back, those of the retrained models that share the trained one's start, which stand apart.
        step: what one sample is worth: a rate is not known to vary by less.
    """

    measure: Measure
    value: float
    trained: float
    retrained: tuple[float, ...]
    step: float = 0.0

    def without(self, numbers: set[int]) -> Compared:
        """The same without some of the retrained models; those that stand apart have no number among them."""
        if self.measure.name in ON_THE_WAY:
            return self
        kept = tuple(value for number, value in enumerate(self.retrained) if number not in numbers)
        return replace(self, retrained=kept)


def compared(
    value: Mapping[str, float | None],
    trained: Mapping[str, float | None],
    retrained: Sequence[Mapping[str, float | None]],
    step: Callable[[Measure], float] | None = None,
    own_start: Sequence[Mapping[str, float | None]] = (),
) -> list[Compared]:
    """The measures that all models have, from their values by name; those of the way back have other models beside.

    Example:
        >>> found = compared({"asr": 0.1}, {"asr": 0.9, "forget_loss": 1.0}, [{"asr": 0.0}, {"asr": 0.01}])
        >>> [(one.measure.name, one.trained) for one in found]
        [('asr', 0.9)]
    """
    found = []
    for measure in MEASURES.values():
        own, before = value.get(measure.name), trained.get(measure.name)
        models, least = (own_start, LEAST) if measure.name in ON_THE_WAY else (retrained, 1)
        others = [known for model in models if (known := model.get(measure.name)) is not None]
        if own is not None and before is not None and len(others) == len(models) >= least:
            found.append(Compared(measure, own, before, tuple(others), step(measure) if step is not None else 0.0))
    return found
