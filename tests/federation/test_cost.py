"""What is counted: forward pass 1/3, gradient 1, product 2; a model once per client while it stays the same."""

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.engine import ask_each, ask_mean, measured
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import (
    CurvatureProduct,
    Draw,
    Gradient,
    LocalSolve,
    Losses,
    Sum,
    Train,
    Trained,
    payload_bytes,
)
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from federation.small import clients, linear, norm_net

MODEL = 12 * 8  # a 3x3 linear layer with bias in float64


def engine_of(**counts):
    return LocalEngine(linear(), CrossEntropy(), clients(**counts))


class TestSampleGradients:
    @pytest.mark.parametrize(
        ("make", "cost"),
        [
            (lambda at, v: Gradient(at), 10),
            (lambda at, v: Gradient(at, only=(0, 1, 2)), 3),
            (lambda at, v: CurvatureProduct(at, v[None], "ggn"), 20),
            (lambda at, v: CurvatureProduct(at, v.repeat(3, 1), "ggn", Draw(4, 0)), 24),
            (lambda at, v: Losses(at, v, (0.0, 0.5, 1.0)), 10),
            (lambda at, v: Losses(at, v, (0.0,), Draw(6, 0)), 2),
            (lambda at, v: Train(at, 3, 4, 0.1, 0), 30),
            (lambda at, v: Train(at, 3, 4, 0.1, 0, exclude=(1, 2)), 24),
        ],
    )
    def test_of_each_task(self, make, cost):
        engine = engine_of(a=10)
        at = Snapshot.of(linear())
        engine.ask({"a": make(at, torch.ones(12, dtype=torch.float64))})
        assert engine.cost.sample_gradients == pytest.approx(cost)
        assert engine.cost.rounds == 1

    def test_of_a_training(self):
        engine = engine_of(a=10, b=5)
        train(engine, Snapshot.of(linear()), TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.1))
        assert engine.cost.sample_gradients == 3 * 2 * 15
        assert engine.cost.rounds == 3
        # Down: each round another model to two clients. Up: two updates a round.
        assert engine.cost.bytes_down == engine.cost.bytes_up == 3 * 2 * MODEL


class TestBytes:
    def test_a_known_model_is_only_named(self):
        engine = engine_of(a=4, b=4)
        first, same, second = Snapshot.of(linear()), Snapshot.of(linear()), Snapshot.of(linear(seed=1))
        sent = []
        for task in (Gradient(first), Gradient(same), Gradient(second), Gradient(first)):
            before = engine.cost.bytes_down
            engine.ask({"a": task})
            sent.append(engine.cost.bytes_down - before)
        assert sent == [MODEL, 0, MODEL, MODEL]
        engine.ask({"b": Gradient(first)})  # b has not seen it
        assert engine.cost.bytes_down == 4 * MODEL
        assert engine.cost.bytes_up == 5 * MODEL

    def test_vectors_are_counted_each_time(self):
        engine = engine_of(a=4)
        at, rows = Snapshot.of(linear()), torch.ones(2, 12, dtype=torch.float64)
        for _ in range(3):
            engine.ask({"a": CurvatureProduct(at, rows, "ggn")})
        assert engine.cost.bytes_down == MODEL + 3 * 2 * MODEL
        assert engine.cost.bytes_up == 3 * 2 * MODEL

    def test_buffers_and_solutions_count(self):
        model = norm_net()
        engine = LocalEngine(model, CrossEntropy(), clients(a=6))
        at = Snapshot.of(model)
        size = len(at.parameters)
        assert at.stored_bytes == (size + 4 + 4) * 8 + 8
        trained = engine.ask({"a": Train(at, 1, 6, 0.1, 0)})["a"]
        assert engine.cost.bytes_up == payload_bytes(trained) == at.stored_bytes
        solved = engine.ask({"a": LocalSolve(at, 2, 0.1, "ggn", "stop")})["a"]
        assert payload_bytes(solved) == size * 8


class TestMeasured:
    def test_only_what_happens_inside(self):
        engine = engine_of(a=4, b=4)
        at = Snapshot.of(linear())
        engine.ask({"a": Gradient(at)})
        with measured(engine) as cost:
            engine.ask({"a": Gradient(at), "b": Gradient(at)})
            engine.ask({"b": Gradient(at)})
        engine.ask({"a": Gradient(at)})
        assert (cost.sample_gradients, cost.rounds, cost.bytes_down, cost.bytes_up) == (12, 2, MODEL, 3 * MODEL)
        assert cost.seconds > 0
        assert cost.as_dict()["rounds"] == 2
        assert (engine.cost.sample_gradients, engine.cost.rounds) == (20, 4)

    def test_a_failure_is_accounted_for_as_well(self):
        engine = engine_of(a=4, b=4)
        cost = None

        def fail():
            nonlocal cost
            with measured(engine) as cost:
                engine.ask({"a": Gradient(Snapshot.of(linear()))})
                raise RequestError("no more")

        with pytest.raises(RequestError):
            fail()
        assert cost.rounds == 1
        assert cost.seconds > 0


class TestEngine:
    def test_mean_over_samples_not_over_clients(self):
        engine = engine_of(a=2, b=8)
        at = Snapshot.of(linear())
        replies = engine.ask({name: Gradient(at) for name in "ab"})
        mean = ask_mean(engine, {name: Gradient(at) for name in "ab"})
        torch.testing.assert_close(mean, (replies["a"].total + replies["b"].total) / 10)
        a, b = replies["a"].total / 2, replies["b"].total / 8
        assert not torch.allclose(mean, (a + b) / 2)

    def test_an_unknown_client_is_refused_before_any_work(self):
        engine = engine_of(a=2, b=8)
        at = Snapshot.of(linear())
        with pytest.raises(RequestError, match="'zoe' can be reached; there are a, b"):
            engine.ask({"a": Gradient(at), "zoe": Gradient(at)})
        assert engine.cost.rounds == engine.cost.sample_gradients == 0

    def test_without_switches_clients_off_and_has_its_own_account(self):
        engine = engine_of(a=2, b=8)
        at = Snapshot.of(linear())
        engine.ask({"b": Gradient(at)})
        rest = engine.without(("a",))
        assert rest.clients() == {"b": 8}
        assert engine.clients() == {"a": 2, "b": 8}
        rest.ask({"b": Gradient(at)})
        assert (rest.cost.rounds, rest.cost.bytes_down) == (1, MODEL)
        assert engine.cost.rounds == 1
        with pytest.raises(RequestError, match="'a'"):
            rest.ask({"a": Gradient(at)})

    def test_replies_of_another_kind_are_refused(self):
        engine, tasks = engine_of(a=2), {"a": Gradient(Snapshot.of(linear()))}
        assert isinstance(ask_each(engine, tasks, Sum)["a"], Sum)
        with pytest.raises(NumericalError, match="'a' replied Sum where Trained"):
            ask_each(engine, tasks, Trained)

    def test_rounds_are_told(self):
        engine, seen = engine_of(a=2), []
        engine.on_round = seen.append
        for _ in range(3):
            engine.ask({"a": Gradient(Snapshot.of(linear()))})
        assert seen == [1, 2, 3]

    def test_nobody_is_refused(self):
        with pytest.raises(RequestError, match="at least one client"):
            LocalEngine(nn.Linear(1, 1), CrossEntropy(), {})
