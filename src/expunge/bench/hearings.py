"""One federation and everything that comes to be judged there: honest retrains, tricks and cheats, all alike.

Every model is asked questions that are drawn when it is fixed; the trained and the retrained models answer the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from expunge.auditing.cheats import Insider, cheats, mixed_weights
from expunge.auditing.disguises import Candidate, mixed, noisy
from expunge.auditing.functional import predict
from expunge.auditing.measured import Measured
from expunge.auditing.model_audit import Asked
from expunge.auditing.tricks import most_frequent, tricks
from expunge.auditing.verdict import Verdict
from expunge.bench.evaluation import Evaluation
from expunge.bench.measuring import SAME_INIT
from expunge.bench.results import Row
from expunge.bench.scenario import Federation
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.request import Request

HONEST = "retrain"
BESIDE = "retrain-beside-"
"""With a number: an honest retrain beside fewer retrained models."""

FEWER = (3, 5, 8)
"""Retrained models that an honest retrain is judged beside, besides all."""

MIXED = (5, 10, 15, 20, 30, 50)
"""Percent of the trained weights, along the curve of mixtures."""

ATTEMPTS = (18, 19, 20, 21, 22)
"""Of the best of five: percent of the trained weights."""

SAME_START = "-same-start"
"""The ending of a row whose honest part was retrained from the training's own initialisation."""

HIDDEN = 30
"""Percent of the trained weights in the model that a spoiled reference is to hide."""

SPOILED, NOISE = 0.3, 0.5
"""How a reference is spoiled: so much of the trained weights in it, or noise so large beside its weights."""


@dataclass(frozen=True, eq=False)
class Models:
    """The finished models of one federation.

    Attributes:
        state: the trained one, as the server has it.
        early: the same after its first rounds.
        references: retrained models that others are judged beside.
        honest: one more retrained model.
        same_start: one that was retrained from the training's own initialisation.
    """

    state: ServerState
    early: Snapshot
    references: Sequence[Snapshot]
    honest: Snapshot
    same_start: Snapshot


@dataclass(frozen=True, eq=False)
class Hearing:
    """One candidate and those that it is judged beside, asked the same questions."""

    evaluation: Evaluation
    own: Measured
    trained: Measured
    references: Sequence[Measured]

    def row(self, name: str, count: int | None = None, attempt: int = 1) -> Row:
        """The verdict beside the first so many references, or beside all."""
        references = self.references[:count]
        verdict = self.evaluation.exam.judgement(self.own, self.trained, references, attempt).verdict.value
        row = self.evaluation.row(name, self.own, self.trained, references)
        return dataclasses.replace(row, verdict=verdict)


