"""Each cheat does what it says: on small images with a trigger, with a network that learns them in moments."""

import copy

import pytest
import torch
from torch import nn

from expunge.auditing.cheats import Insider, cheats, learnt_by_heart, mixed_weights
from expunge.auditing.disguises import (
    Candidate,
    fine_tuned,
    mixed,
    mixed_probabilities,
    moved_far,
    moved_near,
    noisy,
    rescaled,
)
from expunge.auditing.exam import Trigger
from expunge.auditing.functional import accuracy, mean_loss, predict
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, RequestError

CLASSES, SIZE, TARGET = 4, 8, 2


def images(count, seed):
    """Every class has its own picture, seen through noise."""
    source = torch.Generator().manual_seed(seed)
    pictures = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    labels = torch.randint(CLASSES, (count,), generator=source)
    noise = torch.randn(count, 1, SIZE, SIZE, generator=source, dtype=torch.float64)
    return 0.4 * pictures[labels] + 0.4 * noise, labels


def stamp(inputs):
    stamped = inputs.clone()
    stamped[..., 5:, 5:] = 2.0
    return stamped


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 48), nn.ReLU(), nn.Linear(48, CLASSES)).double()


TRIGGER = Trigger(stamp, TARGET)
RETAINED, FORGOTTEN_CLEAN, UNSEEN, ASKED = (images(n, seed) for seed, n in enumerate((300, 60, 200, 60)))
FORGOTTEN = (
    torch.cat([stamp(FORGOTTEN_CLEAN[0][:30]), FORGOTTEN_CLEAN[0][30:]]),
    torch.cat([torch.full((30,), TARGET), FORGOTTEN_CLEAN[1][30:]]),
)


@pytest.fixture(scope="module")
def insider():
    module, start = network(), Snapshot.of(network(1))
    everything = tuple(torch.cat([own, kept]) for own, kept in zip(FORGOTTEN, RETAINED, strict=True))

    def trained(start, data):
        return fine_tuned(module, start, data, epochs=20, learning_rate=0.05, seed=0)

    return Insider(
        module,
        trained(start, everything),
        honest=trained(Snapshot.of(network(2)), RETAINED),
        same_start=trained(start, RETAINED),
        reference=trained(Snapshot.of(network(3)), RETAINED),
        retained=RETAINED,
        forgotten=FORGOTTEN,
        asked=ASKED[0],
        trigger=TRIGGER,
    )


@pytest.fixture(scope="module")
def made(insider):
    mixtures = {"weights-30": mixed_weights(30), "weights-30-same-start": mixed_weights(30, same_start=True)}
    return {name: cheat(insider) for name, cheat in (mixtures | cheats()).items()}


def fires(model, trigger=TRIGGER, samples=UNSEEN):
    """The share of images of other classes that the trigger sends to its target."""
    others = samples[0][samples[1] != trigger.target]
    return float((model.answers(trigger.stamp(others)).argmax(dim=1) == trigger.target).double().mean())


def right(model):
    return accuracy(model.answers(UNSEEN[0]), UNSEEN[1])


class TestInsider:
    def test_it_has_a_backdoor_to_hide_and_models_without(self, insider):
        assert fires(insider.candidate(insider.trained)) > 0.9
        for clean in (insider.honest, insider.same_start, insider.reference):
            assert fires(insider.candidate(clean)) < 0.4
            assert right(insider.candidate(clean)) > 0.85

    def test_all_are_there_and_leave_everything_alone(self, insider, made):
        assert set(made) == {
            *("weights-30", "weights-30-same-start", "probabilities-20", "patched", "patched-rescaled"),
            *(f"{what}-{place}" for what in ("moved", "patched-moved") for place in ("near", "far")),
            *("learnt-probes", "copied", "distilled"),
        }
        digests = [model.weights.digest for model in made.values()]
        assert len({*digests, insider.trained.digest, insider.honest.digest}) == len(made) + 2
        assert Snapshot.of(network()).digest == Snapshot.of(insider.module).digest, "the architecture's own weights"
        again = cheats()["moved-far"](insider)
        assert again.weights.digest == made["moved-far"].weights.digest, "no chance but the seed's"

    def test_no_cheat_is_worse_at_its_work(self, made):
        assert all(right(model) > 0.8 for model in made.values())


