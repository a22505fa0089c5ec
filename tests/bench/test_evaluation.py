import dataclasses
from itertools import permutations
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F

from expunge.auditing.functional import kl_divergence, logit_mse, parameter_gap
from expunge.auditing.measured import Measured
from expunge.auditing.membership import loss_threshold_attack
from expunge.bench.evaluation import ALONE, BESIDE, Evaluation, compare, noise_ranges, retrain_noise
from expunge.bench.results import MEASURES
from expunge.bench.scenario import Scenario
from expunge.core.vectors import Snapshot
from expunge.data import Backdoor, stamp
from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request

BACKDOOR = Backdoor(target=7, size=3, fraction=0.5, boost=2.0)
SCENARIO = Scenario(
    model="softmax",
    clients=3,
    backdoors={"client-1": BACKDOOR},
    plan=TrainingPlan(rounds=1, epochs=1, batch_size=64, learning_rate=0.1),
    seed=4,
)


@pytest.fixture(scope="module")
def federation():
    return SCENARIO.build()


@pytest.fixture(scope="module")
def evaluation(federation):
    return Evaluation(federation, Request.of("client-1"))


@pytest.fixture(scope="module")
def models(federation, evaluation):
    """Four models: trained, two retrained, one that forgot."""
    return [evaluation.measure(federation.initial(seed)) for seed in range(4)]


def logits(federation, snapshot, inputs):
    """By hand: softmax regression is one matrix."""
    weight, bias = snapshot.parameters[:640].view(10, 64), snapshot.parameters[640:]
    return inputs.flatten(1) @ weight.T + bias


class TestScenario:
    def test_the_attacker_alone_is_poisoned_and_boosted(self, federation):
        assert {name: int(mask.sum()) > 0 for name, mask in federation.triggered.items()} == {
            "client-0": False,
            "client-1": True,
            "client-2": False,
        }
        assert sum(len(labels) for _, labels in federation.datasets.values()) == 1437
        mask, labels = federation.triggered["client-1"], federation.datasets["client-1"][1]
        assert (labels[mask] == 7).all()
        task = SCENARIO.plan.task(federation.initial(), 0, "client-1")
        honest = dataclasses.replace(SCENARIO, backdoors={"client-1": dataclasses.replace(BACKDOOR, boost=1.0)}).build()
        boosted = federation.engine().ask({"client-1": task})["client-1"].update
        torch.testing.assert_close(boosted, 2.0 * honest.engine().ask({"client-1": task})["client-1"].update)

    def test_an_attacker_with_few_samples_boosts_more(self, federation):
        wanted = {name: Backdoor(size=3, boost=2.0, share=0.9) for name in ("client-0", "client-1")}
        attacked = dataclasses.replace(SCENARIO, backdoors=wanted).build()
        sizes = {name: len(labels) for name, (_, labels) in attacked.datasets.items()}
        assert attacked.boosts() == pytest.approx({name: max(2.0, 0.9 * 1437 / sizes[name]) for name in wanted})
        assert attacked.boosts()["client-0"] != attacked.boosts()["client-1"]
        task = SCENARIO.plan.task(federation.initial(), 0, "client-1")
        honest = dataclasses.replace(SCENARIO, backdoors={"client-1": Backdoor(size=3)}).build()
        boosted, own = (each.engine().ask({"client-1": task})["client-1"].update for each in (attacked, honest))
        torch.testing.assert_close(boosted, attacked.boosts()["client-1"] * own)

    def test_seeds_decide(self, federation):
        again, other = SCENARIO.build(), SCENARIO.with_seed(5).build()
        assert torch.equal(again.datasets["client-0"][0], federation.datasets["client-0"][0])
        assert again.initial().digest == federation.initial().digest
        assert other.initial().digest != federation.initial().digest
        assert len(other.datasets["client-0"][1]) != len(federation.datasets["client-0"][1])
        assert SCENARIO.with_seed(5).plan.seed == 5
        assert federation.initial(7).digest == SCENARIO.build().initial(7).digest != federation.initial().digest

    def test_nonsense_is_refused(self):
        with pytest.raises(RequestError, match="target must be below 10"):
            dataclasses.replace(SCENARIO, backdoors={"client-1": Backdoor(target=10)}).build()
        with pytest.raises(RequestError, match="no client 'client-9' to attack"):
            dataclasses.replace(SCENARIO, backdoors={"client-9": BACKDOOR}).build()
        with pytest.raises(RequestError, match="seed"):
            dataclasses.replace(SCENARIO, seed=-1)


