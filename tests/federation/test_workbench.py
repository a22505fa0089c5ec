"""Training on benches: clients that take turns end where they would end alone, recorded or not."""

import dataclasses
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from expunge.core.batch import Batch
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, NumericalError
from expunge.federation.engines import local, workbench
from expunge.federation.engines.client import Client
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.local_data import LocalData
from expunge.federation.engines.workbench import Workbench, can_record, side_by_side, weighted_loss
from expunge.federation.messages.tasks import Draw, Train
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, AdamW, Recipe
from expunge.models import GPT
from federation.small import clients, mlp, norm_net

COUNTS = {"ada": 9, "bob": 11, "cyd": 4, "dan": 17}


def parts(build=mlp):
    loss, model = CrossEntropy(l2=0.01), build()
    people = {name: Client(LocalData(data, name), build(), loss) for name, data in clients(**COUNTS).items()}
    tasks = {name: Train(Snapshot.of(model), 2, 4, 0.1, seed) for seed, name in enumerate(people)}
    return people, tasks, loss


@pytest.mark.parametrize("benches", [1, 2, 3, 6])
def test_side_by_side_equals_one_after_another(benches):
    people, tasks, loss = parts()
    alone = {name: people[name].perform(task) for name, task in tasks.items()}
    runs = {name: partial(people[name].training, task) for name, task in tasks.items()}
    together = side_by_side([Workbench(mlp(seed=9), loss, record=False) for _ in range(benches)], runs)
    assert list(together) == list(tasks)
    for name, reply in together.items():
        assert torch.equal(reply.update, alone[name].update)
        assert (reply.steps, reply.count) == (alone[name].steps, COUNTS[name])
    assert len({float(reply.update.norm()) for reply in together.values()}) == len(COUNTS)


def test_clients_take_turns_step_by_step():
    people, tasks, loss = parts()
    order = []

    def watched(name, bench):
        steps = people[name].training(tasks[name], bench)
        while True:
            order.append(name)
            try:
                yield next(steps)
            except StopIteration as done:
                return done.value

    side_by_side([Workbench(mlp(), loss, record=False) for _ in range(2)], {n: partial(watched, n) for n in people})
    assert order[:6] == ["ada", "bob"] * 3


@pytest.mark.parametrize("benches", [1, 2])
@pytest.mark.parametrize(
    ("draw", "expected"), [(None, ["dan", "bob", "ada", "cyd"]), (3, ["ada", "bob", "dan", "cyd"])]
)
def test_an_engine_begins_with_the_largest_and_replies_in_order(benches, draw, expected, monkeypatch):
    engine, begun, own = LocalEngine(mlp(), CrossEntropy(), clients(**COUNTS)), [], Client.training
    some = None if draw is None else Draw(draw, 0)
    tasks = {name: Train(Snapshot.of(mlp()), 1, 4, 0.1, seed, draw=some) for seed, name in enumerate(COUNTS)}
    tasks["cyd"] = dataclasses.replace(tasks["cyd"], exclude=(0, 1))  # two of four are left
    alone = engine.ask(tasks)

    def training(self, task, bench):
        begun.append(self.data.name)
        return own(self, task, bench)

    monkeypatch.setattr(Client, "training", training)
    monkeypatch.setattr(engine, "_benches", [Workbench(mlp(), CrossEntropy(), record=False) for _ in range(benches)])
    found = engine.ask(tasks)
    assert begun == expected
    assert list(found) == list(tasks)
    assert all(torch.equal(found[name].update, alone[name].update) for name in tasks)


def test_a_step_is_plain_sgd_with_weight_decay():
    model, loss = mlp(), CrossEntropy(l2=0.1)
    inputs, targets = clients(ada=5)["ada"]
    leaf = [p.detach().clone().requires_grad_() for p in model.parameters()]
    hidden = torch.tanh(inputs @ leaf[0].T + leaf[1])
    value = torch.nn.functional.cross_entropy(hidden @ leaf[2].T + leaf[3], targets)
    expected = [p - 0.3 * (g + 0.1 * p) for p, g in zip(leaf, torch.autograd.grad(value, leaf), strict=True)]
    Workbench(model, loss, record=False).step(Batch.of(inputs, targets), batch_size=5, learning_rate=0.3)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)


def test_divergence_is_told_with_the_client_who_diverged():
    people, tasks, loss = parts()
    tasks["bob"] = dataclasses.replace(tasks["bob"], learning_rate=1e300)
    runs = {name: partial(people[name].training, task) for name, task in tasks.items()}
    with pytest.raises(NumericalError, match="'bob'"):
        side_by_side([Workbench(mlp(), loss, record=False) for _ in range(4)], runs)


def test_nothing_is_recorded_on_a_cpu():
    assert not can_record(mlp())
    assert LocalEngine(mlp(), CrossEntropy(), clients(**COUNTS))._benches == []


def test_few_steps_are_worth_few_benches(monkeypatch):
    engine = LocalEngine(mlp(), CrossEntropy(), clients(**COUNTS))
    monkeypatch.setattr(engine, "_records", True)
    monkeypatch.setattr(engine, "_make_bench", lambda: Workbench(mlp(), CrossEntropy(), record=False))
    monkeypatch.setattr(workbench, "RECORDING", 2)
    used = []
    own = local.side_by_side
    monkeypatch.setattr(local, "side_by_side", lambda benches, runs: used.append(len(benches)) or own(benches, runs))
    for rate in (0.1, 0.1, 0.1, 0.2):  # 12 steps each; another rate is recorded anew
        engine.ask({name: Train(Snapshot.of(mlp()), 1, 4, rate, 0) for name in COUNTS})
    assert used == [2, 3, 4, 2]
    assert len(engine._benches) == 4


