"""Batches of every shape, and the one place that runs a model on them."""

import pytest
import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, aligned, is_causal, run, unwrapped
from expunge.core.losses import CrossEntropy, mean_loss
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError

transformers = pytest.importorskip("transformers")


class Two(nn.Module):
    """Takes a tensor by position and one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, first: Tensor, *, second: Tensor, flag: bool = True) -> Tensor:
        return self.layer(first) + (second if flag else 0)


def nested() -> Batch:
    named = {"second": torch.arange(10.0).view(5, 2), "flag": True}
    return Batch((torch.ones(5, 2),), {"label": torch.arange(5), "rest": (torch.arange(5) * 2, 0.5)}, named, 5)


def test_nested_tensors_are_split_taken_and_moved_together() -> None:
    first, second, rest = nested().split(2)
    assert [len(part) for part in (first, second, rest)] == [2, 2, 1]
    assert second.targets["rest"][0].tolist() == [4, 6]
    assert second.targets["rest"][1] == 0.5
    assert second.named["flag"] is True
    taken = nested().take(torch.tensor([4, 0]))
    assert taken.named["second"].tolist() == [[8, 9], [0, 1]]
    assert taken.targets["label"].tolist() == [4, 0]
    assert [tensor.device.type for tensor in nested().to("meta").tensors()] == ["meta"] * 4
    assert [part.size for part in nested().split([1, 4])] == [1, 4]


def test_what_has_another_number_of_rows_is_shared_by_all() -> None:
    batch = Batch((torch.ones(5, 2), torch.ones(3)), torch.zeros(5), size=5)
    assert [part.inputs[1].shape for part in batch.split(4)] == [(3,), (3,)]


def test_a_model_runs_with_its_own_or_with_given_tensors() -> None:
    model, batch = Two(), nested()
    zero = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert torch.equal(run(model, batch), model(batch.inputs[0], second=batch.named["second"]))
    assert torch.equal(run(model, batch, tensors=zero), batch.named["second"])
    doubled = run(model, batch, lambda own, given: 2 * own(given.inputs[0], **given.named), tensors=zero)
    assert torch.equal(doubled, 2 * batch.named["second"])
    inner = run(model, batch, lambda own, given: own.layer(given.inputs[0]) + 1, tensors=zero)
    assert torch.equal(inner, torch.ones(5, 2))  # parts of the model have the given tensors, too
    assert model.layer.weight.requires_grad


def test_outputs_that_are_no_tensor_are_refused_with_the_line_that_helps() -> None:
    model = nn.LSTM(2, 3, batch_first=True)
    with pytest.raises(ModelError, match=r"returns a tuple .* forward=lambda model, batch"):
        run(model, Batch.of(torch.ones(1, 4, 2)))
    assert run(model, Batch.of(torch.ones(1, 4, 2)), lambda own, batch: own(batch.inputs[0])[0]).shape == (1, 4, 3)


def gpt(**options: object) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config).eval()


def text(labels: Tensor | None = None) -> Batch:
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    named = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return Batch((), tokens.clone() if labels is None else labels, named, 3)


def test_labels_of_a_language_model_are_shifted_to_the_next_token() -> None:
    model, batch = gpt(), text()
    batch.targets[0, 4:] = -100
    shifted = aligned(model, batch)
    assert torch.equal(shifted.targets, batch.targets[:, 1:])
    assert aligned(model, shifted) is shifted
    outputs = run(model, shifted)
    own = model(**batch.named, labels=batch.targets).loss
    assert torch.allclose(mean_loss(CrossEntropy(), outputs, shifted.targets), own, rtol=1e-5)


def test_labels_that_are_shifted_already_stay_and_others_are_refused() -> None:
    batch = text()
    moved = torch.cat([batch.targets[:, 1:], torch.full((3, 1), -100)], dim=1)
    shifted = text(moved)
    assert aligned(gpt(), shifted) is shifted
    assert run(gpt(), shifted).shape == (3, 6, 11)
    with pytest.raises(DataError, match="neither its tokens nor the next ones"):
        aligned(gpt(), text((batch.targets + 1) % 11))


def test_other_models_keep_their_labels() -> None:
    batch = text()
    assert aligned(nn.Embedding(11, 11), batch) is batch
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=11
    )
    masked = transformers.BertForMaskedLM(config).eval()
    assert not is_causal(masked)
    assert aligned(masked, batch) is batch
    assert run(masked, batch).shape == (3, 6, 11)


def test_wrappers_do_not_hide_what_a_model_is() -> None:
    peft = pytest.importorskip("peft")
    model = gpt()
    wrapped = peft.get_peft_model(gpt(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for outer in (nn.DataParallel(model), torch.compile(model, backend="eager"), wrapped):
        assert is_causal(outer)
        assert type(unwrapped(outer)).__name__ == "GPT2LMHeadModel"
    batch = aligned(wrapped, text())
    tensors = Layout.of(wrapped).unflatten(Snapshot.of(wrapped).parameters)
    assert run(wrapped, batch, tensors=tensors).shape == (3, 5, 11)


class Counting(nn.Module):
    """A forward that counts its calls, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(inputs)


def test_a_forward_that_counts_leaves_what_it_is_given_as_it_is() -> None:
    model = Counting()
    snapshot = Snapshot.of(model)
    before = snapshot.digest
    tensors = {**snapshot.layers().unflatten(snapshot.parameters), **snapshot.buffers}
    run(model, Batch.of(torch.ones(1, 2)), tensors=tensors)
    assert tensors["calls"] == model.calls == 0
    assert before == Snapshot.of(model).digest
