import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ModelError
from expunge.federation.keeping.checkpoint import load_snapshot, save_snapshot
from federation.small import linear, mlp, norm_net


@pytest.mark.parametrize("build", [linear, mlp, norm_net])
def test_round_trip_is_exact_and_under_the_models_own_names(build, tmp_path):
    model = build()
    snapshot = Snapshot.of(build(seed=3))
    save_snapshot(snapshot, model, tmp_path / "m.safetensors")
    assert load_snapshot(model, tmp_path / "m.safetensors").digest == snapshot.digest
    stored = load_file(tmp_path / "m.safetensors")
    assert set(stored) == set(model.state_dict())
    again = build(seed=9)
    again.load_state_dict(stored)
    assert Snapshot.of(again).digest == snapshot.digest


def test_another_architecture_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_snapshot(Snapshot.of(mlp()), mlp(), path)
    with pytest.raises(ModelError, match="another architecture"):
        load_snapshot(linear(), path)
    other = torch.nn.Linear(5, 3).double()  # the same names, other shapes
    save_snapshot(Snapshot.of(other), other, path)
    with pytest.raises(ModelError, match="another architecture"):
        load_snapshot(linear(), path)


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_values_are_refused(name, value, tmp_path):
    tensors = {key: tensor.clone() for key, tensor in norm_net().state_dict().items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="NaN or infinite"):
        load_snapshot(norm_net(), tmp_path / "m.safetensors")


@pytest.mark.parametrize("cut", [0, 5, 50, -1])
def test_damaged_and_missing_files_are_refused(cut, tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(DataError, match="missing"):
        load_snapshot(linear(), path)
    save_snapshot(Snapshot.of(linear()), linear(), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match="damaged"):
        load_snapshot(linear(), path)


def test_a_pickle_is_not_even_opened(tmp_path):
    torch.save(linear().state_dict(), tmp_path / "m.safetensors")
    with pytest.raises(DataError, match="not safetensors"):
        load_snapshot(linear(), tmp_path / "m.safetensors")
