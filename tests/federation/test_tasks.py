"""Every task against dense float64 algebra: sums, draws, exclusion, caches, and that nothing of a client changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, hessian

from cases import case
from expunge.core.batch import Batch
from expunge.core.factors import kronecker_factors
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError, NumericalError, RequestError
from expunge.federation.engines.client import CHUNK, Client
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.local_data import LocalData
from expunge.federation.messages.tasks import (
    Ascend,
    CurvatureFactors,
    CurvatureProduct,
    Draw,
    Gradient,
    LocalSolve,
    Losses,
    NormStatistics,
    Train,
)
from federation.small import Pairs, clients, digest, digest_of, linear, mlp, norm_net, samples, seeded

L2 = 0.2
COUNT = 9


def client_of(model, data=None, loss=None, **options):
    """A client with a workbench of its own: it may overwrite the weights of the module that it is given."""
    bench = copy.deepcopy(model)
    return Client(LocalData(data or samples(COUNT), "ada"), bench, loss or CrossEntropy(L2), **options)


def objective(model, data, chosen=None):
    """The mean loss of some samples as a function of the flat parameters: torch only."""
    inputs, labels = data if chosen is None else (data[0][chosen], data[1][chosen])
    layout = [(name, parameter.shape) for name, parameter in model.named_parameters()]

    def value(theta):
        parts = torch.split(theta, [shape.numel() for _, shape in layout])
        tensors = {name: part.view(shape) for (name, shape), part in zip(layout, parts, strict=True)}
        outputs = functional_call(model, tensors, (inputs,))
        return F.cross_entropy(outputs, labels) + 0.5 * L2 * theta.square().sum()

    return value


def direction(size, seed=5):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestGradient:
    def test_is_count_times_the_mean(self):
        model, data = mlp(), samples(COUNT)
        at = Snapshot.of(mlp(seed=1))  # another point than the client's own module
        reply = client_of(model, data).perform(Gradient(at))
        torch.testing.assert_close(reply.total, COUNT * grad(objective(model, data))(at.parameters))
        assert (reply.count, reply.sample_gradients) == (COUNT, COUNT)

    @pytest.mark.parametrize(
        ("task", "chosen"),
        [({"only": (4, 1)}, [1, 4]), ({"exclude": (0, 8)}, list(range(1, 8))), ({"only": (3,)}, [3])],
    )
    def test_over_some_samples(self, task, chosen):
        model, data = mlp(), samples(COUNT)
        at = Snapshot.of(model)
        reply = client_of(model, data).perform(Gradient(at, **task))
        expected = grad(objective(model, data, torch.tensor(chosen)))(at.parameters)
        torch.testing.assert_close(reply.total, len(chosen) * expected)
        assert (reply.count, reply.sample_gradients) == (len(chosen), len(chosen))

    def test_over_several_chunks_of_unequal_size(self):
        data = samples(CHUNK + 3)
        model = linear()
        reply = client_of(model, data).perform(Gradient(Snapshot.of(model)))
        torch.testing.assert_close(
            reply.total, (CHUNK + 3) * grad(objective(model, data))(Snapshot.of(model).parameters)
        )

    def test_is_taken_in_evaluation_mode_with_the_snapshots_buffers(self):
        model = norm_net()
        at = Snapshot.of(model)
        at = Snapshot(at.parameters, {**at.buffers, "1.running_mean": torch.full((4,), 0.7, dtype=torch.float64)})
        client = client_of(model)
        client.perform(Train(at, 1, 4, 0.1, 0))  # leaves the scratch module in training mode
        evaluated = norm_net().eval()
        evaluated[1].running_mean.fill_(0.7)
        expected = grad(objective(evaluated, samples(COUNT)))(at.parameters)
        torch.testing.assert_close(client.perform(Gradient(at)).total, COUNT * expected)

    def test_overflow_is_a_numerical_error(self):
        model = linear()
        at = Snapshot(torch.full((12,), 1e308, dtype=torch.float64), {})
        with pytest.raises(NumericalError, match="NaN or infinite"):
            client_of(model).perform(Gradient(at))


class TestCurvatureProduct:
    @pytest.mark.parametrize("kind", ["ggn", "hessian"])
    @pytest.mark.parametrize("name", ["mlp", "linear-squared", "mlp-frozen"])
    def test_is_count_times_the_mean_for_every_row(self, name, kind):
        problem = case(name)
        client = client_of(problem.model, (problem.inputs, problem.targets), problem.loss)
        rows = problem.vectors(3)
        reply = client.perform(CurvatureProduct(problem.snapshot, rows, kind))
        torch.testing.assert_close(reply.total, problem.count * rows @ problem.dense(kind))
        assert reply.count == problem.count
        assert reply.sample_gradients == 2 * problem.count * 3

    def test_a_draw_stands_for_all_the_samples(self):
        """The total is scaled to the client's whole count; only the drawn samples are paid for."""
        model, data = mlp(), samples(COUNT)
        at = Snapshot.of(model)
        rows = direction(31)[None]
        chosen = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3))[:4]
        reply = client_of(model, data).perform(CurvatureProduct(at, rows, "hessian", Draw(4, seed=3)))
        dense = hessian(objective(model, data, chosen))(at.parameters)
        torch.testing.assert_close(reply.total, COUNT * rows @ dense)
        assert (reply.count, reply.sample_gradients) == (COUNT, 8)

    def test_excluded_samples_are_not_drawn(self):
        model, data = linear(), samples(COUNT)
        at = Snapshot.of(model)
        rows = direction(12)[None]
        task = CurvatureProduct(at, rows, "ggn", Draw(100, seed=0), exclude=(0, 1, 2))
        reply = client_of(model, data).perform(task)
        dense = hessian(objective(model, data, torch.arange(3, COUNT)))(at.parameters)
        torch.testing.assert_close(reply.total, 6 * rows @ dense)
        assert reply.count == 6

    def test_the_operator_is_rebuilt_when_anything_changes(self):
        """First one model, then another, then the first again; then another kind, draw, exclusion, buffer."""
        model, data = mlp(), samples(COUNT)
        client = client_of(model, data)
        first, second = Snapshot.of(mlp(seed=1)), Snapshot.of(mlp(seed=2))
        rows = direction(31)[None]
        dense = {at: hessian(objective(model, data))(at.parameters) for at in (first, second)}
        for at in (first, second, first, first):
            reply = client.perform(CurvatureProduct(at, rows, "hessian"))
            torch.testing.assert_close(reply.total, COUNT * rows @ dense[at])
        fresh = {}
        tasks = [
            CurvatureProduct(first, rows, "ggn"),
            CurvatureProduct(first, rows, "ggn", Draw(3, 0)),
            CurvatureProduct(first, rows, "ggn", Draw(3, 1)),
            CurvatureProduct(first, rows, "ggn", Draw(3, 1), exclude=(0, 4)),
            CurvatureProduct(first, rows, "ggn", Draw(3, 1), exclude=(1, 2, 3)),
            CurvatureProduct(first, rows, "ggn", Draw(3, 1, from_back=True), exclude=(1, 2, 3)),
            CurvatureProduct(first, 2 * rows, "ggn", Draw(3, 1, from_back=True), exclude=(1, 2, 3)),
        ]
        for number, task in enumerate(tasks):
            fresh[number] = client_of(model, data).perform(task).total
            assert torch.equal(client.perform(task).total, fresh[number])
        assert len({digest(total) for total in fresh.values()}) == len(tasks)

    def test_a_change_of_buffers_alone_is_a_change_of_model(self):
        model = norm_net()
        at = Snapshot.of(model)
        moved = Snapshot(at.parameters, {**at.buffers, "1.running_var": 2 * at.buffers["1.running_var"]})
        client = client_of(model)
        rows = direction(Layout.of(model).size)[None]
        first = client.perform(CurvatureProduct(at, rows, "ggn")).total
        second = client.perform(CurvatureProduct(moved, rows, "ggn")).total
        assert not torch.allclose(first, second)
        assert torch.equal(second, client_of(model).perform(CurvatureProduct(moved, rows, "ggn")).total)

    @pytest.mark.parametrize("budget", [0, 1 << 30])
    def test_training_between_two_products_changes_nothing(self, budget):
        """Also where the graphs are beyond the budget and are rebuilt from a module that was just training."""
        model = norm_net()
        at = Snapshot.of(model)
        client = client_of(model, budget_bytes=budget)
        task = CurvatureProduct(at, direction(Layout.of(model).size)[None], "ggn")
        first = client.perform(task).total
        client.perform(Train(at, 2, 4, 0.5, 0))
        torch.testing.assert_close(client.perform(task).total, first)


