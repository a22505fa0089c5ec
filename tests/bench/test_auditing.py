"""The audit of a run: every model in its place, attacks and evidence of the right ones, and what is drawn."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import expunge
from expunge.auditing.functional import predict
from expunge.auditing.membership import measure_attack
from expunge.auditing.probes import probe_seed
from expunge.bench import auditing
from expunge.bench.auditing import audit, retrain_more, retrain_options, retrained_again
from expunge.bench.evaluation import Evaluation
from expunge.bench.run_folder import RunFolder
from expunge.bench.scenario import Scenario
from expunge.core.seeds import derived_seed
from expunge.data import Backdoor
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import retrain

SCENARIO = Scenario(
    model="softmax",
    clients=4,
    backdoors={"client-1": Backdoor(target=7, size=3, fraction=0.5, boost=4.0)},
    plan=TrainingPlan(rounds=4, epochs=2, batch_size=64, learning_rate=0.1),
    seed=2,
)
REQUEST = Request.of("client-1")
RETRAINS = 4
METHODS = ("do-nothing", "fine-tuning")


@pytest.fixture(scope="module")
def federation():
    return SCENARIO.build()


@pytest.fixture(scope="module")
def folder(federation, tmp_path_factory):
    """A trained run, what two methods made of it, and four retrained models."""
    state = train(federation.engine(), federation.initial(), SCENARIO.plan)
    made = RunFolder.create(tmp_path_factory.mktemp("audit") / "run", federation, state)
    for name in METHODS:
        made.save(REQUEST, method(name)(made.engine(federation), state, REQUEST), federation)
    for count in range(1, RETRAINS + 1):
        assert retrain_more(made, REQUEST, federation, count=count) == 1
    return made


@pytest.fixture(scope="module")
def audited(folder, federation):
    return audit(folder, "without-client-1", federation)


@pytest.fixture(scope="module")
def models(folder, federation):
    """By name, the weights on disk."""
    tried = folder.tried("without-client-1", federation)
    found = {own.method: own.model for own in tried if own.method != "retrain"}
    retrained = [own.model for own in tried if own.method == "retrain"]
    return {"trained": folder.trained(federation).model, **found}, retrained


@pytest.fixture(scope="module")
def measured(models, federation):
    evaluation = Evaluation(federation, REQUEST)
    named, retrained = models
    return (
        evaluation.exam,
        {name: evaluation.measure(model) for name, model in named.items()},
        [evaluation.measure(model) for model in retrained],
    )


def test_each_method_is_judged_by_its_own_model(audited, models, federation):
    """By questions that were drawn for it, each counted as one more attempt."""
    named, retrained = models
    assert set(audited.methods) == set(METHODS)
    for attempt, (name, own) in enumerate(audited.methods.items(), start=1):
        evaluation = Evaluation(federation, REQUEST)
        seed = probe_seed(named[name].digest, own.provenance.nonce)
        drawn = evaluation.drawn(evaluation.exam.drawn(seed))
        model, before, *others = (drawn.measure(each) for each in (named[name], named["trained"], *retrained))
        assert own.judgement == drawn.exam.judgement(model, before, others, attempt)
        assert own.provenance.counted
    assert audited.methods["do-nothing"].judgement != audited.methods["fine-tuning"].judgement
    assert audited.methods["do-nothing"].verdict == "UNDER-FORGOTTEN"


def test_on_request_all_models_are_trained_on_and_judged_again(folder, audited, models, federation):
    """By rounds of those who stay, and by the leaver's own data; unasked, nothing is."""
    found = audit(folder, "without-client-1", federation, persistence=1, relearning=2).methods["do-nothing"]
    rounds, epochs = "1 more round of those who stay", "2 epochs on the forgotten data"
    assert list(found.later) == [rounds, epochs]
    assert found.as_it_is.verdict is found.verdict is found.later[rounds].verdict
    plan = dataclasses.replace(SCENARIO.plan, rounds=1, seed=derived_seed(SCENARIO.seed, "later"))
    stay = federation.engine().without(("client-1",))
    on = train(stay, models[0]["trained"], plan).model
    evaluation = Evaluation(federation, REQUEST)
    drawn = evaluation.drawn(evaluation.exam.drawn(probe_seed(models[0]["trained"].digest, found.provenance.nonce)))
    values = {one.measure.name: one.trained for one in found.later[rounds].findings}
    assert values["forget_loss"] == pytest.approx(drawn.measure(on).alone["forget_loss"])
    again = {one.measure.name: one.retrained for one in found.later[epochs].findings}
    before = {one.measure.name: one.retrained for one in found.as_it_is.findings}
    assert again["forget_loss"] < before["forget_loss"]
    assert audited.methods["do-nothing"].later == {}


