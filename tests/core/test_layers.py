"""Layers beside the linear one they are, norms beside the exact diagonal, and sides that are too wide or too large."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from core.dense_curvature import DOUBLE, curvature_of, dense, gauss_newton, labelled, seeded
from expunge.core import eigen, factored, factors
from expunge.core.batch import Batch
from expunge.core.eigen import bases
from expunge.core.factors import kronecker_factors
from expunge.core.kronecker import KroneckerCurvature
from expunge.core.layers import rows_of
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError


def test_a_convolution_over_one_dimension_is_one_over_two() -> None:
    options = {"padding": 1, "stride": 2, "dilation": 1}
    line = nn.Sequential(nn.Conv1d(2, 3, 3, **options), nn.Flatten()).double().eval()
    plane = nn.Sequential(nn.Conv2d(2, 3, (1, 3), stride=(1, 2), padding=(0, 1)), nn.Flatten()).double().eval()
    plane[0].weight.data, plane[0].bias.data = line[0].weight.data.unsqueeze(2), line[0].bias.data
    inputs = torch.randn(9, 2, 7, generator=seeded(), dtype=DOUBLE)
    own = kronecker_factors(line, Snapshot.of(line), labelled(inputs), SquaredError())
    its = kronecker_factors(plane, Snapshot.of(plane), labelled(inputs.unsqueeze(2)), SquaredError())
    assert torch.equal(own.values, its.values)
    assert own.blocks == its.blocks


class Transposed(nn.Module):
    """A layer whose weight is kept inputs first, between two others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.layer(inputs)).mean(dim=1)


def test_hugging_faces_conv1d_is_a_linear_layer_the_other_way_round() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    theirs, linear = Transposed(pytorch_utils.Conv1D(3, 4)).double().eval(), Transposed(nn.Linear(4, 3)).double().eval()
    linear.layer.weight.data, linear.layer.bias.data = theirs.layer.weight.data.T.contiguous(), theirs.layer.bias.data
    inputs = torch.randn(9, 5, 4, generator=seeded(), dtype=DOUBLE)
    found = [kronecker_factors(own, Snapshot.of(own), labelled(inputs), CrossEntropy()) for own in (theirs, linear)]
    assert torch.equal(found[0].values, found[1].values)
    assert (found[0].blocks[0].terms, found[0].blocks[0].transposed) == (2, True)
    vector = torch.randn(15, generator=seeded(), dtype=DOUBLE)
    moved = torch.cat([vector[:12].view(4, 3).T.reshape(-1), vector[12:]])
    one, other = (
        KroneckerCurvature(own, Layout.of(model)).apply(lambda e, _: e.exp(), way)
        for own, model, way in zip(found, (theirs, linear), (vector, moved), strict=True)
    )
    assert torch.allclose(torch.cat([one[:12].view(4, 3).T.reshape(-1), one[12:]]), other)


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_is_a_linear_layer_of_one_hot_inputs(padding: int | None) -> None:
    table = nn.Embedding(5, 3, padding_idx=padding).double().eval()
    table.weight.data.normal_(generator=seeded())
    linear = nn.Linear(5, 3, bias=False).double().eval()
    linear.weight.data = table.weight.data.T.contiguous()
    tokens = torch.tensor([0, 1, 1, 4, 2, 1])
    own = curvature_of(table, tokens, CrossEntropy())
    kept = tokens if padding is None else tokens[tokens != padding]
    exact = gauss_newton(linear, torch.eye(5, dtype=DOUBLE)[kept], CrossEntropy()) * (len(kept) / len(tokens))
    blocks = exact.view(3, 5, 3, 5)
    found = dense(curvature_of(table, tokens.repeat(3000), CrossEntropy()), 15).view(5, 3, 5, 3)
    for row in range(5):  # rows are apart, as they are exactly, and what is never looked up has no curvature
        assert float((found[row] - 0).abs().sum(dim=(0, 1, 2))) == pytest.approx(
            float(found[row, :, row].abs().sum()), abs=1e-12
        )
    if padding is None:
        mean = blocks.diagonal(dim1=1, dim2=3).sum(-1)
        assert float((found.diagonal(dim1=0, dim2=2).sum(-1) - mean).norm() / mean.norm()) < 0.05
    counts = torch.bincount(kept, minlength=5).double()
    shares = found.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum(-1)
    assert torch.allclose(shares / shares.sum(), counts / counts.sum(), atol=1e-9)
    assert own.layers == 1


