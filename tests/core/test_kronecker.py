"""Kronecker factors: exact where the mathematics says so, checked against dense float64 matrices elsewhere."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, LARGE_CASES, Case, case
from core.dense_curvature import DOUBLE, cosine, curvature_of, dense, gauss_newton, labelled, seeded
from expunge.core.factors import kronecker_factors
from expunge.core.kronecker import Block, Factors, KroneckerCurvature
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError, NumericalError, RequestError


@pytest.mark.parametrize("bias", [True, False])
def test_least_squares_is_exact_up_to_the_drawn_targets(bias):
    """One linear layer under squared error: G = I x E[a a'] whatever the data; only E[g g'] is drawn."""
    model = nn.Linear(5, 3, bias=bias).double().eval()
    inputs = torch.randn(40_000, 5, generator=seeded(), dtype=DOUBLE) @ torch.randn(
        5, 5, generator=seeded(1), dtype=DOUBLE
    )
    loss = SquaredError(l2=0.3)
    found, exact = dense(curvature_of(model, inputs, loss), Layout.of(model).size), gauss_newton(model, inputs, loss)
    assert float((found - exact).norm() / exact.norm()) < 0.03
    assert float((found - found.T).norm() / found.norm()) < 1e-12


def test_the_inputs_factor_is_not_drawn_at_all():
    model = nn.Linear(4, 2).double().eval()
    inputs = torch.randn(7, 4, generator=seeded(), dtype=DOUBLE)
    factors = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    rows = torch.cat([inputs, torch.ones(7, 1, dtype=DOUBLE)], dim=1)
    expected = (rows.T @ rows / 7)[tuple(torch.triu_indices(5, 5))]
    torch.testing.assert_close(factors.values[:15], expected)
    assert factors.blocks == (Block("", 5, 2, True, last=True),)


@pytest.mark.parametrize("sure", [1.0, 8.0])
def test_the_outputs_factor_of_a_softmax_is_its_hessian(sure):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double().eval()
    model.weight.data *= sure
    inputs = torch.randn(9, 4, generator=seeded(), dtype=DOUBLE)
    factors = kronecker_factors(model, Snapshot.of(model), labelled(inputs.repeat(2000, 1)), CrossEntropy())
    with torch.no_grad():
        p = model(inputs).softmax(dim=1)
    exact = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(dim=0)[tuple(torch.triu_indices(3, 3))]
    assert float((factors.values[15:21] - exact).norm() / exact.norm()) < 0.03


def test_drawn_targets_do_not_depend_on_the_process_s_default_type():
    model = nn.Linear(4, 3).double().eval()
    inputs = torch.randn(30, 4, generator=seeded(), dtype=DOUBLE)
    one = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    torch.set_default_dtype(DOUBLE)
    try:
        other = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("problem", [*CASES, *LARGE_CASES], ids=lambda problem: problem.name)
def test_every_architecture_has_factors_that_fit_it(problem: Case):
    model = copy.deepcopy(problem.model)
    problem.snapshot.write_to(model)
    model.eval()
    factors = kronecker_factors(model, problem.snapshot, labelled(problem.inputs), problem.loss)
    curvature = KroneckerCurvature(factors, problem.snapshot.layers())
    vector = torch.randn(problem.size, generator=seeded(), dtype=DOUBLE)
    same = curvature.apply(lambda e, _: torch.ones_like(e), vector)
    torch.testing.assert_close(same, vector)
    filtered = curvature.apply(lambda e, _: 0.1 / (e + 0.1), vector)
    assert float(filtered.norm()) < float(vector.norm())
    root = curvature.apply(lambda e, _: e.sqrt(), vector)
    whole = curvature.apply(lambda e, _: e, vector)
    torch.testing.assert_close(curvature.apply(lambda e, _: e.sqrt(), root), whole, rtol=1e-6, atol=1e-9)
    assert curvature.quadratic(vector) == pytest.approx(float(root.square().sum()), rel=1e-6)
    assert curvature.layers == len(factors.blocks)


class Normed(nn.Module):
    """A norm with a trained scale beside layers, in-place activations and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(12, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.first(inputs))).flatten(1))


