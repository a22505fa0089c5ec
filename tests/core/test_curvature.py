import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from cases import CASES, LARGE_CASES, Case, MultiheadAttention, case
from expunge.core.batch import Batch
from expunge.core.curvature import KINDS, Curvature, require_evaluation_mode
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ExpungeError, ModelError, RequestError

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_kind = pytest.mark.parametrize("kind", KINDS)


def applied(curvature: Curvature, vectors: Tensor) -> Tensor:
    return torch.stack([curvature @ vector for vector in vectors])


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@every_case
def test_the_oracle_itself_is_symmetric_and_equals_finite_differences(case: Case) -> None:
    theta, v, step = case.theta, case.vectors(1)[0], 1e-6
    difference = (grad(case.objective)(theta + step * v) - grad(case.objective)(theta - step * v)) / (2 * step)
    assert relative_error(case.dense("hessian"), case.dense("hessian").T) < 1e-12
    assert relative_error(case.dense("hessian") @ v, difference) < 1e-5


@every_kind
@every_case
def test_products_equal_the_dense_matrix(case: Case, kind: str) -> None:
    vectors = case.vectors(6)
    exact = vectors @ case.dense(kind)
    assert exact.norm() > 1e-3  # a dead network would prove nothing
    assert relative_error(applied(case.curvature(kind), vectors), exact) < 1e-10


@every_kind
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_products_of_whole_networks_equal_forward_mode(case: Case, kind: str) -> None:
    vector = case.vectors(1)[0]
    assert relative_error(case.curvature(kind) @ vector, case.exact_product(kind, vector)) < 1e-10


@every_kind
@pytest.mark.parametrize("name", ["softmax-l2", "mlp", "tied", "cnn"])
def test_the_whole_matrix_column_by_column(name: str, kind: str) -> None:
    problem = case(name)
    found = applied(problem.curvature(kind), torch.eye(problem.size, dtype=torch.float64))
    assert relative_error(found, problem.dense(kind)) < 1e-10
    assert relative_error(found, found.T) < 1e-10
    if kind == "ggn":
        eigenvalues = torch.linalg.eigvalsh(found)
        assert eigenvalues[0] >= problem.loss.l2 - 1e-12 * eigenvalues[-1]


def test_hessian_and_ggn_differ_where_they_should_and_agree_where_they_should() -> None:
    bent, straight = case("mlp"), case("softmax-l2")
    assert relative_error(bent.dense("hessian"), bent.dense("ggn")) > 0.01
    vectors = straight.vectors(3)
    agreed = applied(straight.curvature("ggn"), vectors)
    assert relative_error(applied(straight.curvature("hessian"), vectors), agreed) < 1e-12
    assert bool((torch.linalg.eigvalsh(bent.dense("hessian")) < 0).any())


@every_kind
@every_case
def test_symmetric_and_ggn_not_below_l2(case: Case, kind: str) -> None:
    u, v = case.vectors(2)
    curvature = case.curvature(kind)
    image = curvature @ v
    assert abs(u @ image - v @ (curvature @ u)) <= 1e-11 * u.norm() * image.norm()
    if kind == "ggn":
        assert v @ image >= (case.loss.l2 - 1e-12) * (v @ v)


@every_kind
@pytest.mark.parametrize("name", ["mlp", "linear-squared"])
def test_sum_is_count_times_mean(name: str, kind: str) -> None:
    problem = case(name)
    v = problem.vectors(1)[0]
    found = problem.curvature(kind, reduction="sum") @ v
    assert relative_error(found, problem.count * (problem.dense(kind) @ v)) < 1e-10


@every_kind
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_chunks_do_not_matter(chunk_size: int, kind: str) -> None:
    problem = case("mlp")
    v = problem.vectors(1)[0]
    assert relative_error(problem.curvature(kind, chunk_size=chunk_size) @ v, problem.dense(kind) @ v) < 1e-10


@every_kind
@pytest.mark.parametrize("name", ["cnn", "multihead-attention", "resnet18"])
def test_a_budget_keeps_none_some_or_all_chunks_and_changes_no_product(name: str, kind: str) -> None:
    problem = case(name)
    v = problem.vectors(1)[0]
    curvatures = [problem.curvature(kind, budget_bytes=int(1000 * 1.4**step)) for step in range(-1, 25)]
    kept = [curvature.kept_chunks for curvature in curvatures]
    assert kept == sorted(kept)
    assert set(kept) == set(range(math.ceil(problem.count / problem.chunk_size) + 1))
    exact = problem.dense(kind) @ v
    for number in (0, kept.index(1), -1):
        curvature = curvatures[number]
        assert relative_error(curvature @ v, exact) < 1e-10
        assert relative_error(curvature @ v, exact) < 1e-10  # kept graphs survive a product
        assert curvature.kept_chunks == kept[number]


def test_data_that_is_held_anyway_does_not_count_against_the_budget() -> None:
    model = nn.Linear(1000, 2).double()
    inputs, targets = torch.ones(64, 1000).double(), torch.zeros(64, dtype=torch.int64)
    derivatives = 64 * 2002 * 8
    options = {"chunk_size": 1, "budget_bytes": derivatives + inputs.numel() * 8}
    curvature = Curvature(model, Snapshot.of(model), Batch.of(inputs, targets), CrossEntropy(), **options)
    assert curvature.kept_chunks == 64


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_the_derivatives_that_chunks_keep_count_against_the_budget(kind) -> None:
    """A wide model in one-sample chunks: what is kept is mostly vectors of the parameters' size."""
    model = nn.Linear(1000, 10)
    inputs, targets = torch.ones(64, 1000), torch.zeros(64, dtype=torch.int64)
    budget = 10 * 10_010 * 4
    curvature = Curvature(
        model,
        Snapshot.of(model),
        Batch.of(inputs, targets),
        CrossEntropy(),
        kind=kind,
        chunk_size=1,
        budget_bytes=budget,
    )
    assert 1 <= curvature.kept_chunks <= 10


