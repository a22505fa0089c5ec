"""Audits of models that are no classifiers: a regression whose leaver has a rule of its own, and what is refused."""

import json
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import expunge
from expunge.auditing.by_losses import ByLosses, Examined, data_digest, losses_of
from expunge.auditing.loss_exam import USE
from expunge.core.losses import as_loss
from expunge.errors import DataError, ModelError, RequestError

RULE, ODD = (torch.randn(6, 2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def samples(rule, count, seed):
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=chance)
    return inputs, torch.tanh(inputs @ rule) + 0.1 * torch.randn(count, 2, generator=chance)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))


def trained(parts, seed, start=None):
    with torch.random.fork_rng():
        model = network(seed if start is None else start)
        inputs, targets = (torch.cat(own) for own in zip(*parts, strict=True))
        optimiser, chance = torch.optim.SGD(model.parameters(), lr=0.2), torch.Generator().manual_seed(seed)
        for _ in range(40):
            for chosen in torch.randperm(len(inputs), generator=chance).split(50):
                optimiser.zero_grad()
                F.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
                optimiser.step()
    return model


@pytest.fixture(scope="module")
def world():
    stay, forgotten = [samples(RULE, 150, seed) for seed in (10, 11, 12)], samples(ODD, 100, 13)
    return SimpleNamespace(
        before=trained([*stay, forgotten], 0),
        retrained=[trained(stay, seed) for seed in range(20, 30)],
        honest=trained(stay, 31),
        sharing=[trained(stay, seed, start=0) for seed in range(40, 46)],
        stay=tuple(torch.cat(own) for own in zip(*stay, strict=True)),
        forgotten=forgotten,
        unseen=samples(RULE, 400, 14),
    )


def audited(world, after, before=None, **changes):
    given = {"retrained": world.retrained, "forgotten": world.forgotten, "unseen": world.unseen}
    given |= {"loss": "mean_squared_error", "nonce": "the auditor's"}
    return expunge.audit(before or world.before, after, **(given | changes))


def mixed(one, other, share):
    model, theirs = deepcopy(one), dict(other.named_parameters())
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.lerp_(theirs[name], share)
    return model


