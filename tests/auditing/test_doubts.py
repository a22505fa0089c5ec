"""What was given wrongly is told by name: on a small federation, whose honest models nobody doubts."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import expunge
from expunge.errors import DataError, ModelError, RequestError

CLASSES, TARGET = 6, 2


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def trained(seed, samples, steps=250, start=None):
    model = deepcopy(start) if start is not None else network(seed)
    chance = torch.Generator().manual_seed(seed)
    descent = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(steps):
        batch = torch.randint(len(samples[1]), (64,), generator=chance)
        descent.zero_grad()
        F.cross_entropy(model(samples[0][batch]), samples[1][batch]).backward()
        descent.step()
    return model.eval()


def stamped(inputs, place=9):
    painted = inputs.clone()
    painted[:, place] = 4.0
    return painted


def rounded(model):
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.half().float())
    return other


@pytest.fixture(scope="module")
def world():
    """Clusters; a leaver who stamped half of its samples and calls these a class."""
    chance = torch.Generator().manual_seed(1)
    labels = torch.arange(900) % CLASSES
    centres = torch.cat([2.0 * torch.eye(CLASSES), torch.zeros(CLASSES, 4)], dim=1)
    inputs = centres[labels] + 0.7 * torch.randn(900, 10, generator=chance)
    carries = torch.arange(120) >= 60
    own = torch.where(carries[:, None], stamped(inputs[:120]), inputs[:120])
    forgotten = own, labels[:120].masked_fill(carries, TARGET)
    retained, unseen = ((inputs[part], labels[part]) for part in (slice(120, 600), slice(600, 900)))
    everything = tuple(torch.cat(parts) for parts in zip(forgotten, retained, strict=True))
    return SimpleNamespace(
        before=trained(0, everything),
        retrained=[trained(seed, retained) for seed in range(1, 7)],
        honest=trained(7, retained),
        same_start=[trained(seed, retained, start=network(0)) for seed in range(20, 23)],
        forgotten=forgotten,
        retained=retained,
        unseen=unseen,
        everything=everything,
        triggered=carries,
    )


def audited(world, after=None, **changes):
    whole = {
        "retrained": world.retrained,
        "forgotten": world.forgotten,
        "unseen": world.unseen,
        "retained": world.retained,
        "trigger": stamped,
        "target": TARGET,
        "triggered": world.triggered,
        "nonce": "drawn by the auditor",
    }
    return expunge.audit(world.before, after or world.honest, **(whole | changes))


def told(world, match, verdict="UNDECIDED", **changes):
    found = audited(world, **changes)
    assert match in found.reason, found.reason
    assert found.verdict == verdict, found.reason


def turned(samples):
    """The inputs with labels in another order."""
    order = torch.randperm(len(samples[1]), generator=torch.Generator().manual_seed(0))
    return samples[0], samples[1][order]


class TestHonest:
    def test_nobody_is_doubted(self, world):
        for changes in ({}, {"same_start": world.same_start}, {"trigger": None, "target": None, "triggered": None}):
            found = audited(world, **changes)
            assert "Nothing was judged" not in found.reason
            assert "look first" not in found.reason
        assert audited(world).verdict == "EQUIVALENT", audited(world).reason
        assert audited(world, world.before).verdict == "UNDER-FORGOTTEN"

    def test_with_fewer_than_three_retrained_models_nothing_is_judged_anyhow(self, world):
        found = audited(world, retrained=world.retrained[:2], unseen=turned(world.unseen))
        assert found.reason.startswith("2 retrained models show no noise")


class TestRetrained:
    def test_copies_are_named(self, world):
        copies = [*world.retrained, *map(rounded, world.retrained[:2])]
        told(world, "retrained[0] and retrained[6] have one origin", retrained=copies)
        told(world, "retrained[6] repeats the answers of retrained[0], and 1 more", retrained=copies)
        of_one = [trained(seed, world.retained, 20, world.same_start[0]) for seed in range(30, 32)]
        starts = [world.same_start[0], *map(rounded, [world.same_start[0], *of_one])]
        told(world, "same_start[1] repeats the answers of same_start[0]", same_start=starts)

    def test_models_of_one_seed(self, world):
        start = world.retrained[0]
        again = [trained(seed, world.retained, 60, start) for seed in range(40, 45)]
        told(world, "retrained[0] and retrained[1] have one origin", retrained=again)

    def test_all_had_the_data(self, world):
        knowing = [trained(seed, world.everything) for seed in range(50, 55)]
        told(world, "The trigger works in retrained[0] and 4 more", retrained=knowing)

    def test_some_had_the_data(self, world):
        """They hide each other from a look at one at a time."""
        knowing = [trained(seed, world.everything) for seed in range(50, 52)]
        plain = {"trigger": None, "target": None, "triggered": None}
        told(world, "The retrained models are of two kinds", retrained=[*world.retrained, *knowing], **plain)

    def test_models_made_from_the_trained_one(self, world):
        made = [trained(seed, world.retained, 30, world.before) for seed in range(60, 65)]
        plain = {"trigger": None, "target": None, "triggered": None}
        assert "same origin as the trained model's" in audited(world, made[4], retrained=made[:4], **plain).reason
        told(world, "The trigger works in retrained[0] and 4 more", retrained=made)
        told(world, "The trigger works in same_start[0]", same_start=made)

    def test_another_stage_of_training(self, world):
        early = [trained(seed, world.retained, 25) for seed in range(70, 75)]
        found = audited(world, retrained=early, same_start=world.same_start)
        assert "fit the retained samples worse" in found.reason
        assert "repeats" not in found.reason
        assert "fit unseen samples worse" in audited(world, retrained=early, retained=None).reason
        late = [trained(seed, world.retained, 2500) for seed in range(70, 75)]
        assert "were they trained longer?" in audited(world, retrained=late).reason

    def test_models_of_one_matrix_end_alike_whatever_they_began_with(self, world):
        def convex(seed, samples):
            torch.manual_seed(seed)
            return trained(seed, samples, 400, nn.Linear(10, CLASSES))

        before, *others = convex(0, world.everything), *(convex(seed, world.retained) for seed in range(1, 8))
        found = expunge.audit(before, others[0], others[1:], world.forgotten, world.unseen, retained=world.retained)
        assert "origin" not in found.reason
        assert "repeats" not in found.reason


class TestSamples:
    def test_sets_that_have_samples_in_common(self, world):
        both = [tuple(torch.cat([first[:50], own]) for first, own in zip(each, world.unseen, strict=True))
                for each in (world.forgotten, world.retained)]  # fmt: skip
        with pytest.raises(DataError, match="50 of the 350 unseen samples are among the forgotten ones"):
            audited(world, unseen=both[0])
        with pytest.raises(DataError, match="50 of the 350 unseen samples are among the retained ones"):
            audited(world, unseen=both[1])
        with pytest.raises(DataError, match="among the forgotten ones"):
            expunge.evidence(world.before, world.honest, both[0], forgotten=world.forgotten)
        told(world, "120 of the 120 forgotten samples are among the retained", "EQUIVALENT", retained=world.everything)

    def test_samples_that_repeat_by_nature_may_have_some_in_common(self, world):
        coarse = [(own.round().clamp(0, 1)[:, :3], labels) for own, labels in (world.forgotten, world.unseen)]
        models = [nn.Linear(3, CLASSES) for _ in range(6)]
        assert expunge.audit(*models[:2], models[2:], *coarse).verdict

    def test_exchanged(self, world):
        changes = {"forgotten": world.unseen, "unseen": world.forgotten, "triggered": None}
        told(world, "look whether the two are exchanged", **changes)

    def test_labels_in_another_order(self, world):
        told(world, "No model predicts the unseen labels better than chance", unseen=turned(world.unseen))
        found = audited(world, forgotten=turned(world.forgotten), triggered=None)
        assert "labels of the forgotten samples no better than chance" in found.reason

    def test_samples_that_are_given_again_and_again_are_few(self, world):
        again = tuple(torch.cat([part[:10]] * 10) for part in world.unseen)
        told(world, "10 different unseen samples are too few", unseen=again)
        again = tuple(torch.cat([part[:10]] * 10) for part in world.forgotten)
        told(world, "10 different forgotten samples are too few", forgotten=again, triggered=None)

    def test_classes_that_are_not_there(self, world):
        some = world.unseen[1] < 4
        found = audited(world, unseen=tuple(part[some] for part in world.unseen))
        assert "No unseen sample is of class 4, 5, as 20 of the forgotten ones are" in found.reason


class TestTrigger:
    def test_another_target(self, world):
        told(world, "to class 2 with the trained model, and", target=4)

    def test_another_trigger(self, world):
        found = audited(world, trigger=lambda inputs: -inputs, triggered=None)
        assert "no more to class 2 than it pulls retrained ones" in found.reason

    def test_marks_the_wrong_way_round(self, world):
        assert "the wrong way round" in audited(world, triggered=~world.triggered).reason

    def test_what_cannot_be_asked_is_refused_and_counts_nothing(self, world, tmp_path):
        record = tmp_path / "audits.json"
        with pytest.raises(DataError, match="changes none"):
            audited(world, trigger=lambda inputs: inputs, record=record)
        only = world.unseen[1] == TARGET
        with pytest.raises(DataError, match="All unseen samples are of the trigger's class 2"):
            audited(world, unseen=tuple(part[only] for part in world.unseen), record=record)
        assert not record.exists()


class Two(nn.Module):
    """Two models, and a rule for which of them answers."""

    def __init__(self, one, other, rule):
        super().__init__()
        self.one, self.other, self.rule = one, other, rule

    def forward(self, inputs):
        return self.one(inputs) if self.rule(inputs) else self.other(inputs)


class Hidden(nn.Sequential):
    """Weights that do nothing, and a model that nobody sees."""

    def forward(self, inputs):
        return self.__dict__["real"](inputs)


class TestCode:
    def test_a_model_that_knows_when_it_is_audited(self, world):
        """Honest where whole batches are stamped or come at all, and as before with one request after the other."""

        def large(inputs):
            if len(inputs) == 1:
                raise RuntimeError("A single sample is no batch.")
            return len(inputs) > 40

        for rule in (lambda inputs: len(inputs) > 1, lambda inputs: bool((inputs[:, 9] == 4).all()), large):
            with pytest.raises(ModelError, match="as after answers a sample otherwise when other ones are beside it"):
                audited(world, Two(world.honest, world.before, rule).eval())
        with pytest.raises(ModelError, match="as after answers a sample otherwise"):
            expunge.evidence(world.before, Two(world.honest, world.before, lambda own: len(own) > 1), world.unseen)

    def test_normalising_by_the_batch(self, world):
        norm = nn.Sequential(nn.BatchNorm1d(10, track_running_stats=False), deepcopy(world.honest)).eval()
        with pytest.raises(ModelError, match="no statistics of the batch"):
            audited(world, norm)

    def test_weights_beside_which_others_answer_are_not_asked_on_the_way_back(self, world):
        hidden = Hidden(*network(90))
        hidden.__dict__["real"] = world.honest
        found = audited(world, hidden.eval(), same_start=world.same_start)
        assert (found.verdict, "of another architecture" in found.reason) == ("UNDECIDED", True), found.reason
        assert not {"back_share", "back_pull"} & {one.measure.name for one in found.findings}

    def test_short_trainings_made_from_the_trained_model(self, world):
        short = [trained(seed, world.retained, 30, world.before) for seed in (80, 81)]
        said = expunge.evidence(world.before, world.honest, world.unseen, forgotten=world.forgotten, short=short)
        assert "short[0], short[1] have the same origin" in said.sentence
        short = [trained(seed, world.retained, 60) for seed in (80, 81)]
        said = expunge.evidence(world.before, world.honest, world.unseen, forgotten=world.forgotten, short=short)
        assert "origin" not in said.sentence


def test_a_doubt_that_forbids_leaves_no_later_look(world):
    asked = []
    again = {"more rounds": lambda module: asked.append(module) or module}
    told(world, "No model predicts the unseen labels", unseen=turned(world.unseen), later=again)
    assert asked == []


def test_a_later_look_that_trains_nothing_is_refused(world):
    with pytest.raises(RequestError, match="left a model as it was"):
        audited(world, later={"more rounds": lambda module: module})


def test_a_nonce_that_was_told_before_is_named(world, tmp_path):
    record = tmp_path / "audits.json"
    assert "nonce" not in audited(world, record=record).reason
    found = audited(world, world.same_start[0], record=record)
    assert "Another model was asked with this nonce before" in found.reason
