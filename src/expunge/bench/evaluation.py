"""Measure models of one federation: alone, and beside models retrained without the forgotten data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import permutations
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from expunge.auditing.backdoor import asr_reduction
from expunge.auditing.exam import Exam, Trigger
from expunge.auditing.functional import (
    accuracy_gap,
    agreement,
    causal_faithfulness,
    kl_divergence,
    logit_mse,
    parameter_gap,
    predict,
)
from expunge.auditing.measured import Measured, beside, kept_share
from expunge.auditing.verdict import Judgement
from expunge.auditing.way_back import OnTheWay
from expunge.bench.results import Row
from expunge.bench.scenario import Federation
from expunge.core.vectors import Snapshot
from expunge.data import stamp
from expunge.federation.engines.engine import Cost
from expunge.unlearning.request import Request

ALONE = (
    "test_accuracy",
    "test_loss",
    "forget_accuracy",
    "forget_loss",
    "asr",
    "trigger_pull",
    "trigger_rank",
    "trigger_moves",
    "mia_auc",
    "mia_success",
)
BESIDE = ("kl", "kl_forget", "logit_mse", "agreement", "parameter_gap")


class Evaluation:
    """Measures a federation's models against one request: its samples are the exam.

    The backdoors that count are those of the clients whose data is forgotten; with several, their mean success.
    """

    def __init__(self, federation: Federation, request: Request, exam: Exam | None = None) -> None:
        self._federation, self._request = federation, request
        self.exam = exam if exam is not None else exam_of(federation, request)

    def drawn(self, exam: Exam) -> Evaluation:
        """The same with other questions."""
        return Evaluation(self._federation, self._request, exam)

    def measure(self, model: Snapshot, trained: Snapshot | None = None, *, same_start: bool = False) -> Measured:
        """The model alone; and, with the trained one, on the way back to it."""
        module = self._federation.architecture(model)
        back = on_the_way_to(module, model, trained)
        return self.exam.measure(partial(predict, module, model), model, back, same_start=same_start)

    def judgement(self, measured: Measured, trained: Measured, retrained: Sequence[Measured]) -> Judgement:
        """The verdict on a model, beside retrained ones; one of these is judged by the others."""
        return self.exam.judgement(measured, trained, retrained)

    def row(
        self,
        method: str,
        measured: Measured,
        trained: Measured,
        retrained: Sequence[Measured],
        cost: Cost | None = None,
        retrain_costs: Sequence[Cost] = (),
        stored_bytes: int | None = None,
        training_overhead: float | None = None,
        *,
        nearby: bool = True,
    ) -> Row:
        """A row of results: the mean over the retrained models wherever there is a comparison, else None.

        Asking for nearby triggers takes longest; a row can do without them.
        """
        others = [other for other in retrained if other is not measured]
        compared = _beside(measured, trained, others, nearby) if others and measured.is_finite else {}
        asr, asr_before = measured.alone["asr"], trained.alone["asr"]
        return Row(
            method=method,
            seed=self._federation.scenario.seed,
            **measured.alone,
            **compared,
            asr_reduction=asr_reduction(asr_before, asr) if asr is not None and asr_before is not None else None,
            seconds=cost.seconds if cost else None,
            speedup=_ratio([c.seconds for c in retrain_costs], cost.seconds if cost else 0),
            sample_gradients=cost.sample_gradients if cost else None,
            speedup_in_gradients=_ratio(
                [c.sample_gradients for c in retrain_costs], cost.sample_gradients if cost else 0
            ),
            rounds=cost.rounds if cost else None,
            bytes=cost.bytes_down + cost.bytes_up if cost else None,
            stored_bytes=stored_bytes,
            training_overhead=training_overhead,
            digest=measured.model.digest,
        )


def on_the_way_to(module: nn.Module, model: Snapshot, trained: Snapshot | None) -> OnTheWay | None:
    """How a model of this architecture answers on its way to the trained one; None where there is no such way."""
    if trained is None or model.parameters.shape != trained.parameters.shape:
        return None
    return lambda share: partial(predict, module, model.towards(trained, share))


def exam_of(federation: Federation, request: Request) -> Exam:
    """The forgotten samples with their owners' triggers, the test images, and what all others keep."""
    dataset, backdoors = federation.dataset, federation.scenario.backdoors
    owners = request.parties({name: len(labels) for name, (_, labels) in federation.datasets.items()}).owners
    counted = list(dict.fromkeys(backdoors[name] for name in owners if name in backdoors))
    inputs, labels, triggered = [], [], []
    for name, indices in owners.items():
        rows = slice(None) if indices is None else list(indices)
        inputs.append(federation.datasets[name][0][rows])
        labels.append(federation.datasets[name][1][rows])
        number = 1 + counted.index(backdoors[name]) if name in backdoors else 0
        triggered.append(number * federation.triggered[name][rows])
    kept = [_without(data, owners.get(name, ())) for name, data in federation.datasets.items()]
    retained = torch.cat([data for data, _ in kept]), torch.cat([labels_ for _, labels_ in kept])
    triggers = [Trigger(partial(stamp, backdoor=own, white=dataset.white), own.target) for own in counted]
    forgotten = torch.cat(inputs), torch.cat(labels)
    return Exam(forgotten, (dataset.test_inputs, dataset.test_labels), retained, triggers, torch.cat(triggered))