def test_attacks_are_on_the_models_that_they_are_said_to_be_on(audited, measured):
    """The loss, from the outputs themselves; do-nothing is the trained model."""
    exam, named, retrained = measured

    def by_hand(model):
        members = -F.cross_entropy(model.forget_logits.double(), exam.forgotten[1], reduction="none")
        others = -F.cross_entropy(model.other_logits.double(), exam.other_labels, reduction="none")
        return measure_attack(members, others, exam.weights).auc.value

    for name, own in audited.methods.items():
        found = own.attacks["loss"]
        assert found.trained.auc.value == pytest.approx(by_hand(named["trained"]))
        assert found.unlearned.auc.value == pytest.approx(by_hand(named[name]))
        assert [each.auc.value for each in found.retrained] == pytest.approx([by_hand(each) for each in retrained])
    for found in audited.methods["do-nothing"].attacks.values():
        assert found.unlearned == found.trained
    for found in audited.methods["fine-tuning"].attacks.values():
        assert found.unlearned != found.trained


def test_evidence_is_of_before_and_after_in_this_order(audited, models, federation):
    kept = [data for name, data in federation.datasets.items() if name != "client-1"]
    inputs, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
    named, _ = models
    losses = {
        name: float(F.cross_entropy(predict(federation.model, model, inputs), labels)) for name, model in named.items()
    }
    assert losses["trained"] != pytest.approx(losses["fine-tuning"], rel=1e-3)
    for name, own in audited.methods.items():
        found = {piece.what: piece.values for piece in own.evidence}
        first, said, *rest = found
        assert (first, rest) == ("held-out data", ["retained loss", "retained gradient", "solver"])
        assert said == ("NOT SUPPORTED without retraining" if name == "do-nothing" else said)
        assert said.endswith("without retraining")
        assert found["retained loss"]["before"] == pytest.approx(losses["trained"], rel=1e-5)
        assert found["retained loss"]["after"] == pytest.approx(losses[name], rel=1e-5)
        assert found["held-out data"]["auc_before"] == audited.methods["do-nothing"].evidence[0].values["auc_after"]
    tuned = audited.methods["fine-tuning"].evidence[0].values
    assert tuned["auc_before"] != tuned["auc_after"]


def test_one_attack_is_drawn_under_its_own_name(audited):
    """The scores of every row of the picture give the AUC that the table has for this attack."""
    reached = {name: found.trained.auc.value for name, found in audited.methods["fine-tuning"].attacks.items()}
    assert audited.attack == max(reached, key=reached.get)
    assert set(audited.scores) == {"trained", "retrained", *METHODS}

    def drawn(model):
        return measure_attack(audited.scores[model].members, audited.scores[model].others, audited.weights)

    for name in METHODS:
        found = audited.methods[name].attacks[audited.attack]
        assert drawn("trained") == found.trained
        assert drawn(name) == found.unlearned
        assert drawn("retrained") == found.retrained[0]


def test_what_was_looked_at_is_written_down(audited, models):
    named, retrained = models
    content = audited.as_dict()
    assert content["attack"] == audited.attack
    for name, own in content["methods"].items():
        assert own["models"] == {
            "before": named["trained"].digest,
            "after": named[name].digest,
            "retrained": [model.digest for model in retrained],
            "same_start": [],
        }
        assert own["expunge"] == expunge.__version__
        assert own["date"].endswith("+00:00")
    assert len({*content["methods"]["fine-tuning"]["models"]["retrained"]}) == RETRAINS


def test_a_model_with_a_backdoor_is_asked_with_its_trigger(audited):
    found = {found.measure.name: found for found in audited.methods["fine-tuning"].findings}
    assert {"asr", "trigger_pull", "trigger_rank", "nearby_pull"} <= set(found)
    assert found["asr"].value != found["asr"].trained


def test_the_same_audit_again_is_no_further_attempt(audited, folder, federation):
    again = audit(folder, "without-client-1", federation)
    assert {name: own.judgement for name, own in again.methods.items()} == {
        name: own.judgement for name, own in audited.methods.items()
    }
    other = audit(folder, "without-client-1", federation, nonce="another")
    attempts = [own.judgement.attempt for own in other.methods.values()]
    assert min(attempts) > max(own.judgement.attempt for own in audited.methods.values())


def test_an_audit_without_a_retrained_model_that_there_was_is_a_further_attempt(audited, folder, federation, tmp_path):
    """Else whoever deletes some of them may choose beside which a model passes."""
    copied = tmp_path / "run"
    shutil.copytree(folder.path, copied)
    left = RunFolder.open(copied)
    first = audit(left, "without-client-1", federation).methods
    assert {name: own.judgement.attempt for name, own in first.items()} == {
        name: own.judgement.attempt for name, own in audited.methods.items()
    }
    shutil.rmtree(sorted((copied / "without-client-1").glob("retrain-*"))[-1])
    counts = [own.judgement.attempt for own in audit(left, "without-client-1", federation).methods.values()]
    assert min(counts) > max(own.judgement.attempt for own in audited.methods.values())


