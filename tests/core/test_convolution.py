import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from expunge.core.convolution import lean_convolutions

GEOMETRIES = [
    (F.conv1d, (2, 4, 7), (6, 4, 3), {}),
    (F.conv1d, (2, 4, 7), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
    (F.conv2d, (2, 2, 5, 4), (3, 2, 3, 2), {"padding": (1, 0), "dilation": (1, 2)}),
    (F.conv2d, (2, 2, 5, 5), (2, 1, 3, 3), {"stride": [2, 1], "padding": (2,), "groups": 2}),
    (F.conv2d, (2, 2, 5, 5), (3, 2, 1, 1), {"stride": 3}),
    (F.conv2d, (2, 2, 4, 4), (3, 2, 3, 3), {"padding": "same"}),
    (F.conv2d, (2, 4, 4), (3, 2, 3, 3), {"padding": 1}),
    (F.conv3d, (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), {"padding": 1, "stride": (1, 2, 1)}),
]
every_geometry = pytest.mark.parametrize(("function", "inputs", "weight", "options"), GEOMETRIES)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@every_geometry
def test_values_and_both_derivatives(function: object, inputs: tuple, weight: tuple, options: dict) -> None:
    tensors = (drawn(*inputs), drawn(*weight, seed=1), drawn(weight[0], seed=2))

    def lean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with lean_convolutions(at_fixed_point=False):
            return function(x, w, b, **options)

    assert torch.allclose(lean(*tensors), function(*tensors, **options), atol=1e-13)
    assert gradcheck(lean, tensors)
    assert gradgradcheck(lean, tensors)


@every_geometry
def test_at_a_fixed_point_the_first_derivative_is_differentiated_in_the_outputs_gradient(
    function: object, inputs: tuple, weight: tuple, options: dict
) -> None:
    x, w = drawn(*inputs), drawn(*weight, seed=1)
    with lean_convolutions(at_fixed_point=True):
        outputs = function(x, w, **options)
    probe = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, (x, w), probe, create_graph=True)
    directions = drawn(*inputs, seed=3), drawn(*weight, seed=4)
    (pushed,) = torch.autograd.grad(pulled, probe, directions)
    exact = torch.func.jvp(lambda x, w: function(x, w, **options), (x, w), directions)[1]
    assert torch.allclose(pushed, exact, atol=1e-12)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_frozen_inputs_or_weights(needs: tuple[bool, bool]) -> None:
    tensors = [drawn(2, 2, 4, 4).requires_grad_(needs[0]), drawn(3, 2, 3, 3, seed=1).requires_grad_(needs[1])]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    (plain,) = torch.autograd.grad(F.conv2d(*tensors).square().sum(), wanted)
    with lean_convolutions(at_fixed_point=False):
        (found,) = torch.autograd.grad(F.conv2d(*tensors).square().sum(), wanted)
    assert torch.allclose(found, plain, atol=1e-12)


def test_everything_else_stays_torchs() -> None:
    x = torch.tensor([1.0, -2.0])
    with lean_convolutions(at_fixed_point=True):
        assert torch.equal(F.relu(x), torch.tensor([1.0, 0.0]))
        assert torch.sum(x, dim=0, keepdim=True).shape == (1,)
