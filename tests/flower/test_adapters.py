"""Adapters, and layers that stay at the sites, in a Flower app: less than the model is sent, and named otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from expunge.core.vectors import Layout
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import Recorder, Site, forget, unlearnable
from flower.example import TrainingGrid
from flower.grid import Node

peft = pytest.importorskip("peft")

NAMES = ("ada", "bob", "cyd")


def samples(name: str, count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(NAMES.index(name))
    inputs = torch.randn(count, 4, generator=own)
    labels = (inputs[:, :2].sum(dim=1) > 0).long()
    return inputs, 1 - labels if name == "ada" else labels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def adapted() -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0", "2"]))


def trained_in_place(model: nn.Module, name: str) -> None:
    inputs, labels = samples(name)
    model.train()
    optimiser = torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], lr=0.02)
    for _ in range(8):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()


def replied(message: Message, arrays: dict[str, torch.Tensor]) -> Message:
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 24})})
    return Message(content, reply_to=message)


def tuned(name: str) -> ClientApp:
    """As FlowerTune has it: the base is everybody's, and only the adapters' state dict is sent."""
    app = ClientApp()

    @app.train()
    def training(message: Message, context: Context) -> Message:
        model = adapted()
        peft.set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
        trained_in_place(model, name)
        return replied(message, peft.get_peft_model_state_dict(model))

    return app


def grid(apps: dict[str, ClientApp], sites: dict[str, Site]) -> TrainingGrid:
    wrapped = [unlearnable(app, lambda _, name=name: sites[name]) for name, app in apps.items()]
    return TrainingGrid({101 + number: Node(app) for number, app in enumerate(wrapped)})


def test_adapters_are_recorded_and_a_site_is_forgotten(tmp_path):
    own = grid({name: tuned(name) for name in NAMES}, {name: Site(name, adapted(), samples(name)) for name in NAMES})
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    recorder = Recorder(FedAvg(), model=model, store=tmp_path / "store")
    assert set(recorder.arrays) == set(peft.get_peft_model_state_dict(model))
    recorder.start(own, recorder.arrays, num_rounds=3)
    state = StateStore(tmp_path / "store").load(adapted())
    assert state.model.parameters.numel() == Layout.of(adapted()).size
    assert state.memory.clients == NAMES
    assert state.memory.recipe.client.decoupled  # AdamW was seen, and moments of every adapter came with it

    outcome = forget(own, "ada", store=tmp_path / "store", model=adapted())
    assert (outcome.method, outcome.succeeded) == ("retrace", True)
    result, inputs, labels = adapted(), *samples("ada")
    state.model.write_to(result)
    known = float(nn.functional.cross_entropy(result(inputs), labels).detach())
    outcome.write_to(result)
    assert float(nn.functional.cross_entropy(result(inputs), labels).detach()) > known + 0.1
    frozen = {name for name, own in result.named_parameters() if not own.requires_grad}
    assert all(torch.equal(result.state_dict()[name], before[name]) for name in frozen)

    rounds = outcome.memory.rounds
    again = Recorder(FedAvg(), model=adapted(), store=tmp_path / "store")  # the training goes on under PEFT's names
    again.start(own, again.arrays, num_rounds=1)
    assert StateStore(tmp_path / "store").load(adapted()).memory.rounds == rounds + 1


# Norms that stay at the sites (FedBN)


def normed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[1].requires_grad_(False)
    return model


def test_statistics_that_stay_at_the_sites_are_neither_sent_nor_changed(tmp_path):
    sites = {name: Site(name, normed(), samples(name)) for name in NAMES}
    for number, site in enumerate(sites.values()):
        site.model[1].running_mean.fill_(0.3 * number)

    def app(name: str) -> ClientApp:
        found = ClientApp()

        @found.train()
        def training(message: Message, context: Context) -> Message:
            model = copy.deepcopy(sites[name].model)
            model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
            model[1].eval()
            inputs, labels = samples(name)
            optimiser = torch.optim.SGD([own for own in model.parameters() if own.requires_grad], lr=0.1)
            for _ in range(5):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimiser.step()
            return replied(message, {key: own for key, own in model.state_dict().items() if not key.startswith("1.")})

        return found

    own = grid({name: app(name) for name in NAMES}, sites)
    recorder = Recorder(FedAvg(), model=normed(), store=tmp_path / "store")
    sent = {key: tensor for key, tensor in normed().state_dict().items() if not key.startswith("1.")}
    recorder.start(own, ArrayRecord(sent), num_rounds=2)
    state = StateStore(tmp_path / "store").load(normed())
    assert dict(state.model.buffers) == {}
    outcome = forget(own, "ada", store=tmp_path / "store", model=normed(), recovery=True)
    assert outcome.succeeded
    for number, site in enumerate(sites.values()):
        assert torch.equal(site.model[1].running_mean, torch.full((8,), 0.3 * number))