def test_no_retrained_models_no_attacks(folder, federation, tmp_path):
    alone = RunFolder.create(tmp_path / "alone", federation, folder.trained(federation))
    state = alone.trained(federation)
    alone.save(REQUEST, method("do-nothing")(alone.engine(federation), state, REQUEST), federation)
    found = audit(alone, "without-client-1", federation)
    assert (found.attack, found.scores) == (None, {})
    assert found.methods["do-nothing"].attacks == {}
    assert found.methods["do-nothing"].verdict == "UNDECIDED"


class TestRetraining:
    def test_numbers_have_seeds_of_their_own_and_are_made_again_alike(self, folder, models):
        _, retrained = models
        again = [retrained_again(folder, REQUEST, number, None, "cpu") for number in range(2)]
        assert [state.model.digest for state, _ in again] == [model.digest for model in retrained[:2]]

    def test_each_starts_afresh_and_shuffles_anew(self, folder, federation):
        """From one start, or in one order, they would show less noise than there is."""
        ways = [("next", 0), ("next", 1), ("chosen", 0), ("chosen", 1)]
        options = [retrain_options(folder, federation, *way) for way in ways]
        starts, seeds = ([own.start.digest for own in options], [own.plan.seed for own in options])
        assert len({*starts, federation.initial().digest}) == 5
        assert len({*seeds, SCENARIO.plan.seed}) == 5
        assert all(dataclasses.replace(own.plan, seed=SCENARIO.plan.seed) == SCENARIO.plan for own in options)

    def test_enough_is_enough(self, folder, federation):
        assert retrain_more(folder, REQUEST, federation, count=RETRAINS) == 0
        assert retrain_more(folder, REQUEST, federation, count=1) == 0
        assert folder.retrained(REQUEST) == RETRAINS

    def test_some_more_begin_where_the_training_began(self, folder, federation, tmp_path, monkeypatch):
        own = RunFolder.create(tmp_path / "own", federation, folder.trained(federation))
        own.save(REQUEST, method("do-nothing")(own.engine(federation), own.trained(federation), REQUEST), federation)
        monkeypatch.setattr(auditing, "from_own_start", lambda count: 3 if count > 2 else 0)
        makes = [retrain_more(own, REQUEST, federation, count=count, workers=1) for count in (2, 3, 3)]
        assert (makes, own.own_starts(REQUEST).count(True)) == ([2, 4, 0], 3)
        asked = []
        monkeypatch.setattr(auditing, "retrain", lambda *given: asked.append(given[-1]) or retrain(*given))
        for number, begins in ((0, False), (0, True), (1, True)):
            retrained_again(own, REQUEST, number, None, "cpu", own_start=begins)
        first = federation.initial().digest
        assert [each.start.digest == first for each in asked] == [False, True, True]
        assert len({each.plan.seed for each in asked} | {SCENARIO.plan.seed}) == 4
        found = audit(own, "without-client-1", federation).methods["do-nothing"]
        assert (len(found.provenance.retrained), len(found.provenance.same_start)) == (3, 3)
        assert {"back_share", "back_pull"} <= {one.measure.name for one in found.findings}

    def test_who_leaves_takes_no_part(self, folder, federation):
        """Another poisoned client's data would change the retrained model; the leaver's does not."""
        _, cost = retrained_again(folder, REQUEST, 0, None, "cpu")
        kept = sum(len(labels) for name, (_, labels) in federation.datasets.items() if name != "client-1")
        assert cost.sample_gradients == SCENARIO.plan.rounds * SCENARIO.plan.epochs * kept


def test_the_retained_samples_are_those_that_nobody_asked_to_forget(federation):
    """Forgotten ones among them would make every model look as if it remembered."""
    request = Request.of("client-2", samples={"client-0": [0, 5]})
    exam = Evaluation(federation, request).exam
    whole, part = federation.datasets["client-2"], federation.datasets["client-0"]
    stays = [k for k in range(len(part[1])) if k not in (0, 5)]
    for side in (0, 1):
        forgotten = torch.cat([whole[side], part[side][[0, 5]]])
        others = [part[side][stays], federation.datasets["client-1"][side], federation.datasets["client-3"][side]]
        assert torch.equal(exam.forgotten[side], forgotten)
        assert torch.equal(exam.retained[side], torch.cat(others))
    assert int(exam.triggered.sum()) == 0
    assert np.isclose(float(exam.weights.sum()), 1.0)


def test_two_backdoors_are_two_triggers(federation):
    other = Backdoor(target=3, size=2, corner="top-left", fraction=0.5)
    scenario = dataclasses.replace(SCENARIO, backdoors={**SCENARIO.backdoors, "client-2": other})
    both = scenario.build()
    exam = Evaluation(both, Request.of(["client-1", "client-2"])).exam
    assert [trigger.target for trigger in exam.triggers] == [7, 3]
    first, second = (both.triggered[name] for name in ("client-1", "client-2"))
    assert torch.equal(exam.triggered, torch.cat([1 * first, 2 * second]))
    labels = both.dataset.test_labels
    stamped = [int((labels != target).sum()) for target in (7, 3)]
    assert len(exam.other_labels) == len(labels) + sum(stamped)
    assert exam.other_labels[-1] == 3