class Scaled(nn.Module):
    def __init__(self, norm: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.norm = shape, norm
        self.head = nn.Linear(torch.Size(shape).numel(), 3)
        self.head.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(inputs)).flatten(1))


def lively(norm: nn.Module) -> nn.Module:
    for own in norm.parameters():
        own.data.normal_(generator=seeded())
    for name, buffer in norm.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0, generator=seeded(len(name)))
    return norm


def llama(width: int) -> nn.Module:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    return modeling.LlamaRMSNorm(width)


NORMS = {
    "layer": (lambda: nn.LayerNorm(4), (5, 4)),
    "layer over two": (lambda: nn.LayerNorm((5, 4)), (5, 4)),
    "layer without shift": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "root mean square": (lambda: nn.RMSNorm(4), (5, 4)),
    "Hugging Face's": (lambda: llama(4), (5, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "batch": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
    "a flat batch": (lambda: nn.BatchNorm1d(4), (4,)),
}


def passes(model: nn.Module) -> list[int]:
    sizes: list[int] = []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    return sizes


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS)
def test_the_diagonal_of_a_norm_is_exact_in_expectation_and_takes_whole_chunks(norm, shape) -> None:
    torch.manual_seed(0)
    model = Scaled(lively(norm()), shape).double().eval()
    inputs = torch.randn(4, *shape, generator=seeded(), dtype=DOUBLE)
    exact = gauss_newton_of_trained(model, inputs).diagonal()
    sizes = passes(model)
    found = dense(curvature_of(model, inputs.repeat(500, *[1] * len(shape)), CrossEntropy()), len(exact)).diagonal()
    assert sizes == [*factored.PROBES, *[factors.CHUNK] * 8]
    assert float((found - exact).norm() / exact.norm()) < 0.06


def gauss_newton_of_trained(model: nn.Module, inputs: Tensor) -> Tensor:
    """The dense matrix of the parameters that are trained."""
    whole = gauss_newton(model, inputs, CrossEntropy())
    trained = [torch.full((own.numel(),), own.requires_grad) for own in model.parameters()]
    chosen = torch.cat(trained)
    return whole[chosen][:, chosen]


def test_a_bias_alone_has_an_exact_diagonal_too() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    inputs = torch.randn(4, 4, generator=seeded(), dtype=DOUBLE)
    exact = gauss_newton_of_trained(model, inputs).diagonal()
    sizes = passes(model)
    found = dense(curvature_of(model, inputs.repeat(500, 1), CrossEntropy()), 5).diagonal()
    assert sizes == [1, 3, *[factors.CHUNK] * 8]
    assert float((found - exact).norm() / exact.norm()) < 0.05


class Twice(nn.Module):
    """One norm in two places: a sample's gradient is the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle = lively(nn.LayerNorm(4)), nn.Linear(4, 4)
        self.middle.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.middle(torch.tanh(self.norm(inputs)))).sum(dim=1)


def test_a_norm_that_is_used_twice_is_summed_before_it_is_squared() -> None:
    model = Twice().double().eval()
    inputs = torch.randn(4, 3, 4, generator=seeded(), dtype=DOUBLE)
    exact = gauss_newton_of_trained(model, inputs).diagonal()
    found = dense(curvature_of(model, inputs.repeat(500, 1, 1), CrossEntropy()), 8).diagonal()
    assert float((found - exact).norm() / exact.norm()) < 0.06


def test_something_called_rms_norm_that_is_none_is_estimated() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * (1 + self.weight)

    model = nn.Sequential(OddRMSNorm()).double().eval()
    sizes = passes(model)
    curvature_of(model, torch.randn(80, 4, dtype=DOUBLE), CrossEntropy())
    assert sizes == [1, 3, *[2] * 40]


# Layers that are not what they look like


class Plain(nn.Linear):
    """A forward of its own that is linear."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.T + self.bias


class Doubled(nn.Linear):
    """A forward of its own that is not ``W a``."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2.0 * super().forward(inputs)


class Outside(nn.Module):
    """A weight that is used outside its layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(inputs) + inputs @ self.inner.weight))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda _, __, outputs: 2.0 * outputs)
    return model


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


UNLIKE = {
    "own forward, linear": (lambda: between(Plain(4, 4)), {"0", "2"}),
    "own forward, another": (lambda: between(Doubled(4, 4)), {"2"}),
    "used outside": (Outside, {"last"}),
    "hook": (hooked, {"2"}),
    "weight norm": (lambda: between(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), {"2"}),
    "spectral norm": (lambda: between(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), {"2"}),
}


