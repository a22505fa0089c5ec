"""One federation and everything that comes to be judged there: honest retrains, tricks and cheats, all alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from expunge.auditing import cheats, tricks
from expunge.auditing.answers import Answers
from expunge.auditing.cheats import Insider, mixed_weights
from expunge.auditing.disguises import Candidate, mixed, noisy
from expunge.auditing.functional import predict
from expunge.auditing.model_audit import Asked
from expunge.auditing.tricks import most_frequent
from expunge.auditing.way_back import FAR, NEAR, OnTheWay
from expunge.bench.evaluation import Evaluation, on_the_way_to
from expunge.bench.hearings import BESIDE, BEST, FEWER, HONEST, MIXED, Heard, Hearing
from expunge.bench.measuring import SAME_INIT
from expunge.bench.scenario import Federation
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.request import Request

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
        same_start: one that was retrained from the training's own initialisation, with its batches.
        sharing: further references of that initialisation, for what models show on the way back.
    """

    state: ServerState
    early: Snapshot
    references: Sequence[Snapshot]
    honest: Snapshot
    same_start: Snapshot
    sharing: Sequence[Snapshot] = ()


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
        known = [self._known.get(one.digest) or self.candidate(one) for one in (self.models.state.model, *others)]
        own, trained, *rest = (
            evaluation.exam.measure(one.answers, one.weights, self._back(one)) for one in (candidate, *known)
        )
        sharing = [
            evaluation.exam.measure(one.answers, one.weights, self._back(one), same_start=True)
            for one in (self._known[one.digest] for one in self.models.sharing)
        ]
        return Hearing(evaluation, own, trained, rest, sharing)

    def _back(self, candidate: Candidate) -> OnTheWay | None:
        """A candidate on the way back; what the references answer there is remembered."""
        known = self._known_back.get(candidate.weights.digest)
        return known or on_the_way_to(self.federation.model, candidate.weights, self.models.state.model)

    @cached_property
    def _known_back(self) -> dict[str, OnTheWay]:
        found: dict[str, OnTheWay] = {}
        for one in self.models.sharing:
            way = on_the_way_to(self.federation.model, one, self.models.state.model)
            if way is not None:
                found[one.digest] = {share: remembering(way(share)) for share in (NEAR, FAR)}.__getitem__
        return found

    @cached_property
    def _known(self) -> dict[str, Candidate]:
        """The trained and the retrained models: everybody's questions are put to them, many of them again."""
        known = map(self.candidate, (self.models.state.model, *self.models.references, *self.models.sharing))
        return {own.weights.digest: Candidate(own.weights, remembering(own.answers)) for own in known}

    def honest(self) -> Heard:
        """An honest retrain beside all references."""
        return self._honest.heard(HONEST)

    def power(self) -> Iterator[Heard]:
        """The honest retrain beside fewer references, asked the same."""
        for count in FEWER:
            if count < len(self.models.references):
                yield self._honest.heard(f"{BESIDE}{count}", count)

    @cached_property
    def _honest(self) -> Hearing:
        return self.hearing(self.candidate(self.models.honest))

    def tricks(self) -> Iterator[Heard]:
        """What a server can do that does not forget."""
        for name, model in self.tricked.items():
            yield self.hearing(self.candidate(model)).heard(name)

    @cached_property
    def tricked(self) -> dict[str, Snapshot]:
        """The models of all tricks."""
        backdoor = self.federation.scenario.backdoors.get(self.leaver)
        label = backdoor.target if backdoor is not None else most_frequent(self.federation.datasets[self.leaver][1])
        found, request = tricks.tricks(self.models.early, label), Request.of(self.leaver)
        return {name: trick(self.federation.engine(), self.models.state, request) for name, trick in found.items()}

    def mixtures(self) -> Iterator[Heard]:
        """Mixtures of weights; one of nothing is the honest model with the training's start."""
        insider = self.insider()
        yield self.hearing(self.candidate(insider.same_start)).heard(SAME_INIT)
        for percent in MIXED:
            for end, same in (("", False), (SAME_START, True)):
                mixture = mixed_weights(percent, same_start=same)(insider)
                yield self.hearing(mixture).heard(f"weights-{percent}{end}")

    def cheats(self) -> Iterator[Heard]:
        """What else an insider can do with one model."""
        insider = self.insider()
        for name, cheat in cheats.cheats().items():
            yield self.hearing(cheat(insider)).heard(name)

    def special(self) -> Iterator[Heard]:
        """What an insider can do with more than one model: try again, and spoil a reference."""
        insider = self.insider()
        for same_start in (False, True):
            yield from self._five_attempts(insider, same_start)
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

    def _five_attempts(self, insider: Insider, same_start: bool) -> Iterator[Heard]:
        """Five mixtures one after another, each judged as the attempt that it is; the best one is what counts."""
        for attempt, percent in enumerate(ATTEMPTS, start=1):
            mixture = mixed_weights(percent, same_start=same_start)(insider)
            yield self.hearing(mixture).heard(BEST + SAME_START * same_start, attempt=attempt)

    def _beside_a_spoiled_one(self, insider: Insider, same_start: bool) -> Iterator[Heard]:
        """A mixture beside references of which the first is spoiled, in two ways."""
        first, *others = self.models.references
        spoils: dict[str, Callable[[], Snapshot]] = {
            "mixed": lambda: mixed(first, insider.trained, SPOILED),
            "noisy": lambda: noisy(first, NOISE, self.seed),
        }
        for name, spoil in spoils.items():
            hearing = self.hearing(mixed_weights(HIDDEN, same_start=same_start)(insider), [spoil(), *others])
            yield hearing.heard(f"spoiled-reference-{name}" + SAME_START * same_start)


def remembering(answers: Answers) -> Answers:
    """The same answers; what was asked before is not asked again."""
    places: dict[int, int] = {}
    given: list[Tensor] = []

    def ask(inputs: Tensor) -> Tensor:
        names = [hash(each.tobytes()) for each in inputs.cpu().numpy()]
        new = {name: number for number, name in enumerate(names) if name not in places}
        if new:
            places.update({name: len(places) + at for at, name in enumerate(new)})
            given[:] = [torch.cat([*given, answers(inputs[list(new.values())])])]
        return given[0][[places[name] for name in names]]

    return ask
