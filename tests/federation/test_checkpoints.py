"""Checkpoints of a training's way: which are kept, that they are read back, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.checkpoints import Checkpoints, thinned, wanted_rounds
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import Adam, Recipe
from federation.small import clients, norm_net

PLAN = TrainingPlan(rounds=5, epochs=1, batch_size=4, learning_rate=0.1)


def trained(plan=PLAN, **keep):
    engine = LocalEngine(norm_net(), CrossEntropy(), clients(ada=9, bob=11))
    return train(engine, Snapshot.of(norm_net()), plan, keep=Keep(**keep))


def test_training_keeps_the_models_that_the_rounds_began_with():
    state = trained()
    assert list(state.checkpoints.models) == [0, 2, 4] == list(wanted_rounds(3, 5))
    assert state.checkpoints.models[0].digest == Snapshot.of(norm_net()).digest
    for number in (2, 4):
        shorter = TrainingPlan(number, PLAN.epochs, PLAN.batch_size, PLAN.learning_rate)
        assert state.checkpoints.models[number].digest == trained(shorter).model.digest
    assert state.checkpoints.stored_bytes == 3 * state.model.stored_bytes
    assert trained(checkpoints=0).checkpoints is None
    with pytest.raises(RequestError, match="At least 0"):
        Keep(checkpoints=-1)


def test_they_are_read_back(tmp_path):
    kept = trained().checkpoints
    kept.save(tmp_path / "checkpoints")
    read = Checkpoints.load(tmp_path / "checkpoints")
    assert {n: model.digest for n, model in read.models.items()} == {n: m.digest for n, m in kept.models.items()}
    assert {n: model.layout for n, model in read.models.items()} == {n: m.layout for n, m in kept.models.items()}


def test_how_the_training_went_is_read_back_with_them(tmp_path):
    for recipe in (None, Recipe(Adam(betas=(0.8, 0.9)))):
        Checkpoints(trained().checkpoints.models, recipe).save(tmp_path / "checkpoints")
        assert Checkpoints.load(tmp_path / "checkpoints").recipe == recipe


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_training_of_known_length_ends_with_those_that_are_wanted(count):
    for rounds in (1, 4, 20, 33):
        kept = ()
        for number in range(rounds):
            kept = thinned((*kept, number), count, rounds)
            assert len(kept) == min(count, number + 1)
        assert kept == wanted_rounds(count, rounds)[: len(kept)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_of_a_training_of_unknown_length_no_round_is_far_from_one(count):
    def apart(numbers, rounds):
        return sum(min(abs(number - own) for own in numbers) for number in range(rounds))

    kept = ()
    for number in range(200):
        kept = thinned((*kept, number), count)
        assert apart(kept, number + 1) <= 1.5 * apart(wanted_rounds(count, number + 1), number + 1) + 1
    assert thinned(kept, 0) == ()


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_damaged_file_is_refused(tmp_path, cut):
    path = tmp_path / "checkpoints"
    trained().checkpoints.save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match="cannot be read"):
        Checkpoints.load(path)


def test_a_changed_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "checkpoints"
    trained().checkpoints.save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        Checkpoints.load(path)
    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    for name in ("plain", "absent"):
        with pytest.raises(DataError, match="cannot be read"):
            Checkpoints.load(tmp_path / name)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({}, "at least one model"),
        ({-1: 2}, "number of rounds before them"),
        ({True: 2}, "number of rounds before them"),
        ({0.5: 2}, "number of rounds before them"),
        ({0: 2, 1: 3}, "different sizes"),
    ],
)
def test_what_is_no_checkpoint_is_refused(models, said):
    with pytest.raises(RequestError, match=said):
        Checkpoints({number: Snapshot(torch.zeros(size), {}) for number, size in models.items()})
