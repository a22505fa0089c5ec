from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, NumericalError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import Train, Trained
from expunge.federation.training.fedavg import Keep, _sample_clients, aggregate, average_buffers, train
from expunge.federation.training.plan import TrainingPlan
from federation.small import (
    LINES,
    Watching,
    clients,
    digest_of,
    line_data,
    linear,
    mlp,
    norm_net,
    samples,
    scalar_line,
    seeded,
    theta,
)

FULL = TrainingPlan(rounds=1, epochs=1, batch_size=1000, learning_rate=0.1)


class TestOneRoundByHand:
    """Squared error 1/2 (a x + b - y)^2 at a = 1, b = 0, learning rate 0.1, one full-batch step each.

    ada  (1, 3)                 residual -2          gradient (-2, -2)      update (0.2, 0.2)
    bob  (2, 0), (0, 4)         residuals 2, -4      gradient (2, -1)       update (-0.2, 0.1)
    cyd  (1, 1), (2, 2), (0, 3) residuals 0, 0, -3   gradient (0, -1)       update (0, 0.1)

    Weights 1/6, 2/6, 3/6: mean update (0.2/6 - 0.4/6, 0.2/6 + 0.2/6 + 0.3/6) = (-1/30, 7/60).
    """

    DATA: ClassVar = LINES

    def test_weights_are_the_sample_counts(self):
        model = scalar_line(1.0, 0.0)
        state = train(LocalEngine(model, SquaredError(), self.DATA), Snapshot.of(model), FULL)
        torch.testing.assert_close(state.model.parameters, torch.tensor([1 - 1 / 30, 7 / 60], dtype=torch.float64))

    def test_without_one_client_the_others_weights_grow(self):
        model = scalar_line(1.0, 0.0)
        engine = LocalEngine(model, SquaredError(), self.DATA)
        state = train(engine, Snapshot.of(model), FULL, clients={"ada": (), "cyd": ()})
        torch.testing.assert_close(state.model.parameters, torch.tensor([1.05, 0.05 + 0.075], dtype=torch.float64))

    def test_excluded_samples_lower_the_weight(self):
        model = scalar_line(1.0, 0.0)
        engine = LocalEngine(model, SquaredError(), self.DATA)
        state = train(engine, Snapshot.of(model), FULL, clients={"ada": (), "bob": (), "cyd": (0, 1)})
        # cyd keeps (0, 3): gradient (0, -3), update (0, 0.3); weights 1/4, 2/4, 1/4.
        expected = [1 + (0.2 - 2 * 0.2 + 0) / 4, (0.2 + 2 * 0.1 + 0.3) / 4]
        torch.testing.assert_close(state.model.parameters, torch.tensor(expected, dtype=torch.float64))

    def test_l2_is_part_of_training(self):
        model = scalar_line(1.0, 0.5)
        state = train(LocalEngine(model, SquaredError(l2=0.3), {"ada": line_data((0, 0.5))}), Snapshot.of(model), FULL)
        # The data's gradient is zero: only 0.1 * 0.3 * theta is taken off.
        torch.testing.assert_close(state.model.parameters, torch.tensor([0.97, 0.485], dtype=torch.float64))

    def test_a_boosted_update_is_boosted_exactly(self):
        model = scalar_line(1.0, 0.0)
        task = FULL.task(Snapshot.of(model), 0, "bob")
        honest = LocalEngine(model, SquaredError(), self.DATA).ask({"bob": task})["bob"]
        boosted = LocalEngine(model, SquaredError(), self.DATA, {"bob": 4.0}).ask({"bob": task})["bob"]
        assert torch.equal(boosted.update, 4.0 * honest.update)
        torch.testing.assert_close(boosted.update, torch.tensor([-0.8, 0.4], dtype=torch.float64))
        state = train(LocalEngine(model, SquaredError(), self.DATA, {"bob": 4.0}), Snapshot.of(model), FULL)
        expected = [1 + (0.2 - 2 * 0.8) / 6, (0.2 + 2 * 0.4 + 0.3) / 6]
        torch.testing.assert_close(state.model.parameters, torch.tensor(expected, dtype=torch.float64))