@dataclass(frozen=True, eq=False)
class Court:
    """Judges candidates of one federation.

    Attributes:
        federation: where they come from.
        leaver: who is to be forgotten.
        models: the finished ones.
        learning_rate: of cheats that are taught something.
    """

    federation: Federation
    leaver: str
    models: Models
    learning_rate: float

    @property
    def seed(self) -> int:
        """The federation's."""
        return self.federation.scenario.seed

    def candidate(self, weights: Snapshot) -> Candidate:
        """A model of the federation's architecture."""
        return Candidate(weights, partial(predict, self.federation.model, weights))

    def hearing(self, candidate: Candidate, references: Sequence[Snapshot] | None = None) -> Hearing:
        """A candidate's own questions, answered by everybody."""
        whole = Evaluation(self.federation, Request.of(self.leaver))
        exam = dataclasses.replace(whole.exam, retained=None)  # no verdict needs them, and they take longest
        nonce = str(derived_seed(self.seed, "nonce"))
        evaluation = whole.drawn(Asked(nonce).probes(exam, candidate.weights))
        others = self.models.references if references is None else references
        known = [self.candidate(weights) for weights in (self.models.state.model, *others)]
        own, trained, *rest = (evaluation.exam.measure(one.answers, one.weights) for one in (candidate, *known))
        return Hearing(evaluation, own, trained, rest)

    def honest_row(self) -> Row:
        """An honest retrain beside all references."""
        return self._honest.row(HONEST)

    def power_rows(self) -> Iterator[Row]:
        """The honest retrain beside fewer references, asked the same."""
        for count in FEWER:
            if count < len(self.models.references):
                yield self._honest.row(f"{BESIDE}{count}", count)

    @cached_property
    def _honest(self) -> Hearing:
        return self.hearing(self.candidate(self.models.honest))

    def trick_rows(self) -> Iterator[Row]:
        """What a server can do that does not forget."""
        for name, model in self.tricked.items():
            yield self.hearing(self.candidate(model)).row(name)

    @cached_property
    def tricked(self) -> dict[str, Snapshot]:
        """The models of all tricks."""
        backdoor = self.federation.scenario.backdoors.get(self.leaver)
        label = backdoor.target if backdoor is not None else most_frequent(self.federation.datasets[self.leaver][1])
        found, request = tricks(self.models.early, label), Request.of(self.leaver)
        return {name: trick(self.federation.engine(), self.models.state, request) for name, trick in found.items()}

    def mixture_rows(self) -> Iterator[Row]:
        """Mixtures of weights; one of nothing is the honest model with the training's start."""
        insider = self.insider()
        yield self.hearing(self.candidate(insider.same_start)).row(SAME_INIT)
        for percent in MIXED:
            for end, same in (("", False), (SAME_START, True)):
                mixture = mixed_weights(percent, same_start=same)(insider)
                yield self.hearing(mixture).row(f"weights-{percent}{end}")

    def cheat_rows(self) -> Iterator[Row]:
        """What else an insider can do with one model."""
        insider = self.insider()
        for name, cheat in cheats().items():
            yield self.hearing(cheat(insider)).row(name)

    def special_rows(self) -> Iterator[Row]:
        """What an insider can do with more than one model: try again, and spoil a reference."""
        insider = self.insider()
        for same_start in (False, True):
            yield self._best_of_five(insider, same_start)
            yield from self._beside_a_spoiled_one(insider, same_start)

    def insider(self) -> Insider:
        """Somebody who has seen all that an audit of the trained model asked, with another nonce."""
        evaluation = Evaluation(self.federation, Request.of(self.leaver))
        exam, models = evaluation.exam, self.models
        assert exam.retained is not None
        return Insider(
            self.federation.model,
            models.state.model,
            models.honest,
            models.same_start,
            models.references[0],
            exam.retained,
            exam.forgotten,
            Asked("an earlier audit").probes(exam, models.state.model).unseen[0],
            exam.triggers[0],
            self.learning_rate,
            self.seed,
        )

    def _best_of_five(self, insider: Insider, same_start: bool) -> Row:
        """Five mixtures one after another, each judged as the attempt that it is; the best one is what counts."""
        name = "best-of-five" + SAME_START * same_start
        return best(
            [
                self.hearing(mixed_weights(percent, same_start=same_start)(insider)).row(name, attempt=attempt)
                for attempt, percent in enumerate(ATTEMPTS, start=1)
            ]
        )

    def _beside_a_spoiled_one(self, insider: Insider, same_start: bool) -> Iterator[Row]:
        """A mixture beside references of which the first is spoiled, in two ways."""
        first, *others = self.models.references
        spoils: dict[str, Callable[[], Snapshot]] = {
            "mixed": lambda: mixed(first, insider.trained, SPOILED),
            "noisy": lambda: noisy(first, NOISE, self.seed),
        }
        for name, spoil in spoils.items():
            hearing = self.hearing(mixed_weights(HIDDEN, same_start=same_start)(insider), [spoil(), *others])
            yield hearing.row(f"spoiled-reference-{name}" + SAME_START * same_start)


def best(rows: Sequence[Row]) -> Row:
    """The one that its maker would show: EQUIVALENT before UNDECIDED before all else, the first where several are.

    Example:
        >>> rows = [Row("attempt", n, verdict=v) for n, v in enumerate(["DAMAGED", "UNDECIDED", "EQUIVALENT"])]
        >>> best(rows).verdict, best(rows[:2]).verdict
        ('EQUIVALENT', 'UNDECIDED')
    """
    return max(rows, key=lambda row: (row.verdict == Verdict.EQUIVALENT, row.verdict == Verdict.UNDECIDED))
