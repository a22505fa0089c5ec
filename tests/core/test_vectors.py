import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, Tied, frozen, mlp, resnet
from expunge.core.vectors import Layout, Snapshot, shared_copy
from expunge.errors import ModelError

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def scrambled(model: nn.Module) -> nn.Module:
    """A copy whose trainable parameters and buffers are other numbers."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*(p for p in other.parameters() if p.requires_grad), *other.buffers()]:
            tensor.add_(1)
    return other


@every_case
def test_round_trip_through_another_model(case: Case) -> None:
    before = case.model.state_dict()
    other = scrambled(case.model)
    Snapshot.of(case.model).write_to(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@every_case
def test_the_vector_is_torchs_own_without_frozen_parameters(case: Case) -> None:
    trainable = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
    snapshot = Snapshot.of(case.model)
    assert torch.equal(snapshot.parameters, nn.utils.parameters_to_vector(trainable).detach())
    layout = Layout.of(case.model)
    assert layout.size == snapshot.parameters.numel()
    parts = layout.unflatten(snapshot.parameters)
    assert [part.shape for part in parts.values()] == [parameter.shape for parameter in trainable]
    assert torch.equal(layout.flatten(parts), snapshot.parameters)


def test_tied_parameters_count_once_and_stay_tied() -> None:
    model = Tied()
    assert Layout.of(model).size == 4 * 4 + 2 * 4
    Snapshot.of(scrambled(model)).write_to(model)
    assert model.decoder.weight is model.encoder.weight


def test_frozen_parameters_are_neither_read_nor_written() -> None:
    model = frozen(mlp(), "2.bias")
    snapshot = Snapshot.of(model)
    assert torch.equal(snapshot.parameters, model[2].bias.detach())
    other = scrambled(model)
    with torch.no_grad():
        other[0].weight.fill_(7.0)
    snapshot.write_to(other)
    assert bool((other[0].weight == 7.0).all())
    assert torch.equal(other[2].bias, model[2].bias)


def test_no_trainable_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="no trainable"):
        Layout.of(frozen(mlp()))


def test_buffers_lie_apart() -> None:
    model = resnet()
    snapshot = Snapshot.of(model)
    assert snapshot.buffers.keys() == dict(model.named_buffers()).keys()
    assert snapshot.parameters.numel() == sum(parameter.numel() for parameter in model.parameters())
    moved = snapshot.moved(snapshot.parameters + 1)
    assert moved.buffers is snapshot.buffers
    assert torch.equal(moved.parameters, snapshot.parameters + 1)


def test_a_snapshot_is_a_copy() -> None:
    for model in (nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False)):
        snapshot = Snapshot.of(model)
        digest = Snapshot(snapshot.parameters, snapshot.buffers).digest
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(1)
        assert Snapshot(snapshot.parameters, snapshot.buffers).digest == digest
        assert not snapshot.parameters.requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["weight", "running_var"])
def test_values_that_are_not_finite_are_refused(name: str, value: float) -> None:
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        getattr(model, name)[1] = value
    with pytest.raises(ModelError, match="NaN or infinite"):
        Snapshot.of(model)


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(3, 3),
        nn.BatchNorm1d(5),
        nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(2, affine=False)),
        nn.Linear(3, 1),
    ],
    ids=str,
)
def test_another_architecture_is_refused_and_left_as_it_was(other: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1, affine=False))
    before = Snapshot.of(other).digest
    with pytest.raises(ModelError):
        Snapshot.of(model).write_to(other)
    assert Snapshot.of(other).digest == before


@pytest.mark.parametrize(
    "tensors",
    [{"weight": torch.ones(1, 2)}, {"weight": torch.ones(2, 1), "bias": torch.ones(1)}, {}],
    ids=["missing", "transposed", "empty"],
)
def test_named_tensors_of_another_architecture_are_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ModelError, match="another architecture"):
        Layout.of(nn.Linear(2, 1)).flatten(tensors)


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), ()])
def test_vectors_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="does not fit"):
        Layout.of(nn.Linear(2, 1)).unflatten(torch.zeros(shape))


def test_the_digest_is_of_the_numbers_and_not_of_the_objects() -> None:
    first, second = Snapshot.of(resnet()), Snapshot.of(resnet())
    assert first.digest != second.digest
    again = Snapshot(first.parameters.clone(), dict(reversed([(k, v.clone()) for k, v in first.buffers.items()])))
    assert again.digest == first.digest
    doubled = torch.stack([first.parameters, first.parameters], dim=1)
    assert Snapshot(doubled[:, 0], first.buffers).digest == first.digest  # strided, the same numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_digest_changes_with_one_unit_in_the_last_place(dtype: torch.dtype) -> None:
    snapshot = Snapshot.of(nn.BatchNorm1d(4).to(dtype))
    digests = {snapshot.digest}
    for index in range(8):
        parameters = snapshot.parameters.clone()
        parameters[index] = torch.nextafter(parameters[index], torch.full((), 9.0, dtype=dtype))
        digests.add(snapshot.moved(parameters).digest)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        changed = snapshot.buffers[name].clone()
        changed.view(-1)[0] += 1
        digests.add(Snapshot(snapshot.parameters, {**snapshot.buffers, name: changed}).digest)
    assert len(digests) == 1 + 8 + 3


def test_the_digest_tells_dtypes_apart() -> None:
    zeros = [Snapshot(torch.zeros(2, dtype=dtype), {}).digest for dtype in (torch.float32, torch.int32)]
    assert zeros[0] != zeros[1]


def test_stored_bytes_count_everything_once() -> None:
    assert Snapshot.of(nn.BatchNorm1d(3)).stored_bytes == 4 * (3 + 3 + 3 + 3) + 8


def complex_layer() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def sparse_weight() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.LazyLinear(2), "no numbers yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "no numbers yet"),
        (complex_layer, "complex"),
        (sparse_weight, "sparse"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), "Layer '0' has max_norm"),
    ],
)
def test_what_is_no_vector_of_numbers_is_refused(build, said) -> None:
    with pytest.raises(ModelError, match=said):
        Snapshot.of(build())


def test_what_an_earlier_call_left_in_a_layer_is_not_copied_and_what_cannot_be_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.before = model(torch.ones(1, 2))
    copied = shared_copy(model)
    assert copied.before.grad_fn is None
    assert copied.weight is not model.weight
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="cannot be copied"):
        shared_copy(model)