def test_local_training_is_plain_sgd_in_a_seeded_order():
    """Two epochs in batches of two, done again here with the order that the seed gives."""
    inputs, labels = samples(5)
    model = mlp()
    start = Snapshot.of(model)
    reply = LocalEngine(model, CrossEntropy(l2=0.2), {"ada": (inputs, labels)}).ask(
        {"ada": Train(start, epochs=2, batch_size=2, learning_rate=0.3, seed=7)}
    )["ada"]
    again = mlp()
    order = torch.Generator().manual_seed(7)
    for _ in range(2):
        for batch in torch.split(torch.randperm(5, generator=order), 2):
            loss = F.cross_entropy(again(inputs[batch]), labels[batch])
            loss = loss + 0.1 * sum(p.square().sum() for p in again.parameters())
            gradients = torch.autograd.grad(loss, list(again.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(again.parameters(), gradients, strict=True):
                    parameter -= 0.3 * gradient
    torch.testing.assert_close(reply.update, theta(again) - start.parameters)
    assert (reply.count, reply.steps, reply.sample_gradients) == (5, 6, 10.0)


@given(left_out=st.sets(st.integers(0, 5), max_size=5))
@settings(max_examples=25, deadline=None)
def test_excluding_equals_never_having_had_the_samples(left_out):
    inputs, labels = samples(6)
    keep = torch.tensor([i for i in range(6) if i not in left_out])
    plan = TrainingPlan(rounds=2, epochs=2, batch_size=6, learning_rate=0.2)
    model = linear()
    other = samples(4, seed=30)
    whole = LocalEngine(model, CrossEntropy(), {"ada": (inputs, labels), "bob": other})
    fewer = LocalEngine(model, CrossEntropy(), {"ada": (inputs[keep], labels[keep]), "bob": other})
    without = train(whole, Snapshot.of(model), plan, clients={"ada": tuple(sorted(left_out)), "bob": ()})
    never = train(fewer, Snapshot.of(model), plan)
    torch.testing.assert_close(without.model.parameters, never.model.parameters)
    assert without.schedule == never.schedule
    torch.testing.assert_close(without.memory.influence(["bob"]), never.memory.influence(["bob"]))


class TestSampling:
    NAMES = tuple(f"client-{number}" for number in range(12))

    @settings(deadline=None)
    @given(count=st.integers(1, 200), percent=st.integers(1, 99), seed=st.integers(0, 5), number=st.integers(0, 3))
    def test_size_order_and_no_repeats(self, count, percent, seed, number):
        names = tuple(f"c{i}" for i in range(count))
        chosen = _sample_clients(names, TrainingPlan(participation=percent / 100, seed=seed), number)
        assert len(chosen) == max(1, -(-percent * count // 100))  # exact arithmetic, rounded up
        assert len(set(chosen)) == len(chosen)
        assert list(chosen) == [name for name in names if name in chosen]

    def test_each_round_draws_anew_and_the_seed_decides(self):
        def draws(seed):
            plan = TrainingPlan(participation=0.5, seed=seed)
            return [_sample_clients(self.NAMES, plan, number) for number in range(6)]

        assert draws(3) == draws(3)
        assert draws(3) != draws(4)
        assert len(set(draws(3))) > 1
        assert set().union(*draws(3)) == set(self.NAMES)

    def test_training_asks_only_those(self):
        data = clients(a=3, b=4, c=5, d=6)
        model = linear()
        engine = Watching(model, CrossEntropy(), data)
        plan = TrainingPlan(rounds=6, epochs=1, batch_size=8, learning_rate=0.1, participation=0.5, seed=1)
        state = train(engine, Snapshot.of(model), plan)
        assert [tuple(tasks) for tasks in engine.asked] == [_sample_clients(tuple("abcd"), plan, n) for n in range(6)]
        assert all(len(tasks) == 2 for tasks in engine.asked)
        seeds = [task.seed for tasks in engine.asked for task in tasks.values()]
        assert len(set(seeds)) == len(seeds)
        assert set(state.memory.clients) == {name for tasks in engine.asked for name in tasks}
        by_hand = Snapshot.of(model).parameters
        for replies in engine.replied:
            total = sum(len(data[name][0]) for name in replies)
            by_hand = by_hand + sum(len(data[name][0]) / total * reply.update for name, reply in replies.items())
        torch.testing.assert_close(state.model.parameters, by_hand)

    @pytest.mark.parametrize("participation", [0.0, -0.1, 1.1, float("nan")])
    def test_nonsense_is_refused(self, participation):
        with pytest.raises(RequestError, match="participation"):
            TrainingPlan(participation=participation)


class TestDeterminism:
    PLAN = TrainingPlan(rounds=2, epochs=2, batch_size=2, learning_rate=0.1, participation=0.7, seed=5)

    @staticmethod
    def run(plan, model):
        return train(LocalEngine(model, CrossEntropy(), clients(a=4, b=5, c=6)), Snapshot.of(model), plan)

    def test_bit_by_bit_with_dropout_and_the_global_generator_untouched(self):
        model = norm_net()
        state = torch.get_rng_state()
        first = self.run(self.PLAN, model)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        second = self.run(self.PLAN, model)
        assert first.model.digest == second.model.digest
        assert torch.equal(first.memory.influence(["a"]), second.memory.influence(["a"]))

    def test_another_seed_is_another_model(self):
        model = linear()
        other = TrainingPlan(rounds=2, epochs=2, batch_size=2, learning_rate=0.1, participation=0.7, seed=6)
        assert self.run(self.PLAN, model).model.digest != self.run(other, model).model.digest

    def test_the_users_model_and_start_are_left_alone(self):
        model = norm_net()
        start, before = Snapshot.of(model), digest_of(model)
        kept = start.parameters.clone()
        train(LocalEngine(model, CrossEntropy(), clients(a=4, b=5)), start, self.PLAN)
        assert digest_of(model) == before
        assert torch.equal(start.parameters, kept)

    def test_derived_seeds_differ_by_every_part(self):
        seeds = {derived_seed(s, r, n) for s in range(4) for r in range(4) for n in ("a", "b", "1")}
        assert len(seeds) == 48
        assert derived_seed(1, 12) != derived_seed(11, 2)
        assert all(0 <= seed < 2**63 for seed in seeds)


class TestBuffers:
    def test_means_by_count_and_the_largest_counter(self):
        one = {"mean": torch.tensor([1.0, 2.0]), "seen": torch.tensor(3)}
        two = {"mean": torch.tensor([5.0, 0.0]), "seen": torch.tensor(9)}
        averaged = average_buffers({"a": (one, 3), "b": (two, 1)})
        torch.testing.assert_close(averaged["mean"], torch.tensor([2.0, 1.5]))
        assert averaged["seen"].item() == 9
        assert averaged["seen"].dtype == torch.int64

    def test_batch_norm_after_a_round(self):
        data = clients(a=4, b=12)
        model = seeded(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
        plan = TrainingPlan(rounds=1, epochs=1, batch_size=6, learning_rate=0.1)
        state = train(LocalEngine(model, CrossEntropy(), data), Snapshot.of(model), plan)
        # a: one batch; b: two batches, whose order the seed decides: take it from the real client.
        engine = Watching(model, CrossEntropy(), data)
        replies = engine.ask({name: plan.task(Snapshot.of(model), 0, name) for name in data})
        expected = sum(n / 16 * replies[name].buffers["0.running_mean"] for name, n in (("a", 4), ("b", 12)))
        torch.testing.assert_close(state.model.buffers["0.running_mean"], expected)
        torch.testing.assert_close(replies["a"].buffers["0.running_mean"], 0.1 * data["a"][0].mean(dim=0))
        assert replies["a"].buffers["0.num_batches_tracked"] == 1
        assert state.model.buffers["0.num_batches_tracked"] == 2

    def test_a_last_batch_of_one_sample_is_no_crash_under_batch_norm(self):
        """torch refuses a training batch of one; a client with 5 samples in batches of 4 would end in a ValueError."""
        model = norm_net()
        reply = LocalEngine(model, CrossEntropy(), clients(a=5)).ask(
            {"a": Train(Snapshot.of(model), epochs=1, batch_size=4, learning_rate=0.1, seed=0)}
        )["a"]
        assert torch.isfinite(reply.update).all()
        assert (reply.count, reply.steps) == (5, 1)


class TestDivergence:
    def test_an_infinite_update_is_a_numerical_error_that_names_the_client(self):
        model = linear()
        good = Trained(torch.zeros(12, dtype=torch.float64), {}, 3, 1, 1.0)
        bad = Trained(torch.full((12,), float("nan"), dtype=torch.float64), {}, 3, 1, 1.0)
        with pytest.raises(NumericalError, match="diverged at client 'bob'"):
            aggregate(Snapshot.of(model), {"ada": good, "bob": bad})

    @pytest.mark.parametrize("learning_rate", [1e200, float("inf")])
    def test_a_training_that_diverges_says_so(self, learning_rate):
        """Squared error on a line doubles and redoubles; wherever it is noticed, it is one of our errors."""
        data = {"ada": line_data((1, 3), (2, 1)), "bob": line_data((1, 2))}
        model = scalar_line(1.0, 0.0)
        plan = TrainingPlan(rounds=3, epochs=3, batch_size=1, learning_rate=learning_rate)
        with pytest.raises((NumericalError, ModelError)) as caught:
            train(LocalEngine(model, SquaredError(), data), Snapshot.of(model), plan)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, NumericalError)

    def test_a_nan_start_is_refused_before_any_work(self):
        model = linear()
        engine = LocalEngine(model, CrossEntropy(), clients(a=4))
        start = Snapshot(torch.full((12,), float("nan"), dtype=torch.float64), {})
        with pytest.raises(ModelError, match="NaN"):
            train(engine, start, FULL)
        assert engine.cost.rounds == 0


class TestPlanAndSchedule:
    @pytest.mark.parametrize(
        "values", [{"rounds": 0}, {"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"learning_rate": -1.0}]
    )
    def test_nonsense_is_refused(self, values):
        with pytest.raises(RequestError):
            TrainingPlan(**values)

    def test_local_steps_are_means_by_size(self):
        # 10 samples: 3 batches of 4, twice; 2 samples: 1 batch, twice.
        plan = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.5)
        schedule = plan.schedule({"a": 10, "b": 2})
        assert schedule.local_steps == pytest.approx((10 * 6 + 2 * 2) / 12)
        assert schedule.damping == pytest.approx(1 / (0.5 * schedule.local_steps * 3))

    def test_nobody_is_refused(self):
        with pytest.raises(RequestError, match="at least one client"):
            train(LocalEngine(linear(), CrossEntropy(), clients(a=4)), Snapshot.of(linear()), FULL, clients={})

    def test_progress_and_forgetful_training(self):
        seen = []
        plan = TrainingPlan(rounds=2, epochs=1, batch_size=8, learning_rate=0.1)
        engine = LocalEngine(linear(), CrossEntropy(), clients(a=4, b=4))
        state = train(
            engine, Snapshot.of(linear()), plan, keep=Keep(vectors=False), progress=lambda *said: seen.append(said)
        )
        assert seen == [("training", 1, 2), ("training", 2, 2)]
        assert state.memory is None