def test_other_parameters_get_the_diagonal():
    torch.manual_seed(0)
    model = Normed().double().eval()
    model.last.weight.data *= 6  # sure of itself: drawn gradients then have a mean, which only random signs cancel
    inputs = torch.randn(12, 1, 3, 3, generator=seeded(), dtype=DOUBLE)
    found = dense(curvature_of(model, inputs.repeat(400, 1, 1, 1), CrossEntropy()), Layout.of(model).size)
    exact = gauss_newton(model, inputs, CrossEntropy())
    norm = slice(15, 21)  # after the convolution's 12 + 3
    ratio = found.diagonal()[norm] / exact.diagonal()[norm]
    assert float((ratio - 1).abs().max()) < 0.4
    off = found[norm, norm] - torch.diag(found.diagonal()[norm])
    assert float(off.abs().max()) == 0


def test_work_in_place_after_a_layer_changes_nothing():
    torch.manual_seed(0)
    inputs = torch.randn(30, 6, generator=seeded(), dtype=DOUBLE)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    in_place = copy.deepcopy(plain)
    in_place[1] = nn.ReLU(inplace=True)
    found = [
        kronecker_factors(model, Snapshot.of(plain), labelled(inputs), CrossEntropy()).values
        for model in (plain, in_place)
    ]
    assert torch.equal(*found)


def test_attention_s_projection_and_shared_weights_are_left_to_the_diagonal():
    attention, tied = case("multihead-attention"), case("tied")
    for problem, names in ((attention, {"classifier"}), (tied, set())):
        model = copy.deepcopy(problem.model).eval()
        factors = kronecker_factors(model, problem.snapshot, labelled(problem.inputs), problem.loss)
        assert {block.name for block in factors.blocks} == names


def test_frozen_layers_are_not_touched():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double().eval()
    model[0].weight.requires_grad_(False)
    factors = kronecker_factors(model, Snapshot.of(model), labelled(torch.randn(5, 3, dtype=DOUBLE)), CrossEntropy())
    assert [block.name for block in factors.blocks] == ["1"]
    KroneckerCurvature(factors, Layout.of(model))


def test_chunks_add_up_and_clients_can_be_averaged():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    snapshot, inputs = Snapshot.of(model), torch.randn(600, 4, generator=seeded(), dtype=DOUBLE)
    whole = kronecker_factors(model, snapshot, labelled(inputs), CrossEntropy())
    parts = [kronecker_factors(model, snapshot, labelled(part), CrossEntropy()) for part in inputs.split((450, 150))]
    mean = 0.75 * parts[0].values + 0.25 * parts[1].values
    inputs_only = slice(0, 15)
    torch.testing.assert_close(mean[inputs_only], whole.values[inputs_only])
    assert cosine(mean, whole.values) > 0.999


def test_the_same_seed_gives_the_same_factors_and_another_gives_others():
    model = nn.Linear(4, 3).double().eval()
    inputs = torch.randn(20, 4, dtype=DOUBLE)
    first, again, other = (
        kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy(), seed=seed).values
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_layers_curve_together_makes_all_of_it_stiffer_along_a_vector_and_never_less():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    inputs = torch.randn(40, 4, generator=seeded(), dtype=DOUBLE)
    curvature, exact = (
        curvature_of(model, inputs, CrossEntropy(l2=0.1)),
        gauss_newton(model, inputs, CrossEntropy(l2=0.1)),
    )
    strong = torch.linalg.eigh(exact).eigenvectors[:, -1]
    stiffer = curvature.stiffer(curvature.coupling(strong, exact @ strong))
    assert stiffer.stiffness > 1.1
    assert stiffer.quadratic(strong) == pytest.approx(float(strong @ exact @ strong))
    assert curvature.stiffness == 1.0
    assert curvature.coupling(strong, 0.1 * strong) == 1.0
    assert stiffer.stiffer(2.0).stiffness == 2 * stiffer.stiffness


def test_curvature_that_is_unlike_where_factors_are_alike_has_their_ratios_variance_for_its_spread():
    layout, l2 = Layout.of(nn.Linear(6, 1, bias=False)), 0.3
    values = torch.cat([torch.eye(6, dtype=DOUBLE)[tuple(torch.triu_indices(6, 6))], torch.tensor([2.0, l2]).double()])
    curvature = KroneckerCurvature(Factors(values, (Block("", 6, 1, False),)), layout)
    ratios = torch.tensor([0.1, 0.5, 1.0, 3.0, 5.0, 0.9], dtype=DOUBLE)
    turned = torch.linalg.qr(torch.randn(6, 6, generator=seeded(), dtype=DOUBLE)).Q  # the factors know no directions
    exact = turned @ torch.diag(2.0 * ratios + l2) @ turned.T
    vector = turned.sum(dim=1)
    expected = float(ratios.var(correction=0) / ratios.mean() ** 2)
    assert curvature.spread(vector, exact @ vector) == pytest.approx(expected)
    assert curvature.spread(vector, (3.0 * 2.0 + l2) * vector) == pytest.approx(0.0, abs=1e-12)
    assert curvature.spread(vector, l2 * vector) == curvature.spread(0.0 * vector, 0.0 * vector) == 0.0