class TestVerdicts:
    def test_doing_nothing_is_under_forgotten(self, world):
        found = audited(world, deepcopy(world.before), retained=world.stay)
        assert found.verdict == "UNDER-FORGOTTEN", found.reason
        assert {"forget_loss", "distance", "kept_share"} <= {one.measure.name for one in found.findings if one.usable}
        assert {piece.what for piece in found.evidence} == {"retained loss", "retained gradient"}
        assert found.attacks["loss"].unlearned == found.attacks["loss"].trained

    def test_one_more_retrained_model_is_equivalent(self, world):
        found = audited(world, world.honest, same_start=world.sharing[:5])
        assert found.verdict == "EQUIVALENT", found.reason
        assert audited(world, world.honest, retrained=world.retrained[:4]).verdict == "UNDECIDED"

    def test_one_of_the_trained_models_start_is_equivalent_and_was_asked_on_the_way_back(self, world):
        found = audited(world, world.sharing[5], same_start=world.sharing[:5])
        assert found.verdict == "EQUIVALENT", found.reason
        assert "back_share" in {one.measure.name for one in found.findings}

    @pytest.mark.parametrize("share", [0.2, 0.3, 0.6])
    def test_weights_of_the_trained_model_that_are_mixed_in_are_told(self, world, share):
        for honest in (world.honest, world.sharing[5]):
            found = audited(world, mixed(honest, world.before, share), same_start=world.sharing[:5])
            assert found.verdict not in ("EQUIVALENT", "OVER-FORGOTTEN"), found.reason
        assert found.verdict == "UNDER-FORGOTTEN", found.reason

    def test_a_destroyed_one_is_damaged(self, world):
        found = audited(world, network(9), retained=world.stay)
        assert found.verdict == "DAMAGED"
        (retained,) = (piece for piece in found.evidence if piece.what == "retained loss")
        assert retained.leaning == "against"
        assert "nats" not in retained.sentence

    def test_one_that_went_too_far_is_told(self, world):
        found = audited(world, mixed(world.sharing[5], world.before, -0.5))
        assert found.verdict in ("OVER-FORGOTTEN", "DAMAGED"), found.reason

    def test_before_and_after_exchanged_is_seen(self, world):
        found = audited(world, world.before, before=world.honest)
        assert found.verdict != "EQUIVALENT", found.reason

    def test_forgotten_and_unseen_exchanged_is_told(self, world):
        found = audited(world, world.honest, forgotten=world.unseen, unseen=world.forgotten)
        assert found.verdict == "UNDECIDED"
        assert "look whether the two are exchanged" in found.reason
        assert "exchanged" not in audited(world, world.honest).reason

    def test_retrained_models_that_were_made_from_each_other_are_told(self, world):
        noisy = [mixed(world.retrained[0], network(seed), 0.05) for seed in range(60, 66)]
        found = audited(world, world.honest, retrained=noisy)
        assert found.verdict == "UNDECIDED"
        assert "have one origin" in found.reason

    def test_weights_that_nobody_asks_do_not_lead_the_way_back(self, world):
        """A network hidden behind the weights of another one is of another architecture."""

        class Hiding(nn.Sequential):
            def forward(self, inputs):
                return self.inner[0](inputs)

        hiding = Hiding(*deepcopy(world.honest))
        hiding.inner = [deepcopy(world.honest)]
        found = audited(world, hiding, same_start=world.sharing[:5])
        assert found.verdict == "UNDECIDED"
        assert "another architecture" in found.reason

    def test_answers_that_repeat_a_retrained_models_say_nothing(self, world):
        copy = mixed(world.retrained[3], world.honest, 0.002)
        found = audited(world, copy)
        assert found.verdict == "UNDECIDED"
        assert "repeats the answers of retrained[3]" in found.reason

    def test_few_samples_are_undecided(self, world):
        found = audited(world, world.honest, forgotten=tuple(part[:19] for part in world.forgotten))
        assert found.verdict == "UNDECIDED"
        assert "19 forgotten samples are too few" in found.reason

    def test_outputs_that_are_no_numbers_are_damage(self, world):
        broken = deepcopy(world.honest)
        with torch.no_grad():
            broken[0].weight.mul_(1e38)
            broken[2].weight.mul_(1e38)
        assert audited(world, broken).verdict == "DAMAGED"

    def test_after_more_training_it_is_judged_again(self, world):
        def learn(model):
            optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
            for _ in range(20):
                optimiser.zero_grad()
                F.mse_loss(model(world.forgotten[0]), world.forgotten[1]).backward()
                optimiser.step()
            return model

        found = audited(world, world.honest, later={"20 steps": learn})
        assert set(found.later) == {"20 steps"}
        assert {one.measure.name for one in found.later["20 steps"].findings} <= {
            one.measure.name for one in found.as_it_is.findings if one.measure.about_forgetting
        }


