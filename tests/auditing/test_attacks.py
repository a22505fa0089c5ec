"""Attacks put together: whose shadows, on which samples, in which direction; beside the formulas themselves."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from expunge.auditing.attacks import attack_scores
from expunge.auditing.comparison import beside_retrained
from expunge.auditing.exam import Exam
from expunge.auditing.lira import lira
from expunge.auditing.measured import Measured
from expunge.auditing.membership import measure_attack
from expunge.auditing.model_audit import Asked, Panel
from expunge.auditing.rmia import rmia
from expunge.auditing.signals import membership_scores
from expunge.core.vectors import Snapshot

CLASSES, FORGOTTEN, UNSEEN, RETAINED = 3, 80, 120, 90
LABELS = {
    what: torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(count))
    for what, count in (("forgotten", FORGOTTEN), ("unseen", UNSEEN), ("retained", RETAINED))
}
EXAM = Exam(*((torch.zeros(len(labels), 1), labels) for labels in LABELS.values()))


def model(seed, known=0.0):
    """Random outputs; the right answers of retained samples are raised, those of forgotten ones where they are known.

    Each forgotten and unseen sample has its own difficulty, the same for all models.
    """
    chance, common = (torch.Generator().manual_seed(number) for number in (100 + seed, 7))
    found = {}
    for what, advantage in (("forgotten", known), ("unseen", 0.0), ("retained", 2.0)):
        labels = LABELS[what]
        hard = torch.randn(len(labels), 1, generator=common, dtype=torch.float64)
        noise = 0.5 * torch.randn(len(labels), CLASSES, generator=chance, dtype=torch.float64)
        found[what] = noise + (1.0 + advantage + hard) * one_hot(labels, CLASSES)
    return EXAM.measure(Answering(found), Snapshot(torch.full((2,), float(seed)), {}))


class Answering:
    """Gives its outputs by the number of samples that it is asked about."""

    def __init__(self, outputs):
        self.outputs = {len(logits): logits for logits in outputs.values()}

    def __call__(self, inputs):
        return self.outputs[len(inputs)]


RETRAINED = [model(seed) for seed in range(5)]
TRAINED, FORGOT = model(10, known=2.0), model(11, known=0.5)


def by_hand(attack, target, shadows):
    """Scores of the forgotten and of the unseen samples from the formulas' own functions."""
    signal = {"LiRA": "confidence", "RMIA": "loss"}[attack]

    def signals(own, what):
        logits = own.forget_logits if what == "forgotten" else own.test_logits
        return membership_scores(logits, LABELS[what], signal)

    found = []
    for what in ("forgotten", "unseen"):
        table = np.stack([signals(own, what) for own in shadows])
        out = np.zeros(table.shape, dtype=bool)
        if attack == "LiRA":
            found.append(lira(signals(target, what), table, out, online=False))
        else:
            population = signals(target, "unseen"), np.stack([signals(own, "unseen") for own in shadows])
            found.append(rmia(signals(target, what), table, out, *population, online=False))
    return found


@pytest.mark.parametrize("attack", ["LiRA", "RMIA"])
@pytest.mark.parametrize("target", [TRAINED, FORGOT])
def test_all_retrained_models_are_shadows_of_the_others(attack, target):
    found = attack_scores(EXAM, target, RETRAINED)[attack]
    members, others = by_hand(attack, target, RETRAINED)
    np.testing.assert_allclose(found.members, members)
    np.testing.assert_allclose(found.others, others)


@pytest.mark.parametrize("attack", ["LiRA", "RMIA"])
@pytest.mark.parametrize("number", range(5))
def test_a_retrained_model_is_not_its_own_shadow(attack, number):
    found = attack_scores(EXAM, RETRAINED[number], RETRAINED)[attack]
    rest = [own for own in RETRAINED if own is not RETRAINED[number]]
    members, others = by_hand(attack, RETRAINED[number], rest)
    np.testing.assert_allclose(found.members, members)
    np.testing.assert_allclose(found.others, others)
    assert not np.allclose(members, by_hand(attack, RETRAINED[number], RETRAINED)[0])