def _without(data: tuple[Tensor, Tensor], forgotten: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """A client's samples but the forgotten ones; None is all of them."""
    keep = torch.full((len(data[1]),), forgotten is not None, device=data[1].device)
    if forgotten:
        keep[list(forgotten)] = False
    return data[0][keep], data[1][keep]


def _ratio(retrained: Sequence[float], own: float) -> float | None:
    """How many times cheaper than the median retraining; None where either is missing or free."""
    return median(retrained) / own if retrained and own else None


def _beside(measured: Measured, trained: Measured, others: Sequence[Measured], nearby: bool) -> dict[str, Any]:
    """The measures that need retrained models, averaged over them."""
    distances = [compare(other, measured) for other in others]
    shared = [name for name in BESIDE if all(name in distance for distance in distances)]
    retrained = fmean(other.alone["test_accuracy"] for other in others)
    own, before = measured.alone["test_accuracy"], trained.alone["test_accuracy"]
    faithfulness = causal_faithfulness(before, retrained, own)
    return {
        **{name: fmean(distance[name] for distance in distances) for name in shared},
        **beside(measured, others, nearby=nearby),
        "kept_share": kept_share(measured, trained, others),
        # A flagged value measures the noise of two accuracies; it does not go among results.
        "causal_faithfulness": None if faithfulness.flag else faithfulness.value,
        "accuracy_gap": accuracy_gap(retrained, own),
        "privacy_gap": abs(measured.alone["mia_success"] - fmean(other.alone["mia_success"] for other in others)),
    }


def compare(retrained: Measured, measured: Measured) -> dict[str, float]:
    """How far one model is from one retrained model; an ensemble has no distance in parameters."""
    distances = {
        "kl": kl_divergence(retrained.test_logits, measured.test_logits),
        "kl_forget": kl_divergence(retrained.forget_logits, measured.forget_logits),
        "logit_mse": logit_mse(retrained.test_logits, measured.test_logits),
        "agreement": agreement(retrained.test_logits, measured.test_logits),
    }
    if retrained.model.parameters.shape == measured.model.parameters.shape:
        distances["parameter_gap"] = parameter_gap(retrained.model.parameters, measured.model.parameters)
    return distances


def retrain_noise(retrained: Sequence[Measured]) -> dict[str, list[float]]:
    """All values that retraining alone produces: of each model, and of each pair of models."""
    noise = {name: [value for model in retrained if (value := model.alone[name]) is not None] for name in ALONE}
    pairs = [compare(first, second) for first, second in permutations(retrained, 2)]
    return {**noise, **{name: [pair[name] for pair in pairs] for name in BESIDE}}


def noise_ranges(values: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Low, high and mean of each measure over the values of several seeds."""
    pooled = {name: [v for part in values for v in part.get(name, ())] for name in (*ALONE, *BESIDE)}
    return {name: {"low": min(v), "high": max(v), "mean": fmean(v)} for name, v in pooled.items() if v}