@pytest.mark.parametrize("name", list(UNLIKE))
def test_a_layer_that_is_not_what_its_calls_show_has_a_diagonal(name: str) -> None:
    build, names = UNLIKE[name]
    torch.manual_seed(0)
    model = build().double().eval()
    batch = labelled(torch.randn(9, 4, generator=seeded(), dtype=DOUBLE))
    found = kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy())
    assert {block.name for block in found.blocks} == names
    KroneckerCurvature(found, Layout.of(model))  # it fits


def test_a_linear_forward_of_its_own_has_the_factors_of_torch_s() -> None:
    one, other = between(Plain(4, 4)).double().eval(), between(nn.Linear(4, 4)).double().eval()
    other.load_state_dict(one.state_dict())
    batch = labelled(torch.randn(9, 4, generator=seeded(), dtype=DOUBLE))
    found = [kronecker_factors(own, Snapshot.of(own), batch, CrossEntropy()).values for own in (one, other)]
    torch.testing.assert_close(*found)


def test_inputs_that_ask_for_gradients_change_nothing() -> None:
    model, inputs = between(nn.Linear(4, 4)).double().eval(), torch.randn(9, 4, generator=seeded(), dtype=DOUBLE)
    batches = labelled(inputs), labelled(inputs.clone().requires_grad_())
    found = [kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy()).values for batch in batches]
    assert torch.equal(*found)


class Attention(nn.Module):
    """To the bias of a key nothing is due: its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        heard = nn.functional.scaled_dot_product_attention(self.query(inputs), self.key(inputs), self.value(inputs))
        return self.last(heard.mean(dim=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_rounding_alone_takes_no_layer_its_factors(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Attention().to(dtype).eval()
    batch = labelled(torch.randn(9, 5, 4, generator=seeded()).to(dtype))
    found = kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy())
    assert {block.name for block in found.blocks} == {"query", "key", "value", "last"}


class Cut(nn.Module):
    """What can be trained runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.trunk(inputs)
        return self.head(hidden)


def test_layers_that_run_without_gradients_are_refused_by_name_unless_they_are_frozen() -> None:
    model, batch = Cut().double().eval(), labelled(torch.randn(9, 4, generator=seeded(), dtype=DOUBLE))
    with pytest.raises(ModelError, match=r"trunk.weight, trunk.bias can be trained, but run without gradients"):
        kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy())
    model.trunk.requires_grad_(False)
    found = kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy())
    assert [block.name for block in found.blocks] == ["head"]


# Adapters and language models


