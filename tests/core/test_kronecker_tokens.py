"""Linear layers over tokens: two Kronecker products, and whose a token is."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cases import case
from core.dense_curvature import DOUBLE, cosine, curvature_of, dense, gauss_newton, labelled, seeded
from expunge.core.factors import kronecker_factors
from expunge.core.kronecker import Block, Factors, KroneckerCurvature
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot


class OverTokens(nn.Module):
    """A linear layer over tokens, and outputs that are a weighted sum of what it makes of them."""

    def __init__(self, weights: Tensor, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(3, 2), inner or nn.Identity()
        self.register_buffer("weights", weights)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("p,npo->no", self.weights, self.inner(self.layer(inputs)))


def test_tokens_that_are_alike_and_count_alike_are_as_good_as_one():
    """Exact up to the drawn targets; taken for independent, each of the six would bring a sixth of a sixth."""
    model = OverTokens(torch.full((6,), 1 / 6)).double().eval()
    inputs = 1 + torch.randn(20_000, 1, 3, generator=seeded(), dtype=DOUBLE).expand(-1, 6, -1)
    found = dense(curvature_of(model, inputs, SquaredError()), Layout.of(model).size)
    exact = gauss_newton(model, inputs, SquaredError())
    assert float((found - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ([0.25, 0.25, 0.25, 0.25], 1.0),  # all of a sample's gradients are the same: the first term is all there is
        ([1.0, -1.0, 2.0, -2.0], 0.75),  # they cancel, and a mean of four taken out leaves 3/4 of independent tokens
    ],
)
def test_how_much_a_layer_over_tokens_curves_is_exact_where_one_term_is_all_there_is(weights, part):
    """In which directions is not, quite: the eigenvectors are those of both terms' factors."""
    model = OverTokens(torch.tensor(weights)).double().eval()
    inputs = 1 + torch.randn(20_000, 4, 3, generator=seeded(), dtype=DOUBLE)
    found = dense(curvature_of(model, inputs, SquaredError()), Layout.of(model).size)
    exact = gauss_newton(model, inputs, SquaredError())
    assert float(found.trace() / exact.trace()) == pytest.approx(part, rel=0.03)
    assert cosine(found, exact) > 0.9


def test_tokens_that_are_alike_and_cancel_curve_nothing():
    model = OverTokens(torch.tensor([1.0, -1.0, 2.0, -2.0])).double().eval()
    inputs = torch.randn(500, 1, 3, generator=seeded(), dtype=DOUBLE).expand(-1, 4, -1)
    found = dense(curvature_of(model, inputs, SquaredError()), Layout.of(model).size)
    assert float(found.abs().max()) < 1e-20


def test_a_transformer_s_layers_are_nearer_to_the_dense_matrix_than_independent_positions():
    problem = case("vit-lite")
    model = copy.deepcopy(problem.model)
    problem.snapshot.write_to(model)
    factors = kronecker_factors(model, problem.snapshot, labelled(problem.inputs.repeat(100, 1, 1, 1)), problem.loss)
    layout, exact = problem.snapshot.layers(), gauss_newton(model, problem.inputs, problem.loss)
    found = dense(KroneckerCurvature(factors, layout), problem.size)
    sizes = torch.tensor([shape.numel() for _, shape in layout.shapes])
    ends = dict(zip((name for name, _ in layout.shapes), sizes.cumsum(0).tolist(), strict=True))
    over_tokens = [block for block in factors.blocks if block.terms == 2]
    assert len(over_tokens) == 8  # four in each of two blocks: not the patches' convolution, not the classifier
    errors = []
    for block in over_tokens:
        end = ends[block.parameters[-1]]
        own = slice(end - block.inputs * block.outputs, end)
        errors.append(float((found[own, own] - exact[own, own]).norm() / exact[own, own].norm()))
    assert sum(errors) / 8 < 0.6  # 0.71 with positions taken for independent


@pytest.mark.parametrize(
    ("shape", "terms"),
    [((1, 5, 3), 2), ((1, 2, 5, 3), 2), ((1, 3), 1), ((5, 1, 3), 1), ((4, 5, 3), 1)],
    ids=["tokens", "a grid of tokens", "no tokens", "tokens first", "windows"],
)
def test_positions_are_told_from_samples_where_samples_come_first(shape, terms):
    """Where they do not, nobody can say which row is whose, so positions are taken for independent."""

    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            if shape[1] == 1:
                return self.layer(inputs.transpose(0, 1)).mean(dim=0)
            return (
                self.layer(inputs.reshape(len(inputs) * shape[0], *shape[1:])).reshape(len(inputs), -1, 2).mean(dim=1)
            )

    torch.manual_seed(0)
    model = Shaped().double().eval()
    count = torch.Size(shape).numel() // 3
    inputs = torch.randn(30, count, 3, generator=seeded(), dtype=DOUBLE)
    factors = kronecker_factors(model, Snapshot.of(model), labelled(inputs), SquaredError())
    assert factors.blocks == (Block("layer", 4, 2, True, terms),)
    rows = torch.cat([inputs, torch.ones(30, count, 1, dtype=DOUBLE)], dim=2)
    if terms == 2:
        mean = rows.mean(dim=1)
        expected = count * mean.T @ mean / 30
    else:
        expected = rows.flatten(0, 1).T @ rows.flatten(0, 1) / 30
    torch.testing.assert_close(factors.values[:10], expected[tuple(torch.triu_indices(4, 4))])