def test_members_score_high_in_every_attack_and_a_retrained_model_knows_none():
    found, never = (attack_scores(EXAM, own, RETRAINED) for own in (TRAINED, RETRAINED[0]))
    assert list(found) == ["loss", "modified entropy", "shadow models", "RMIA", "LiRA"]
    for attack, scores in found.items():
        assert measure_attack(scores.members, scores.others).auc.low > 0.7, attack
        assert measure_attack(never[attack].members, never[attack].others).auc.covers(0.5), attack
    aucs = {attack: measure_attack(own.members, own.others).auc.value for attack, own in found.items()}
    assert min(aucs["LiRA"], aucs["RMIA"]) > aucs["loss"], "shadows know which samples are hard"


def test_shadow_models_are_left_out_where_they_have_nothing_to_learn_from():
    assert list(attack_scores(EXAM, TRAINED, RETRAINED[:3])) == ["loss", "modified entropy"]
    without = dataclasses.replace(EXAM, retained=None)
    assert list(attack_scores(without, TRAINED, RETRAINED)) == ["loss", "modified entropy", "RMIA", "LiRA"]
    odd = torch.where(torch.arange(FORGOTTEN) == 0, 2, LABELS["forgotten"].clamp(max=1))
    few = dataclasses.replace(
        EXAM,
        forgotten=(EXAM.forgotten[0], odd),
        unseen=(EXAM.unseen[0], LABELS["unseen"].clamp(max=1)),
        retained=(EXAM.retained[0], LABELS["retained"].clamp(max=1)),
    )
    assert "shadow models" not in attack_scores(few, TRAINED, RETRAINED), "no shadow answered for class 2"


def test_a_model_does_not_count_among_its_own_references():
    assert EXAM.judgement(RETRAINED[0], TRAINED, RETRAINED) == EXAM.judgement(RETRAINED[0], TRAINED, RETRAINED[1:])


class TestPanel:
    PANEL = Panel(EXAM, TRAINED, RETRAINED)
    JUDGEMENT, ASKED = EXAM.judgement(FORGOT, TRAINED, RETRAINED), Asked("nonce")

    def test_every_model_is_in_its_place(self):
        found = self.PANEL.audit(FORGOT, self.JUDGEMENT, self.ASKED)
        assert (found.judgement, found.provenance.nonce) == (self.JUDGEMENT, "nonce")
        trained, own, *others = (attack_scores(EXAM, each, RETRAINED) for each in (TRAINED, FORGOT, *RETRAINED))
        for attack, compared in found.attacks.items():
            scores = [each[attack] for each in others]
            assert compared == beside_retrained(trained[attack], own[attack], scores, EXAM.weights.numpy())
            assert compared.trained.auc.value > compared.unlearned.auc.value
        assert found.provenance.before == TRAINED.model.digest
        assert found.provenance.after == FORGOT.model.digest
        assert found.provenance.retrained == tuple(own.model.digest for own in RETRAINED)
        held_out = found.evidence[0].values
        assert held_out["auc_before"] > held_out["auc_after"] > 0.5
        assert found.klom.before.value > found.klom.after.value > found.klom.after.noise_floor

    def test_the_strongest_attack_is_that_on_the_trained_model(self):
        attacks = self.PANEL.audit(FORGOT, self.JUDGEMENT, self.ASKED).attacks
        reached = {name: own.trained.auc.value for name, own in attacks.items()}
        assert self.PANEL.strongest == max(reached, key=reached.get)
        assert reached[self.PANEL.strongest] > min(reached.values())
        assert Panel(EXAM, TRAINED, []).strongest is None

    def test_more_evidence_stands_behind_the_held_out_data(self):
        more = self.PANEL.audit(FORGOT, self.JUDGEMENT, self.ASKED).evidence[0]
        assert self.PANEL.audit(FORGOT, self.JUDGEMENT, self.ASKED, [more]).evidence == (more, more)


def test_outputs_that_are_not_finite_say_nothing_but_that():
    wild = dataclasses.replace(FORGOT, forget_logits=FORGOT.forget_logits * torch.nan)
    assert not wild.is_finite
    assert isinstance(wild, Measured)
    judged = EXAM.judgement(wild, TRAINED, RETRAINED)
    found = Panel(EXAM, TRAINED, RETRAINED).audit(wild, judged, Asked("nonce"))
    assert (found.verdict, found.attacks, found.klom) == ("DAMAGED", {}, None)
    measured = EXAM.measure(lambda inputs: torch.full((len(inputs), CLASSES), torch.inf), TRAINED.model)
    assert [measured.alone[name] for name in ("forget_loss", "mia_auc", "mia_success")] == [None] * 3
