"""The sum of replies in one pass is the sum of each one's reply, and costs as much."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from expunge.core import factors
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.engines.engine import ask_factors, ask_mean
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.summing import Summing
from expunge.federation.messages.tasks import CurvatureFactors, CurvatureProduct, Draw, Gradient, Losses
from federation.lying import LyingEngine
from federation.small import clients, generator, mlp, seeded

COUNTS = {"ada": 9, "bob": 11, "cyd": 4, "dan": 17}
DRAWS = {"ada": Draw(6, 3), "bob": Draw(7, 3), "cyd": None, "dan": Draw(5, 3, from_back=True)}
LOSSES = [CrossEntropy(), CrossEntropy(l2=0.3), CrossEntropy(weight=(1.0, 2.0, 0.5))]


class Tokens(nn.Module):
    """Two tables, a norm and a head over tokens."""

    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(7, 4, padding_idx=0), nn.Parameter(torch.zeros(1, 5, 4))
        self.norm, self.inner, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, texts):
        return self.head(torch.relu_(self.inner(self.norm(self.word(texts) + self.place))))


def picture_net():
    layers = (nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Flatten())
    return seeded(nn.Sequential(*layers, nn.Linear(16, 3)))


def pictures(count, seed):
    inputs = torch.randn(count, 2, 4, 4, generator=generator(seed), dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=generator(seed + 1))


def texts(count, seed):
    words = torch.randint(7, (count, 5), generator=generator(seed))
    targets = torch.randint(7, (count, 5), generator=generator(seed + 1))
    return words, targets.where(torch.rand(count, 5, generator=generator(seed)) > 0.3, -100)


MODELS = {
    "mlp": (mlp, clients(**COUNTS)),
    "pictures": (picture_net, {name: pictures(count, 5 * count) for name, count in COUNTS.items()}),
    "tokens": (lambda: seeded(Tokens()), {name: texts(count, 5 * count) for name, count in COUNTS.items()}),
}


def engines(model, loss, data, kind=LocalEngine):
    """One that asks each, and one that may sum."""
    alone, together = kind(model, loss, data), kind(model, loss, data)
    together._summing = Summing(1 << 30)  # as where the model is on a GPU
    return alone, together


def exactly(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "l2", "weighted"])
@pytest.mark.parametrize("chunk", [4, 250])
def test_the_sum_is_that_of_all_replies(kind, loss, chunk, monkeypatch):
    make, data = MODELS[kind]
    loss = CrossEntropy(l2=loss.l2) if kind == "tokens" else loss
    monkeypatch.setattr(factors, "CHUNK", chunk)
    model = make().eval()
    theta, (alone, together) = Snapshot.of(model), engines(model, loss, data)
    rows = torch.randn(2, theta.parameters.numel(), generator=generator(7), dtype=torch.float64)
    draws = {name: (DRAWS[name], (1,) if name == "bob" else ()) for name in data}

    gradients = {name: Gradient(theta, exclude=gone, draw=draw) for name, (draw, gone) in draws.items()}
    exactly(ask_mean(together, gradients), ask_mean(alone, gradients))
    for curved in ("ggn", "hessian"):
        for vectors in (rows, rows[:1] + 1.0, rows):
            products = {name: CurvatureProduct(theta, vectors, curved, *own) for name, own in draws.items()}
            exactly(ask_mean(together, products), ask_mean(alone, products))
    told = {name: CurvatureFactors(theta, seed, *draws[name]) for seed, name in enumerate(draws)}
    found, expected = ask_factors(together, told), ask_factors(alone, told)
    exactly(found.values, expected.values)
    assert found.blocks == expected.blocks
    assert asdict(together.cost) == pytest.approx(asdict(alone.cost))


def test_another_model_is_another_operator():
    _, together = engines(mlp(), CrossEntropy(), clients(**COUNTS))
    for seed in range(3):
        theta = Snapshot.of(mlp(seed))
        rows = torch.ones(1, theta.parameters.numel(), dtype=torch.float64)
        tasks = {name: CurvatureProduct(theta, rows, "ggn") for name in COUNTS}
        exactly(ask_mean(together, tasks), ask_mean(engines(mlp(), CrossEntropy(), clients(**COUNTS))[0], tasks))


def test_it_is_one_pass(monkeypatch):
    _, together = engines(mlp(), CrossEntropy(), clients(**COUNTS))
    monkeypatch.setattr("expunge.federation.engines.client.Client.perform", None)
    tasks = dict.fromkeys(COUNTS, Gradient(Snapshot.of(mlp())))
    assert ask_mean(together, tasks).shape == (31,)
    assert together.cost.rounds == 1


def test_who_lies_is_heard():
    honest, lying = (engines(mlp(), CrossEntropy(), clients(**COUNTS), kind)[1] for kind in (LocalEngine, LyingEngine))
    lying.lies = {"bob": lambda _, reply: reply}
    tasks = dict.fromkeys(COUNTS, Gradient(Snapshot.of(mlp())))
    assert honest.ask_sum(tasks) is not None
    assert lying.ask_sum(tasks) is None
    honest.ask = honest.ask
    assert honest.ask_sum(tasks) is None


def test_what_is_no_sum_of_one_thing_is_asked_of_each():
    _, together = engines(mlp(), CrossEntropy(), clients(**COUNTS))
    theta, other = Snapshot.of(mlp()), Snapshot.of(mlp(1))
    for tasks in (
        {"ada": Gradient(theta)},
        {"ada": Gradient(theta), "bob": Gradient(other)},
        {"ada": Gradient(theta), "bob": CurvatureFactors(theta, 0)},
        {"ada": Gradient(theta), "bob": Gradient(theta, only=(0,))},
        {name: Losses(theta, theta.parameters, (0.0,)) for name in COUNTS},
    ):
        assert together.ask_sum(tasks) is None
    assert together.cost.rounds == 0


def test_what_is_not_finite_is_told_as_by_each():
    alone, together = engines(mlp(), CrossEntropy(), clients(**COUNTS))
    theta = Snapshot.of(mlp())
    tasks = dict.fromkeys(COUNTS, Gradient(theta.moved(theta.parameters * torch.nan)))
    for engine in (alone, together):
        with pytest.raises(NumericalError, match="A gradient is NaN or infinite"):
            ask_mean(engine, tasks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="sums in one pass are a GPU's")
@pytest.mark.parametrize("kind", MODELS)
def test_on_a_gpu_it_is_what_a_cpu_tells(kind):
    make, data = MODELS[kind]
    there = {name: tuple(own.cuda() for own in pair) for name, pair in data.items()}
    slow, fast = LocalEngine(make(), CrossEntropy(), data), LocalEngine(make().cuda(), CrossEntropy(), there)
    found = {}
    for where, (engine, device) in enumerate(((slow, "cpu"), (fast, "cuda"))):
        theta = Snapshot.of(make().to(device))
        rows = torch.randn(2, theta.parameters.numel(), generator=generator(7), dtype=torch.float64).to(device)
        tasks = (
            {name: Gradient(theta, draw=DRAWS[name]) for name in data},
            {name: CurvatureProduct(theta, rows, "ggn", DRAWS[name]) for name in data},
        )
        factored = ask_factors(engine, {name: CurvatureFactors(theta, 3, DRAWS[name]) for name in data})
        found[where] = [factored.values, *(ask_mean(engine, own) for own in tasks)]
    assert fast.ask_sum(tasks[0]) is not None
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-6, atol=1e-8)
