import dataclasses

import pytest
import torch

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain
from federation.small import clients, linear

PLAN = TrainingPlan(rounds=3, epochs=2, batch_size=100, learning_rate=0.2)
DATA = clients(ada=9, bob=11, cyd=13)


def run(request, **options):
    start = Snapshot.of(linear())
    engine = LocalEngine(linear(), CrossEntropy(), DATA)
    return retrain(engine, ServerState(start), request, RetrainOptions(start, PLAN, **options))


def trained_on(data):
    return train(LocalEngine(linear(), CrossEntropy(), data), Snapshot.of(linear()), PLAN)


def test_a_client_equals_a_federation_that_never_had_it():
    found = run(Request.of("ada"))
    never = trained_on({name: data for name, data in DATA.items() if name != "ada"})
    assert found.state.model.digest == never.model.digest
    assert found.state.schedule == never.schedule
    assert torch.equal(found.memory.influence(["bob"]), never.memory.influence(["bob"]))
    assert found.cost.sample_gradients == 3 * 2 * 24


def test_samples_equal_a_federation_that_never_had_them():
    found = run(Request.of(samples={"ada": [0, 5], "cyd": [12]}))
    keep = {"ada": [i for i in range(9) if i not in (0, 5)], "bob": list(range(11)), "cyd": list(range(12))}
    never = trained_on({name: (x[keep[name]], y[keep[name]]) for name, (x, y) in DATA.items()})
    torch.testing.assert_close(found.state.model.parameters, never.model.parameters)
    assert found.state.schedule == never.schedule


def test_another_plan_seed_is_another_model():
    start = Snapshot.of(linear())
    small = dataclasses.replace(PLAN, batch_size=2)
    outcomes = [
        retrain(
            LocalEngine(linear(), CrossEntropy(), DATA),
            ServerState(start),
            Request.of("ada"),
            RetrainOptions(start, dataclasses.replace(small, seed=seed)),
        )
        for seed in (0, 0, 1)
    ]
    digests = [outcome.state.model.digest for outcome in outcomes]
    assert digests[0] == digests[1] != digests[2]


def test_without_memory_and_with_progress():
    seen = []
    outcome = run(Request.of("ada"), keep=Keep(vectors=False), progress=lambda *said: seen.append(said))
    assert outcome.memory is None
    assert seen == [("training", done, 3) for done in (1, 2, 3)]


@pytest.mark.parametrize("options", [{}, {"start": Snapshot.of(linear())}, {"plan": PLAN}])
def test_it_needs_a_start_and_a_plan(options):
    engine = LocalEngine(linear(), CrossEntropy(), DATA)
    with pytest.raises(RequestError, match="start model and a training plan"):
        retrain(engine, ServerState(Snapshot.of(linear())), Request.of("ada"), RetrainOptions(**options))
    assert engine.cost.rounds == 0