class TestCurvatureFactors:
    def test_is_count_times_those_of_its_samples_with_the_seed_that_was_asked_for(self):
        model, data = mlp().eval(), samples(30)
        client, at = client_of(model, data), Snapshot.of(model)
        for seed in (4, 5):
            own = kronecker_factors(model, at, Batch.of(*data), CrossEntropy(L2), seed=seed)
            assert torch.equal(client.perform(CurvatureFactors(at, seed)).total, 30 * own.values)
        assert not torch.equal(client.perform(CurvatureFactors(at, 4)).total, 30 * own.values)


class TestTrainingOnADraw:
    def test_only_the_drawn_samples_train_but_all_of_them_give_the_weight(self):
        model, data = mlp(), samples(COUNT)
        at, draw = Snapshot.of(model), Draw(4, seed=3)
        client = client_of(model, data)
        drawn = client._drawn(draw, (0,))
        rest = tuple(sorted(set(range(COUNT)) - set(drawn.tolist())))
        reply = client.perform(Train(at, 3, 100, 0.1, 0, exclude=(0,), draw=draw))
        alone = client.perform(Train(at, 3, 100, 0.1, 0, exclude=rest))
        torch.testing.assert_close(reply.update, alone.update)
        assert (reply.count, reply.steps, reply.sample_gradients) == (COUNT - 1, 3, 12)

    def test_one_sample_under_batch_norm_uses_the_models_statistics(self):
        model = norm_net()
        at = Snapshot.of(model)
        reply = client_of(model).perform(Train(at, 1, 4, 0.1, 0, draw=Draw(1, seed=0)))
        assert float(reply.update.norm()) > 0
        assert all(torch.equal(reply.buffers[name], at.buffers[name]) for name in at.buffers)


