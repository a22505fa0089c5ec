import dataclasses

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.history import History
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.unlearning.fed_eraser import FedEraserOptions, calibrated, fed_eraser
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from federation.small import LINES, Watching, clients, linear, mlp, norm_net, scalar_line

ONE_STEP = FedEraserOptions(epochs=1, learning_rate=0.1, batch_size=1000)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def by_hand(*rounds, **more):
    """A state at slope 1 and intercept 0 with these stored rounds, each (number, updates)."""
    start = Snapshot.of(scalar_line(1.0, 0.0))
    history = History(start)
    for number, updates in rounds:
        counts = {name: len(LINES[name][0]) for name in updates}
        history.record(number, {name: vector(*update) for name, update in updates.items()}, counts)
    return ServerState(start, history=history, **more)


def watched():
    return Watching(scalar_line(1.0, 0.0), SquaredError(), LINES)


class TestByHand:
    """The line a x + b from a = 1, b = 0; squared error, one full-batch step of 0.1; two layers of one parameter each.

    ada  (1, 3)                     1 sample, leaves
    bob  (2, 0), (0, 4)             2 samples
    cyd  (1, 1), (2, 2), (0, 3)     3 samples

    With one parameter a layer, the calibrated update is the stored size with the fresh sign.
    """

    FIRST = (0, {"ada": (9.0, 9.0), "bob": (0.5, -1.0), "cyd": (-1.0, 0.0)})
    SECOND = (2, {"ada": (9.0, -9.0), "bob": (0.3, -0.7), "cyd": (-0.7, 0.4)})
    THIRD = (4, {"ada": (9.0, 9.0), "bob": (0.1, 0.2)})

    def test_the_first_round_is_taken_as_it_was_stored(self):
        # (2 (0.5, -1) + 3 (-1, 0)) / 5 = (-0.4, -0.4); nobody is asked.
        engine = watched()
        outcome = fed_eraser(engine, by_hand(self.FIRST), Request.of("ada"), ONE_STEP)
        torch.testing.assert_close(outcome.state.model.parameters, vector(0.6, -0.4))
        assert engine.cost.rounds == 0

    def test_later_rounds_have_the_stored_length_and_the_fresh_direction_layer_by_layer(self):
        # From (0.6, -0.4):
        # bob  residuals 0.8, -4.4          gradient (0.8, -1.8)       goes (-, +): (0.3, -0.7) becomes (-0.3, 0.7)
        # cyd  residuals -0.8, -1.2, -3.4   gradient (-3.2/3, -1.8)    goes (+, +): (-0.7, 0.4) becomes (0.7, 0.4)
        # (2 (-0.3, 0.7) + 3 (0.7, 0.4)) / 5 = (1.5, 2.6) / 5 = (0.3, 0.52).
        # Length and direction swapped would give (0.08, -0.18) for bob; one length for both layers 0.76 instead of
        # 0.3 and 0.7; the mean calibrated after averaging (0.3, 0.04); equal weights (0.2, 0.55).
        outcome = fed_eraser(watched(), by_hand(self.FIRST, self.SECOND), Request.of("ada"), ONE_STEP)
        torch.testing.assert_close(outcome.state.model.parameters, vector(0.9, 0.12))

    def test_who_was_away_in_a_stored_round_adds_nothing_there(self):
        # From (0.9, 0.12), bob alone: residuals 1.92, -3.88, gradient (1.92, -0.98), goes (-, +) by (0.1, 0.2).
        engine = watched()
        state = by_hand(self.FIRST, self.SECOND, self.THIRD)
        outcome = fed_eraser(engine, state, Request.of("ada"), ONE_STEP)
        torch.testing.assert_close(outcome.state.model.parameters, vector(0.8, 0.32))
        assert [set(asked) for asked in engine.asked] == [{"bob", "cyd"}, {"bob"}]
        assert outcome.details["stored_rounds"] == [0, 2, 4]
        assert outcome.details["update_norms"] == pytest.approx([0.4 * 2**0.5, (0.3**2 + 0.52**2) ** 0.5, 0.05**0.5])

    def test_the_leaver_need_not_be_there(self):
        state = by_hand(self.FIRST, self.SECOND, self.THIRD)
        outcome = fed_eraser(watched().without(("ada",)), state, Request.of("ada"), ONE_STEP)
        torch.testing.assert_close(outcome.state.model.parameters, vector(0.8, 0.32))

    def test_a_first_round_of_the_leaver_alone_does_not_excuse_the_next_from_calibration(self):
        # From (1, 0), bob's gradient is (2, -1): he goes (-, +), so (0.3, -0.7) becomes (-0.3, 0.7).
        state = by_hand((0, {"ada": (9.0, 9.0)}), (3, {"bob": (0.3, -0.7)}))
        outcome = fed_eraser(watched(), state, Request.of("ada"), ONE_STEP)
        torch.testing.assert_close(outcome.state.model.parameters, vector(0.7, 0.7))

    def test_samples(self):
        # cyd keeps (0, 3) only: at (1, 0) its gradient is (0, -3). Its stored update knows what is to be forgotten, so
        # it is calibrated in the first round, too: (-1, 0.5) becomes (0, 0.5), for a zero layer has no direction.
        # (1 (0.3, 0.6) + 2 (0.5, -1) + 1 (0, 0.5)) / 4 = (1.3, -0.9) / 4.
        first = (0, {"ada": (0.3, 0.6), "bob": (0.5, -1.0), "cyd": (-1.0, 0.5)})
        engine = watched()
        outcome = fed_eraser(engine, by_hand(first), Request.of(samples={"cyd": [0, 1]}), ONE_STEP)
        torch.testing.assert_close(outcome.state.model.parameters, vector(1.325, -0.225))
        assert [set(asked) for asked in engine.asked] == [{"cyd"}]
        assert "lengths of the updates of cyd" in outcome.warnings[0]
        (stored,) = outcome.state.history.rounds
        assert dict(stored.counts) == {"ada": 1, "bob": 2, "cyd": 1}
        torch.testing.assert_close(stored.updates["cyd"], vector(0.0, 0.5))

    def test_what_is_stored_afterwards_are_the_calibrated_updates(self):
        state = by_hand(self.FIRST, self.SECOND, memory=None)
        after = fed_eraser(watched(), state, Request.of("ada"), ONE_STEP).state
        assert after.history.clients == ("bob", "cyd")
        first, second = after.history.rounds
        torch.testing.assert_close(first.updates["bob"], vector(0.5, -1.0))
        torch.testing.assert_close(second.updates["bob"], vector(-0.3, 0.7))
        torch.testing.assert_close(second.updates["cyd"], vector(0.7, 0.4))
        assert after.memory is None
        # Next bob leaves: cyd alone, (-1, 0) and then, from (0, 0), residuals -1, -2, -3, it goes (+, +) by (0.7, 0.4).
        again = fed_eraser(watched().without(("ada",)), after, Request.of("bob"), ONE_STEP)
        torch.testing.assert_close(again.state.model.parameters, vector(0.7, 0.4))


