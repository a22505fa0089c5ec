from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge.errors import ModelError, RequestError
from expunge.models import CNN, GPT, MODELS, DigitsNet, InBfloat16, ResNet18, SoftmaxRegression, ViTLite, build


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "channels", "size", "parameters"),
    [
        ("cnn", 3, 32, 188_810),
        ("cnn", 1, 32, 188_234),
        ("resnet18", 3, 32, 11_173_962),
        ("resnet18", 1, 32, 11_172_810),
        ("vit-lite", 3, 32, 3_391_626),
        ("resnet18-bf16", 3, 32, 11_173_962),
        ("vit-lite-bf16", 3, 32, 3_391_626),
        ("softmax", 3, 32, 30_730),
        ("digits-net", 1, 8, 38_282),
    ],
)
def test_parameter_counts_and_output_shape(name: str, channels: int, size: int, parameters: int) -> None:
    model = build(name, channels, size, classes=10, seed=0).eval()
    assert count(model) == parameters
    with torch.no_grad():
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_softmax_without_bias() -> None:
    assert count(SoftmaxRegression(64, 10, bias=False)) == 640


@pytest.mark.parametrize("name", MODELS)
def test_seed_decides_the_weights_and_global_randomness_is_left_alone(name: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = build(name, channels=1, size=8, classes=3, seed=5)
    assert torch.equal(torch.rand(3), expected)
    second = build(name, channels=1, size=8, classes=3, seed=5)
    other = build(name, channels=1, size=8, classes=3, seed=6)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        RequestError, match="cnn, cnn-narrow, resnet18, vit-lite, resnet18-bf16, vit-lite-bf16, softmax"
    ):
        build("vgg", channels=3, size=32, classes=10, seed=0)


@pytest.mark.parametrize(
    ("name", "size"),
    [("cnn", 7), ("resnet18", 7), ("vit-lite", 30), ("vit-lite", 2), ("softmax", 0), ("digits-net", 32)],
)
def test_a_size_that_cannot_be_taken_is_refused(name: str, size: int) -> None:
    with pytest.raises(ModelError) as caught:
        build(name, channels=1, size=size, classes=10, seed=0)
    assert "\n" not in str(caught.value)


def test_heads_must_share_the_width() -> None:
    with pytest.raises(ModelError, match="no multiple"):
        ViTLite(width=10, heads=4)


@pytest.mark.parametrize("size", [8, 28, 32])
def test_cnn_takes_odd_halvings(size: int) -> None:
    assert CNN(size=size, width=2, hidden=4)(torch.zeros(1, 3, size, size)).shape == (1, 10)


def test_vit_attends_between_patches_and_knows_positions() -> None:
    torch.manual_seed(0)
    model = ViTLite(channels=1, size=8, width=8, depth=1, heads=2)
    image = torch.randn(1, 1, 8, 8)
    swapped = torch.cat([image[..., 4:], image[..., :4]], dim=-1)
    assert not torch.allclose(model(image), model(swapped))
    with torch.no_grad():
        model.position.zero_()
    torch.testing.assert_close(model(image), model(swapped))


NARROW: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: CNN(channels=1, size=8, width=4, hidden=8),
    "cnn-narrow": lambda: build("cnn-narrow", channels=1, size=8, classes=10, seed=0),
    "resnet18": lambda: ResNet18(channels=1, size=8, width=4),
    "vit-lite": lambda: ViTLite(channels=1, size=8, width=8, depth=2, heads=2),
    "resnet18-bf16": lambda: InBfloat16(ResNet18(channels=1, size=8, width=4)),
    "vit-lite-bf16": lambda: InBfloat16(ViTLite(channels=1, size=8, width=8, depth=2, heads=2)),
    "softmax": lambda: SoftmaxRegression(64, 10),
    "digits-net": DigitsNet,
    "mlp": lambda: build("mlp", channels=1, size=8, classes=10, seed=0),
}


def hessian_product(model: nn.Module, vector: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64)
    loss = cross_entropy(model(inputs), torch.arange(6))
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    return list(torch.autograd.grad(gradient, parameters, grad_outputs=vector, materialize_grads=True))


def dot(left: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()


@pytest.mark.parametrize("name", MODELS)
def test_hessian_products_are_finite_and_symmetric(name: str) -> None:
    torch.manual_seed(0)
    model = NARROW[name]().double().eval()
    u, v = ([torch.randn_like(parameter) for parameter in model.parameters()] for _ in range(2))
    left, right = dot(u, hessian_product(model, v)), dot(v, hessian_product(model, u))
    assert left.isfinite()
    assert left.abs() > 0
    torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


def test_digits_net_learns_quickly() -> None:
    from expunge.data import load

    digits = load("digits")
    model = build("digits-net", channels=1, size=8, classes=10, seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for batch in torch.randperm(len(digits.train_labels), generator=generator).split(64):
            optimiser.zero_grad()
            cross_entropy(model(digits.train_inputs[batch]), digits.train_labels[batch]).backward()
            optimiser.step()
    predicted = model(digits.test_inputs).argmax(dim=1)
    assert (predicted == digits.test_labels).double().mean() > 0.95


def test_a_language_model_does_not_look_ahead():
    model = GPT(characters=7, length=6, width=8, depth=2, heads=2).double().eval()
    texts = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(0))
    other = texts.clone()
    other[:, 4] = (other[:, 4] + 1) % 7
    first, second = model(texts), model(other)
    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4:], second[:, 4:])
    for wrong in (lambda: GPT(width=10, heads=4), lambda: model(torch.zeros(1, 7, dtype=torch.long))):
        with pytest.raises(ModelError):
            wrong()
