"""Losses of all clients in one pass are those of each on its own."""

import pytest
import torch

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError
from expunge.federation.engines import looking
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import Draw, Losses
from federation.small import clients, mlp

COUNTS = {"ada": 9, "bob": 11, "cyd": 4, "dan": 17}


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(l2=0.3), CrossEntropy(weight=(1.0, 2.0, 0.5))])
@pytest.mark.parametrize("chunk", [1, 5, 12, 256])
def test_together_is_one_by_one(loss, chunk, monkeypatch):
    model, data = mlp(), clients(**COUNTS)
    engine = LocalEngine(model, loss, data)
    theta = Snapshot.of(model)
    way = torch.linspace(-1, 1, theta.parameters.numel(), dtype=theta.parameters.dtype)
    tasks = {name: Losses(theta, way, (0.0, 0.5, 1.0), Draw(6, 3, from_back=True), (1,)) for name in data}
    tasks["dan"] = Losses(theta, way, (0.0, 0.5, 1.0))
    alone = {name: engine._clients[name].perform(task) for name, task in tasks.items()}
    monkeypatch.setattr(looking, "CHUNK", chunk)
    together = engine.ask(tasks)
    assert list(together) == list(tasks)
    for name, expected in alone.items():
        torch.testing.assert_close(together[name].total, expected.total, rtol=1e-12, atol=1e-12)
        assert (together[name].count, together[name].sample_gradients) == (expected.count, expected.sample_gradients)
    inputs, targets = data["dan"]
    for number, length in enumerate((0.0, 0.5, 1.0)):
        moved = mlp()
        theta.moved(theta.parameters - length * way).write_to(moved)
        own = torch.nn.functional.cross_entropy(moved(inputs), targets, weight=_weight(loss, inputs))
        own = own + loss.l2 / 2 * Snapshot.of(moved).parameters.square().sum()
        assert float(together["dan"].total[number] / 17) == pytest.approx(own.item(), rel=1e-9)


def test_other_questions_are_asked_one_by_one_and_another_model_is_refused():
    model, data = mlp(), clients(**COUNTS)
    engine, theta = LocalEngine(model, CrossEntropy(), data), Snapshot.of(model)
    way = torch.ones_like(theta.parameters)
    tasks = {name: Losses(theta, way * at, (0.0, 1.0)) for at, name in enumerate(data)}
    for name, reply in engine.ask(tasks).items():
        assert torch.equal(reply.total, engine._clients[name].perform(tasks[name]).total)
    other, shorter = Snapshot(theta.parameters[1:], {}), way[1:]
    with pytest.raises(ModelError, match="parameters"):
        engine.ask({name: Losses(other, shorter, (0.0,)) for name in data})


def _weight(loss, like):
    return None if loss.weight is None else torch.as_tensor(loss.weight).to(like)