def test_adapters_and_tied_weights_get_blocks() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(11, (6, 8), generator=seeded())
    batch = Batch((), tokens, {"input_ids": tokens}, 6)
    whole = transformers.GPT2LMHeadModel(config).eval()
    blocks = {block.name for block in kronecker_factors(whole, Snapshot.of(whole), batch, CrossEntropy()).blocks}
    assert blocks == {
        "transformer.wte",
        "transformer.wpe",
        *(f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    }
    adapted = peft.get_peft_model(
        whole, peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    ).eval()
    found = kronecker_factors(adapted, Snapshot.of(adapted), batch, CrossEntropy())
    covered = {name for block in found.blocks for name in block.parameters}
    assert covered == {name for name, own in adapted.named_parameters() if own.requires_grad}
    assert all(block.terms == 2 for block in found.blocks)


# Wide and large sides


def test_of_a_wide_side_the_strongest_directions_are_exact_and_the_rest_share_their_mean() -> None:
    rotation = torch.linalg.qr(torch.randn(30, 30, generator=seeded(), dtype=DOUBLE)).Q
    values = torch.cat([torch.tensor([50.0, 20.0, 9.0], dtype=DOUBLE), torch.linspace(0, 0.1, 27, dtype=DOUBLE)])
    matrix = rotation @ torch.diag(values) @ rotation.T
    found = bases([[matrix]], [3])[0]
    assert found.is_partial
    assert torch.allclose(found.values[0, :3].sort(descending=True).values, values[:3], rtol=1e-6)
    assert float(found.values[0, 3]) == pytest.approx(0.05)
    rows = torch.randn(4, 30, generator=seeded(1), dtype=DOUBLE)
    assert torch.allclose(found.composed(found.analysed(rows)), rows)
    factor = found.spread(found.values.sqrt())
    flat = torch.cat([values[:3], torch.full((27,), 0.05, dtype=DOUBLE)]).sqrt()
    exact = rows @ rotation @ torch.diag(flat) @ rotation.T
    assert torch.allclose(found.composed(found.analysed(rows) * factor), exact, atol=1e-3)


def test_wide_layers_are_taken_by_their_strongest_directions_and_it_is_said(monkeypatch) -> None:
    """Eight samples have at most eight directions, so nothing is lost in ten of twenty-one."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2)).double().eval()
    inputs = torch.randn(8, 20, generator=seeded(), dtype=DOUBLE)
    found = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    exact = KroneckerCurvature(found, Layout.of(model))
    monkeypatch.setattr(eigen, "CUBES", {"cpu": 1.0})
    monkeypatch.setattr(eigen, "STRONGEST", 1)
    monkeypatch.setattr("expunge.core.kronecker.STRONGEST", 10)
    coarse = KroneckerCurvature(found, Layout.of(model))
    assert exact.notes == ()
    assert "The curvature of '0', '2' has its 10 strongest directions" in coarse.notes[0]
    vector = torch.randn(Layout.of(model).size, generator=seeded(2), dtype=DOUBLE)
    for function in (lambda e, _: e, lambda e, _: 1 / (1 + 100 * e)):
        assert torch.allclose(coarse.apply(function, vector), exact.apply(function, vector), rtol=1e-6, atol=1e-9)
        for own in (coarse, exact, coarse.stiffer(3.0)):
            assert own.along(vector)(function) == pytest.approx(float(vector @ own.apply(function, vector)), rel=1e-9)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv1d])
def test_patches_are_those_of_torch(kind) -> None:
    for more in ({"padding": 1}, {"stride": 2, "bias": False}, {"dilation": 2, "padding": 3, "stride": 3}):
        layer, sides = kind(3, 5, 3, **more), (11, 12) if kind is nn.Conv2d else (12,)
        inputs = torch.randn(4, 3, *sides, generator=seeded())
        weight = torch.cat([layer.weight.flatten(1), *([] if layer.bias is None else [layer.bias[:, None]])], dim=1)
        made = layer(inputs).movedim(1, -1).reshape(-1, 5)
        torch.testing.assert_close(rows_of(layer, inputs) @ weight.T, made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("limit", "diagonals"), [("WIDEST", {"0": "", "2": "o"}), ("NUMBERS", {"0": "", "2": "o"})])
def test_sides_that_are_too_long_are_diagonals_and_it_is_said(monkeypatch, limit, diagonals) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 40)).double().eval()
    inputs = torch.randn(5, 3, generator=seeded(), dtype=DOUBLE)
    whole = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    monkeypatch.setattr(factored, limit, {"WIDEST": 39, "NUMBERS": 100}[limit])
    found = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    assert {block.name: block.diagonal for block in found.blocks} == diagonals
    layout = Layout.of(model)
    exact = dense(KroneckerCurvature(whole, layout), layout.size)
    own = KroneckerCurvature(found, layout)
    assert own.notes == ("One side of the curvature of '2' is a diagonal: all of it is too large.",)
    kept = dense(own, layout.size)
    assert torch.allclose(kept[:16, :16], exact[:16, :16])
    assert torch.allclose(kept.diagonal(), exact.diagonal())
    between = exact[16:176, 16:176].view(40, 4, 40, 4)
    apart = torch.eye(40, dtype=DOUBLE)[:, None, :, None]
    assert torch.allclose(kept[16:176, 16:176].view(40, 4, 40, 4), between * apart)


class Tongue(nn.Module):
    """A table whose weight is the output layer's, too."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)))


def test_a_tied_weight_has_the_products_of_both_its_uses() -> None:
    torch.manual_seed(0)
    tied, apart = Tongue().double().eval(), Tongue(tied=False).double().eval()
    apart.table.weight.data = apart.head.weight.data = tied.table.weight.data.clone()
    tokens = torch.randint(5, (7, 4), generator=seeded())
    targets = torch.randint(5, (7, 4), generator=seeded(1))
    sizes = passes(tied)
    own, its = (
        kronecker_factors(model, Snapshot.of(model), Batch.of(tokens, targets), CrossEntropy())
        for model in (tied, apart)
    )
    assert sizes == [1, 3, 7]
    (block,) = own.blocks
    assert (block.name, block.inputs, block.outputs, block.terms) == ("table", 3, 5, 3)
    both = dense(KroneckerCurvature(its, Layout.of(apart)), 30)
    of_table, of_head = both[:15, :15], both[15:, 15:]
    found = dense(KroneckerCurvature(own, Layout.of(tied)), 15)
    total = of_table + of_head
    assert float((found.diagonal().sum() - total.diagonal().sum()).abs() / total.diagonal().sum()) < 1e-9
    assert float((found - total).norm() / total.norm()) < 0.5  # of a sum its diagonal in the summed factors' vectors


def test_sides_of_one_length_together_are_each_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = torch.Generator().manual_seed(0)
    roots = [torch.randn(side, side, generator=chance, dtype=torch.float64) for side in (3, 5, 3, 4, 3, 5, 5)]
    sides = [[root @ root.T, torch.eye(len(root)).double()][: 1 + number % 2] for number, root in enumerate(roots)]
    strongest = [None, 2, None, None, 9, None, None]
    alone = [bases([side], [most])[0] for side, most in zip(sides, strongest, strict=True)]
    for numbers in (1, 18, 1 << 20):
        monkeypatch.setattr(eigen, "TOGETHER", numbers)
        for found, expected in zip(bases(sides, strongest), alone, strict=True):
            torch.testing.assert_close(found.values, expected.values)
            torch.testing.assert_close(found.vectors, expected.vectors)


def test_a_model_that_is_changed_is_looked_at_again() -> None:
    model, batch = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), Batch.of(torch.ones(2, 3))
    batch = replace(batch, targets=torch.tensor([0, 1]))
    before = kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy())
    again = kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy())
    assert torch.equal(before.values, again.values)
    model[1] = nn.LayerNorm(4).eval()
    fresh = copy.deepcopy(model)
    after, expected = (kronecker_factors(own, Snapshot.of(own), batch, CrossEntropy()) for own in (model, fresh))
    assert torch.equal(after.values, expected.values)
    model[2].weight.requires_grad_(False)
    assert [block.name for block in kronecker_factors(model, Snapshot.of(model), batch, CrossEntropy()).blocks] == ["0"]


