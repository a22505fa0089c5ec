import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import hessian

from cases import CASES, Case
from expunge.core.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    SquaredError,
    as_loss,
    objective,
)
from expunge.errors import RequestError

OUTPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 1, 2])
NUMBERS = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def named(value: object) -> str:
    """A name without an address, which differs from process to process."""
    return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)


BOTH = pytest.mark.parametrize(("loss", "targets"), [(CrossEntropy(), LABELS), (SquaredError(), NUMBERS)], ids=named)


def test_per_sample_values_are_their_definitions() -> None:
    log_likelihoods = [math.log(z.exp()[y] / z.exp().sum()) for z, y in zip(OUTPUTS, LABELS, strict=True)]
    assert CrossEntropy().per_sample(OUTPUTS, LABELS).tolist() == pytest.approx([-value for value in log_likelihoods])
    halves = [0.5 * float(((z - y) ** 2).sum()) for z, y in zip(OUTPUTS, NUMBERS, strict=True)]
    assert SquaredError().per_sample(OUTPUTS, NUMBERS).tolist() == pytest.approx(halves)


@BOTH
def test_output_hessian_products_are_those_of_the_dense_matrix(loss: Loss, targets: Tensor) -> None:
    vectors = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = loss.output_hessian_product(OUTPUTS, targets, vectors)
    for z, y, v, row in zip(OUTPUTS, targets, vectors, found, strict=True):
        dense = hessian(lambda z, y=y: loss.per_sample(z[None], y[None])[0])(z)
        assert torch.allclose(row, dense @ v, atol=1e-12)


def test_confident_logits_give_no_nan() -> None:
    outputs = torch.tensor([[1000.0, -1000.0]])
    assert CrossEntropy().per_sample(outputs, torch.tensor([1])).tolist() == [2000.0]
    assert CrossEntropy().output_hessian_product(outputs, torch.tensor([1]), torch.ones(1, 2)).tolist() == [[0.0, 0.0]]


def test_squared_error_of_one_number_or_of_an_image_a_sample() -> None:
    assert SquaredError().per_sample(torch.ones(3), torch.zeros(3)).tolist() == [0.5] * 3
    assert SquaredError().per_sample(torch.ones(2, 3, 4), torch.zeros(2, 3, 4)).tolist() == [6.0] * 2


def test_squared_error_refuses_targets_that_would_be_broadcast() -> None:
    with pytest.raises(RequestError, match=r"\(5, 1\)"):
        SquaredError().per_sample(torch.zeros(5, 1), torch.zeros(5))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_objective_is_the_mean_with_l2(case: Case) -> None:
    found = objective(case.loss, case.outputs(case.theta), case.targets, case.theta)
    assert float(found) == pytest.approx(float(case.objective(case.theta)), rel=1e-12)


def test_objective_of_a_union_is_the_mean_weighted_by_samples() -> None:
    theta, loss = torch.ones(3).double(), CrossEntropy(l2=0.4)
    parts = [(2, objective(loss, OUTPUTS[:2], LABELS[:2], theta)), (3, objective(loss, OUTPUTS[2:], LABELS[2:], theta))]
    union = objective(loss, OUTPUTS, LABELS, theta)
    assert float(sum(count * value for count, value in parts) / 5) == pytest.approx(float(union), rel=1e-12)


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])

READ = [
    ("cross_entropy", CrossEntropy(0.5)),
    ("squared_error", SquaredError(0.5)),
    ("mean_squared_error", MeanSquaredError(0.5)),
    ("binary_cross_entropy", BinaryCrossEntropy(0.5)),
    (nn.CrossEntropyLoss(), CrossEntropy(0.5)),
    (F.cross_entropy, CrossEntropy(0.5)),
    (nn.CrossEntropyLoss(WEIGHTS, ignore_index=7, label_smoothing=0.1), CrossEntropy(0.5, WEIGHTS, 0.1, 7)),
    (nn.NLLLoss(WEIGHTS, ignore_index=3), CrossEntropy(0.5, WEIGHTS, ignore_index=3)),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), BinaryCrossEntropy(0.5, pos_weight=WEIGHTS)),
    (nn.BCEWithLogitsLoss(WEIGHTS), BinaryCrossEntropy(0.5, WEIGHTS)),
    (nn.MSELoss(), MeanSquaredError(0.5)),
    (F.mse_loss, MeanSquaredError(0.5)),
]


@pytest.mark.parametrize(("given", "expected"), READ, ids=named)
def test_losses_by_name_and_from_torch(given: object, expected: Loss) -> None:
    assert as_loss(given, l2=0.5) == expected


def test_a_loss_object_is_itself_and_keeps_its_own_l2() -> None:
    loss = SquaredError(l2=0.1)
    assert as_loss(loss) is loss
    with pytest.raises(RequestError, match="not both"):
        as_loss(loss, l2=0.2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("hinge", "not known"),
        (None, "not known"),
        (nn.CrossEntropyLoss(reduction="sum"), "not the mean"),
        (nn.MSELoss(reduction="none"), "not the mean"),
        (nn.BCELoss(), "leave the sigmoid out"),
        (F.binary_cross_entropy, "leave the sigmoid out"),
        (nn.TripletMarginLoss(), "TripletMarginLoss is no sum"),
        (nn.CTCLoss(), "CTCLoss is no sum"),
        (nn.CosineEmbeddingLoss(), "CosineEmbeddingLoss is no sum"),
        (nn.KLDivLoss(reduction="batchmean"), "not the mean"),
        (nn.CrossEntropyLoss(torch.tensor([-1.0, 1.0])), "must not be negative"),
    ],
    ids=named,
)
def test_losses_that_are_no_mean_over_samples_are_refused_by_name(given: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        as_loss(given)


def test_one_output_tells_no_classes_apart():
    """It is right about everything, whatever the labels: a model for binary cross-entropy, whose loss was not said."""
    for labels in (torch.zeros(3, dtype=torch.int64), torch.ones(3, 1)):
        assert "one output" in CrossEntropy().problem(torch.randn(3, 1), labels)
    assert CrossEntropy().problem(torch.randn(3, 2), torch.ones(3, 2) / 2) is None
