"""Audit what was tried in a run: a verdict, membership attacks beside retrained models, and evidence without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from expunge.auditing.attempts import RECORD, asked_now
from expunge.auditing.comparison import Scores
from expunge.auditing.convexity import no_certificate
from expunge.auditing.evidence import Evidence, engine_evidence
from expunge.auditing.functional import predict
from expunge.auditing.later import Way, judged_later, learnt_again, more_rounds
from expunge.auditing.measured import Measured
from expunge.auditing.model_audit import ModelAudit, Panel
from expunge.auditing.statement import statement
from expunge.auditing.verdict import RETRAINS, Judgement, Verdict, from_own_start
from expunge.bench.evaluation import Evaluation
from expunge.bench.results import Results
from expunge.bench.run_folder import OWN_START, RunFolder
from expunge.bench.run_results import MeasuredRun, Questioned
from expunge.bench.scenario import Federation
from expunge.bench.workers import one_by_one, side_by_side
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, Progress
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain


@dataclass(frozen=True)
class Audit:
    """The audit of one request.

    Attributes:
        results: the usual measures, with the verdict in every row.
        methods: by the method's name.
        attack: the name of the attack behind the scores: the one that tells most of the trained model's members.
        scores: of this attack, by model ("trained", "retrained", and each method), for a picture.
        weights: of the non-members in it.
        certificate: why there is none, or that there can be one.
    """

    results: Results
    methods: dict[str, ModelAudit]
    attack: str | None
    scores: dict[str, Scores]
    weights: np.ndarray
    certificate: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "experiment": self.results.experiment,
            "certificate": self.certificate,
            "attack": self.attack,
            "methods": {name: own.as_dict() for name, own in self.methods.items()},
        }


def audit(
    folder: RunFolder,
    name: str,
    federation: Federation,
    nonce: str | None = None,
    *,
    persistence: int = 0,
    relearning: int = 0,
) -> Audit:
    """Audit everything that was tried for one request, with the retrained models that are there.

    Every model counts as an attempt of its request: the folder keeps a record.

    Args:
        folder: the run.
        name: of the request.
        federation: its clients.
        nonce: the auditor's.
        persistence: judge again after so many more rounds of those who stay; 0 does not.
        relearning: judge again after so many epochs on what was to be forgotten; 0 does not.
    """
    run = MeasuredRun(folder, name, federation)
    evaluation, request, trained = run.evaluation, run.request, run.trained
    references = [measured for _, measured in run.retrained]
    panel = Panel(evaluation.exam, run.before, [*references, *run.sharing])
    beside = [other.model.digest for other in panel.retrained + panel.same_start]
    ways = _ways(folder, federation, request, persistence, relearning)
    methods: dict[str, ModelAudit] = {}
    questioned: dict[str, Questioned] = {}
    for own, measured in run.tried:
        outcome = Outcome(own.method, ServerState(own.model), own.cost, details=own.details)
        evidence = [_said(evaluation, federation, trained, own.model)]
        evidence += engine_evidence(folder.engine(federation), trained, outcome, request)
        asked = asked_now(folder.path / RECORD, run.samples, own.model.digest, nonce, beside=beside)
        questioned[own.method] = answered = run.questioned(own.model, asked)
        models = [other.model for other, _ in run.retrained]
        later = _judged_later(answered.drawn, ways, own.model, trained, models, answered.judgement)
        methods[own.method] = panel.audit(measured, answered.judgement, asked, evidence, later)
    attack, scores = panel.strongest, {}
    if attack is not None:
        drawn = {"trained": run.before, **{own.method: each for own, each in run.tried}, "retrained": references[0]}
        scores = {label: found[attack] for label, model in drawn.items() if (found := panel.scores(model))}
    results = run.results(questioned, {method: each.verdict.value for method, each in methods.items()})
    reason = no_certificate(federation.model, federation.loss)
    certificate = reason or "A certificate is possible: see expunge.auditing.certificate."
    return Audit(results, methods, attack, scores, evaluation.exam.weights.numpy(), certificate)


def _said(evaluation: Evaluation, federation: Federation, trained: Snapshot, model: Snapshot) -> Evidence:
    """What can be said without retrained models, of one trigger at most."""
    exam = evaluation.exam
    before, after = (partial(predict, federation.architecture(own), own) for own in (trained, model))
    trigger = exam.triggers[0] if len(exam.triggers) == 1 else None
    return statement(before, after, exam.unseen, exam.forgotten, trigger).as_evidence()


def _ways(folder: RunFolder, federation: Federation, request: Request, rounds: int, epochs: int) -> dict[str, Way]:
    """What is done to all models before they are judged again; each model is trained on once."""
    plan = dataclasses.replace(folder.scenario.plan, seed=derived_seed(folder.scenario.seed, "later"))
    found: dict[str, Way] = {}
    if rounds:
        what = f"{rounds} more round{'s' * (rounds != 1)} of those who stay"
        found[what] = cache(more_rounds(folder.engine(federation), plan, request, rounds))
    if epochs:
        plain = LocalEngine(federation.model, federation.loss, federation.datasets)  # here nobody boosts
        what = f"{epochs} epoch{'s' * (epochs != 1)} on the forgotten data"
        found[what] = cache(learnt_again(plain.without(folder.departed), plan, request, epochs))
    return found


def _judged_later(
    drawn: Evaluation,
    ways: Mapping[str, Way],
    model: Snapshot,
    trained: Snapshot,
    retrained: Sequence[Snapshot],
    now: Judgement,
) -> dict[str, Judgement]:
    if model.parameters.shape != trained.parameters.shape:
        told = "It is of another architecture than the trained model, and cannot be trained on like it."
        return {name: Judgement(Verdict.UNDECIDED, told, attempt=now.attempt) for name in ways}
    measures = {name: partial(_measured_after, drawn, way) for name, way in ways.items()}
    return judged_later(drawn.exam, measures, model, trained, retrained, now)


def _measured_after(drawn: Evaluation, way: Way, model: Snapshot) -> Measured:
    return drawn.measure(way(model))


def retrain_more(
    folder: RunFolder,
    request: Request,
    federation: Federation,
    *,
    count: int = RETRAINS,
    data_dir: Path | None = None,
    device: str = "cpu",
    workers: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Retrain until there are ``count`` fresh retrained models of a request, and those of the training's own start.

    Returns:
        How many were made.
    """
    there, known = folder.retrained(request), folder.own_starts(request)
    missing = [(number, False) for number in range(known.count(False), count)]
    missing += [(number, True) for number in range(known.count(True), from_own_start(count))]
    with one_by_one() if device != "cpu" or len(missing) < 2 else side_by_side(workers) as pool:
        for start in range(0, len(missing), pool.count):
            some = missing[start : start + pool.count]
            jobs = [
                pool.submit(partial(retrained_again, folder, request, number, data_dir, device, own_start=own))
                for number, own in some
            ]
            for (_, own), job in zip(some, jobs, strict=True):
                state, cost = job.result()
                details = {OWN_START: True} if own else {}
                folder.save(request, Outcome("retrain", state, cost, details=details), federation)
                if progress is not None:
                    progress("retraining", folder.retrained(request) - there, len(missing))
    return len(missing)


def retrained_again(
    folder: RunFolder, request: Request, number: int, data_dir: Path | None, device: str, *, own_start: bool = False
) -> tuple[ServerState, Cost]:
    """One more retrained model: from a fresh initialisation, or from the training's own; its seed by its number."""
    federation = folder.scenario.build(data_dir, device=device)
    options = retrain_options(folder, federation, "own start" if own_start else "next", number)
    if own_start:
        options = dataclasses.replace(options, start=federation.initial())
    outcome = retrain(folder.engine(federation), folder.trained(federation), request, options)
    return outcome.state, outcome.cost


def retrain_options(folder: RunFolder, federation: Federation, *which: object) -> RetrainOptions:
    """Options for retraining; a chosen seed and the next unused one never meet: equal models would show no noise."""
    fresh = derived_seed(folder.scenario.seed, "retrain", *which)
    plan = dataclasses.replace(folder.scenario.plan, seed=fresh)
    return RetrainOptions(federation.initial(fresh), plan, keep=Keep())