class TestMeasuring:
    def test_the_sets_are_the_right_ones(self, federation, evaluation):
        snapshot = federation.initial(0)
        found = evaluation.measure(snapshot)
        inputs, labels = federation.datasets["client-1"]
        test = logits(federation, snapshot, federation.dataset.test_inputs)
        forget = logits(federation, snapshot, inputs)
        torch.testing.assert_close(found.test_logits, test)
        torch.testing.assert_close(found.forget_logits, forget)
        assert found.alone["test_accuracy"] == pytest.approx(
            float((test.argmax(1) == federation.dataset.test_labels).double().mean())
        )
        assert found.alone["forget_accuracy"] == pytest.approx(float((forget.argmax(1) == labels).double().mean()))
        assert found.alone["forget_loss"] == pytest.approx(float(F.cross_entropy(forget, labels)), rel=1e-5)
        others = federation.dataset.test_labels != 7
        stamped = stamp(federation.dataset.test_inputs[others], BACKDOOR, federation.dataset.white)
        hits = logits(federation, snapshot, stamped).argmax(1) == 7
        assert found.alone["asr"] == pytest.approx(float(hits.double().mean()))

    def test_some_samples_of_several_owners(self, federation):
        request = Request.of("client-2", samples={"client-0": [0, 5]})
        found = Evaluation(federation, request).measure(federation.initial(0))
        assert len(found.forget_logits) == len(federation.datasets["client-2"][1]) + 2
        only = Evaluation(federation, Request.of(samples={"client-0": [5, 0]})).measure(federation.initial(0))
        torch.testing.assert_close(
            only.forget_logits, logits(federation, federation.initial(0), federation.datasets["client-0"][0][[0, 5]])
        )

    def test_membership_matches_labels_and_triggers(self, federation, evaluation):
        """Triggered test images stand beside triggered members, clean ones beside clean ones."""
        snapshot = federation.initial(0)
        found = evaluation.measure(snapshot).alone
        dataset = federation.dataset
        stamped = stamp(dataset.test_inputs, BACKDOOR, dataset.white)
        keep = dataset.test_labels != 7
        sevens = torch.full((int(keep.sum()),), 7)
        inputs, labels = federation.datasets["client-1"]
        losses = [
            F.cross_entropy(logits(federation, snapshot, x), y, reduction="none")
            for x, y in ((inputs, labels), (dataset.test_inputs, dataset.test_labels), (stamped[keep], sevens))
        ]
        groups = labels + 10 * federation.triggered["client-1"].long()
        expected = loss_threshold_attack(
            losses[0], groups, torch.cat(losses[1:]), torch.cat([dataset.test_labels, sevens + 10])
        )
        assert found["mia_auc"] == pytest.approx(expected.auc, abs=1e-6)
        assert found["mia_success"] == pytest.approx(expected.success_rate, abs=1e-6)

    def test_without_a_backdoor_there_is_no_attack(self):
        clean = dataclasses.replace(SCENARIO, backdoors={}).build()
        found = Evaluation(clean, Request.of("client-1")).measure(clean.initial(0))
        assert found.alone["asr"] is None
        assert set(found.alone) == set(ALONE)


class TestRows:
    COST = Cost(seconds=2.0, sample_gradients=50.0, rounds=4, bytes_down=10, bytes_up=6)
    RETRAIN = (Cost(seconds=10.0, sample_gradients=1000.0), Cost(seconds=30.0, sample_gradients=3000.0))

    def test_complete(self, evaluation, models):
        trained, *retrained, forgot = models
        row = evaluation.row("mine", forgot, trained, retrained, self.COST, self.RETRAIN, stored_bytes=9)
        assert (row.method, row.seed) == ("mine", 4)
        assert row.digest == forgot.model.digest != trained.model.digest
        missing = [name for name in MEASURES if getattr(row, name) is None]
        of_text = ["secret_loss", "secret_rank", "secrets_likely", "secrets_first"]
        asked = ("forget", "others")
        of_text += [f"{whose}_{name}" for whose in asked for name in ("probability", "rouge", "truth_ratio")]
        assert missing == [*of_text, "training_overhead", "warned"]
        assert row.speedup == pytest.approx(20 / 2)
        assert row.speedup_in_gradients == pytest.approx(2000 / 50)
        assert (row.seconds, row.sample_gradients, row.rounds, row.bytes, row.stored_bytes) == (2.0, 50.0, 4, 16, 9)
        for name in ALONE:
            assert getattr(row, name) == forgot.alone[name]

    def test_comparisons_are_means_over_the_retrained(self, evaluation, models):
        trained, first, second, forgot = models
        row = evaluation.row("mine", forgot, trained, [first, second])
        kls = [kl_divergence(other.forget_logits, forgot.forget_logits) for other in (first, second)]
        assert row.kl_forget == pytest.approx(fmean(kls))
        swapped = fmean(kl_divergence(forgot.forget_logits, other.forget_logits) for other in (first, second))
        assert abs(row.kl_forget - swapped) > 1e-3
        assert row.logit_mse == pytest.approx(
            fmean(logit_mse(other.test_logits, forgot.test_logits) for other in (first, second))
        )
        accuracies = fmean(other.alone["test_accuracy"] for other in (first, second))
        own, before = forgot.alone["test_accuracy"], trained.alone["test_accuracy"]
        assert row.accuracy_gap == pytest.approx(abs(own - accuracies))
        assert row.causal_faithfulness == pytest.approx(1 - abs(own - accuracies) / abs(before - accuracies))
        assert row.asr_reduction == pytest.approx(1 - forgot.alone["asr"] / trained.alone["asr"])
        success = fmean(other.alone["mia_success"] for other in (first, second))
        assert row.privacy_gap == pytest.approx(abs(forgot.alone["mia_success"] - success))
        assert row.privacy_gap != pytest.approx(abs(trained.alone["mia_success"] - success))
        assert row.seconds is row.speedup is None

    def test_without_retraining_comparisons_are_none(self, evaluation, models):
        trained, _, _, forgot = models
        row = evaluation.row("mine", forgot, trained, [], self.COST)
        names = (*BESIDE, "causal_faithfulness", "accuracy_gap", "privacy_gap", "speedup", "speedup_in_gradients")
        assert all(getattr(row, name) is None for name in names)
        assert row.test_accuracy == forgot.alone["test_accuracy"]
        assert row.seconds == 2.0

    def test_a_retrained_model_is_not_compared_with_itself(self, evaluation, models):
        trained, first, second, _ = models
        row = evaluation.row("retrain", first, trained, [first, second], self.RETRAIN[0], self.RETRAIN)
        assert row.kl == pytest.approx(kl_divergence(second.test_logits, first.test_logits))
        assert row.kl > 0
        assert row.speedup == pytest.approx(2.0)
        alone = evaluation.row("retrain", first, trained, [first], self.RETRAIN[0], self.RETRAIN[:1])
        assert alone.kl is None
        assert alone.speedup == 1.0