class Placed(nn.Module):
    """Tokens with a place each and one more in front, a mean that all samples share, and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 4, 3, generator=seeded(), dtype=DOUBLE))
        self.front = nn.Parameter(torch.randn(1, 1, 3, generator=seeded(), dtype=DOUBLE))
        self.mean = nn.Parameter(torch.randn(1, 1, 2, generator=seeded(), dtype=DOUBLE))
        self.layer = nn.Linear(3, 2).double()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits; places are cut to the tokens that there are."""
        tokens = inputs + self.place[:, : inputs.shape[1]]
        tokens = torch.cat([self.front.expand(len(inputs), -1, -1), tokens], dim=1)
        return self.layer(tokens.tanh()).mean(dim=1) * self.mean.mean(dim=0)


def test_what_is_added_to_every_sample_has_its_exact_diagonal_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Placed().eval()
    inputs = torch.randn(50, 3, 3, generator=seeded(), dtype=DOUBLE)
    passes: list[int] = []
    monkeypatch.setattr(factors._Pass, "add", _counted(passes, factors._Pass.add))
    with pytest.MonkeyPatch.context() as fixed:
        model.mean.requires_grad_(False)
        fixed.setattr(SquaredError, "sampled_gradients", lambda _, outputs, *__: torch.ones_like(outputs))
        found = kronecker_factors(model, Snapshot.of(model), labelled(inputs), SquaredError())
    assert passes == [50]
    squares = {name: torch.zeros_like(getattr(model, name)) for name in ("place", "front")}
    for one in inputs:
        gradients = torch.autograd.grad(model(one[None]).sum(), [model.place, model.front])
        for name, gradient in zip(squares, gradients, strict=True):
            squares[name] += gradient.square() / len(inputs)
    expected = torch.cat([own.flatten() for own in squares.values()])
    torch.testing.assert_close(found.values[-1 - len(expected) : -1], expected)
    assert squares["place"][0, 3].abs().sum() == 0  # no token was there


def test_what_all_samples_share_in_another_way_is_estimated() -> None:
    model = Placed().eval()
    sample = labelled(torch.randn(1, 3, 3, generator=seeded(), dtype=DOUBLE))
    assert factors._Pass(model, Snapshot.of(model), sample, None).estimated == ["mean"]


def _counted(passes, add):
    def counted(self, parts, loss):
        passes.append(sum(len(part.batch) for part in parts))
        return add(self, parts, loss)

    return counted