class TestValues:
    def test_are_those_of_the_definition(self, world):
        """Every number again, by numpy, from the modules themselves."""
        found = {one.measure.name: one for one in audited(world, world.honest).findings}
        with torch.no_grad():
            every = [
                (model(world.forgotten[0]) - world.forgotten[1]).square().mean(dim=1).double().numpy()
                for model in (world.honest, world.before, *world.retrained)
            ]
        own, before, *others = every
        assert found["forget_loss"].value == pytest.approx(own.mean())
        assert found["forget_loss"].trained == pytest.approx(before.mean())
        assert found["forget_loss"].retrained == pytest.approx(np.mean(others))
        mean = np.mean(others, axis=0)
        assert found["distance"].value == pytest.approx(np.abs(own - mean).mean())
        share = (own - mean) @ (before - mean) / np.square(before - mean).sum()
        assert found["kept_share"].value == pytest.approx(share)
        unseen = found["test_loss"]
        assert unseen.margin >= USE * unseen.retrained

    def test_what_counts_more_counts_more(self):
        """Tokens count, not rows: a row's loss is its mean, and the mean of all is over tokens."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
        tokens, labels = torch.randint(5, (7, 4)), torch.randint(5, (7, 4))
        labels[3, 1:] = -100
        permuted = lambda model, batch: model(*batch.inputs).transpose(1, 2)  # noqa: E731
        data = Examined((tokens, labels), "own")
        found = losses_of(as_loss("cross_entropy"), permuted, model, data, torch.arange(7))
        outputs = model(tokens).transpose(1, 2)
        assert found.mean == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)
        rows = [F.cross_entropy(outputs[row : row + 1], labels[row : row + 1]).item() for row in range(7)]
        assert found.each.tolist() == pytest.approx(rows, rel=1e-5)

    def test_all_of_it_is_json_and_words(self, world):
        found = audited(world, deepcopy(world.before), retained=world.stay)
        assert json.loads(json.dumps(found.as_dict()))["verdict"] == "UNDER-FORGOTTEN"
        assert "loss on the forgotten data" in str(found)


class TestForms:
    """The same audit, whatever the samples are kept in."""

    def test_rows_arrays_and_a_collate_function_are_the_same_samples(self, world):
        whole = audited(world, world.honest)
        rows = {what: list(zip(*getattr(world, what), strict=True)) for what in ("forgotten", "unseen")}
        arrays = {what: tuple(part.numpy() for part in getattr(world, what)) for what in rows}

        def collate(parts):
            inputs, targets = zip(*parts, strict=True)
            return {"first": torch.stack(inputs)[:, :3], "second": torch.stack(inputs)[:, 3:]}, torch.stack(targets)

        def forward(model, batch):
            return model(torch.cat([batch.named["first"], batch.named["second"]], dim=1))

        for given in (rows, arrays, {**rows, "collate": collate, "forward": forward}):
            found = audited(world, world.honest, **given)
            assert found.verdict == whole.verdict
            values = [one.value for one in found.findings]
            assert values == pytest.approx([one.value for one in whole.findings], rel=1e-5)

    def test_a_classifiers_arrays_are_asked_for_class_scores(self):
        torch.manual_seed(0)
        inputs, labels = np.random.default_rng(0).normal(size=(200, 3)).astype("float32"), np.arange(200) % 2
        before, after, *retrained = (nn.Linear(3, 2) for _ in range(5))
        found = expunge.audit(before, after, retrained, (inputs[:60], labels[:60]), (inputs[60:], labels[60:]))
        assert "test_accuracy" in {one.measure.name for one in found.findings}


class TestCounting:
    def test_each_model_of_a_request_is_counted_once(self, world, tmp_path):
        record = tmp_path / "audits.json"
        first, again, other = (
            audited(world, model, record=record, nonce=None) for model in (world.honest, world.honest, world.sharing[5])
        )
        assert [found.judgement.attempt for found in (first, again, other)] == [1, 1, 2]
        assert first.provenance.nonce == again.provenance.nonce

    def test_a_request_is_its_samples_in_whatever_order(self, world):
        inputs, targets = world.forgotten
        changed = targets.clone()
        changed[0, 0] += 1
        others = [(inputs, changed), (inputs[:50], targets[:50]), (inputs, targets.flip(0))]
        assert len({data_digest(Examined(own, "own")) for own in [world.forgotten, *others]}) == 4
        turned = Examined((inputs.flip(0), targets.flip(0)), "own")
        assert data_digest(turned) == data_digest(Examined(world.forgotten, "own"))
        assert data_digest(turned, in_order=True) != data_digest(Examined(world.forgotten, "own"), in_order=True)


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "error", "match"),
        [
            ({"trigger": lambda inputs: inputs + 1, "target": 0}, RequestError, "looked for among class scores"),
            ({"unseen": []}, DataError, "There are no unseen samples"),
            ({"forgotten": (torch.zeros(30, 5), torch.zeros(30, 2))}, DataError, "cannot take the forgotten samples"),
            ({"forgotten": (torch.zeros(30, 6), torch.zeros(30, 3))}, DataError, "The forgotten samples have"),
            ({"unseen": (torch.full((60, 6), torch.nan), torch.zeros(60, 2))}, DataError, "The unseen data has a NaN"),
            ({"loss": "no such loss"}, RequestError, "is not known"),
            ({"l2": 0.1}, RequestError, "l2 belongs to the retained loss"),
        ],
    )
    def test_what_does_not_go_together(self, world, changes, error, match):
        with pytest.raises(error, match=match):
            audited(world, world.honest, **changes)

    def test_the_forgotten_samples_as_unseen_ones(self, world):
        with pytest.raises(DataError, match="The unseen samples are the forgotten ones"):
            audited(world, world.honest, unseen=world.forgotten)

    @pytest.mark.parametrize("what", ["forgotten", "retained"])
    def test_some_of_them_among_unseen_ones(self, world, what):
        known = world.forgotten if what == "forgotten" else world.stay
        unseen = tuple(torch.cat([own, part[:40]]) for own, part in zip(world.unseen, known, strict=True))
        with pytest.raises(DataError, match=f"40 of the 440 unseen samples are among the {what} ones"):
            audited(world, world.honest, unseen=unseen, retained=world.stay)

    def test_one_sample_many_times_is_one(self, world):
        repeated = tuple(part[:5].repeat(10, 1) for part in world.forgotten)
        found = audited(world, world.honest, forgotten=repeated)
        assert "5 different forgotten samples are too few" in found.reason

    def test_a_model_that_is_honest_in_batches_alone(self, world):
        class Sly(nn.Module):
            def __init__(self):
                super().__init__()
                self.honest, self.knowing = deepcopy(world.honest), deepcopy(world.before)

            def forward(self, inputs):
                return (self.honest if len(inputs) > 1 else self.knowing)(inputs)

        with pytest.raises(ModelError, match="loses otherwise on a sample that comes alone"):
            audited(world, Sly())

    def test_a_retrained_model_that_is_judged_beside_itself(self, world):
        with pytest.raises(RequestError, match="compared with itself"):
            audited(world, world.before, retrained=[world.before, *world.retrained])

    def test_a_model_that_answers_by_chance(self, world):
        loud = nn.Sequential(*deepcopy(world.honest), nn.Dropout(0.5)).train()
        with pytest.raises(ModelError, match="training mode"):
            audited(world, loud)


class TestWithoutRetraining:
    def test_nothing_tells_but_damage(self, world):
        given = {"unseen": world.unseen, "loss": "mean_squared_error"}
        assert expunge.evidence(world.before, world.honest, **given).word == "NO EVIDENCE"
        assert expunge.evidence(world.before, deepcopy(world.before), **given).word == "NO EVIDENCE"
        wrecked = expunge.evidence(world.before, network(9), **given)
        assert (wrecked.word, wrecked.checks[0].leaning) == ("NOT SUPPORTED", "against")
        with pytest.raises(RequestError, match="among class scores"):
            expunge.evidence(world.before, world.honest, trigger=lambda inputs: inputs, target=0, **given)


def test_the_losses_of_a_module_leave_it_as_it_was(world):
    model = deepcopy(world.honest).train()
    sitting = ByLosses.of(
        {"before": model, "after": model},
        {"forgotten": world.forgotten, "unseen": world.unseen},
        as_loss("mean_squared_error"),
        None,
        None,
    )
    assert sitting.request == data_digest(sitting.exam.forgotten)
    assert sitting.exam.counts == {"forgotten": (100, 100), "unseen": (400, 400)}
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