class TestCalibrated:
    LAYERS = Layout((("a", torch.Size([2, 1])), ("b", torch.Size([1])), ("c", torch.Size([2]))))

    def test_length_and_direction_of_each_layer(self):
        stored, fresh = vector(3, 4, -7, 0, 0), vector(0, -1e-3, 20, 1, 1)
        torch.testing.assert_close(calibrated(stored, fresh, self.LAYERS), vector(0, -5, 7, 0, 0))

    def test_a_zero_direction_gives_zero(self):
        found = calibrated(vector(3, 4, -7, 1, 1), vector(0, 0, 0, 0, 3), self.LAYERS)
        torch.testing.assert_close(found, vector(0, 0, 0, 0, 2**0.5))
        assert torch.isfinite(calibrated(vector(1, 1, 1, 1, 1).float(), torch.zeros(5), self.LAYERS)).all()

    def test_an_update_that_is_already_right_stays(self):
        update = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        torch.testing.assert_close(calibrated(update, update, self.LAYERS), update)
        torch.testing.assert_close(calibrated(update, 1e-5 * update, self.LAYERS), update)


PLAN = TrainingPlan(rounds=4, epochs=5, batch_size=4, learning_rate=0.1)
FEW = clients(ada=9, bob=11, cyd=13)


def trained(build=mlp, **keep):
    return train(
        LocalEngine(build(), CrossEntropy(), FEW), Snapshot.of(build()), PLAN, keep=Keep(**{"updates_every": 1, **keep})
    )


def test_with_nobody_calibrated_away_from_itself_it_is_retraining():
    """Full batches, one step: fresh and stored updates agree while the leaver changed nothing (it never took part)."""
    plan = TrainingPlan(rounds=3, epochs=1, batch_size=1000, learning_rate=0.1)
    engine = LocalEngine(mlp(), CrossEntropy(), FEW)
    state = train(engine, Snapshot.of(mlp()), plan, clients={"bob": (), "cyd": ()}, keep=Keep(updates_every=1))
    outcome = fed_eraser(engine, state, Request.of("ada"), FedEraserOptions())
    torch.testing.assert_close(outcome.state.model.parameters, state.model.parameters)
    for name in ("bob", "cyd"):
        torch.testing.assert_close(outcome.memory.influence([name]), state.memory.influence([name]))


