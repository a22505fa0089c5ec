"""Every loss beside torch's value and beside dense matrices: its Hessian, its drawn gradients, curvature, factors."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from core.loss_cases import CALLABLE, DOUBLE, LOSSES, LossCase, chance
from expunge.core.batch import Batch
from expunge.core.curvature import Curvature
from expunge.core.factors import kronecker_factors
from expunge.core.kronecker import KroneckerCurvature
from expunge.core.losses import CrossEntropy, PerSample, as_loss, mean_loss
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import RequestError

each = pytest.mark.parametrize("case", [*LOSSES, CALLABLE], ids=lambda case: case.name)
known = pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)


def blocks(case: LossCase, outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample the dense Hessian of its loss in its outputs."""
    found = []
    for z, y in zip(outputs, targets, strict=True):
        dense = hessian(lambda z, y=y: case.loss.per_sample(z[None], y[None])[0])(z)
        found.append(dense.reshape(z.numel(), z.numel()))
    return torch.stack(found)


class Answering(nn.Module):
    """A small network with outputs of any shape."""

    def __init__(self, shape: tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.layer = nn.Linear(2, max(1, torch.Size(shape).numel()), bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.layer(inputs)).reshape(len(inputs), *self.shape)


def problem(case: LossCase) -> tuple[nn.Module, Batch, Tensor]:
    """A network, samples, and the dense Gauss-Newton matrix by Jacobians."""
    torch.manual_seed(1)
    model = Answering(case.shape[1:]).double().eval()
    inputs = torch.randn(case.shape[0], 2, generator=chance(3), dtype=DOUBLE)
    _, targets = case.drawn()
    layout = Layout.of(model)
    flat = layout.flatten(dict(model.named_parameters()))

    def outputs(theta: Tensor) -> Tensor:
        return functional_call(model, layout.unflatten(theta), (inputs,))

    jacobian = jacrev(outputs)(flat).reshape(len(inputs), -1, layout.size)
    inner = blocks(case, outputs(flat), targets)
    mass = case.loss.mass(targets)
    total = float(len(inputs)) if mass is None else float(mass.sum())
    return model, Batch.of(inputs, targets), torch.einsum("nop,noq,nqr->pr", jacobian, inner, jacobian) / total


@each
def test_the_mean_is_torchs(case: LossCase) -> None:
    outputs, targets = case.drawn()
    found = mean_loss(case.loss, outputs, targets)
    if case.torchs is not None:
        assert torch.allclose(found, case.torchs(outputs, targets), rtol=1e-12)


@each
def test_the_mean_of_a_union_is_by_what_the_parts_count(case: LossCase) -> None:
    outputs, targets = case.drawn()
    mass = case.loss.mass(targets)
    counts = torch.ones(len(outputs), dtype=DOUBLE) if mass is None else mass
    parts = [mean_loss(case.loss, outputs[own], targets[own]) * counts[own].sum() for own in (slice(0, 1), slice(1, 4))]
    assert torch.allclose(sum(parts) / counts.sum(), mean_loss(case.loss, outputs, targets), rtol=1e-12)


@each
def test_products_are_those_of_the_dense_hessian(case: LossCase) -> None:
    outputs, targets = case.drawn()
    vectors = torch.randn(outputs.shape, generator=chance(2), dtype=DOUBLE)
    found = case.loss.output_hessian_product(outputs, targets, vectors)
    exact = torch.einsum("nij,nj->ni", blocks(case, outputs, targets), vectors.reshape(len(outputs), -1))
    assert torch.allclose(found.reshape(exact.shape), exact, atol=1e-12)


@known
def test_drawn_gradients_have_the_dense_hessian_as_their_mean_square(case: LossCase) -> None:
    one, target = (part[:1] for part in case.drawn())
    exact = blocks(case, one, target)[0]
    many, alike = (part.expand(20_000, *part.shape[1:]) for part in (one, target))
    drawn = case.loss.sampled_gradients(many, alike, chance(5)).reshape(20_000, -1)
    assert float((drawn.T @ drawn / 20_000 - exact).norm() / exact.norm()) < 0.05


@each
@pytest.mark.parametrize("chunk_size", [3, 100])
def test_curvature_products_are_those_of_the_dense_matrix(case: LossCase, chunk_size: int) -> None:
    model, batch, exact = problem(case)
    curvature = Curvature(model, Snapshot.of(model), batch, case.loss, chunk_size=chunk_size)
    vector = torch.randn(len(exact), generator=chance(4), dtype=DOUBLE)
    assert torch.allclose(curvature @ vector, exact @ vector, rtol=1e-9, atol=1e-12)


@each
def test_hessian_products_are_those_of_the_mean_loss(case: LossCase) -> None:
    model, batch, _ = problem(case)
    layout = Layout.of(model)
    flat = layout.flatten(dict(model.named_parameters()))

    def value(theta: Tensor) -> Tensor:
        outputs = functional_call(model, layout.unflatten(theta), batch.inputs)
        own = case.torchs if case.torchs is not None else lambda z, y: ((z - y) ** 2).sum() / 2 / len(z)
        return own(outputs, batch.targets)

    exact = hessian(value)(flat)
    vector = torch.randn(len(flat), generator=chance(4), dtype=DOUBLE)
    curvature = Curvature(model, Snapshot.of(model), batch, case.loss, kind="hessian", chunk_size=3)
    assert torch.allclose(curvature @ vector, exact @ vector, rtol=1e-8, atol=1e-11)


@known
def test_factors_are_those_of_the_dense_matrix_where_all_inputs_are_alike(case: LossCase) -> None:
    """With one input the block is a Kronecker product, whatever the loss: in expectation it is the matrix itself."""
    one = torch.tensor([[0.7, -0.4]], dtype=DOUBLE)
    torch.manual_seed(1)
    model = Answering(case.shape[1:], bias=False).double().eval()
    _, targets = case.drawn()
    repeated = Batch.of(one.expand(4, 2), targets)
    layout = Layout.of(model)
    flat = layout.flatten(dict(model.named_parameters()))
    jacobian = jacrev(lambda theta: functional_call(model, layout.unflatten(theta), (one,)))(flat).reshape(
        -1, len(flat)
    )
    with torch.no_grad():
        outputs = model(repeated.inputs[0])
    mass = case.loss.mass(targets)
    total = 4.0 if mass is None else float(mass.sum())
    exact = torch.einsum("op,noq,qr->pr", jacobian, blocks(case, outputs, targets), jacobian) / total
    factors = kronecker_factors(model, Snapshot.of(model), many(repeated, 2000), case.loss)
    found = KroneckerCurvature(factors, layout)
    dense = torch.stack([found.apply(lambda values, _: values, row) for row in torch.eye(len(flat), dtype=DOUBLE)])
    assert float((dense - exact).norm() / exact.norm()) < 0.06


def many(batch: Batch, times: int) -> Batch:
    return batch.take(torch.arange(len(batch)).repeat(times))


def test_where_classes_are_is_told_by_the_targets_or_refused() -> None:
    with pytest.raises(RequestError, match=r"class_dimension=-1"):
        CrossEntropy().per_sample(torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(RequestError, match="one row of class scores for each label"):
        CrossEntropy().per_sample(torch.zeros(2, 3, 4), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(RequestError, match="class probabilities"):
        CrossEntropy().per_sample(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))


def test_a_function_that_is_no_sum_over_samples_is_refused_by_name() -> None:
    def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs @ outputs.T).log_softmax(dim=1).diagonal() + 0 * targets

    outputs, targets = torch.randn(4, 3, generator=chance()), torch.zeros(4)
    assert "'contrastive' that is no sum over samples" in PerSample(contrastive).problem(outputs, targets)
    assert "one number a sample" in as_loss(lambda z, y: ((z - y[:, None]) ** 2).mean()).problem(outputs, targets)
    assert as_loss(nn.HuberLoss()).problem(outputs, torch.zeros(4, 3)) is None
    with pytest.raises(RequestError, match="retrace-krylov"):
        PerSample(contrastive).sampled_gradients(outputs, targets, chance())


def test_a_loss_that_torch_differentiates_only_once_is_refused_by_name() -> None:
    loss, outputs = as_loss(nn.MultiMarginLoss()), torch.randn(4, 3, generator=chance())
    with pytest.raises(RequestError, match="'MultiMarginLoss' cannot be differentiated twice"):
        loss.output_hessian_product(outputs, torch.tensor([0, 1, 2, 0]), torch.ones(4, 3))
    assert as_loss(nn.HuberLoss()).name == "'HuberLoss'"


@pytest.mark.parametrize("kind", [nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss])
def test_torchs_other_losses_have_their_own_scale(kind: type[nn.Module]) -> None:
    outputs, targets = torch.randn(4, 3, generator=chance()), torch.ones(4, 3)
    assert torch.allclose(mean_loss(as_loss(kind()), outputs, targets), kind()(outputs, targets))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "reason"),
    [
        (CrossEntropy(), torch.zeros(2, 3), torch.tensor([0, 3]), "labels 0 to 3, but the model tells 3"),
        (CrossEntropy(), torch.zeros(2, 3), torch.tensor([0, -100]), "labels -100 to 0"),
        (CrossEntropy(), torch.zeros(2, 3), torch.zeros(2), "numbers where cross-entropy needs class labels"),
        (CrossEntropy(), torch.zeros(2, 3), (1, 2), "targets of type tuple"),
        (CrossEntropy(), torch.zeros(2, 4, 3), torch.full((2, 4), -100), "no label but -100"),
        (CrossEntropy(), torch.zeros(2, 4, 3), torch.full((2, 4), 3), "labels 3 to 3"),
        (CrossEntropy(weight=(1, 2)), torch.zeros(2, 3), torch.tensor([0, 1]), "there are 2 class weights"),
        (as_loss("binary_cross_entropy"), torch.zeros(2, 1), torch.zeros(2), r"shape \(2, 1\)"),
        (as_loss("binary_cross_entropy"), torch.zeros(2, 1), torch.full((2, 1), 2.0), "outside 0 to 1"),
        (as_loss(nn.BCEWithLogitsLoss(torch.ones(2, 1))), torch.zeros(2, 1), torch.zeros(2, 1), "as of samples"),
        (as_loss("mean_squared_error"), torch.zeros(2, 1), torch.zeros(2), "Mean squared error needs targets"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_told(loss, outputs, targets, reason) -> None:
    assert re.search(reason, loss.problem(outputs, targets))


@each
def test_what_goes_together_has_no_problem(case: LossCase) -> None:
    assert case.loss.problem(*case.drawn()) is None