def model_with(parameters, value, asr):
    """A measured model in made-up numbers."""
    outputs = torch.tensor([[float(parameters[0]), 0.0]])
    alone = dict.fromkeys(ALONE, value) | {"asr": asr}
    return Measured(
        Snapshot(torch.tensor(parameters), {}),
        outputs,
        outputs,
        outputs,
        None,
        torch.zeros(0, 2),
        (outputs[:, 0], outputs[:0, 0]),
        lambda: torch.zeros(0, 2),
        alone,
    )


def test_causal_faithfulness_that_measures_noise_is_left_out(evaluation):
    """Where trained and retrained accuracy are less than a point apart."""
    for apart, expected in ((0.2, 0.5), (0.009, None)):
        trained, retrained, own = (
            model_with([1.0, number], value, None)
            for number, value in ((0.0, 0.7 + apart), (1.0, 0.7), (2.0, 0.7 + apart / 2))
        )
        assert evaluation.row("mine", own, trained, [retrained]).causal_faithfulness == pytest.approx(expected)


def test_a_model_whose_outputs_are_not_finite_has_a_row_without_comparisons(evaluation, federation, models):
    start = federation.initial(0)
    broken = evaluation.measure(start.moved(torch.full_like(start.parameters, 3e38)))
    assert not broken.is_finite
    trained, first, second, _ = models
    row = evaluation.row("mine", broken, trained, [first, second])
    assert (row.kl, row.forget_loss, row.mia_auc, row.privacy_gap) == (None, None, None, None)
    more = evaluation.measure(federation.initial(7))
    assert evaluation.judgement(broken, trained, [first, second, more]).verdict == "DAMAGED"


class TestNoise:
    def test_ranges_by_hand(self):
        one, two, three = (
            model_with(p, v, a)
            for p, v, a in (([3.0, 4.0], 0.5, None), ([0.0, 1.0], 0.7, None), ([0.0, 2.0], 0.9, None))
        )
        values = retrain_noise([one, two, three])
        assert values["test_accuracy"] == [0.5, 0.7, 0.9]
        assert values["asr"] == []
        pairs = [parameter_gap(a.model.parameters, b.model.parameters) for a, b in permutations([one, two, three], 2)]
        assert values["parameter_gap"] == pytest.approx(pairs)
        assert 1.0 in values["parameter_gap"]  # from (0, 1) to (0, 2)
        assert 0.5 in values["parameter_gap"]  # and back
        ranges = noise_ranges([values, retrain_noise([model_with([1.0, 1.0], 0.1, None)])])
        assert ranges["test_accuracy"] == {"low": 0.1, "high": 0.9, "mean": pytest.approx(0.55)}
        assert "asr" not in ranges
        assert ranges["parameter_gap"]["high"] == pytest.approx(max(pairs))
        assert ranges["parameter_gap"]["mean"] == pytest.approx(fmean(pairs))

    def test_one_model_has_no_pairs(self):
        ranges = noise_ranges([retrain_noise([model_with([1.0, 1.0], 0.25, 0.5)])])
        assert ranges["asr"] == {"low": 0.5, "high": 0.5, "mean": 0.5}
        assert not set(BESIDE) & set(ranges)
        assert noise_ranges([]) == {}

    def test_compare_names_every_measure_with_the_retrained_first(self, models):
        _, first, second, _ = models
        found = compare(first, second)
        assert set(found) == set(BESIDE)
        assert found["kl"] == kl_divergence(first.test_logits, second.test_logits)
        assert found["parameter_gap"] == parameter_gap(first.model.parameters, second.model.parameters)