@pytest.mark.parametrize(("training", "calibration"), [(1, 1), (2, 1), (5, 3), (6, 3)])
def test_half_of_the_epochs_by_default(training, calibration):
    state = trained(linear)
    state = dataclasses.replace(state, schedule=dataclasses.replace(state.schedule, epochs=training))
    engine = Watching(linear(), CrossEntropy(), FEW)
    outcome = method("fed-eraser")(engine, state, Request.of("ada"))
    assert outcome.details["calibration_epochs"] == calibration
    asked = [task for tasks in engine.asked for task in tasks.values()]
    assert {task.epochs for task in asked} == {calibration}
    assert {(task.learning_rate, task.batch_size) for task in asked} == {(0.1, 4)}
    assert engine.cost.sample_gradients == 3 * calibration * 24  # three rounds after the first


@pytest.mark.parametrize("every", [1, 4])
def test_batch_norm_statistics_come_from_those_who_stay(every):
    """With a single stored round nobody trains, and they are estimated anew."""
    state = trained(norm_net, updates_every=every)
    engine = Watching(norm_net(), CrossEntropy(), FEW)
    model = fed_eraser(engine, state, Request.of("ada"), FedEraserOptions()).state.model
    model.require_finite()
    for name in ("1.running_mean", "1.running_var"):
        assert not torch.equal(model.buffers[name], state.history.initial.buffers[name])
    if every == 1:
        last = engine.replied[-1]
        mean = sum(last[name].count * last[name].buffers["1.running_mean"] for name in last) / 24
        torch.testing.assert_close(model.buffers["1.running_mean"], mean)


class TestRefusals:
    @staticmethod
    def refused(match, state, request="ada", engine=None, **options):
        engine = engine or LocalEngine(mlp(), CrossEntropy(), FEW)
        with pytest.raises(RequestError, match=match) as caught:
            fed_eraser(engine, state, Request.of(request), FedEraserOptions(**options))
        assert "\n" not in str(caught.value)
        assert engine.cost.rounds == 0

    def test_without_a_history(self):
        self.refused("No updates were kept", trained(updates_every=None))

    def test_without_a_schedule(self):
        state = dataclasses.replace(trained(), schedule=None)
        self.refused("epochs, a learning rate and a batch size", state)
        state = dataclasses.replace(state, schedule=Schedule(0.1, 10, 4))
        self.refused("epochs, a learning rate and a batch size", state)
        fed_eraser(LocalEngine(mlp(), CrossEntropy(), FEW), state, Request.of("ada"), FedEraserOptions(epochs=1))

    def test_a_history_of_another_model(self):
        self.refused("another model", dataclasses.replace(trained(linear), model=Snapshot.of(mlp())))

    def test_one_who_stays_and_is_away(self):
        engine = LocalEngine(mlp(), CrossEntropy(), FEW).without(("bob",))
        self.refused("'bob' stays but cannot be reached", trained(), engine=engine)

    def test_nobody_stored_who_stays(self):
        state = trained()
        state = dataclasses.replace(state, history=state.history.without(["bob", "cyd"]))
        self.refused("retrain instead", state)

    def test_no_epochs(self):
        with pytest.raises(RequestError, match="at least 1 epoch"):
            FedEraserOptions(epochs=0)


def test_another_method_drops_the_history():
    state = trained()
    outcome = method("retrace")(LocalEngine(mlp(), CrossEntropy(), FEW), state, Request.of("ada"))
    assert outcome.state.history is None
    assert state.history is not None


def test_on_softmax_regression_it_comes_nearer_to_retraining_than_doing_nothing():
    model = nn.Linear(3, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    plan = TrainingPlan(rounds=20, epochs=2, batch_size=8, learning_rate=0.2)
    data = clients(ada=30, bob=40, cyd=50)
    data["ada"] = (data["ada"][0], torch.zeros_like(data["ada"][1]))  # a one-sided client
    engine = LocalEngine(model, CrossEntropy(l2=0.01), data)
    state = train(engine, Snapshot.of(model), plan, keep=Keep(updates_every=2))
    retrained = train(engine, Snapshot.of(model), plan, clients={"bob": (), "cyd": ()})
    found = method("fed-eraser")(engine, state, Request.of("ada"))
    before = (state.model.parameters - retrained.model.parameters).norm()
    after = (found.state.model.parameters - retrained.model.parameters).norm()
    assert after < 0.5 * before