@every_kind
@pytest.mark.parametrize("name", ["mlp-frozen", "tied", "resnet18"])
def test_model_snapshot_data_and_vector_are_left_alone(name: str, kind: str) -> None:
    problem = case(name)
    v = problem.vectors(1)[0]
    model, digest, data, vector = (
        copy.deepcopy(problem.model),
        problem.snapshot.digest,
        problem.inputs.clone(),
        v.clone(),
    )
    _ = problem.curvature(kind, budget_bytes=0) @ v
    assert Snapshot(problem.snapshot.parameters, problem.snapshot.buffers).digest == digest
    assert torch.equal(problem.inputs, data)
    assert torch.equal(v, vector)
    for before, after in zip(model.state_dict().values(), problem.model.state_dict().values(), strict=True):
        assert torch.equal(before, after)
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    assert not problem.snapshot.parameters.requires_grad


def test_the_snapshot_decides_not_the_models_own_weights() -> None:
    problem = case("mlp")
    v = problem.vectors(1)[0]
    at_model = Curvature(
        problem.model,
        Snapshot.of(problem.model),
        Batch.of(problem.inputs, problem.targets),
        problem.loss,
        kind="hessian",
    )
    assert relative_error(at_model @ v, problem.dense("hessian") @ v) > 1e-3


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.5)),
        nn.BatchNorm1d(2),
        nn.Sequential(nn.Sequential(nn.BatchNorm2d(2))),
        MultiheadAttention(),
        nn.LSTM(2, 2, num_layers=2, dropout=0.5),
        nn.RReLU(),
    ],
    ids=lambda module: type(module[0] if isinstance(module, nn.Sequential) else module).__name__,
)
def test_what_depends_on_chance_or_batch_is_refused_while_training(module: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"call model\.eval\(\) first"):
        require_evaluation_mode(module.train())
    assert require_evaluation_mode(module.eval()) is None


def test_batch_norm_without_running_statistics_is_refused_even_in_evaluation_mode() -> None:
    with pytest.raises(ModelError, match="depend on the batch"):
        require_evaluation_mode(nn.BatchNorm1d(2, track_running_stats=False).eval())


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_curvature_itself_refuses_training_mode_and_one_layer_is_enough(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 3), layer).eval()
    layer.train()
    with pytest.raises(ModelError, match="'1'"):
        Curvature(model, Snapshot.of(model), Batch.of(torch.ones(2, 2), torch.zeros(2, 3)), SquaredError())


def test_training_mode_without_chance_is_fine() -> None:
    model = nn.Linear(2, 1, bias=False).train()
    curvature = Curvature(model, Snapshot.of(model), Batch.of(torch.ones(1, 2), torch.zeros(1, 1)), SquaredError())
    assert torch.equal(curvature @ torch.ones(2), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": "fisher"}, RequestError),
        ({"reduction": "median"}, RequestError),
        ({"chunk_size": 0}, RequestError),
        ({"targets": torch.zeros(2, 1)}, DataError),
        ({"inputs": torch.ones(0, 2), "targets": torch.ones(0, 1)}, DataError),
        ({"targets": torch.zeros(3), "kind": "hessian"}, RequestError),
        ({"snapshot": Snapshot(torch.zeros(5), {})}, ModelError),
    ],
    ids=str,
)
def test_bad_requests_are_refused_before_any_product(changes: dict, error: type[ExpungeError]) -> None:
    model = nn.Linear(2, 1)
    sound = {"snapshot": Snapshot.of(model), "inputs": torch.ones(3, 2), "targets": torch.zeros(3, 1)}
    wanted = sound | changes
    with pytest.raises(error):
        Curvature(model, loss=SquaredError(), batch=Batch.of(wanted.pop("inputs"), wanted.pop("targets")), **wanted)


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (1, 3), ()])
def test_vectors_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = nn.Linear(2, 1)
    curvature = Curvature(model, Snapshot.of(model), Batch.of(torch.ones(3, 2), torch.zeros(3, 1)), SquaredError())
    with pytest.raises(RequestError, match="length 3"):
        _ = curvature @ torch.ones(shape)


class Checkpointed(nn.Module):
    """Its second half runs again for a gradient, in evaluation mode, too."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(3, 4), nn.Linear(4, 2), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return checkpoint(self.last, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_runs_again_for_a_gradient_has_the_weights_that_it_is_asked_about(reentrant: bool) -> None:
    """Not those that the module has meanwhile."""
    chance = torch.Generator().manual_seed(0)
    batch = Batch.of(torch.randn(9, 3, generator=chance), torch.randint(2, (9,), generator=chance))
    asked, other = (Checkpointed(reentrant).eval() for _ in range(2))
    plain = nn.Sequential(asked.first, nn.Tanh(), asked.last).eval()
    vector = torch.randn(26, generator=chance)
    found = Curvature(other, Snapshot.of(asked), batch, CrossEntropy()) @ vector
    torch.testing.assert_close(found, Curvature(plain, Snapshot.of(plain), batch, CrossEntropy()) @ vector)
    asked(batch.inputs[0].requires_grad_()).sum().backward()  # and the user's own training goes on as it was
    assert bool(asked.last.weight.grad.any())
    assert torch_checkpoint._checkpoint_without_reentrant_generator.__module__ == "torch.utils.checkpoint"