@pytest.mark.parametrize(("network", "share"), [(nn.LSTM(4, 3), 1.0), (nn.Linear(4, 3), 0.0)])
def test_matrices_without_factors_are_told(network, share):
    layout = Layout.of(network)
    blocks = (Block("", 5, 3, True),) if share == 0 else ()
    count = sum(block.numbers for block in blocks) + (0 if blocks else layout.size) + 1
    curvature = KroneckerCurvature(Factors(torch.ones(count, dtype=DOUBLE), blocks), layout)
    assert curvature.without_factors == share
    assert curvature.over_tokens == (share > 0)


@pytest.mark.parametrize("row", [[0.0, 1.0, -2.0], [9.0, 0.0, 1.0], [20.0, 0.0, 0.0]])
def test_weighted_squares_of_drawn_gradients_are_the_output_hessian(row):
    outputs = torch.tensor([row], dtype=DOUBLE).repeat(20_000, 1)
    gradients = CrossEntropy().sampled_gradients(outputs, torch.zeros(20_000, dtype=torch.int64), seeded())
    p = outputs[0].softmax(0)
    found = gradients.T @ gradients / len(gradients)
    exact = torch.diag(p) - torch.outer(p, p)
    assert float((found - exact).norm() / exact.norm()) < 0.02  # also where the model is sure of itself


def test_what_does_not_fit_is_refused():
    model = nn.Linear(4, 3).double().eval()
    factors = kronecker_factors(model, Snapshot.of(model), labelled(torch.randn(5, 4, dtype=DOUBLE)), CrossEntropy())
    with pytest.raises(DataError, match="another architecture"):
        KroneckerCurvature(factors, Layout.of(nn.Linear(4, 2)))
    with pytest.raises(DataError, match="another architecture"):
        KroneckerCurvature(Factors(factors.values[:-1], factors.blocks), Layout.of(model))
    for terms, values in ((2, factors.values), (0, factors.values[-1:]), (-1, factors.values)):
        with pytest.raises(DataError, match="another architecture"):
            KroneckerCurvature(Factors(values, (Block("", 5, 3, True, terms),)), Layout.of(model))
    with pytest.raises(DataError, match="at least one sample"):
        kronecker_factors(model, Snapshot.of(model), labelled(torch.empty(0, 4, dtype=DOUBLE)), CrossEntropy())
    with pytest.raises(RequestError, match="one row of class scores"):
        kronecker_factors(model, Snapshot.of(model), labelled(torch.ones(2, 5, 4, dtype=DOUBLE)), CrossEntropy())
    with pytest.raises(NumericalError, match="NaN"):
        kronecker_factors(
            model, Snapshot.of(model), labelled(torch.full((2, 4), torch.nan, dtype=DOUBLE)), CrossEntropy()
        )
    with pytest.raises(ModelError, match="training mode"):
        kronecker_factors(
            Normed().double().train(), Snapshot.of(Normed().double()), torch.randn(2, 1, 3, 3), CrossEntropy()
        )


def test_negative_curvature_of_a_liar_does_not_make_the_step_longer():
    """No honest samples make a negative diagonal, eigenvalue or l2; taken as they are they would blow the filter up."""
    model = Normed().double().eval()
    inputs = torch.randn(12, 1, 3, 3, generator=seeded(), dtype=DOUBLE)
    factors = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    vector = torch.randn(Layout.of(model).size, generator=seeded(), dtype=DOUBLE)
    for lie in (slice(-1, None), slice(-7, -1), slice(None)):
        values = factors.values.clone()
        values[lie] = -0.4999
        filtered = KroneckerCurvature(Factors(values, factors.blocks), Layout.of(model)).apply(
            lambda e, _: 0.5 / (e + 0.5), vector
        )
        assert float(filtered.norm()) <= float(vector.norm()) * (1 + 1e-12)
