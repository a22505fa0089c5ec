"""Audit what was tried in a run: a verdict, membership attacks beside retrained models, and evidence without them.

The retrained models serve three times: as what a verdict compares with, as the value that an attack has to come down
to, and as the shadow models of LiRA and RMIA, since none of them saw the forgotten samples. A retrained model is
attacked with the help of the others only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from expunge.auditing.comparison import Comparison, Scores, beside_retrained
from expunge.auditing.convexity import no_certificate
from expunge.auditing.evidence import Evidence, Outputs, gather
from expunge.auditing.lira import lira
from expunge.auditing.rmia import rmia
from expunge.auditing.verdict import RETRAINS, Judgement
from expunge.bench.evaluation import Evaluation, Measured
from expunge.bench.results import Results
from expunge.bench.run_folder import RunFolder, Tried
from expunge.bench.scenario import Federation
from expunge.bench.workers import one_by_one, side_by_side
from expunge.core.losses import CrossEntropy
from expunge.core.seeds import derived_seed
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, Progress
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain

FEWEST_SHADOWS = 4
"""LiRA needs a spread over shadows, and one of them is the target when a retrained model is attacked."""


@dataclass(frozen=True)
class MethodAudit:
    """What was found about one method's model.

    Attributes:
        judgement: the verdict, its reason and its power.
        attacks: by the attack's name, the trained, the unlearned and the retrained models side by side.
        evidence: what can be said without retrained models.
    """

    judgement: Judgement
    attacks: dict[str, Comparison]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Audit:
    """The audit of one request.

    Attributes:
        results: the usual measures, with the verdict in every row.
        methods: by the method's name.
        scores: of the strongest attack, by model ("trained", "retrained", and each method), for a picture.
        weights: of the non-members in it.
        certificate: why there is none, or that there can be one.
    """

    results: Results
    methods: dict[str, MethodAudit]
    scores: dict[str, Scores]
    weights: np.ndarray
    certificate: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "experiment": self.results.experiment,
            "certificate": self.certificate,
            "methods": {
                name: {
                    "verdict": own.judgement.verdict.value,
                    "reason": own.judgement.reason,
                    "power": own.judgement.power.sentence if own.judgement.power is not None else None,
                    "findings": [
                        {
                            "measure": found.measure.name,
                            "value": found.value,
                            "retrained": found.retrained,
                            "low": None if found.low == -np.inf else found.low,
                            "high": None if found.high == np.inf else found.high,
                            "p_value": found.p_value,
                            "deviates": found.deviates,
                            "doing_nothing": nothing.value,
                        }
                        for found, nothing in zip(own.judgement.findings, own.judgement.doing_nothing, strict=True)
                    ],
                    "attacks": {attack: dataclasses.asdict(found) for attack, found in own.attacks.items()},
                    "evidence": [dataclasses.asdict(found) for found in own.evidence],
                }
                for name, own in self.methods.items()
            },
        }


def audit(folder: RunFolder, name: str, federation: Federation) -> Audit:
    """Audit everything that was tried for one request, with the retrained models that are there."""
    request, results = folder.requests()[name], folder.results(name, federation)
    evaluation = Evaluation(federation, request)
    trained = folder.trained(federation)
    before = evaluation.measure(trained.model)
    tries = folder.tried(name, federation)
    references = [evaluation.measure(own.model) for own in tries if own.method == "retrain"]
    weights = np.asarray(evaluation.non_member_weights())
    methods: dict[str, MethodAudit] = {}
    scores: dict[str, Scores] = {}
    for own in tries:
        if own.method == "retrain":
            continue
        after = evaluation.measure(own.model)
        attacked = _attacked(evaluation, before, after, references)
        attacks = {
            attack: beside_retrained(found[0], found[1], found[2:], weights) for attack, found in attacked.items()
        }
        if attacked:
            best = max(attacks, key=lambda attack: attacks[attack].trained.auc.value)
            strongest = attacked[best]
            scores |= {"trained": strongest[0], own.method: strongest[1], "retrained": strongest[2]}
        judgement = evaluation.judgement(after, before, references)
        evidence = _evidence(folder, federation, evaluation, trained, before, after, own, request)
        methods[own.method] = MethodAudit(judgement, attacks, tuple(evidence))
    reason = no_certificate(federation.model, CrossEntropy())
    certificate = reason or "A certificate is possible: see expunge.auditing.certificate."
    return Audit(results, methods, scores, weights, certificate)


def _attacked(
    evaluation: Evaluation, before: Measured, after: Measured, references: Sequence[Measured]
) -> dict[str, list[Scores]]:
    """By the attack's name, the scores of the trained, the unlearned and each retrained model."""
    if not references:
        return {}
    models = [before, after, *references]
    found = {
        label: [evaluation.scores(model, signal) for model in models]
        for label, signal in (("loss", "loss"), ("modified entropy", "modified_entropy"))
    }
    if len(references) >= FEWEST_SHADOWS:
        for label, signal, attack in (("RMIA", "loss", _rmia), ("LiRA", "confidence", _lira)):
            signals = [evaluation.scores(model, signal) for model in models]
            shadows = signals[2:]
            found[label] = [
                attack(target, [shadow for shadow in shadows if shadow is not target]) for target in signals
            ]
    return found