class TestAveragedTraining:
    @pytest.mark.parametrize(("epochs", "batch"), [(1, 1), (1, 2), (3, 4), (1, 100), (2, 100)])
    def test_is_the_mean_of_the_models_after_the_later_half_of_the_steps(self, epochs, batch):
        model, data = mlp(), samples(COUNT)
        at, ways = Snapshot.of(model), []
        chance, theta = torch.Generator().manual_seed(7), at.parameters
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(COUNT, generator=chance), batch):
                theta = theta - 0.1 * grad(objective(model, data, chosen))(theta)
                ways.append(theta - at.parameters)
        task = Train(at, epochs, batch, 0.1, seed=7, averaged=True)
        reply = client_of(model, data, boost=2.0).perform(task)
        torch.testing.assert_close(reply.update, 2.0 * torch.stack(ways[len(ways) // 2 :]).mean(dim=0))
        assert (reply.count, reply.steps, reply.sample_gradients) == (COUNT, len(ways), COUNT * epochs)

    @pytest.mark.parametrize(("count", "batch", "epochs"), [(5, 4, 1), (2, 1, 1), (5, 4, 2), (9, 4, 2), (1, 4, 3)])
    def test_a_last_sample_that_joins_the_batch_before_is_no_step_of_its_own(self, count, batch, epochs):
        model = norm_net()
        task = Train(Snapshot.of(model), epochs, batch, 0.1, seed=0, averaged=True)
        reply = client_of(model, samples(count)).perform(task)
        assert reply.steps == epochs * (2 if count == 9 else 1)
        assert float(reply.update.norm()) > 0

    def test_whoever_is_thrown_off_stays_where_it_was(self):
        reply = client_of(mlp()).perform(Train(Snapshot.of(mlp()), 60, 1, 1e200, seed=0, averaged=True))
        assert float(reply.update.abs().max()) == 0.0
        assert (reply.count, reply.sample_gradients) == (COUNT, 60 * COUNT)

    def test_frozen_weights_keep_their_bits(self):
        model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 4)).float()
        inputs, labels = samples(COUNT)
        model[0] = nn.Linear(inputs.shape[1], 40)
        model[0].requires_grad_(requires_grad=False)
        bench = copy.deepcopy(model)
        client = Client(LocalData((inputs.float(), labels), "ada"), bench, CrossEntropy())
        client.perform(Train(Snapshot.of(model), 7, 1, 0.1, seed=0, averaged=True))
        assert torch.equal(bench[0].weight, model[0].weight)
        assert not torch.equal(bench[1].weight, model[1].weight)

    def test_rounding_does_not_add_up(self):
        inputs, labels = samples(COUNT)
        model = nn.Linear(inputs.shape[1], 4).bfloat16()
        client = Client(LocalData((inputs.bfloat16(), labels), "ada"), copy.deepcopy(model), CrossEntropy())
        reply = client.perform(Train(Snapshot.of(model), 50, 1, 1e-30, seed=0, averaged=True))
        assert float(reply.update.abs().max()) == 0.0


class TestAscend:
    def climb(self, model, data, only=None, loss=None, **options):
        at = Snapshot.of(model)
        given = {"epochs": 1, "batch_size": 100, "learning_rate": 0.1, "seed": 0} | options
        return at.parameters, client_of(model, data, loss).perform(Ascend(at, only=only, **given))

    @pytest.mark.parametrize("only", [None, (4, 1)])
    def test_up_the_loss_of_those_samples_without_its_l2_term(self, only):
        model, data = mlp(), samples(COUNT)
        chosen = torch.arange(COUNT) if only is None else torch.tensor(only)
        theta, reply = self.climb(model, data, only)
        slope = grad(objective(model, data, chosen))(theta) - L2 * theta
        torch.testing.assert_close(reply.update, 0.1 * slope)
        assert (reply.count, reply.steps, reply.sample_gradients) == (len(chosen), 1, len(chosen))

    def test_down_the_unlearning_cross_entropy(self):
        """-log(1 - p/2) with p the probability of the true class, by automatic differentiation."""
        model, (inputs, labels) = linear(), samples(COUNT)

        def unlearning(theta):
            outputs = functional_call(model, Layout.of(model).unflatten(theta), (inputs,))
            return -torch.log(1 - outputs.softmax(dim=1)[torch.arange(COUNT), labels] / 2).mean()

        theta, reply = self.climb(model, (inputs, labels), bounded=True)
        torch.testing.assert_close(reply.update, -0.1 * grad(unlearning)(theta))

    def test_clipped_and_projected(self):
        model, data = mlp(), samples(COUNT)
        _, free = self.climb(model, data)
        _, clipped = self.climb(model, data, max_norm=0.01)
        assert float(clipped.update.norm()) == pytest.approx(0.1 * 0.01)
        torch.testing.assert_close(clipped.update / clipped.update.norm(), free.update / free.update.norm())
        _, inside = self.climb(model, data, radius=0.003, epochs=4)
        assert float(inside.update.norm()) == pytest.approx(0.003)
        assert inside.steps == 4

    def test_every_sample_once_an_epoch(self):
        """With a tiny step the gradient does not change: three batches of three add up to three times the mean."""
        model, data = linear(), samples(COUNT)
        _, reply = self.climb(model, data, batch_size=3, learning_rate=1e-9)
        _, whole = self.climb(model, data, learning_rate=3e-9)
        assert (reply.steps, reply.sample_gradients) == (3, COUNT)
        torch.testing.assert_close(reply.update, whole.update, rtol=1e-5, atol=1e-15)

    def test_stops_before_the_step_when_the_accuracy_has_fallen(self):
        """One sample that is classified right: the first step makes it wrong, the second is not made."""
        model = linear()
        inputs, _ = samples(1)
        labels = model(inputs).argmax(dim=1)
        _, reply = self.climb(model, (inputs, labels), learning_rate=50.0, epochs=5, stop_accuracy=0.5)
        assert (reply.steps, reply.sample_gradients) == (1, pytest.approx(1 + 1 / 3))
        _, never = self.climb(model, (inputs, labels), learning_rate=50.0, epochs=5)
        assert (never.steps, never.sample_gradients) == (5, 5)

    def test_an_accuracy_needs_classes(self):
        data = (torch.ones(2, 3).double(), torch.zeros(2, 3).double())
        with pytest.raises(RequestError, match="stop_accuracy=None"):
            self.climb(linear(), data, loss=SquaredError(), stop_accuracy=0.1)

    def test_overflow_is_a_numerical_error(self):
        data = (torch.ones(2, 3).double(), torch.zeros(2, 3).double())
        with pytest.raises(NumericalError, match="overflowed at client 'ada'"):
            self.climb(linear(), data, loss=SquaredError(), learning_rate=1e200, epochs=9)


class TestLosses:
    def test_line_of_losses(self):
        model, data = mlp(), samples(COUNT)
        at, way = Snapshot.of(model), direction(31)
        lengths = (0.0, 0.5, 2.0)
        reply = client_of(model, data).perform(Losses(at, way, lengths, exclude=(2,)))
        kept = torch.tensor([i for i in range(COUNT) if i != 2])
        value = objective(model, data, kept)
        expected = torch.stack([8 * value(at.parameters - length * way) for length in lengths])
        torch.testing.assert_close(reply.total, expected)
        assert reply.count == 8
        assert reply.sample_gradients == pytest.approx(8 * 3 / 3)

    def test_on_a_draw(self):
        model, data = linear(), samples(COUNT)
        at, way = Snapshot.of(model), direction(12)
        reply = client_of(model, data).perform(Losses(at, way, (1.0,), Draw(2, 4, from_back=True)))
        chosen = torch.randperm(COUNT, generator=torch.Generator().manual_seed(4))[-2:]
        expected = COUNT * objective(model, data, chosen)(at.parameters - way)
        torch.testing.assert_close(reply.total, expected[None])
        assert reply.sample_gradients == pytest.approx(2 / 3)


class TestLocalSolve:
    @pytest.mark.parametrize("only", [None, (1, 5)])
    def test_own_curvature_gradient_of_the_forgotten(self, only):
        model, data = linear(), samples(COUNT)
        at = Snapshot.of(model)
        reply = client_of(model, data).perform(LocalSolve(at, 40, 0.3, "ggn", "stop", only))
        chosen = torch.arange(COUNT) if only is None else torch.tensor(only)
        gradient = grad(objective(model, data, chosen))(at.parameters)
        matrix = hessian(objective(model, data))(at.parameters) + 0.3 * torch.eye(12, dtype=torch.float64)
        torch.testing.assert_close(reply.solution.vector, torch.linalg.solve(matrix, gradient), rtol=1e-8, atol=1e-10)
        assert reply.gradient_norm == pytest.approx(float(gradient.norm()))
        assert reply.sample_gradients == len(chosen) + 2 * COUNT * reply.solution.products


class TestDraws:
    @settings(deadline=None)
    @given(count=st.integers(1, 40), front=st.integers(1, 40), back=st.integers(1, 40), seed=st.integers(0, 9))
    def test_front_and_back_are_disjoint_where_there_are_enough(self, count, front, back, seed):
        client = client_of(linear(), samples(count))
        one = client._drawn(Draw(front, seed), ())
        other = client._drawn(Draw(back, seed, from_back=True), ())
        assert len(set(one.tolist())) == min(front, count)
        assert len(set(other.tolist())) == min(back, count)
        shared = set(one.tolist()) & set(other.tolist())
        assert len(shared) == max(0, min(front, count) + min(back, count) - count)

    @settings(deadline=None)
    @given(excluded=st.sets(st.integers(0, 19), max_size=19), size=st.integers(1, 25), seed=st.integers(0, 9))
    def test_seeded_and_never_an_excluded_sample(self, excluded, size, seed):
        client = client_of(linear(), samples(20))
        drawn = client._drawn(Draw(size, seed), tuple(excluded))
        assert torch.equal(drawn, client._drawn(Draw(size, seed), tuple(excluded)))
        assert len(drawn) == min(size, 20 - len(excluded))
        assert not set(drawn.tolist()) & excluded

    def test_another_seed_is_another_draw(self):
        client = client_of(linear(), samples(40))
        assert len({tuple(client._drawn(Draw(5, seed), ()).tolist()) for seed in range(10)}) == 10


class TestNormStatistics:
    def test_one_batch_gives_the_statistics_of_the_data(self):
        data = samples(COUNT)
        model = seeded(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
        reply = client_of(model, data).perform(NormStatistics(Snapshot.of(model), batch_size=64, exclude=(0, 3)))
        kept = data[0][[1, 2, 4, 5, 6, 7, 8]]
        torch.testing.assert_close(reply.buffers["0.running_mean"], kept.mean(dim=0))
        torch.testing.assert_close(reply.buffers["0.running_var"], kept.var(dim=0, unbiased=True))
        assert reply.buffers["0.num_batches_tracked"] == 1
        assert (reply.count, reply.sample_gradients) == (7, pytest.approx(7 / 3))

    def test_equal_batches_give_the_mean_over_batches(self):
        data = samples(8)
        model = seeded(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
        reply = client_of(model, data).perform(NormStatistics(Snapshot.of(model), batch_size=4))
        torch.testing.assert_close(reply.buffers["0.running_mean"], data[0].mean(dim=0))
        variances = torch.stack([part.var(dim=0) for part in torch.split(data[0], 4)])
        torch.testing.assert_close(reply.buffers["0.running_var"], variances.mean(dim=0))

    def test_a_draw_is_looked_at_alone_and_stands_for_all(self):
        data = samples(12)
        model = seeded(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
        client, draw = client_of(model, data), Draw(5, seed=1)
        reply = client.perform(NormStatistics(Snapshot.of(model), 64, exclude=(0, 3), draw=draw))
        chosen = client._drawn(draw, (0, 3))
        assert not {0, 3} & set(chosen.tolist())
        torch.testing.assert_close(reply.buffers["0.running_mean"], data[0][chosen].mean(dim=0))
        torch.testing.assert_close(reply.buffers["0.running_var"], data[0][chosen].var(dim=0))
        assert (reply.count, reply.sample_gradients) == (10, pytest.approx(5 / 3))

    def test_dropout_is_off_and_chance_untouched(self):
        """Behind a dropout layer: random statistics would make forgetting irreproducible."""
        model = seeded(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 3)))
        data = samples(COUNT)
        state = torch.get_rng_state()
        client = client_of(model, data)
        reply = client.perform(NormStatistics(Snapshot.of(model), batch_size=64))
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(reply.buffers["1.running_mean"], data[0].mean(dim=0))

    def test_a_last_batch_of_one_is_no_crash(self):
        model = norm_net()
        reply = client_of(model, samples(5)).perform(NormStatistics(Snapshot.of(model), batch_size=4))
        assert torch.isfinite(reply.buffers["1.running_var"]).all()

    def test_one_sample_has_none_and_the_models_own_are_used(self):
        model = norm_net()
        reply = client_of(model, samples(1)).perform(NormStatistics(Snapshot.of(model), batch_size=4))
        assert all(torch.equal(reply.buffers[name], buffer) for name, buffer in model.named_buffers())
        assert (reply.count, reply.sample_gradients) == (1, 0.0)

    def test_what_overflows_is_said_by_name(self):
        model, (inputs, labels) = norm_net(), samples(5)
        client = client_of(model, (1e300 * inputs, labels))
        with pytest.raises(NumericalError, match=r"statistics overflow at client .*left as it was"):
            client.perform(NormStatistics(Snapshot.of(model), batch_size=4))

    def test_momentum_is_put_back(self):
        model = norm_net()
        client = client_of(model)
        before = client.perform(Train(Snapshot.of(model), 1, 4, 0.1, 0)).buffers
        client.perform(NormStatistics(Snapshot.of(model), batch_size=4))
        after = client.perform(Train(Snapshot.of(model), 1, 4, 0.1, 0)).buffers
        assert all(torch.equal(before[name], after[name]) for name in before)


def all_tasks(at):
    size = len(at.parameters)
    return [
        Train(at, 2, 4, 0.1, 0, exclude=(1,)),
        Train(at, 2, 4, 0.1, 0, exclude=(1,), draw=Draw(5, 3)),
        Ascend(at, 2, 2, 0.1, 0, only=(0, 2, 5)),
        Ascend(at, 2, 4, 0.1, 0, bounded=True, max_norm=0.2, radius=0.05, stop_accuracy=0.01),
        Gradient(at, only=(0, 2)),
        Gradient(at, exclude=(3,)),
        CurvatureProduct(at, direction(size)[None], "ggn", Draw(5, 0), exclude=(1,)),
        CurvatureProduct(at, direction(size)[None], "hessian"),
        LocalSolve(at, 3, 0.5, "hessian", "ignore", (0, 1)),
        Losses(at, direction(size), (0.0, 1.0), Draw(4, 0, from_back=True)),
        NormStatistics(at, 4),
    ]


def tensors_of(reply):
    found = [value for value in vars(reply).values() if isinstance(value, torch.Tensor)]
    if hasattr(reply, "buffers"):
        found += reply.buffers.values()
    if hasattr(reply, "solution"):
        found.append(reply.solution.vector)
    return found


@pytest.mark.parametrize("number", range(11))
class TestEveryTask:
    def test_a_dataset_of_ones_own_gives_the_same_reply(self, number):
        model = norm_net()
        task = all_tasks(Snapshot.of(model))[number]
        from_tensors = client_of(model).perform(task)
        from_pairs = client_of(model, Pairs(samples(COUNT))).perform(task)
        assert digest(*tensors_of(from_tensors)) == digest(*tensors_of(from_pairs))
        assert len(tensors_of(from_tensors)) > 0
        assert from_tensors.sample_gradients == from_pairs.sample_gradients

    def test_nothing_of_the_clients_or_the_users_model_changes(self, number):
        """Clients of one engine take turns on one module: nothing of one client's work may reach another's reply."""
        model, data = norm_net(), {"ada": samples(COUNT), "bob": samples(7, seed=50)}
        loss, at, other = CrossEntropy(L2), Snapshot.of(model), Snapshot.of(norm_net(seed=1))

        def traces():
            sent = [tensor for snapshot in (at, other) for tensor in (snapshot.parameters, *snapshot.buffers.values())]
            return digest_of(model), digest(*(tensor for pair in data.values() for tensor in pair)), digest(*sent)

        before, chance = traces(), torch.get_rng_state()
        task = all_tasks(at)[number]
        alone = {name: LocalEngine(model, loss, data).ask({name: task})[name] for name in data}
        engine = LocalEngine(model, loss, data)
        first = engine.ask({"ada": task, "bob": task})
        for one in (*all_tasks(at), *all_tasks(other)):
            engine.ask({"bob": one, "ada": one})
        again = engine.ask({"bob": task, "ada": task})
        assert traces() == before
        assert torch.equal(torch.get_rng_state(), chance)
        for name in data:
            expected = digest(*tensors_of(alone[name]))
            assert digest(*tensors_of(first[name])) == digest(*tensors_of(again[name])) == expected
        assert digest(*tensors_of(alone["ada"])) != digest(*tensors_of(alone["bob"]))

    def test_a_model_of_another_size_is_refused(self, number):
        at = Snapshot(torch.zeros(7, dtype=torch.float64), {})
        with pytest.raises(ModelError, match="7 parameters where this client's has"):
            client_of(norm_net()).perform(all_tasks(at)[number])


class TestLocalData:
    @pytest.mark.parametrize("bad", [(9,), (-1,), (0, 100)])
    def test_foreign_indices_are_refused(self, bad):
        client = client_of(linear())
        at = Snapshot.of(linear())
        for task in (Gradient(at, only=bad), Gradient(at, exclude=bad), Train(at, 1, 4, 0.1, 0, exclude=bad)):
            with pytest.raises(RequestError, match="'ada' has samples 0 to 8 only"):
                client.perform(task)

    def test_unusable_data_is_refused(self):
        inputs, labels = samples(4)
        broken = inputs.clone()
        broken[2, 1] = float("nan")
        for data, said in (
            ((inputs, labels[:3]), "4 inputs but 3 targets"),
            ((inputs[:0], labels[:0]), "no samples"),
            ((broken, labels), "NaN or infinite"),
            ((inputs, labels, labels), "pair of tensors"),
            ("data", "pair of tensors"),
            (3, "pair of tensors"),
            ([], "no samples"),
        ):
            with pytest.raises(DataError, match=said):
                LocalData(data, "ada")

    def test_a_dataset_is_checked_as_it_is_read(self):
        inputs, labels = samples(4)
        inputs[2, 1] = float("nan")
        at = Snapshot.of(linear())
        client = client_of(linear(), Pairs((inputs, labels)))
        with pytest.raises(DataError, match="client 'ada' has a NaN"):
            client.perform(Gradient(at))
        assert client.perform(Gradient(at, exclude=(2,))).count == 3
        with pytest.raises(DataError, match="pairs"):
            client_of(linear(), [torch.zeros(3)]).perform(Gradient(at))


@given(size=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_the_mean_does_not_depend_on_the_chunks(size):
    data = samples(size)
    model = linear()
    at = Snapshot.of(model)
    reply = client_of(model, data).perform(Losses(at, torch.zeros(12, dtype=torch.float64), (0.0,)))
    torch.testing.assert_close(reply.total[0] / size, objective(model, data)(at.parameters).detach())


def test_batches_come_in_the_order_of_the_shuffle_however_many_are_looked_up_together(monkeypatch):
    def update(at_once):
        monkeypatch.setattr("expunge.federation.engines.client.BATCHES_AT_ONCE", at_once)
        client = Client(LocalData(clients(ada=41)["ada"], "ada"), mlp(), CrossEntropy())
        return client.perform(Train(Snapshot.of(mlp()), 2, 2, 0.5, 0))

    one = update(1)
    assert one.steps == 42
    for at_once in (2, 16, 100):
        assert torch.equal(update(at_once).update, one.update)
        assert update(at_once).steps == one.steps