class Calls(nn.Module):
    """A layer that is called as somebody else's code would."""

    def __init__(self, how) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 3), how
        self.register_buffer("table", torch.randn(1, 5, 3, generator=seeded()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.how(self.layer, inputs, self.table)


def trimmed(layer: nn.Module, inputs: Tensor, table: Tensor) -> Tensor:
    """Tokens first, and no more of them than the longest sample has."""
    longest = int((inputs != 0).any(dim=2).sum(dim=1).max())
    return layer(inputs[:, :longest].transpose(0, 1)).mean(dim=0)


@pytest.mark.parametrize(
    "how",
    [
        lambda layer, inputs, table: layer(layer(inputs).mean(dim=1)),
        lambda layer, inputs, table: layer(layer(inputs.mean(dim=1))[:, None] + inputs).mean(dim=1),
        lambda layer, inputs, table: layer(layer(inputs)).mean(dim=1),
        lambda layer, inputs, table: (inputs * layer(table)).sum(dim=1),
        lambda layer, inputs, table: layer(inputs.flatten(0, 1)[None]).reshape(inputs.shape).mean(dim=1),
        lambda layer, inputs, table: layer(inputs[:, :3].transpose(0, 1)).mean(dim=0),
        trimmed,
    ],
    ids=[
        "with tokens, then without",
        "without, then with",
        "twice",
        "over what all samples share",
        "all in a row",
        "as many tokens as probes",
        "the first sample has one token",
    ],
)
def test_where_it_cannot_be_told_whose_a_token_is_positions_are_taken_for_independent(how):
    model = Calls(how).double().eval()
    inputs = torch.randn(30, 5, 3, generator=seeded(), dtype=DOUBLE)
    inputs[0, 1:] = 0
    (block,) = kronecker_factors(model, Snapshot.of(model), labelled(inputs), SquaredError()).blocks
    assert block.terms == 1


@pytest.mark.parametrize("padded", [True, False])
def test_torch_s_own_encoder_has_its_two_layers_over_tokens(padded):
    """Without gradients it would take a fused path, with padding even through nested tensors."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4, padding_idx=0)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            padding = tokens == 0 if padded else None
            return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding).mean(dim=1))

    torch.manual_seed(0)
    model = Text().eval()
    tokens = torch.randint(1, 10, (20, 6), generator=seeded())
    tokens[::2, 4:] = 0
    factors = kronecker_factors(model, Snapshot.of(model), labelled(tokens), CrossEntropy())
    terms = {block.name: block.terms for block in factors.blocks}
    assert terms == {"embedding": 1, "encoder.layers.0.linear1": 2, "encoder.layers.0.linear2": 2, "head": 1}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_products_that_commute_are_exact_whichever_comes_first(order):
    plain, full = torch.eye(2, dtype=DOUBLE), torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=DOUBLE)
    pairs = [((full, full), (3 * plain, plain))[number] for number in order]  # one says nothing of the directions
    corner = tuple(torch.triu_indices(2, 2))
    values = torch.cat([*(matrix[corner] for pair in pairs for matrix in pair), torch.zeros(1, dtype=DOUBLE)])
    layout = Layout.of(nn.Linear(2, 2, bias=False))
    found = dense(KroneckerCurvature(Factors(values, (Block("", 2, 2, False, 2),)), layout), 4)
    torch.testing.assert_close(found, sum(torch.kron(outputs, inputs) for inputs, outputs in pairs))


def test_tokens_of_chunks_and_clients_add_up_too():
    torch.manual_seed(0)
    model = OverTokens(torch.linspace(-1, 2, 5), nn.Tanh()).double().eval()
    snapshot, inputs = Snapshot.of(model), torch.randn(600, 5, 3, generator=seeded(), dtype=DOUBLE)
    whole = kronecker_factors(model, snapshot, labelled(inputs), SquaredError())
    parts = [kronecker_factors(model, snapshot, labelled(part), SquaredError()) for part in inputs.split((450, 150))]
    mean = 0.75 * parts[0].values + 0.25 * parts[1].values
    for inputs_only in (slice(0, 10), slice(13, 23)):  # of what tokens share, and of how they differ
        torch.testing.assert_close(mean[inputs_only], whole.values[inputs_only])
    assert cosine(mean, whole.values) > 0.99


def test_a_liar_s_negative_factors_do_not_make_the_step_longer():
    model = OverTokens(torch.ones(4)).double().eval()
    inputs = torch.randn(12, 4, 3, generator=seeded(), dtype=DOUBLE)
    factors = kronecker_factors(model, Snapshot.of(model), labelled(inputs), CrossEntropy())
    vector = torch.randn(Layout.of(model).size, generator=seeded(), dtype=DOUBLE)
    for lie in (slice(0, 10), slice(10, 13), slice(13, 23), slice(None)):
        values = factors.values.clone()
        values[lie] = -0.4999
        curvature = KroneckerCurvature(Factors(values, factors.blocks), Layout.of(model))
        assert float(curvature.apply(lambda e, _: 0.5 / (e + 0.5), vector).norm()) <= float(vector.norm()) * (1 + 1e-12)