def _lira(target: Scores, shadows: Sequence[Scores]) -> Scores:
    """Offline: how far above what models without the sample give, in standard deviations."""
    return _both(target, shadows, lambda own, table, masks: lira(own, table, masks, online=False))


def _rmia(target: Scores, shadows: Sequence[Scores]) -> Scores:
    """Offline, beside the non-members as population."""
    population, table = np.asarray(target.others), np.stack([np.asarray(shadow.others) for shadow in shadows])
    return _both(target, shadows, lambda own, rows, masks: rmia(own, rows, masks, population, table, online=False))


def _both(target: Scores, shadows: Sequence[Scores], attack: Callable[..., np.ndarray]) -> Scores:
    """An attack on members and non-members alike: no shadow was trained on either."""
    scored = []
    for part in ("members", "others"):
        table = np.stack([np.asarray(getattr(shadow, part)) for shadow in shadows])
        scored.append(attack(np.asarray(getattr(target, part)), table, np.zeros(table.shape, dtype=bool)))
    return Scores(*scored)


def _evidence(
    folder: RunFolder,
    federation: Federation,
    evaluation: Evaluation,
    trained: ServerState,
    before: Measured,
    after: Measured,
    own: Tried,
    request: Request,
) -> list[Evidence]:
    outcome = Outcome(own.method, ServerState(own.model), own.cost, details=own.details)
    outputs = tuple(Outputs(measured.forget_logits.cpu(), measured.test_logits.cpu()) for measured in (before, after))
    labels = evaluation.forget_labels.cpu(), federation.dataset.test_labels.cpu()
    return gather(
        folder.engine(federation), trained.model, outcome, request, outputs=(outputs[0], outputs[1]), labels=labels
    )


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
    """Retrain until there are ``count`` retrained models of a request; returns how many were made."""
    there = folder.retrained(request)
    numbers = range(there, count)
    with one_by_one() if device != "cpu" or len(numbers) < 2 else side_by_side(workers) as pool:
        for start in range(0, len(numbers), pool.count):
            works = [
                partial(retrained_again, folder, request, number, data_dir, device)
                for number in numbers[start : start + pool.count]
            ]
            for job in [pool.submit(work) for work in works]:
                state, cost = job.result()
                folder.save(request, Outcome("retrain", state, cost), federation)
                if progress is not None:
                    progress("retraining", folder.retrained(request) - there, len(numbers))
    return len(numbers)


def retrained_again(
    folder: RunFolder, request: Request, number: int, data_dir: Path | None, device: str
) -> tuple[ServerState, Cost]:
    """One more retrained model: from a fresh initialisation, its seed by its number."""
    federation = folder.scenario.build(data_dir, device=device)
    options = retrain_options(folder, federation, "next", number)
    outcome = retrain(folder.engine(federation), folder.trained(federation), request, options)
    return outcome.state, outcome.cost


def retrain_options(folder: RunFolder, federation: Federation, *which: object) -> RetrainOptions:
    """Options for retraining; a chosen seed and the next unused one never meet: equal models would show no noise."""
    fresh = derived_seed(folder.scenario.seed, "retrain", *which)
    plan = dataclasses.replace(folder.scenario.plan, seed=fresh)
    return RetrainOptions(federation.initial(fresh), plan, keep=Keep())
