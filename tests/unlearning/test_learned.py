"""Data that do not belong to the model are seen by losses that no training has lowered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expunge import forget
from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, MeanSquaredError, PerSample, SquaredError
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import Adam, FedAvgM, Recipe
from expunge.unlearning.learned import Learned, guessed
from expunge.unlearning.request import Request
from federation.small import generator, seeded

CLASSES, UNLEARNT = 4, "predicts the data of those who stay no better than"
CENTRES = 2 * torch.randn(CLASSES, 6, generator=generator(5), dtype=torch.float64)
WITHOUT_MEMORY = {"method": "hf-kcu", "damping": 0.1}


def blobs(count, seed, classes=range(CLASSES)):
    """A cloud of samples around the centre of each class."""
    labels = torch.tensor(classes)[torch.randint(len(classes), (count,), generator=generator(seed))]
    return CENTRES[labels] + torch.randn(count, 6, generator=generator(seed + 1), dtype=torch.float64), labels


NAMES = ("ada", "bob", "cyd", "dan", "eve")
ALIKE = {name: blobs(60, 10 * number) for number, name in enumerate(NAMES)}
APART = {name: blobs(60, 10 * number, (number % 4, (number + 1) % 4)) for number, name in enumerate(NAMES)}
POISONED = ALIKE | {"bob": (ALIKE["bob"][0], (ALIKE["bob"][1] + 1) % CLASSES)}
UNEQUAL = {name: blobs(20 * 2**number, 10 * number) for number, name in enumerate(NAMES)}
NUMBERS = {name: (inputs, inputs[:, :2] @ torch.ones(2, 1).double()) for name, (inputs, _) in ALIKE.items()}


def network(outputs=CLASSES):
    return seeded(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)))


def trained(data=ALIKE, loss=None, outputs=CLASSES, boosts=None, **plan):
    model = network(outputs)
    engine = LocalEngine(model, loss or CrossEntropy(), data, boosts)
    plan = TrainingPlan(**{"rounds": 4, "epochs": 2, "batch_size": 16, "learning_rate": 0.2} | plan)
    state = train(engine, Snapshot.of(model), plan, keep=Keep())
    state.model.write_to(model)
    return model, state.memory


def told(model, data, **call):
    return [warning for warning in forget(model, data, "ada", **call).warnings if UNLEARNT in warning]


def next_label(inputs, labels):
    return inputs, (labels + 1) % CLASSES


def shuffled(inputs, labels):
    return inputs, labels[torch.randperm(len(labels), generator=generator(3))]


@pytest.mark.parametrize("changed", [next_label, shuffled])
@pytest.mark.parametrize("kept", [True, False])
def test_labels_in_another_order_are_told(changed, kept):
    model, memory = trained()
    data = {name: changed(*pair) for name, pair in ALIKE.items()}
    (warning,) = told(model, data, **({"memory": memory} if kept else WITHOUT_MEMORY))
    assert ("the weights that the training began with" in warning) == kept


def test_numbers_of_another_scale_are_told():
    model, memory = trained(NUMBERS, SquaredError(), 1, learning_rate=0.05)
    other = {name: (inputs, -targets) for name, (inputs, targets) in NUMBERS.items()}
    assert told(model, other, loss="squared_error", memory=memory)
    assert told(model, other, loss="squared_error", **WITHOUT_MEMORY)
    for call in ({"memory": memory}, WITHOUT_MEMORY):
        assert told(model, NUMBERS, loss="squared_error", **call) == []


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("data", "plan"),
    [
        (ALIKE, {}),
        (ALIKE, {"rounds": 1, "epochs": 2, "batch_size": 60, "learning_rate": 0.3}),  # has hardly learnt anything
        (ALIKE, {"recipe": Recipe(Adam()), "learning_rate": 0.02}),
        (ALIKE, {"recipe": Recipe(server=FedAvgM(momentum=0.5)), "learning_rate": 0.1}),
        (ALIKE, {"participation": 0.4}),
        (APART, {"participation": 0.2, "epochs": 10, "rounds": 5}),  # fits whoever came last
        (POISONED, {"boosts": {"bob": 3.0}}),
        (UNEQUAL, {}),
    ],
)
def test_the_data_of_the_training_are_not_doubted(data, plan, kept):
    model, memory = trained(data, **plan)
    assert told(model, data, **({"memory": memory} if kept else WITHOUT_MEMORY)) == []


def test_its_cost_is_told_and_it_asks_once():
    model, _ = trained()
    engine, request = LocalEngine(model, CrossEntropy(l2=3.0), ALIKE), Request.of("ada")
    state = ServerState(Snapshot.of(model))
    check = Learned(state, request.parties(engine.clients()), CrossEntropy(l2=3.0))
    assert check.doubts(engine) == ()  # a penalty is no loss of theirs
    assert engine.cost.rounds == check.estimate.messages == 1
    assert engine.cost.sample_gradients <= check.estimate.sample_gradients
    assert engine.cost.bytes_down <= check.estimate.bytes_down
    assert engine.cost.bytes_up <= check.estimate.bytes_up


class TestTheBestAnswerForAll:
    def test_of_classes_is_how_often_each_comes(self):
        labels = torch.tensor([0, 0, 1, 2])
        assert guessed(CrossEntropy(), labels) == pytest.approx(1.5 * torch.tensor(2.0).log().item())
        assert guessed(CrossEntropy(ignore_index=2), torch.tensor([[0, 2], [1, 2]])) == pytest.approx(0.6931, abs=1e-4)
        weighted = CrossEntropy(weight=(1.0, 2.0, 0.0, 1.0))
        assert guessed(weighted, labels) == pytest.approx(0.6931, abs=1e-4)

    def test_of_numbers_is_their_mean(self):
        targets = torch.tensor([[0.0], [2.0]])
        assert guessed(SquaredError(), targets) == 0.5
        assert guessed(MeanSquaredError(), targets) == 1.0
        assert guessed(BinaryCrossEntropy(), targets / 2) == pytest.approx(0.6931, abs=1e-4)

    def test_of_an_unknown_loss_is_not_known(self):
        assert guessed(PerSample(lambda outputs, targets: outputs[:, 0]), torch.zeros(2)) is None
