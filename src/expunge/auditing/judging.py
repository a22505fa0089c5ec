"""How one model is judged beside retrained ones, whatever all of them were asked.

Classifiers are asked for class scores (``exam.py``), all other models for their loss on every sample
(``loss_exam.py``). What comes before a verdict is the same: samples must be enough, models comparable, and none the
copy of another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Self, TypeVar

from torch import Tensor

from expunge.auditing.comparison import Scores
from expunge.auditing.evidence import Evidence
from expunge.auditing.margins import SPREADS, Finding
from expunge.auditing.measured import Shown, chance_share, kept_share, on_the_way, require_comparable, strangers
from expunge.auditing.measures import LEAST, STAND_INS, Compared, Measure, compared
from expunge.auditing.probes import LEAST_UNSEEN
from expunge.auditing.signals import Floats
from expunge.auditing.verdict import Judgement, Verdict, judge

LEAST_FORGOTTEN = 20
"""Below so many samples one of them is worth 5 points: more than is to be told."""

Model = TypeVar("Model", bound=Shown)


class Judging(ABC, Generic[Model]):
    """What all exams have in common: from what models show to a verdict."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[str, tuple[int, int]]:
        """How many different samples there are, and how many in all, by what they are."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """Of the non-members, in an attack."""

    @abstractmethod
    def drawn(self, seed: int) -> Self:
        """The same exam with questions that nobody knew before."""

    @abstractmethod
    def beside(self, model: Model, others: Sequence[Model]) -> dict[str, float | None]:
        """What a model shows beside others that were trained apart."""

    @abstractmethod
    def copied(self, measured: Model, others: Sequence[Model]) -> int | None:
        """The number of the model whose answers these repeat."""

    @abstractmethod
    def step(self, measure: Measure) -> float:
        """What one sample is worth in a rate."""

    @abstractmethod
    def attacks(self, model: Model, retrained: Sequence[Model]) -> dict[str, Scores]:
        """By the attack's name, scores of the forgotten samples and of non-members, large for members."""

    @abstractmethod
    def confidence(self, model: Model) -> Floats:
        """How well each forgotten sample is known, for KLoM."""

    def held_out(self, before: Model, after: Model) -> list[Evidence]:
        """What held-out samples say without retrained models, where they can say something."""
        del before, after
        return []

    def judgement(
        self,
        measured: Model,
        trained: Model,
        retrained: Sequence[Model],
        attempt: int = 1,
        since: Judgement | None = None,
    ) -> Judgement:
        """The verdict on a model, beside retrained ones; one of these is judged by the others.

        ``since`` is that of the same models before all were trained on: then only forgetting is asked for, and by no
        smaller margin than at first.
        """
        others = [other for other in retrained if other is not measured]
        require_comparable(measured, trained, others)
        if not measured.is_finite:
            return Judgement(Verdict.DAMAGED, "The model's outputs are not finite.", attempt=attempt)
        for what, least in (("forgotten", LEAST_FORGOTTEN), ("unseen", LEAST_UNSEEN)):
            count, given = self.counts[what]
            if count < least:
                kind = f"different {what}" if count < given else what
                short = f"{count} {kind} samples are too few for a verdict: at least {least} are needed."
                return Judgement(Verdict.UNDECIDED, short, attempt=attempt)
        for name, own in (("retrained", False), ("same_start", True)):  # those of one start are nearer to each other
            source = self.copied(measured, [other for other in others if other.same_start is own])
            if source is not None:
                text = (
                    f"It repeats the answers of {name}[{source}], which says nothing of its own: compare with others."
                )
                return Judgement(Verdict.UNDECIDED, text, attempt=attempt)
        strange = strangers(trained, others)
        others = [other for other in others if other not in strange.values()]
        asked = self.compared(measured, trained, others)
        found = judge(asked if since is None else since_first(asked, since.findings), attempt)
        found = replace(found, reason=found.reason + _left_out(strange, others))
        if found.verdict is Verdict.EQUIVALENT and since is None and _is_out_of_the_way(measured, others):
            text = "Nothing speaks against it, but it is of another architecture than the trained model, so whether the"
            told = f"{text} trained model's weights are mixed into it cannot be asked."
            return replace(found, verdict=Verdict.UNDECIDED, reason=told)
        return found

    def compared(self, measured: Model, trained: Model, retrained: Sequence[Model]) -> list[Compared]:
        """Every measure of all models; a distance to the others is taken for each retrained one without itself.

        Those that share the trained model's start are alike in more than retraining is, so they stand apart: they tell
        what an honest model shows on the way back, and nothing else.
        """
        if all(other.same_start for other in retrained):
            return []
        fresh, sharing = ([other for other in retrained if other.same_start is own] for own in (False, True))
        rest = [[other for other in fresh if other is not model] for model in fresh]
        own, before, *others = (
            model.alone | self.beside(model, them) | {"kept_share": kept_share(model, trained, them)}
            for model, them in [(measured, fresh), (trained, fresh), *zip(fresh, rest, strict=True)]
        )
        shares: list[dict[str, float | None]] = []
        if len(sharing) >= LEAST:
            own, before, *shares = (
                alone | on_the_way(model, trained, fresh)
                for alone, model in [(own, measured), (before, trained), *(({}, other) for other in sharing)]
            )
        steps = {"kept_share": chance_share(trained, fresh) / SPREADS}
        found = compared(own, before, others, lambda measure: steps.get(measure.name, self.step(measure)), shares)
        return [one for one in found if one.measure.name not in STAND_INS]


def since_first(asked: Sequence[Compared], first: Sequence[Finding]) -> list[Compared]:
    """The measures of forgetting, with noise enough that no margin is below the first one.

    What all models have learnt alike differs in the last decimals only, and a tenth of that would be no margin.
    """
    margins = {one.measure.name: one.margin for one in first if one.measure.about_forgetting}
    return [
        replace(one, step=max(one.step, margins[one.measure.name] / SPREADS))
        for one in asked
        if one.measure.name in margins
    ]


def _left_out(strange: Collection[int], others: Sequence[Shown]) -> str:
    """Which models of the trained one's start were left out, and whether others were enough."""
    if not strange:
        return ""
    names = " and ".join(f"same_start[{number}]" for number in strange)
    enough = sum(other.same_start for other in others) >= LEAST
    rest = "" if enough else " Whether the trained model's weights are mixed in was not asked, therefore."
    return f" Left out: {names}, no nearer to the trained model than models of fresh starts.{rest}"


def _is_out_of_the_way(measured: Shown, retrained: Sequence[Shown]) -> bool:
    """Whether others were asked on the way back, and it cannot be."""
    return measured.back is None and sum(other.same_start for other in retrained) >= LEAST
