import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import aggregate, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.recovery import Recovery, strip_return, without_return
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from federation.small import clients, linear, mlp, norm_net
from unlearning.presets import CORRECTED, KRYLOV, forgotten, recovering

numbers = st.integers(-1000, 1000).map(lambda value: value / 64)
pairs = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.lists(numbers, min_size=size, max_size=size), st.lists(numbers, min_size=size, max_size=size)
    )
)


class TestStripReturn:
    @settings(deadline=None)
    @given(pairs)
    def test_never_towards_the_model_that_remembers_and_only_that_is_taken(self, pair):
        update, towards = (torch.tensor(values, dtype=torch.float64) for values in pair)
        stripped = strip_return(update, towards)
        along = torch.dot(update, towards)
        if along <= 0 or torch.dot(towards, towards) == 0:
            assert torch.equal(stripped, update)
            return
        scale = float(update.norm() * towards.norm())
        assert abs(float(torch.dot(stripped, towards))) <= 1e-12 * scale
        # What was taken is parallel to `towards`, and it is the whole component.
        taken = update - stripped
        torch.testing.assert_close(
            taken, along / torch.dot(towards, towards) * towards, rtol=1e-9, atol=1e-12 * float(update.norm())
        )
        assert float(stripped.norm()) <= float(update.norm()) * (1 + 1e-12)

    @settings(deadline=None)
    @given(pairs)
    def test_twice_is_once(self, pair):
        update, towards = (torch.tensor(values, dtype=torch.float64) for values in pair)
        once = strip_return(update, towards)
        torch.testing.assert_close(strip_return(once, towards), once, rtol=1e-9, atol=1e-9)


def recovered(engine, remembers, forgot, request, plan):
    """What the clients that stay send in a recovery round."""
    stay = Retained.of(engine, ServerState(forgot), request.parties(engine.clients()))
    return without_return(stay.train(forgot, plan), remembers, forgot)


class Line(nn.Module):
    """``a x1 + b x2`` without a bias: two parameters that one can follow by hand."""

    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[a, b]], dtype=torch.float64))

    def forward(self, inputs):
        return inputs @ self.weight.T


def test_a_round_by_hand():
    """From (0, 0), remembering model at (1, 0), squared error, one full-batch step of 0.1.

    ada: input (1, 1), target 2: gradient (-2, -2), update (0.2, 0.2), stripped of the first: (0, 0.2).
    bob: two of input (1, 0), target -3: gradient (3, 0), update (-0.3, 0), which goes away from it: kept.
    Averaged by counts 1 and 2: (-0.2, 0.2/3).
    """
    data = {
        "ada": (torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[2.0]]).double()),
        "bob": (torch.tensor([[1.0, 0.0]] * 2).double(), torch.tensor([[-3.0]] * 2).double()),
        "zoe": (torch.tensor([[9.0, 9.0]]).double(), torch.tensor([[9.0]]).double()),
    }
    forgot, remembers = Snapshot.of(Line(0.0, 0.0)), Snapshot.of(Line(1.0, 0.0))
    engine = LocalEngine(Line(0.0, 0.0), SquaredError(), data)
    plan = TrainingPlan(rounds=1, epochs=1, batch_size=10, learning_rate=0.1)
    updates = recovered(engine, remembers, forgot, Request.of("zoe"), plan)
    assert set(updates) == {"ada", "bob"}
    torch.testing.assert_close(updates["ada"].update, torch.tensor([0.0, 0.2]).double())
    torch.testing.assert_close(updates["bob"].update, torch.tensor([-0.3, 0.0]).double())
    after = aggregate(forgot, updates).parameters
    torch.testing.assert_close(after, torch.tensor([-0.2, 0.2 / 3]).double())


PLAN = TrainingPlan(rounds=4, epochs=2, batch_size=4, learning_rate=0.3)
DATA = clients(ada=20, bob=24, cyd=16)


def retained_loss(model, snapshot, names):
    inputs, labels = (torch.cat([DATA[name][part] for name in names]) for part in (0, 1))
    snapshot.write_to(model)
    with torch.no_grad():
        return float(cross_entropy(model.eval()(inputs), labels))