def test_one_compilation_serves_all_benches():
    counter = CompileCounter()
    compiled = torch.compile(weighted_loss, backend=counter, dynamic=False)
    inputs, targets = clients(ada=5)["ada"]
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=inputs.dtype)
    for seed in range(3):
        model = mlp(seed)
        wanted = torch.nn.functional.cross_entropy(model(inputs[:2]), targets[:2])
        torch.testing.assert_close(compiled(model, CrossEntropy(), inputs, targets, weights), wanted)
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recording needs a GPU")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # what compiling imports
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("build", [mlp, norm_net])
def test_recorded_steps_are_the_plain_ones(build, compiled, monkeypatch):
    monkeypatch.setattr(workbench, "RECORDING", 0)
    model = build().cuda()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    data = {name: (inputs.cuda(), labels.cuda()) for name, (inputs, labels) in clients(**COUNTS).items()}
    engine = LocalEngine(model, CrossEntropy(l2=0.01), data, compiled=compiled)
    assert engine._benches == []
    for rate, averaged in ((0.1, False), (0.2, True), (0.1, True)):  # another learning rate is recorded anew
        start = Snapshot.of(model)
        tasks = {name: Train(start, 3, 4, rate, seed, averaged=averaged) for seed, name in enumerate(data)}
        recorded = engine.ask(tasks)
        assert len(engine._benches) == len(COUNTS)
        for name, task in tasks.items():
            plain = engine._clients[name].perform(task)
            torch.testing.assert_close(recorded[name].update, plain.update, rtol=1e-9, atol=1e-12)
            for buffer, values in plain.buffers.items():
                torch.testing.assert_close(recorded[name].buffers[buffer], values, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recording needs a GPU")
@pytest.mark.parametrize("rule", [SGD(0.9), Adam(), AdamW()], ids=repr)
def test_a_memory_looks_on_while_steps_are_recorded(rule):
    model = mlp().cuda()
    data = {name: (inputs.cuda(), labels.cuda()) for name, (inputs, labels) in clients(**COUNTS).items()}
    engine, plan = LocalEngine(model, CrossEntropy(), data), TrainingPlan(3, 2, 4, 0.01, recipe=Recipe(rule))
    state = train(engine, Snapshot.of(model), plan)
    assert state.memory is not None
    assert state.memory.doubts(state.schedule) == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recording needs a GPU")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # what compiling imports
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_steps_on_tokens_are_the_plain_ones(compiled):
    model, chance = GPT(6, 5, width=8, depth=1, heads=2).double().cuda(), torch.Generator().manual_seed(0)
    inputs = {name: torch.randint(6, (count, 5), generator=chance).cuda() for name, count in COUNTS.items()}
    targets = {name: own.roll(-1, dims=1).where(own != 3, -100) for name, own in inputs.items()}
    data = {name: (inputs[name], targets[name]) for name in COUNTS}
    engine, start = LocalEngine(model, CrossEntropy(), data, compiled=compiled), Snapshot.of(model)
    tasks = {name: Train(start, 3, 4, 0.1, seed) for seed, name in enumerate(data)}
    for name, reply in engine.ask(tasks).items():
        plain = engine._clients[name].perform(tasks[name])
        torch.testing.assert_close(reply.update, plain.update, rtol=1e-9, atol=1e-12)


def test_batches_of_tokens_weigh_as_many_as_count():
    """A recorded step divides by the tokens that count in the batch, as the plain one does, not by its samples."""
    inputs = torch.randint(6, (12, 5), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, dims=1)
    for row in range(12):
        targets[row, : row % 5] = -100
    plain, filled = (
        Workbench(GPT(6, 5, width=8, depth=1, heads=2).double(), CrossEntropy(), record=False) for _ in range(2)
    )
    filled.model.load_state_dict(plain.model.state_dict())
    filled._stream = object()  # as if it were recorded: the step is what lies in its own tensors
    filled._recorded = lambda rate: partial(filled._descend, filled._weighted, rate)
    for part in (slice(0, 4), slice(3, 7), slice(8, 9), slice(6, 10), slice(1, 3)):
        for bench in (plain, filled):
            bench.step(Batch.of(inputs[part], targets[part]), batch_size=4, learning_rate=0.5)
        for own, wanted in zip(filled.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-12)


def test_short_batches_weigh_what_they_hold():
    loss, (inputs, targets) = CrossEntropy(l2=0.01), clients(ada=12)["ada"]
    plain, filled = (Workbench(mlp(), loss, record=False) for _ in range(2))
    filled._stream = object()  # as if it were recorded: the step is what lies in its own tensors
    filled._recorded = lambda rate: partial(filled._descend, filled._weighted, rate)
    for size, rate in ((4, 0.1), (4, 0.1), (1, 0.1), (4, 0.1), (3, 0.1), (3, 0.2), (4, 0.2), (2, 0.2)):
        for bench in (plain, filled):
            bench.step(Batch.of(inputs[:size], targets[:size]), batch_size=4, learning_rate=rate)
        for own, wanted in zip(filled.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-12)


def test_a_module_of_torch_jit_is_refused_in_a_sentence():
    with pytest.raises(ModelError, match=r"torch\.jit"):
        Workbench(torch.jit.script(mlp()), CrossEntropy(), record=False)
