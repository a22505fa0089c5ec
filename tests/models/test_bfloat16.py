"""Training in bfloat16: what is trained, what unlearning sees, and that the two are about the same."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge.core.batch import Batch
from expunge.core.curvature import Curvature
from expunge.core.factors import kronecker_factors
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Layout, Snapshot
from expunge.models import CNN, InBfloat16, ResNet18, ViTLite

NETWORKS = {
    "cnn": lambda: CNN(channels=1, size=8, width=4, hidden=8),
    "resnet18": lambda: ResNet18(channels=1, size=8, width=4),
    "vit-lite": lambda: ViTLite(channels=1, size=8, width=8, depth=2, heads=2),
}


@pytest.fixture(params=NETWORKS)
def network(request) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[request.param]()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)


def loss_after(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], steps: int = 40) -> float:
    optimiser = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimiser.step()
    return float(loss.detach())


def test_products_are_bfloat16_in_training_and_float32_in_evaluation(network, data):
    model, seen = InBfloat16(network), []
    layer = next(module for module in network.modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(lambda _layer, _inputs, outputs: seen.append(outputs.dtype))
    logits = model.train()(data[0])
    loss = cross_entropy(logits, data[1])
    loss.backward()
    exact = model.eval()(data[0])
    assert seen == [torch.bfloat16, torch.float32]
    assert logits.dtype == exact.dtype == torch.float32
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert torch.equal(exact, network.eval()(data[0]))


def test_it_learns_as_float32_does_but_not_bit_by_bit(network, data):
    before = float(cross_entropy(network(data[0]), data[1]).detach())
    plain, model = copy.deepcopy(network), InBfloat16(network)
    exact, coarse = loss_after(plain, data), loss_after(model, data)
    assert exact != coarse
    assert coarse < before - 0.05
    assert abs(coarse - exact) < 0.1 * exact


def test_batch_norm_counts_in_float32(data):
    network = NETWORKS["resnet18"]()
    plain, model = copy.deepcopy(network), InBfloat16(network)
    loss_after(plain, data, steps=1)
    loss_after(model, data, steps=1)
    others = dict(plain.named_buffers())
    for name, buffer in network.named_buffers():
        assert buffer.dtype == others[name].dtype
        torch.testing.assert_close(buffer, others[name], rtol=0.05, atol=0.005)
        assert not torch.equal(buffer, torch.zeros_like(buffer))


def test_unlearning_sees_the_network_itself_in_float32(network, data):
    loss_after(InBfloat16(network), data, steps=5)
    model = InBfloat16(network).eval()
    inner, outer = Snapshot.of(network), Snapshot.of(model)
    assert torch.equal(inner.parameters, outer.parameters)
    assert [name for name, _ in Layout.of(model).shapes] == [f"network.{n}" for n, _ in Layout.of(network).shapes]
    vector = torch.randn(inner.parameters.shape, generator=torch.Generator().manual_seed(2))
    for kind in ("ggn", "hessian"):
        own, its = (
            Curvature(each, at, Batch.of(*data), CrossEntropy(), kind=kind) @ vector
            for each, at in ((model, outer), (network, inner))
        )
        assert torch.equal(own, its)
    own, its = (
        kronecker_factors(each, at, Batch.of(*data), CrossEntropy()) for each, at in ((model, outer), (network, inner))
    )
    assert torch.equal(own.values, its.values)
    assert [block.name for block in own.blocks] == [f"network.{block.name}" for block in its.blocks]
    assert len(own.blocks) >= 5