@pytest.mark.parametrize("learning_rate", [0.05, 0.3, 30.0])
@pytest.mark.parametrize("options", [CORRECTED, KRYLOV])
@pytest.mark.parametrize("build", [linear, mlp, norm_net])
def test_recovery_never_raises_the_retained_loss(build, options, learning_rate):
    """A learning rate of 30 throws every client off: then no part of the round is taken."""
    model = build()
    state = train(LocalEngine(model, CrossEntropy(), DATA), Snapshot.of(model), PLAN)
    engine = LocalEngine(model, CrossEntropy(), DATA)
    without = forgotten(engine, state, Request.of("ada"), options)
    with_it = forgotten(
        engine, state, Request.of("ada"), recovering(options, Recovery(learning_rate=learning_rate, batch_size=4))
    )
    found = with_it.details["recovery"]
    before = retained_loss(build(), without.state.model, ["bob", "cyd"])
    after = retained_loss(build(), with_it.state.model, ["bob", "cyd"])
    assert found["retained_loss_before"] == pytest.approx(before)
    assert found["retained_loss_after"] == pytest.approx(after)
    assert after <= before + 1e-12
    towards = state.model.parameters - without.state.model.parameters
    walked = with_it.state.model.parameters - without.state.model.parameters
    assert float(torch.dot(walked, towards)) <= 1e-9
    if found["length"] == 0:
        assert with_it.state.model.digest == without.state.model.digest
        assert with_it.memory.rounds == without.memory.rounds
    else:
        assert with_it.memory.rounds == without.memory.rounds + 1
        assert float(walked.norm()) > 0


def test_the_round_is_recorded_as_it_was_taken():
    """The next request finds in the memory what the recovery round added, at the length that was taken."""
    model = linear()
    state = train(LocalEngine(model, CrossEntropy(), DATA), Snapshot.of(model), PLAN)
    engine = LocalEngine(model, CrossEntropy(), DATA)
    recovery = Recovery(learning_rate=0.3, batch_size=4, seed=3)
    outcome = forgotten(engine, state, Request.of("ada"), recovering(KRYLOV, recovery))
    before = forgotten(engine, state, Request.of("ada"), KRYLOV)
    length = outcome.details["recovery"]["length"]
    assert length > 0
    plan = TrainingPlan(1, 1, 4, 0.3, seed=3)
    updates = recovered(engine, state.model, before.state.model, Request.of("ada"), plan)
    expected = before.memory.copy()
    expected.record({name: length * reply.update for name, reply in updates.items()}, {"bob": 24, "cyd": 16})
    torch.testing.assert_close(outcome.memory.influence(["bob"]), expected.influence(["bob"]))
    mean = (24 * updates["bob"].update + 16 * updates["cyd"].update) / 40
    torch.testing.assert_close(outcome.state.model.parameters, before.state.model.parameters + length * mean)


def test_samples_that_are_forgotten_do_not_recover():
    model = linear()
    state = train(LocalEngine(model, CrossEntropy(), DATA), Snapshot.of(model), PLAN)
    gone = {"bob": list(range(12))}
    whole = LocalEngine(model, CrossEntropy(), DATA)
    spoiled = {**DATA, "bob": (DATA["bob"][0].clone(), DATA["bob"][1])}
    plan = TrainingPlan(1, 1, 100, 0.3)
    spoiled["bob"][0][:12] = 77.0
    request = Request.of(samples=gone)
    one = recovered(whole, state.model, Snapshot.of(model), request, plan)
    other = recovered(LocalEngine(model, CrossEntropy(), spoiled), state.model, Snapshot.of(model), request, plan)
    assert torch.equal(one["bob"].update, other["bob"].update)
    assert one["bob"].count == 12


def test_nonsense_is_refused():
    with pytest.raises(RequestError, match="epochs must be at least 1"):
        Recovery(epochs=0)
    with pytest.raises(RequestError, match="begin with 0"):
        Recovery(lengths=(0.5, 1.0))
    defaults = {"epochs": 1, "learning_rate": None, "batch_size": None, "seed": 0}
    assert dataclasses.asdict(Recovery()) == {**defaults, "lengths": (0.0, 0.25, 0.5, 0.75, 1.0)}
