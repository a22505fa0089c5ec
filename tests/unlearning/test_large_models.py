"""The default method from end to end on the two large architectures, made narrow: batch norm, attention, bfloat16."""

import pytest
import torch

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.models import InBfloat16, ResNet18, ViTLite
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

PLAN = TrainingPlan(rounds=2, epochs=2, batch_size=8, learning_rate=0.05)
NETWORKS = {
    "resnet18": lambda: ResNet18(channels=1, classes=3, size=8, width=4),
    "vit-lite": lambda: ViTLite(channels=1, classes=3, size=8, width=16, depth=2, heads=2),
    "resnet18-bf16": lambda: InBfloat16(ResNet18(channels=1, classes=3, size=8, width=4)),
    "vit-lite-bf16": lambda: InBfloat16(ViTLite(channels=1, classes=3, size=8, width=16, depth=2, heads=2)),
}


def trained(name: str) -> tuple[LocalEngine, ServerState]:
    """Three clients, one of whom sees everything inverted."""
    chance = torch.Generator().manual_seed(0)
    marks = torch.randn(3, 1, 8, 8, generator=chance)
    datasets = {}
    for client in ("ada", "bob", "eve"):
        labels = torch.randint(3, (21,), generator=chance)
        images = marks[labels] + 0.5 * torch.randn(21, 1, 8, 8, generator=chance)
        datasets[client] = (-images if client == "eve" else images, labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name]()
    engine = LocalEngine(model, CrossEntropy(), datasets)
    return engine, train(engine, Snapshot.of(model), PLAN)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("recovery", ["", "+recovery"])
def test_the_default_runs_from_end_to_end(name, recovery):
    engine, state = trained(name)
    outcome = method(f"retrace{recovery}").configured({"tau": 1.0})(engine.without(("eve",)), state, Request.of("eve"))
    assert outcome.succeeded
    assert outcome.details["solver"] == "kronecker"
    assert outcome.details["steps"][0]["length"] > 0
    after = outcome.state.model
    after.require_finite()
    assert not torch.equal(after.parameters, state.model.parameters)
    assert outcome.state.memory.clients == ("ada", "bob")
    for buffer in after.buffers:  # batch-norm statistics were estimated again, without the leaver
        assert not torch.equal(after.buffers[buffer], state.model.buffers[buffer]), buffer
    assert bool(after.buffers) == ("resnet" in name)


@pytest.mark.parametrize("name", ["resnet18", "vit-lite"])
def test_every_parameter_is_filtered(name):
    """Norms and positions are in no Kronecker factor: their diagonal is, and it is not zero."""
    engine, state = trained(name)
    default = method("retrace").configured({"tau": None, "damping": 0.01})
    outcome = default(engine, state, Request.of("eve"))
    moved = outcome.state.model.parameters - state.model.parameters
    whole = -outcome.details["reach"] * state.memory.influence(["eve"])
    parts, unfiltered = (state.model.layers().unflatten(vector) for vector in (moved, whole))
    for parameter, part in parts.items():
        assert float(part.norm()) < float(unfiltered[parameter].norm()), parameter
