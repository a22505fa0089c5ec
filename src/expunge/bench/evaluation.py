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

from expunge.auditing.backdoor import asr_reduction, attack_success_rate
from expunge.auditing.comparison import Scores
from expunge.auditing.functional import (
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
from expunge.auditing.measures import Observed
from expunge.auditing.membership import loss_threshold_attack, matched_weights
from expunge.auditing.signals import membership_scores
from expunge.auditing.verdict import Judgement, judge
from expunge.bench.results import Row
from expunge.bench.scenario import Federation
from expunge.core.vectors import Snapshot
from expunge.data import stamp
from expunge.federation.engines.engine import Cost
from expunge.unlearning.request import Request

ALONE = ("test_accuracy", "forget_accuracy", "forget_loss", "asr", "mia_auc", "mia_success")
BESIDE = ("kl", "kl_forget", "logit_mse", "agreement", "parameter_gap")


@dataclass(frozen=True, eq=False)
class Measured:
    """One model: its outputs on the sets that matter, and what they say of it alone.

    ``other_logits`` are those of the non-members that a membership attack compares the forgotten samples with.
    """

    parameters: Tensor
    test_logits: Tensor
    forget_logits: Tensor
    other_logits: Tensor
    retained_auc: float
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
        kept = [_without(data, owners.get(name, ())) for name, data in federation.datasets.items()]
        self._retained_inputs, self._retained_labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
        test_labels = federation.dataset.test_labels
        self._usable = [test_labels != backdoor.target for backdoor in self._backdoors]
        stamped = [
            torch.full_like(test_labels[u], b.target) for u, b in zip(self._usable, self._backdoors, strict=True)
        ]
        self.other_labels = torch.cat([test_labels, *stamped])
        marks = [labels_ + number * classes for number, labels_ in enumerate(stamped, start=1)]
        self._other_groups = torch.cat([test_labels, *marks])

    @property
    def forget_labels(self) -> Tensor:
        """Labels of the forgotten samples, as their owners had them."""
        return self._forget_labels

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
        poisoned = [logits[usable] for logits, usable in zip(triggered_logits, self._usable, strict=True)]
        other_logits = torch.cat([test_logits, *poisoned])
        alone |= self._membership(forget_logits, other_logits)
        retained_logits = predict(architecture, model, self._retained_inputs)
        retained_auc = self._retained_membership(test_logits, retained_logits)
        return Measured(model.parameters, test_logits, forget_logits, other_logits, retained_auc, alone)

    def observed(self, measured: Measured) -> Observed:
        """The model as the verdict looks at it."""
        return Observed(
            measured.test_logits,
            self._federation.dataset.test_labels,
            measured.forget_logits,
            self._forget_labels,
            asr=measured.alone["asr"],
            forget_auc=measured.alone["mia_auc"],
            retained_auc=measured.retained_auc,
        )

    def scores(self, measured: Measured, signal: str) -> Scores:
        """The model's membership signal of the forgotten samples and of non-members, large for members."""
        return Scores(
            membership_scores(measured.forget_logits.cpu(), self._forget_labels.cpu(), signal),
            membership_scores(measured.other_logits.cpu(), self.other_labels.cpu(), signal),
        )

    def non_member_weights(self) -> Tensor:
        """Weights that give the non-members the forgotten samples' labels and triggers."""
        return matched_weights(self._forget_groups.cpu(), self._other_groups.cpu())

    def judgement(
        self, measured: Measured, trained: Measured, retrained: Sequence[Measured], same_init: Sequence[Measured] = ()
    ) -> Judgement:
        """The verdict on a model, beside retrained ones; one of these is judged by the others."""
        return judge(
            retrained=[self.observed(other) for other in retrained if other is not measured],
            trained=self.observed(trained),
            candidate=self.observed(measured),
            same_init=[self.observed(other) for other in same_init if other is not measured],
        )

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

    def _retained_membership(self, test: Tensor, retained: Tensor) -> float:
        """AUC of the retained samples beside test images of the same labels."""
        labels = self._federation.dataset.test_labels
        return loss_threshold_attack(
            F.cross_entropy(retained, self._retained_labels, reduction="none").cpu(),
            self._retained_labels.cpu(),
            F.cross_entropy(test, labels, reduction="none").cpu(),
            labels.cpu(),
        ).auc

    def _membership(self, forget: Tensor, others: Tensor) -> dict[str, float]:
        attack = loss_threshold_attack(
            F.cross_entropy(forget, self._forget_labels, reduction="none").cpu(),
            self._forget_groups.cpu(),
            F.cross_entropy(others, self.other_labels, reduction="none").cpu(),
            self._other_groups.cpu(),
        )
        return {"mia_auc": attack.auc, "mia_success": attack.success_rate}


def _without(data: tuple[Tensor, Tensor], forgotten: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """A client's samples but the forgotten ones; None is all of them."""
    keep = torch.full((len(data[1]),), forgotten is not None, device=data[1].device)
    if forgotten:
        keep[list(forgotten)] = False
    return data[0][keep], data[1][keep]


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
