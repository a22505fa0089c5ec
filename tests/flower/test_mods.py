"""Apps with mods: what a site answers expunge does not pass them, and that is never unsaid."""

from __future__ import annotations

import logging

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)

from expunge.core.vectors import Snapshot
from expunge.errors import RequestError, SiteError
from expunge.federation.engines.flower.engine import FlowerEngine
from expunge.federation.messages.tasks import Gradient
from expunge.flower import Site, unlearnable, unlearning_mod
from federation.small import clients, mlp
from flower.example import TrainingGrid
from flower.grid import Node

DATA = clients(ada=9)["ada"]
NOISE = LocalDpMod(clipping_norm=0.5, sensitivity=0.0, epsilon=1.0, delta=1e-5)  # clips only: nothing is random
CHANGING = {
    "LocalDpMod": NOISE,
    "fixedclipping_mod": fixedclipping_mod,
    "adaptiveclipping_mod": adaptiveclipping_mod,
    "secaggplus_mod": secaggplus_mod,
    "own": lambda message, context, call_next: call_next(message, context),
}


def site(context) -> Site:
    return Site("ada", mlp(), DATA)


def training(message, context):
    """The model comes back moved by one everywhere."""
    moved = {name: tensor + 1 for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
    metrics = MetricRecord({"num-examples": len(DATA[1])})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


def answered(app: ClientApp):
    """The site's gradient, as the engine gets it."""
    engine = FlowerEngine(TrainingGrid({101: Node(app)}), deadline=1.0, poll=0.01)
    return engine.ask({"ada": Gradient(Snapshot.of(mlp()))})["ada"].total


def trained(app: ClientApp) -> Message:
    content = RecordDict({"arrays": ArrayRecord(mlp().state_dict())})
    (reply,) = TrainingGrid({101: Node(app)}).send_and_receive([Message(content, 101, "train")])
    return reply


@pytest.mark.parametrize("name", CHANGING)
def test_mods_that_the_answers_would_bypass_are_refused_without_a_yes(name):
    said = "<lambda>" if name == "own" else name
    with pytest.raises(RequestError, match=rf"app's mods \({said}\).*answers_bypass_mods=True"):
        unlearnable(ClientApp(mods=[message_size_mod, CHANGING[name]]), site)


def test_mods_that_only_look_are_no_matter():
    plain = answered(unlearnable(ClientApp(), site))
    assert torch.equal(answered(unlearnable(ClientApp(mods=[arrays_size_mod, message_size_mod]), site)), plain)


def test_after_a_yes_the_training_passes_the_mod_the_answers_do_not_and_the_server_is_told(caplog):
    app = unlearnable(ClientApp(mods=[NOISE]), site, answers_bypass_mods=True)
    app.train()(training)
    update = trained(app).content["arrays"].to_torch_state_dict()
    length = sum(float((update[name] - own).norm() ** 2) for name, own in mlp().state_dict().items()) ** 0.5
    assert length == pytest.approx(0.5)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr"):
        assert torch.equal(answered(app), answered(unlearnable(ClientApp(), site)))
    (record,) = caplog.records
    assert record.getMessage() == "expunge: site 'ada' answers around its mods (LocalDpMod), as its app allows."


def test_mods_of_single_handlers_are_noticed_whenever_they_are_registered():
    before = ClientApp()
    before.train(mods=[NOISE])(training)
    with pytest.raises(RequestError, match="LocalDpMod"):
        unlearnable(before, site)
    outside = unlearnable(ClientApp(), site)
    for register in (outside.train, outside.evaluate, outside.query):
        with pytest.raises(RequestError, match="LocalDpMod"):
            register(mods=[NOISE])
    inside = ClientApp()
    app = unlearnable(inside, site)
    inside.train(mods=[NOISE])(training)
    with pytest.raises(SiteError, match="LocalDpMod"):
        answered(app)
    assert "LocalDpMod" in trained(app).error.reason


def test_a_mod_among_others_knows_those_that_come_after_it():
    def client_fn(context):
        raise AssertionError("nobody trains here")

    after = ClientApp(client_fn, mods=[unlearning_mod(site), message_size_mod, NOISE])
    with pytest.raises(SiteError, match=r"app's mods \(LocalDpMod\)"):
        answered(after)
    assert "LocalDpMod" in trained(after).error.reason
    plain = answered(unlearnable(ClientApp(), site))
    allowed = ClientApp(client_fn, mods=[unlearning_mod(site, answers_bypass_mods=True), NOISE])
    assert torch.equal(answered(allowed), plain)
    assert torch.equal(answered(ClientApp(client_fn, mods=[unlearning_mod(site), message_size_mod])), plain)
