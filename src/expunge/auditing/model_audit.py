"""All that an audit says of one model, put together in one place for benchmark federations and for users' own models.

The retrained models serve three times: as what a verdict compares with, as the value that an attack has to come down
to, and as the shadow models of the attacks, since none of them saw the forgotten samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from textwrap import fill
from typing import Any, Generic, TypeVar

import numpy as np

from expunge.auditing import words
from expunge.auditing.comparison import Comparison, Scores, beside_retrained
from expunge.auditing.evidence import Evidence
from expunge.auditing.judging import Judging
from expunge.auditing.klom import FEWEST_RETRAINED, Klom, klom
from expunge.auditing.later import deciding
from expunge.auditing.margins import Finding
from expunge.auditing.measured import Shown
from expunge.auditing.membership import measure_attack
from expunge.auditing.power import Power
from expunge.auditing.probes import probe_seed
from expunge.auditing.verdict import Judgement, Verdict, level_of
from expunge.core.vectors import Snapshot
from expunge.version import __version__

Model = TypeVar("Model", bound=Shown)
AnExam = TypeVar("AnExam", bound=Judging[Any])


@dataclass(frozen=True)
class Provenance:
    """Which models were looked at, when, and by which version.

    Attributes:
        before: digest of the trained model.
        after: of the judged one.
        retrained: of every fresh retrained one.
        date: in UTC.
        version: of expunge.
        nonce: the auditor's: with the judged model's digest it gives the probes again.
        counted: whether earlier audits of the request were counted.
        same_start: of every retrained one that has the trained model's own start.
    """

    before: str
    after: str
    retrained: tuple[str, ...]
    date: str
    version: str
    nonce: str = ""
    counted: bool = False
    same_start: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """How a model was asked: with which nonce, and the how many-th of the request it is.

    Attributes:
        nonce: the auditor's.
        attempt: from 1 on.
        counted: whether earlier audits of the request are known.
        is_known: whether another model was asked with this nonce before, so that the maker of this one may know it.
    """

    nonce: str
    attempt: int = 1
    counted: bool = False
    is_known: bool = False

    def probes(self, exam: AnExam, model: Snapshot) -> AnExam:
        """The exam with questions drawn for this model."""
        return exam.drawn(probe_seed(model.digest, self.nonce))


@dataclass(frozen=True)
class KlomOfTwo:
    """KLoM of the trained and of the judged model, each as the one model that it is."""

    before: Klom
    after: Klom


@dataclass(frozen=True)
class ModelAudit:
    """What was found about one model.

    Attributes:
        judgement: the verdict, its reason, its power, and every measure behind it.
        attacks: by the attack's name, the trained, the judged and the retrained models side by side.
        evidence: what can be said without retrained models.
        provenance: which models these were, and when they were looked at.
        klom: divergence of margins on the forgotten data (Georgiev et al. 2024), or None with too few retrained models.
        later: the judgements after all models were trained on, by what was done; one of them may be the verdict.
        as_it_is: the judgement before that; None where nothing was done.
    """

    judgement: Judgement
    attacks: dict[str, Comparison]
    evidence: tuple[Evidence, ...]
    provenance: Provenance
    klom: KlomOfTwo | None = None
    later: dict[str, Judgement] = field(default_factory=dict)
    as_it_is: Judgement | None = None

    @property
    def verdict(self) -> Verdict:
        """One word."""
        return self.judgement.verdict

    @property
    def reason(self) -> str:
        """One sentence."""
        return self.judgement.reason

    @property
    def power(self) -> Power | None:
        """What could have been told."""
        return self.judgement.power

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every measure of the model beside the retrained ones."""
        return self.judgement.findings

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        origin = self.provenance
        return {
            "verdict": self.verdict.value,
            "sentence": words.sentence(self.verdict),
            "number": words.number(self.judgement),
            "reason": self.reason,
            "power": self.power.sentence if self.power is not None else None,
            "attempt": self.judgement.attempt if origin.counted else None,
            "level": level_of(self.judgement.attempt),
            "refused": [one.sentence for one in self.judgement.refused],
            "findings": [_plain(found) for found in self.findings],
            "as_it_is": _plain_judgement(self.as_it_is) if self.as_it_is is not None else None,
            "later": {name: _plain_judgement(found) for name, found in self.later.items()},
            "attacks": {attack: dataclasses.asdict(found) for attack, found in self.attacks.items()},
            "klom": dataclasses.asdict(self.klom) if self.klom is not None else None,
            "evidence": [dataclasses.asdict(found) for found in self.evidence],
            "models": {
                "before": origin.before,
                "after": origin.after,
                "retrained": list(origin.retrained),
                "same_start": list(origin.same_start),
            },
            "nonce": origin.nonce,
            "date": origin.date,
            "expunge": origin.version,
            "limits": words.LIMITS,
        }

    def __str__(self) -> str:
        """For a reader: a sentence, a number, a picture in letters, the limits; below, the details, a line each."""
        origin, found = self.provenance, self.judgement
        lines = [f"{self.verdict.value}: {words.sentence(self.verdict)}", words.number(found)]
        lines += ["", *words.picture(self.findings), words.LEGEND] if self.findings else []
        lines += ["", f"Why: {self.reason}"] if self.reason not in lines else []
        lines += ["", *words.looks(self.as_it_is, self.later)] if self.as_it_is is not None else []
        lines += ["", words.attempt(found, origin.counted), f"What no audit sees: {words.LIMITS}", ""]
        lines += [self.power.sentence] if self.power is not None else []
        lines += [_attack_line(attack, found) for attack, found in self.attacks.items()]
        if self.klom is not None:
            was, is_now = self.klom.before, self.klom.after
            lines.append(f"  KLoM: {is_now.value:.3f}, retrained {is_now.noise_floor:.3f}, before {was.value:.3f}")
        lines += [f"  {found.what} ({found.leaning}): {found.sentence}" for found in self.evidence]
        lines.append(f"Model {origin.after}, {origin.date}, expunge {origin.version}, nonce {origin.nonce}.")
        return "\n".join(line if line.startswith("  ") else fill(line, 110) for line in lines)


