"""Measure what was tried in a run, once, for its report and for its audit; both give the same verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from expunge.auditing.attempts import RECORD, asked_before, samples_digest
from expunge.auditing.measured import Measured
from expunge.auditing.model_audit import Asked
from expunge.auditing.verdict import Judgement
from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.results import Results, Row, environment, utc_now
from expunge.bench.run_folder import RunFolder, Tried
from expunge.bench.scenario import Federation
from expunge.core.vectors import Snapshot
from expunge.unlearning.request import Request

UNASKED = Asked("not audited")
"""The questions for a model that no audit has asked yet: an audit draws others."""


@dataclass(frozen=True, eq=False)
class Questioned:
    """A model and those that it is judged beside, asked the questions that were drawn for it."""

    drawn: Evaluation
    own: Measured
    before: Measured
    others: Sequence[Measured]
    attempt: int

    @cached_property
    def judgement(self) -> Judgement:
        """The verdict on the model."""
        return self.drawn.exam.judgement(self.own, self.before, self.others, self.attempt)

    @cached_property
    def doing_nothing(self) -> str:
        """The verdict on the trained model, by the same questions."""
        return self.drawn.exam.judgement(self.before, self.before, self.others).verdict.value


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """Everything that was tried for one request, and the models that it is judged beside.

    Attributes:
        folder: the run.
        name: of the request.
        federation: its clients.
    """

    folder: RunFolder
    name: str
    federation: Federation

    @cached_property
    def request(self) -> Request:
        """What was to be forgotten."""
        return self.folder.requests()[self.name]

    @cached_property
    def evaluation(self) -> Evaluation:
        """With all questions."""
        return Evaluation(self.federation, self.request)

    @cached_property
    def samples(self) -> str:
        """What names the request in the record of audits."""
        return samples_digest(self.evaluation.exam.forgotten)

    @cached_property
    def trained(self) -> Snapshot:
        """The model that knows the data."""
        return self.folder.trained(self.federation).model

    @cached_property
    def before(self) -> Measured:
        """The trained model."""
        return self.evaluation.measure(self.trained)

    @cached_property
    def tried(self) -> list[tuple[Tried, Measured]]:
        """All that methods made, without retrained models."""
        return [(own, self.evaluation.measure(own.model)) for own in self._every if own.method != "retrain"]

    @cached_property
    def retrained(self) -> list[tuple[Tried, Measured]]:
        """The retrained models of fresh starts."""
        found = [own for own in self._every if own.method == "retrain" and not own.has_own_start]
        return [(own, self.evaluation.measure(own.model)) for own in found]

    @cached_property
    def sharing(self) -> list[Measured]:
        """Those of the training's own start."""
        found = [own.model for own in self._every if own.has_own_start]
        return [self.evaluation.measure(model, same_start=True) for model in found]

    @cached_property
    def _every(self) -> Sequence[Tried]:
        return self.folder.tried(self.name, self.federation)

    def questioned(self, model: Snapshot, asked: Asked) -> Questioned:
        """A model and the others, by questions that are drawn for it."""
        drawn = self.evaluation.drawn(asked.probes(self.evaluation.exam, model))
        own, before = (drawn.measure(each, self.trained) for each in (model, self.trained))
        others = [drawn.measure(each.model) for each, _ in self.retrained]
        others += [drawn.measure(each.model, self.trained, same_start=True) for each in self.sharing]
        return Questioned(drawn, own, before, others, asked.attempt)

    def asked(self) -> dict[str, Questioned]:
        """Everything that was tried, by method, as the last audit asked it, or as one may ask."""
        record = self.folder.path / RECORD
        known = [(own, asked_before(record, self.samples, own.model.digest)) for own, _ in self.tried]
        return {own.method: self.questioned(own.model, asked or UNASKED) for own, asked in known}

    def results(self, asked: Mapping[str, Questioned], verdicts: Mapping[str, str] | None = None) -> Results:
        """A row for every model with its verdict; the yardstick is not judged by itself.

        Args:
            asked: everything that was tried, by method.
            verdicts: the last word on some of them, where that is another one.
        """
        judged = {method: own.judgement.verdict.value for method, own in asked.items()} | dict(verdicts or {})
        for own in [*asked.values()][:1]:
            judged["trained"] = own.doing_nothing
        judged = judged if self.retrained else {}
        references = [measured for _, measured in self.retrained]
        costs = [own.cost for own, _ in self.retrained]

        def row(method: str, measured: Measured, *more: Any) -> Row:
            found = self.evaluation.row(method, measured, self.before, references, *more, nearby=False)
            return dataclasses.replace(found, verdict=judged.get(method))

        rows = [row("trained", self.before)]
        rows += [row(own.method, measured, own.cost, costs) for own, measured in (*self.retrained, *self.tried)]
        noise = noise_ranges([retrain_noise(references)]) if references else {}
        warnings = [warning for own, _ in (*self.retrained, *self.tried) for warning in own.warnings]
        described = {
            "forgotten": [*self.request.clients, *self.request.samples],
            "request": self.name,
            "departed": list(self.folder.departed),
            "warnings": list(dict.fromkeys(warnings)),
        }
        scenario, name = {**self.folder.scenario.as_dict(), **described}, f"{self.folder.path.name}/{self.name}"
        return Results(name, scenario, environment(), rows, noise, date=utc_now())


def run_results(folder: RunFolder, name: str, federation: Federation) -> Results:
    """Measure everything that was tried for one request, named by its folder."""
    measured = MeasuredRun(folder, name, federation)
    return measured.results(measured.asked())
