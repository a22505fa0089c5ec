"""Some of a model's parameters, names that wrappers change, weights that are shared, types that differ."""

import copy

import pytest
import torch
from torch import nn

from expunge.core.batch import Batch, run
from expunge.core.vectors import Layout, Snapshot, named_as, shared_copy
from expunge.errors import ModelError


def body_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "chosen", [["0", "1.weight", "1.bias"], lambda name: not name.startswith("3"), ("module.0", "_orig_mod.1")]
)
def test_parameters_are_chosen_by_names_of_layers_or_a_function(chosen) -> None:
    names = [name for name, _ in Layout.of(body_and_head(), chosen).shapes]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("chosen", "reason"), [(["4.weight"], "trains no parameter '4.weight'"), (lambda name: False, "None of")]
)
def test_names_that_mean_nothing_are_refused(chosen, reason) -> None:
    with pytest.raises(ModelError, match=reason):
        Layout.of(body_and_head(), chosen)


def test_a_subset_leaves_all_else_alone_also_statistics_of_norms_outside_it() -> None:
    model = body_and_head()
    inside = Snapshot.of(model, lambda name: name.startswith(("0", "3")))
    assert inside.buffers == {}
    assert set(Snapshot.of(model, ["1"]).buffers) == {
        f"1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }
    other = copy.deepcopy(model)
    for own in (*other.parameters(), other[1].running_mean):
        own.data.fill_(7.0)
    inside.write_to(other)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[3].bias, model[3].bias)
    assert torch.equal(other[1].weight.detach(), torch.full((4,), 7.0))
    assert torch.equal(other[1].running_mean, torch.full((4,), 7.0))


def test_a_copy_shares_what_is_frozen_and_trains_what_it_is_told_alone() -> None:
    model = body_and_head()
    model[0].requires_grad_(False)
    whole = shared_copy(model)
    assert whole[0].weight is model[0].weight
    assert whole[3].weight is not model[3].weight
    head = shared_copy(model, Layout.of(model, ["3"]))
    assert [name for name, _ in Layout.of(head).shapes] == ["3.weight", "3.bias"]
    assert head[1].weight.data_ptr() == model[1].weight.data_ptr()
    assert model[1].weight.requires_grad
    assert head[1].running_mean.data_ptr() != model[1].running_mean.data_ptr()


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_state_dicts_of_wrapped_models_are_the_same_parameters(wrap) -> None:
    model = body_and_head()
    wrapped = wrap(copy.deepcopy(model))
    flat = Layout.of(model).flatten(dict(model.named_parameters()))
    assert torch.equal(Layout.of(model).flatten(wrapped.state_dict()), flat)
    assert torch.equal(Layout.of(wrapped).flatten(model.state_dict()), flat)
    Snapshot(torch.zeros_like(flat), {}, Layout.of(model)).write_to(wrapped)
    assert all(not bool(own.any()) for own in wrapped.parameters())


def test_names_that_could_be_two_are_none() -> None:
    assert named_as(["a.default.w"], ["a.w"]) == {"a.default.w": "a.w"}
    assert named_as(["b.w"], ["module.b.w", "_orig_mod.b.w"]) == {}
    assert named_as(["a.w", "a.default.w"], ["a.w", "a.default.w"]) == {"a.w": "a.w", "a.default.w": "a.default.w"}


def test_state_dicts_of_adapters_are_the_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(body_and_head(), peft.LoraConfig(r=2, target_modules=["0", "3"]))
    for own in model.parameters():
        own.data += 0.1
    sent = peft.get_peft_model_state_dict(model)
    layout = Layout.of(model)
    assert set(sent).isdisjoint(name for name, _ in layout.shapes)
    assert torch.equal(layout.flatten(sent), layout.flatten(dict(model.named_parameters())))


def test_parameters_of_several_types_run_in_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2))
    cast = lambda own, batch: own[1](own[0](batch.inputs[0].bfloat16()).float())  # noqa: E731
    snapshot = Snapshot.of(model)
    assert snapshot.parameters.dtype == torch.float32
    tensors = Layout.of(model).unflatten(snapshot.parameters.requires_grad_())
    batch = Batch.of(torch.randn(5, 3))
    outputs = run(model, batch, cast, tensors=tensors)
    assert torch.equal(outputs, cast(model, batch))
    (gradient,) = torch.autograd.grad(outputs.sum(), snapshot.parameters)
    assert gradient.shape == snapshot.parameters.shape
    assert bool(gradient[:12].any())