class Panel(Generic[Model]):
    """The models that others stand beside, the trained and the retrained ones, and what attacks make of each."""

    def __init__(self, exam: Judging[Model], before: Model, retrained: Sequence[Model]) -> None:
        self.exam, self.before = exam, before
        fresh, own = (tuple(other for other in retrained if other.same_start is own) for own in (False, True))
        self.retrained, self.same_start = fresh, own
        self._scores: dict[Model, dict[str, Scores]] = {}

    def audit(
        self,
        after: Model,
        judgement: Judgement,
        asked: Asked,
        evidence: Iterable[Evidence] = (),
        later: Mapping[str, Judgement] | None = None,
    ) -> ModelAudit:
        """Put together what is known of a model: its verdicts, how it was asked, and further evidence."""
        provenance = _provenance(self.before, after, (*self.retrained, *self.same_start), asked)
        if not after.is_finite:
            broken = Evidence("outputs", "against", "Some outputs are NaN or infinite: the model is of no use.", {})
            return ModelAudit(judgement, {}, (broken,), provenance)
        before, own = self.scores(self.before), self.scores(after)
        others = [self.scores(model) for model in self.retrained]
        weights = self.exam.weights.numpy()
        attacks = {
            attack: beside_retrained(before[attack], own[attack], [other[attack] for other in others], weights)
            for attack in own
        }
        evidence = (*self.exam.held_out(self.before, after), *evidence)
        if not later:
            return ModelAudit(judgement, attacks, evidence, provenance, self._klom(after))
        told = deciding(judgement, later)
        return ModelAudit(told, attacks, evidence, provenance, self._klom(after), dict(later), judgement)

    def scores(self, model: Model) -> dict[str, Scores]:
        """What each attack makes of a model; nothing where there is no retrained one to compare with."""
        if not self.retrained or not model.is_finite:
            return {}
        if model not in self._scores:
            self._scores[model] = self.exam.attacks(model, self.retrained)
        return self._scores[model]

    @cached_property
    def strongest(self) -> str | None:
        """The attack that tells most of the trained model's members; None where there is none."""
        weights = self.exam.weights.numpy()
        reached = {
            attack: measure_attack(found.members, found.others, weights).auc.value
            for attack, found in self.scores(self.before).items()
        }
        return max(reached, key=lambda attack: reached[attack], default=None)

    def _klom(self, after: Model) -> KlomOfTwo | None:
        if len(self.retrained) < FEWEST_RETRAINED:
            return None
        before, now, *others = (self.exam.confidence(own) for own in (self.before, after, *self.retrained))
        return KlomOfTwo(*(klom(own[None], np.stack(others)) for own in (before, now)))


def _provenance(before: Shown, after: Shown, retrained: Sequence[Shown], asked: Asked) -> Provenance:
    fresh, own_start = (
        tuple(other.model.digest for other in retrained if other.same_start is own) for own in (False, True)
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Provenance(
        before.model.digest, after.model.digest, fresh, now, __version__, asked.nonce, asked.counted, own_start
    )


def _plain_judgement(found: Judgement) -> dict[str, Any]:
    return {
        "verdict": found.verdict.value,
        "reason": found.reason,
        "findings": [_plain(one) for one in found.findings],
    }


def _plain(found: Finding) -> dict[str, Any]:
    return {
        "measure": found.measure.name,
        "value": found.value,
        "retrained": found.retrained,
        "doing_nothing": found.trained,
        "spread": found.spread,
        "margin": found.margin,
        "usable": found.usable,
        "outcome": found.outcome,
    }


def _attack_line(attack: str, found: Comparison) -> str:
    goal = float(np.mean([own.auc.value for own in found.retrained]))
    values = f"{found.unlearned.auc.value:.3f}, retrained {goal:.3f}, before {found.trained.auc.value:.3f}"
    return f"  AUC of the attack {attack}: {values}"
