"""A small federation whose app knows nothing of expunge but its name, to be trained by strategies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD
from expunge.flower import Recorder, Site, unlearnable, unlearning_mod
from federation.small import Pairs, clients, mlp
from flower.example import TrainingGrid
from flower.grid import Node

DATA = clients(ada=9, bob=5, cyd=7)
PLAN = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.1)
SETTINGS = {"optimiser": SGD(), "learning_rate": 0.1, "batch_size": 4, "local_epochs": 2}


def update(site: Site, model: nn.Module, number: int) -> None:
    """Train the model in place, as our own clients do in round ``number``."""
    start = Snapshot.of(model)
    reply = site.client().perform(PLAN.task(start, number, site.name))
    Snapshot(start.parameters + reply.update, reply.buffers, start.layout).write_to(model)


def handlers(site: Site, architecture, spoil=lambda name, number, tensors: tensors) -> ClientApp:
    """An app as authors write it: handlers that know nothing of expunge."""
    app = ClientApp()

    @app.train()
    def training(message: Message, context: Context) -> Message:
        number, model = message.content["config"]["server-round"] - 1, architecture()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        update(site, model, number)
        arrays = ArrayRecord(spoil(site.name, number, model.state_dict()))
        metrics = MetricRecord({"num-examples": len(site.data)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluation(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": len(site.data), "reached": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def sites(architecture=mlp) -> dict[str, Site]:
    return {name: Site(name, architecture(), Pairs(data)) for name, data in DATA.items()}


def federation(architecture=mlp, wrap=unlearnable, **options) -> TrainingGrid:
    apps = [
        wrap(handlers(site, architecture, **options), lambda _, site=site: site)
        for site in sites(architecture).values()
    ]
    return TrainingGrid({101 + number: Node(app) for number, app in enumerate(apps)})


class OldClient(NumPyClient):
    """A client of Flower's old API: its arrays have numbers instead of names."""

    def __init__(self, site: Site) -> None:
        self.site, self.model = site, mlp()

    def fit(self, parameters, config):
        names = self.model.state_dict()
        tensors = (torch.from_numpy(np.asarray(array)) for array in parameters)
        self.model.load_state_dict(dict(zip(names, tensors, strict=True)))
        update(self.site, self.model, config["server-round"] - 1)
        return [tensor.numpy() for tensor in self.model.state_dict().values()], len(self.site.data), {}

    def evaluate(self, parameters, config):
        return 0.5, len(self.site.data), {"reached": 1.0, "by": self.site.name}


def legacy_federation() -> TrainingGrid:
    """The same sites, each app made of a client function."""

    def app(site: Site) -> ClientApp:
        return ClientApp(lambda context: OldClient(site).to_client(), mods=[unlearning_mod(lambda context: site)])

    return TrainingGrid({101 + number: Node(app(site)) for number, site in enumerate(sites().values())})


def recorder(store, strategy=None, architecture=mlp, **changes) -> Recorder:
    return Recorder(strategy or FedAvg(), model=architecture(), store=store, **{**SETTINGS, **changes})


def start(grid, own: Recorder, rounds: int = PLAN.rounds, **more):
    return own.start(grid, own.arrays, num_rounds=rounds, **more)


def ours(architecture=mlp, plan=PLAN):
    """The same training without Flower."""
    pairs = {name: site.data for name, site in sites(architecture).items()}
    return train(LocalEngine(architecture(), CrossEntropy(), pairs), Snapshot.of(architecture()), plan)


def kept(store, architecture=mlp):
    return StateStore(store).load(architecture())


def same(one, other) -> None:
    """Two states are the same but for the order of additions."""
    torch.testing.assert_close(one.model.parameters, other.model.parameters, rtol=1e-9, atol=1e-12)
    assert set(one.memory.clients) == set(other.memory.clients)
    for name in other.memory.clients:
        torch.testing.assert_close(one.memory.influence([name]), other.memory.influence([name]), rtol=1e-7, atol=1e-12)
        assert one.memory.mass([name]) == pytest.approx(other.memory.mass([name]))
