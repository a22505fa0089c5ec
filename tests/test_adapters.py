"""Subsets of parameters through ``expunge.forget``: a body without its heads, adapters on a frozen base."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import expunge
from expunge.core.losses import CrossEntropy
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.unlearning.doubts import ADAPTERS

NAMES = ("ada", "bob", "cyd")


def samples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(NAMES.index(name))
    inputs = torch.randn(30, 4, generator=own)
    labels = (inputs[:, 0] > 0).long()
    return inputs, 1 - labels if name == "ada" else labels


DATA = {name: samples(name) for name in NAMES}
STAYING = {name: data for name, data in DATA.items() if name != "ada"}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def trained(model: nn.Module, memory: expunge.Memory, sent, loaded) -> None:
    """FedAvg of what ``sent`` gives of a model; ``loaded`` puts it back."""
    for _ in range(4):
        before, updates = copy.deepcopy(sent(model)), {}
        for name, (inputs, labels) in DATA.items():
            own = copy.deepcopy(model)
            optimiser = torch.optim.SGD([part for part in own.parameters() if part.requires_grad], lr=0.2)
            for _ in range(6):
                optimiser.zero_grad()
                nn.functional.cross_entropy(own(inputs), labels).backward()
                optimiser.step()
            updates[name] = {key: tensor - before[key] for key, tensor in sent(own).items()}
        memory.record(updates, dict.fromkeys(DATA, 1), learning_rate=0.2, steps=6)
        for key in before:
            before[key] = before[key] + sum(update[key] for update in updates.values()) / 3
        loaded(model, before)


def body(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items() if key.startswith("0.")}


def test_of_a_body_without_its_head_only_the_body_is_forgotten():
    model, frozen = network(), network()
    frozen[2].requires_grad_(False)
    memories = expunge.Memory(model, parameters=["0"]), expunge.Memory(frozen)
    for own, memory in zip((model, frozen), memories, strict=True):
        # the head is frozen while this trains, so that both are the same training
        own[2].requires_grad_(False)
        trained(own, memory, body, lambda module, state: module.load_state_dict(state, strict=False))
    model[2].requires_grad_(True)
    one, other = (
        expunge.forget(own, STAYING, "ada", memory=memory, progress=False)
        for own, memory in zip((model, frozen), memories, strict=True)
    )
    assert torch.equal(one.state.model.parameters, other.state.model.parameters)
    result = copy.deepcopy(model)
    one.write_to(result)
    assert torch.equal(result[2].weight, model[2].weight)
    assert not torch.equal(result[0].weight, model[0].weight)
    assert model[2].weight.requires_grad
    assert one.memory.parameters == ("0.weight", "0.bias")
    with pytest.raises(RequestError, match="another length"):
        expunge.forget(model, STAYING, "ada", memory=memories[0], parameters=["0", "2"], progress=False)


def test_parameters_cannot_be_chosen_without_a_model():
    with pytest.raises(RequestError, match="make the memory with its model"):
        expunge.Memory(parameters=["0"])


class To(nn.Module):
    """Goes over to another type."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_adapters_are_forgotten_by_the_state_dicts_that_peft_sends(kind):
    """The base may be in half precision, with adapters in single."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = nn.Sequential(To(kind), *network(), To(torch.float32))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["1", "3"]))
    for own in model.parameters():
        own.data = own.data if own.requires_grad else own.data.to(kind)
    memory = expunge.Memory(model)
    trained(model, memory, peft.get_peft_model_state_dict, peft.set_peft_model_state_dict)
    outcome = expunge.forget(model, STAYING, "ada", memory=memory, progress=False)
    assert outcome.method == "retrace"
    assert ADAPTERS in outcome.warnings
    result = copy.deepcopy(model)
    outcome.write_to(result)
    inputs, labels = DATA["ada"]

    def loss(own: nn.Module) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(own(inputs), labels))

    assert loss(result) > loss(model) + 0.1
    assert {own.dtype for own in result.parameters()} == {torch.float32, kind}


def test_a_frozen_base_is_not_copied_for_the_clients():
    model = network()
    model[0].requires_grad_(False)
    engine = LocalEngine(model, CrossEntropy(), DATA)
    (working,) = {id(client._model): client._model for client in engine._clients.values()}.values()
    assert working[0].weight is model[0].weight
    assert working[2].weight is not model[2].weight
