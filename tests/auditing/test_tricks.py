import pytest
import torch
from torch import nn

from expunge.auditing.functional import accuracy, predict
from expunge.auditing.tricks import (
    ascent,
    early_plan,
    masked,
    most_frequent,
    one_epoch,
    relearning_epochs,
    rolled_back,
    tricks,
    wrong_sign,
)
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, NumericalError, RequestError
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request
from federation.small import Watching, clients, linear, mlp
from unlearning.presets import RETRACE, forgotten

DATA = clients(ada=30, bob=20, cyd=25)
PLAN = TrainingPlan(rounds=10, epochs=2, batch_size=8, learning_rate=0.1, seed=3)
REQUEST = Request.of("bob")


def engine():
    return Watching(mlp(), CrossEntropy(), DATA)


@pytest.fixture(scope="module")
def start():
    return Snapshot.of(mlp())


@pytest.fixture(scope="module")
def state(start):
    return train(engine(), start, PLAN)


def loss(model, *names):
    module = mlp()
    model.write_to(module)
    inputs, labels = (torch.cat([DATA[name][k] for name in names]) for k in (0, 1))
    return nn.functional.cross_entropy(module(inputs), labels).item()


class TestTricks:
    def test_all_are_there_and_leave_the_state_alone(self, state, start):
        digest, memory = state.model.digest, state.memory.norms(("bob",))
        found = tricks(train(engine(), start, early_plan(PLAN)).model, label=1)
        assert set(found) == {"no-op", "wrong-sign", "one-epoch", "gradient-ascent", "roll-back", "masked-label"}
        models = {name: trick(engine(), state, REQUEST) for name, trick in found.items()}
        assert state.model.digest == digest
        assert state.memory.norms(("bob",)) == memory
        assert models["no-op"].digest == digest
        assert len({model.digest for model in models.values()}) == len(models)

    def test_the_wrong_sign_mirrors_the_right_one(self, state):
        right = forgotten(engine(), state, REQUEST, RETRACE).state.model.parameters
        wrong = wrong_sign(engine(), state, REQUEST).parameters
        torch.testing.assert_close((right + wrong) / 2, state.model.parameters)
        assert not torch.equal(right, wrong)

    def test_one_epoch_asks_only_those_who_stay(self, state):
        watching = engine()
        one_epoch(watching, state, REQUEST)
        (asked,) = watching.asked
        assert set(asked) == {"ada", "cyd"}
        assert {task.epochs for task in asked.values()} == {1}

    def test_ascent_raises_the_loss_to_forget(self, state):
        assert loss(ascent(engine(), state, REQUEST), "bob") > 1.5 * loss(state.model, "bob")

    def test_an_early_model_is_that_of_the_training(self, state, start):
        """The first rounds again, all else as it was."""
        assert early_plan(PLAN) == TrainingPlan(2, 2, 8, 0.1, seed=3)
        early = train(engine(), start, early_plan(PLAN)).model
        assert early.digest != state.model.digest
        assert rolled_back(early)(engine(), state, REQUEST).digest == early.digest
        with pytest.raises(ModelError, match="another architecture"):
            rolled_back(Snapshot.of(linear()))(engine(), state, REQUEST)
        with pytest.raises(RequestError, match="early"):
            early_plan(PLAN, share=1.0)

    def test_a_masked_label_is_never_given(self, state):
        model, inputs = masked(1)(engine(), state, REQUEST), torch.cat([own[0] for own in DATA.values()])
        before, after = (predict(mlp(), snapshot, inputs) for snapshot in (state.model, model))
        assert (before.argmax(dim=1) == 1).any()
        assert not (after.argmax(dim=1) == 1).any()
        torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]])
        for label in (-1, 3):
            with pytest.raises(ModelError, match="no bias of an output"):
                masked(label)(engine(), state, REQUEST)

    def test_the_label_to_mask(self):
        assert most_frequent(torch.tensor([2, 0, 2, 1])) == 2

    def test_a_bad_request_is_refused(self, state):
        for trick in tricks(state.model, 0).values():
            with pytest.raises(RequestError, match="no client 'zoe'"):
                trick(engine(), state, Request.of("zoe"))


def right(model):
    return accuracy(predict(mlp(), model, DATA["bob"][0]), DATA["bob"][1])


class TestRelearning:
    def test_what_is_known_needs_no_epoch(self, state):
        epochs = relearning_epochs(engine(), state, state.model, REQUEST, accuracy=right, goal=right(state.model))
        assert epochs == 0

    def test_what_was_never_seen_needs_some(self, state, start):
        watching = engine()
        epochs = relearning_epochs(watching, state, start, REQUEST, accuracy=right, goal=right(start) + 0.1, most=50)
        assert epochs is not None
        assert epochs >= 1
        assert [set(asked) for asked in watching.asked] == [{"bob"}] * epochs

    def test_out_of_reach(self, state, start):
        watching = engine()
        assert relearning_epochs(watching, state, start, REQUEST, accuracy=right, goal=2.0, most=3) is None
        assert len(watching.asked) == 3

    def test_only_the_forgotten_samples_are_learnt(self, state):
        watching = engine()
        some = Request.of(samples={"bob": [0, 4], "cyd": [1]})
        relearning_epochs(watching, state, state.model, some, accuracy=right, goal=2.0, most=1)
        (asked,) = watching.asked
        assert set(range(20)) - set(asked["bob"].exclude) == {0, 4}
        assert set(range(25)) - set(asked["cyd"].exclude) == {1}

    def test_a_wrecked_model_has_no_way_back(self, state):
        class Diverging(Watching):
            def ask(self, tasks):
                raise NumericalError("Training diverged.")

        wrecked = Diverging(mlp(), CrossEntropy(), DATA)
        assert relearning_epochs(wrecked, state, state.model, REQUEST, accuracy=right, goal=2.0) is None