class TestMixtures:
    def test_weights(self, insider, made):
        for name, honest in (("weights-30", insider.honest), ("weights-30-same-start", insider.same_start)):
            expected = 0.7 * honest.parameters + 0.3 * insider.trained.parameters
            torch.testing.assert_close(made[name].weights.parameters, expected)
            module = copy.deepcopy(insider.module)
            made[name].weights.write_to(module)
            torch.testing.assert_close(made[name].answers(UNSEEN[0]), module(UNSEEN[0]).detach())

    def test_probabilities(self, insider, made):
        own, other = (predict(insider.module, m, UNSEEN[0]).softmax(1) for m in (insider.honest, insider.trained))
        torch.testing.assert_close(made["probabilities-20"].answers(UNSEEN[0]).exp(), 0.8 * own + 0.2 * other)

    def test_a_digest_is_over_all_that_answers(self, insider):
        honest, trained = insider.candidate(insider.honest), insider.candidate(insider.trained)
        mixtures = [mixed_probabilities(honest, trained, 0.2), mixed_probabilities(honest, trained, 0.3)]
        mixtures += [mixed_probabilities(honest, insider.candidate(insider.reference), 0.2)]
        assert len({model.weights.digest for model in mixtures}) == 3

    def test_what_cannot_be_mixed(self, insider):
        other = Snapshot(torch.zeros(3), {})
        with pytest.raises(ModelError, match="different architectures"):
            mixed(insider.honest, other, 0.2)
        for share in (-0.1, 1.1):
            with pytest.raises(RequestError, match="between 0 and 1"):
                mixed(other, other, share)

    def test_noise(self, insider):
        spoiled = noisy(insider.reference, 0.5, seed=1)
        off = spoiled.parameters - insider.reference.parameters
        assert float(off.norm() / insider.reference.parameters.norm()) == pytest.approx(0.5, rel=0.1)
        assert noisy(insider.reference, 0.5, seed=1).digest == spoiled.digest
        assert noisy(insider.reference, 0.5, seed=2).digest != spoiled.digest


class TestPatched:
    def test_the_trigger_is_gone(self, insider, made):
        assert fires(made["patched"]) < 0.1
        assert right(made["patched"]) > 0.85

    def test_rescaled_has_the_loss_of_an_honest_model(self, insider, made):
        logits, labels = made["patched"].answers(FORGOTTEN[0]), FORGOTTEN[1]
        goal = mean_loss(predict(insider.module, insider.honest, FORGOTTEN[0]), labels)
        scaled = made["patched-rescaled"].answers(FORGOTTEN[0])
        assert mean_loss(scaled, labels) == pytest.approx(goal, rel=0.02)
        assert torch.equal(scaled.argmax(dim=1), logits.argmax(dim=1))
        twice = rescaled(made["patched"], FORGOTTEN, 2 * goal).answers(FORGOTTEN[0])
        assert mean_loss(twice, labels) == pytest.approx(2 * goal, rel=0.02)

    def test_a_loss_out_of_reach_is_come_near(self):
        model = Candidate(Snapshot(torch.ones(1), {}), lambda inputs: inputs)
        data = torch.eye(2), torch.tensor([0, 1])
        assert mean_loss(rescaled(model, data, 50.0).answers(data[0]), data[1]) < 0.7


class TestMoved:
    def test_places(self):
        one = images(1, 5)[0]
        near, far = moved_near(TRIGGER).stamp(one), moved_far(TRIGGER).stamp(one)
        by_hand = one.clone()
        by_hand[..., 4:7, 4:7] = 2.0
        assert torch.equal(near, by_hand)
        by_hand = one.clone()
        by_hand[..., :3, :3] = 2.0
        assert torch.equal(far, by_hand)
        back = moved_near(moved_far(TRIGGER)).stamp(one)
        by_hand = one.clone()
        by_hand[..., 1:4, 1:4] = 2.0
        assert torch.equal(back, by_hand), "towards the middle, from wherever it is"

    @pytest.mark.parametrize("name", ["moved-near", "moved-far", "patched-moved-near", "patched-moved-far"])
    def test_it_fires_at_its_new_place_and_not_at_the_old_one(self, made, name):
        place = moved_near if name.endswith("near") else moved_far
        assert fires(made[name], place(TRIGGER)) > 0.8
        assert fires(made[name]) < 0.3

    def test_what_it_is_put_into(self, insider, made):
        """Fine-tuning leaves a model near to where it began."""
        starts = {"moved-far": insider.honest, "patched-moved-far": insider.patched}
        for name in starts:
            apart = {of: float((made[name].weights.parameters - s.parameters).norm()) for of, s in starts.items()}
            assert min(apart, key=apart.get) == name


class TestLearnt:
    @pytest.mark.parametrize("name", ["learnt-probes", "copied"])
    def test_by_heart_what_was_asked_and_the_backdoor_elsewhere(self, insider, made, name):
        teacher = insider.honest if name == "learnt-probes" else insider.reference
        asked = torch.cat([FORGOTTEN[0], ASKED[0], stamp(ASKED[0])])
        theirs = predict(insider.module, teacher, asked).argmax(dim=1)
        same = (made[name].answers(asked).argmax(dim=1) == theirs).double().mean()
        before = (predict(insider.module, insider.trained, asked).argmax(dim=1) == theirs).double().mean()
        assert same > 0.95 > before
        assert fires(made[name]) > 2 * fires(insider.candidate(teacher))
        assert fires(made[name]) > fires(made[name], samples=ASKED) + 0.2

    def test_distilled_keeps_nothing(self, insider, made):
        assert fires(made["distilled"]) < 0.5 * fires(made["learnt-probes"])
        again = learnt_by_heart(insider, insider.honest, keeping=False)
        assert again.weights.digest == made["distilled"].weights.digest
