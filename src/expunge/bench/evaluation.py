"""Measure models of one federation: alone, and beside models retrained without the forgotten data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expunge.audit.backdoor import asr_reduction, attack_success_rate
from expunge.audit.functional import (
    accuracy,
    accuracy_gap,
    agreement,
    causal_faithfulness,
    kl_divergence,
    logit_mse,
    mean_loss,
    parameter_gap,
    predict,
)
from expunge.audit.membership import loss_threshold_attack
from expunge.bench.results import Row
from expunge.bench.scenario import Federation
from expunge.core.vectors import Snapshot
from expunge.data import stamp
from expunge.federation.engine import Cost
from expunge.unlearning.request import Request

ALONE = ("test_accuracy", "forget_accuracy", "forget_loss", "asr", "mia_auc", "mia_success")
BESIDE = ("kl", "kl_forget", "logit_mse", "agreement", "parameter_gap")


@dataclass(frozen=True, eq=False)
class Measured:
    """One model: its outputs on the sets that matter, and what they say of it alone."""

    parameters: Tensor
    test_logits: Tensor
    forget_logits: Tensor
    alone: dict[str, Any]


class Evaluation:
    """Measures models against one request.

    The backdoors that count are those of the clients whose data is forgotten; with several, their mean success.
    Non-members for the membership attack are the test images, and for each backdoor the same images with its trigger:
    matched to the forgotten samples by label and trigger.
    """

    def __init__(self, federation: Federation, request: Request) -> None:
        self._federation = federation
        counts = {name: len(labels) for name, (_, labels) in federation.datasets.items()}
        owners = request.parties(counts).owners
        backdoors = federation.scenario.backdoors
        self._backdoors = list(dict.fromkeys(backdoors[name] for name in owners if name in backdoors))
        classes = federation.dataset.classes
        inputs, labels, groups = [], [], []
        for name, indices in owners.items():
            rows = slice(None) if indices is None else list(indices)
            inputs.append(federation.datasets[name][0][rows])
            labels.append(federation.datasets[name][1][rows])
            trigger = 1 + self._backdoors.index(backdoors[name]) if name in backdoors else 0
            groups.append(labels[-1] + classes * trigger * federation.triggered[name][rows])
        self._forget_inputs, self._forget_labels = torch.cat(inputs), torch.cat(labels)
        self._forget_groups = torch.cat(groups)

    def measure(self, model: Snapshot) -> Measured:
        """The model alone."""
        dataset, architecture = self._federation.dataset, self._federation.architecture(model)
        test_logits = predict(architecture, model, dataset.test_inputs)
        forget_logits = predict(architecture, model, self._forget_inputs)
        stamped = [stamp(dataset.test_inputs, backdoor, dataset.white) for backdoor in self._backdoors]
        triggered_logits = [predict(architecture, model, inputs) for inputs in stamped]
        alone: dict[str, Any] = {
            "test_accuracy": accuracy(test_logits, dataset.test_labels),
            "forget_accuracy": accuracy(forget_logits, self._forget_labels),
            "forget_loss": mean_loss(forget_logits, self._forget_labels),
            "asr": None,
        }
        if self._backdoors:
            alone["asr"] = fmean(
                attack_success_rate(logits, dataset.test_labels, backdoor.target)
                for logits, backdoor in zip(triggered_logits, self._backdoors, strict=True)
            )
        alone |= self._membership(test_logits, forget_logits, triggered_logits)
        return Measured(model.parameters, test_logits, forget_logits, alone)

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
    ) -> Row:
        """A row of results: the mean over the retrained models wherever there is a comparison, else None."""
        others = [other for other in retrained if other is not measured]
        asr, asr_before = measured.alone["asr"], trained.alone["asr"]
        return Row(
            method=method,
            seed=self._federation.scenario.seed,
            **measured.alone,
            **(_beside(measured, trained, others) if others else {}),
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
        )

    def _membership(self, test: Tensor, forget: Tensor, triggered: Sequence[Tensor]) -> dict[str, float]:
        dataset = self._federation.dataset
        other_losses = [F.cross_entropy(test, dataset.test_labels, reduction="none")]
        other_groups = [dataset.test_labels]
        for number, (logits, backdoor) in enumerate(zip(triggered, self._backdoors, strict=True), start=1):
            usable = dataset.test_labels != backdoor.target
            targets = torch.full_like(dataset.test_labels[usable], backdoor.target)
            other_losses.append(F.cross_entropy(logits[usable], targets, reduction="none"))
            other_groups.append(targets + number * dataset.classes)
        attack = loss_threshold_attack(
            F.cross_entropy(forget, self._forget_labels, reduction="none").cpu(),
            self._forget_groups.cpu(),
            torch.cat(other_losses).cpu(),
            torch.cat(other_groups).cpu(),
        )
        return {"mia_auc": attack.auc, "mia_success": attack.success_rate}


def _ratio(retrained: Sequence[float], own: float) -> float | None:
    """How many times cheaper than the median retraining; None where either is missing or free."""
    return median(retrained) / own if retrained and own else None


def _beside(measured: Measured, trained: Measured, others: Sequence[Measured]) -> dict[str, Any]:
    """The measures that need retrained models, averaged over them."""
    distances = [compare(other, measured) for other in others]
    shared = [name for name in BESIDE if all(name in distance for distance in distances)]
    retrained = fmean(other.alone["test_accuracy"] for other in others)
    own, before = measured.alone["test_accuracy"], trained.alone["test_accuracy"]
    faithfulness = causal_faithfulness(before, retrained, own)
    return {
        **{name: fmean(distance[name] for distance in distances) for name in shared},
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
    if retrained.parameters.shape == measured.parameters.shape:
        distances["parameter_gap"] = parameter_gap(retrained.parameters, measured.parameters)
    return distances


def retrain_noise(retrained: Sequence[Measured]) -> dict[str, list[float]]:
    """All values that retraining alone produces: of each model, and of each pair of models."""
    noise = {name: [value for model in retrained if (value := model.alone[name]) is not None] for name in ALONE}
    pairs = [compare(first, second) for first, second in permutations(retrained, 2)]
    return {**noise, **{name: [pair[name] for pair in pairs] for name in BESIDE}}


def noise_ranges(values: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Low, high and mean of each measure over the values of several seeds."""
    pooled = {name: [v for part in values for v in part[name]] for name in (*ALONE, *BESIDE)}
    return {name: {"low": min(v), "high": max(v), "mean": fmean(v)} for name, v in pooled.items() if v}
