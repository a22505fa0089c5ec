import dataclasses
import math
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from auditing.synthetic import FORGET_LABELS, TEST_LABELS, observed, retrained, trained
from expunge.auditing.equivalence import findings, retrained_noise, value_of
from expunge.auditing.functional import accuracy, kl_divergence
from expunge.auditing.measures import MEASURES, NATS, POINT
from expunge.auditing.verdict import Verdict, judge, nearer_to_trained
from expunge.errors import DataError, ModelError, RequestError

BY_NAME = {measure.name: measure for measure in MEASURES}
ISSUE = {
    "test_accuracy",
    "forget_accuracy",
    "forget_loss",
    "kl",
    "kl_forget",
    "agreement",
    "asr",
    "forget_auc",
    "retained_auc",
}


def verdict(candidate, **how):
    return judge(retrained=retrained(**how), trained=trained(**how), candidate=candidate)


class TestLevel:
    def test_all_measures_together_are_wrong_once_in_fifty(self):
        """The limits where nothing else is said, by hand: Student's t at a ninth of 2%, widened by the margin.

        A spread is not known to be smaller than one sample is worth.
        """
        models = retrained()
        found = {own.measure.name: own for own in verdict(observed(70)).findings}
        for name in ("test_accuracy", "asr"):
            values = [BY_NAME[name].alone(model) for model in models]
            sides = 1 if BY_NAME[name].side == "below" else 2
            spread = max(stdev(values), 1 / len(TEST_LABELS)) * math.sqrt(1 + 1 / len(values))
            reach = student.isf(0.02 / 9 / sides, len(values) - 1) * spread
            assert found[name].low == pytest.approx(fmean(values) - reach - POINT)

    def test_what_is_rarer_than_that_deviates_and_what_is_not_does_not(self):
        """One measure alone off, by what one honest retrain in 30 or in 80 would be: above and below one in 50."""
        models = retrained()
        values = [model.retained_auc for model in models]
        spread = max(stdev(values), 1 / len(TEST_LABELS)) * math.sqrt(1 + 1 / len(values))
        for chance, deviates in ((1 / 30, False), (1 / 80, True)):
            off = student.isf(chance / 9 / 2, len(values) - 1) * spread + POINT
            own = observed(70, retained_auc=fmean(values) + off)
            (finding,) = (each for each in verdict(own).findings if each.measure.name == "retained_auc")
            assert finding.p_value == pytest.approx(chance / 9)
            assert finding.deviates is deviates


class TestMeasures:
    def test_all_that_was_asked_for_with_margins_fixed_beforehand(self):
        assert set(BY_NAME) == ISSUE
        nats = {"forget_loss", "kl", "kl_forget"}
        assert all(measure.margin == (NATS if name in nats else POINT) for name, measure in BY_NAME.items())
        assert (POINT, NATS) == (0.01, 0.02)

    def test_values_by_hand(self):
        models, own = retrained(4), observed(77, kept=0.3)
        assert value_of(BY_NAME["test_accuracy"], own, models) == accuracy(own.test_logits, own.test_labels)
        kls = [kl_divergence(model.forget_logits, own.forget_logits) for model in models]
        expected = 0.02 * (math.exp(fmean(math.log(1 + kl / 0.02) for kl in kls)) - 1)
        assert value_of(BY_NAME["kl_forget"], own, models) == pytest.approx(expected)
        backwards = [kl_divergence(own.forget_logits, model.forget_logits) for model in models]
        assert abs(fmean(kls) - fmean(backwards)) > 1e-3, "the retrained one is the reference, not the candidate"
        assert value_of(BY_NAME["asr"], own, models) == own.asr

    def test_limits_are_widened_and_agree_with_p_values(self):
        models = retrained(5)
        for noise in retrained_noise(models):
            low, high = noise.limits(0.01)
            for limit in (low, high):
                if math.isfinite(limit) and limit > 0:
                    assert noise.p_value(limit) == pytest.approx(0.01, rel=1e-6), noise.measure.name
            assert noise.p_value(noise.centre + 0.999 * noise.measure.margin) == 1.0

    def test_a_rate_varies_by_one_sample_at_least(self):
        models = [dataclasses.replace(model, asr=0.0) for model in retrained(5)]
        noise = next(own for own in retrained_noise(models) if own.measure.name == "asr")
        assert noise.further.spread == 1 / len(TEST_LABELS)

    def test_without_attack_or_membership_they_are_left_out(self):
        bare = {"asr": None, "forget_auc": None, "retained_auc": None}
        noise = retrained_noise(retrained(5, **bare))
        assert {own.measure.name for own in noise} == ISSUE - set(bare)
        with pytest.raises(DataError, match="attack success is missing for one model"):
            findings(retrained_noise(retrained(5)), observed(9, asr=None), retrained(5))


class TestEveryKind:
    def test_equivalent(self):
        found = verdict(observed(50))
        assert found.verdict == Verdict.EQUIVALENT
        assert not any(finding.deviates for finding in found.findings)
        assert any(finding.deviates for finding in found.doing_nothing)

    def test_doing_nothing_is_under_forgotten(self):
        found = verdict(trained())
        assert found.verdict == Verdict.UNDER_FORGOTTEN
        assert "towards the trained model" in found.reason

    @pytest.mark.parametrize("kept", [0.3, 0.6, 1.3])
    def test_a_part_of_it_and_more_than_all_of_it(self, kept):
        assert verdict(observed(51, kept=kept)).verdict == Verdict.UNDER_FORGOTTEN

    def test_hidden_answers_but_a_live_trigger(self):
        """Everything but the attack is as in a retrained model."""
        found = verdict(observed(52, asr=0.5))
        assert found.verdict == Verdict.UNDER_FORGOTTEN
        assert "attack success is 50.0%" in found.reason

    def test_over_forgotten(self):
        found = verdict(observed(53, beyond=1.0))
        assert found.verdict == Verdict.OVER_FORGOTTEN
        assert "away from" in found.reason

    def test_an_auc_below_the_retrained_is_over_forgotten(self):
        """Lower is not better."""
        assert verdict(observed(54, forget_auc=0.3)).verdict == Verdict.OVER_FORGOTTEN

    def test_damaged(self):
        found = verdict(observed(55, damage=1.0))
        assert found.verdict == Verdict.DAMAGED
        assert "test accuracy" in found.reason

    def test_damage_that_accuracy_does_not_show(self):
        """Ten times more confident: the answers are the same, the probabilities are not."""
        model = observed(56)
        loud = dataclasses.replace(model, test_logits=10 * model.test_logits)
        found = verdict(loud)
        assert found.verdict == Verdict.DAMAGED
        assert "divergence on test data" in found.reason

    def test_memorised_retained_data_is_damage(self):
        assert verdict(observed(57, retained_auc=0.9)).verdict == Verdict.DAMAGED

    def test_remembering_and_damaged(self):
        found = verdict(observed(58, kept=1.0, damage=1.0))
        assert found.verdict == Verdict.DAMAGED
        assert "towards the trained model: " in found.reason

    def test_damage_that_remembering_explains(self):
        """The leaver had ruined the model itself: what is still ruined as before was not ruined by forgetting."""
        ruined = trained(damage=1.0)
        found = judge(retrained=retrained(), trained=ruined, candidate=observed(59, kept=0.9, damage=1.0))
        assert found.verdict == Verdict.UNDER_FORGOTTEN

    def test_not_finite_is_damaged(self):
        broken = observed(60)
        broken.forget_logits[0, 0] = math.nan
        assert verdict(broken).verdict == Verdict.DAMAGED

    def test_better_test_accuracy_is_no_fault(self):
        models = retrained(damage=0.55)
        found = judge(retrained=models, trained=trained(damage=0.55), candidate=observed(61))
        told = {finding.measure.name for finding in found.findings if finding.deviates}
        assert "test_accuracy" not in told


class TestUndecided:
    @pytest.mark.parametrize("kept", [0.0, 1.0])
    def test_where_nothing_can_be_seen(self, kept):
        found = verdict(observed(70, kept=kept, trace=0.0), trace=0.0)
        assert found.verdict == Verdict.UNDECIDED
        assert "ot distinguishable from doing nothing" in found.reason

    def test_damage_is_seen_there_all_the_same(self):
        assert verdict(observed(71, trace=0.0, damage=1.0), trace=0.0).verdict == Verdict.DAMAGED

    def test_half_of_it_must_be_told(self):
        """Doing nothing is just caught, so a model that kept half would pass: no EQUIVALENT."""
        bare = {"asr": None, "forget_auc": None, "noise": 1.6}
        models, seen = retrained(**bare), set()
        for trace in torch.linspace(0.0, 0.6, 25).tolist():
            before = observed(500, kept=1.0, trace=trace, **bare)
            found = judge(retrained=models, trained=before, candidate=observed(72, **bare))
            assert found.verdict in (Verdict.UNDECIDED, Verdict.EQUIVALENT)
            if found.verdict == Verdict.EQUIVALENT:
                assert found.power.share_told <= 0.5
            seen.add(found.reason.split(":")[0].split(" 50%")[0].split(";")[0])
        assert {"Not distinguishable from doing nothing", "A model that kept"} <= seen

    def test_how_many_retrains_would_do(self):
        bare = {"asr": None, "forget_auc": None, "noise": 1.6}
        before = observed(500, kept=1.0, trace=0.25, **bare)
        few = judge(retrained=retrained(3, **bare), trained=before, candidate=observed(72, **bare))
        assert few.verdict == Verdict.UNDECIDED
        assert few.power.needed > 3
        assert f"about {few.power.needed} retrained models would tell" in few.reason
        assert few.power.needed >= 4

    @pytest.mark.parametrize("count", [0, 1, 2])
    def test_too_few_retrains(self, count):
        found = judge(retrained=retrained(count), trained=trained(), candidate=observed(73))
        assert found.verdict == Verdict.UNDECIDED
        assert "at least 3 are needed, 5 are better" in found.reason

    def test_too_few_samples(self):
        def cut(model, forgotten=80, test=120):
            return dataclasses.replace(
                model,
                forget_logits=model.forget_logits[:forgotten],
                forget_labels=model.forget_labels[:forgotten],
                test_logits=model.test_logits[:test],
                test_labels=model.test_labels[:test],
            )

        for what, size in (("forgotten", {"forgotten": 19}), ("test", {"test": 49})):
            found = judge(
                retrained=[cut(model, **size) for model in retrained()],
                trained=cut(trained(), **size),
                candidate=cut(observed(74), **size),
            )
            assert found.verdict == Verdict.UNDECIDED
            assert f"{next(iter(size.values()))} {what} samples are too few" in found.reason


class TestErrorRates:
    def test_honest_retrains_pass_and_doing_nothing_does_not(self):
        """120 times over: five retrained models, a sixth to be judged, and a model that kept a tenth."""
        called = {"honest": [], "tenth": [], "nothing": []}
        for run in range(120):
            models = retrained(6, first=10 * run + 5000)
            before = observed(10 * run + 5008, kept=1.0)
            candidates = {
                "honest": models.pop(),
                "tenth": observed(10 * run + 5009, kept=0.1),
                "nothing": observed(10 * run + 5007, kept=1.0),
            }
            for name, model in candidates.items():
                called[name].append(judge(retrained=models, trained=before, candidate=model).verdict)
        assert called["honest"].count(Verdict.EQUIVALENT) >= 114
        assert set(called["nothing"]) == {Verdict.UNDER_FORGOTTEN}
        assert called["tenth"].count(Verdict.UNDER_FORGOTTEN) > 60

    def test_the_power_that_is_told(self):
        found = verdict(observed(80)).power
        assert found.retrains == 5
        assert 0.95 <= found.honest_passes <= 1.0
        assert found.nothing_caught > 0.99
        assert 0 < found.share_told < 0.2
        assert set(found.smallest_told) == ISSUE
        assert all(told > BY_NAME[name].margin for name, told in found.smallest_told.items())
        assert "an honest retrain passes" in found.sentence
        assert "too little to be told" in verdict(observed(80, trace=0.0), trace=0.0).power.sentence

    def test_more_retrains_tell_more(self):
        few, many = (
            judge(retrained=retrained(count), trained=trained(), candidate=observed(81)).power for count in (4, 12)
        )
        assert many.share_told < few.share_told

    @settings(max_examples=15)
    @given(st.permutations(range(5)), st.floats(0, 1.2))
    def test_the_order_of_the_retrained_does_not_matter(self, order, kept):
        models, model = retrained(), observed(82, kept=kept)
        one = judge(retrained=models, trained=trained(), candidate=model)
        other = judge(retrained=[models[k] for k in order], trained=trained(), candidate=model)
        assert one.verdict == other.verdict
        for first, second in zip(one.findings, other.findings, strict=True):
            assert first.p_value == pytest.approx(second.p_value, rel=1e-6, abs=1e-12)

    @settings(max_examples=15)
    @given(st.floats(0, 1))
    def test_what_remembers_more_is_never_taken_for_less(self, kept):
        """Once under-forgotten, always so as more is kept."""
        less, more = (verdict(observed(83, kept=share)).verdict for share in (kept, min(1.0, kept + 0.3)))
        assert less != Verdict.UNDER_FORGOTTEN or more == Verdict.UNDER_FORGOTTEN
        assert more != Verdict.EQUIVALENT

    def test_same_init_noise_is_shown_and_not_used(self):
        same = retrained(3, first=300, noise=0.1)
        one = verdict(observed(84))
        other = judge(retrained=retrained(), trained=trained(), candidate=observed(84), same_init=same)
        assert one.verdict == other.verdict
        shown = {finding.measure.name: finding.same_init for finding in other.findings}
        losses = [BY_NAME["forget_loss"].alone(model) for model in same]
        assert shown["forget_loss"] == pytest.approx(stdev(losses))
        assert all(finding.same_init is None for finding in one.findings)


class TestSwapped:
    def test_trained_and_candidate(self):
        """Swapped, an honest candidate would look like a trained model that does nothing."""
        right = judge(retrained=retrained(), trained=trained(), candidate=observed(90))
        swapped = judge(retrained=retrained(), trained=observed(90), candidate=trained())
        assert right.verdict == Verdict.EQUIVALENT
        assert swapped.verdict != Verdict.EQUIVALENT

    def test_arguments_have_names(self):
        with pytest.raises(TypeError):
            judge(retrained(), trained(), observed(90))

    def test_a_retrained_model_beside_itself(self):
        models = retrained()
        with pytest.raises(RequestError, match="candidate is one of the retrained"):
            judge(retrained=models, trained=trained(), candidate=models[2])
        with pytest.raises(RequestError, match="trained model is one of the retrained"):
            judge(retrained=models, trained=models[0], candidate=observed(90))

    def test_retrained_ones_that_are_trained_ones(self):
        """The references remember, the candidate does not: away from the one called trained."""
        found = judge(retrained=retrained(kept=1.0), trained=observed(90), candidate=observed(91))
        assert found.verdict == Verdict.UNDER_FORGOTTEN, "towards the model that was given as trained"

    def test_nearer_to_trained(self):
        models = retrained()
        assert nearer_to_trained(models, trained(), observed(92, kept=0.5))
        assert not nearer_to_trained(models, trained(), observed(92, beyond=1.0))


class TestRefused:
    def refused(self, error, match, **changes):
        with pytest.raises(error, match=match) as caught:
            judge(retrained=retrained(), trained=trained(), candidate=observed(95, **changes))
        assert "\n" not in str(caught.value)

    def test_another_shape(self):
        self.refused(ModelError, "different shapes", test_logits=torch.zeros(120, 7))
        self.refused(ModelError, "different shapes", forget_logits=torch.zeros(40, 5), forget_labels=FORGET_LABELS[:40])

    def test_labels_that_do_not_match(self):
        self.refused(DataError, "different labels", forget_labels=FORGET_LABELS.flip(0))
        self.refused(DataError, "different labels", test_labels=TEST_LABELS.flip(0))
        self.refused(DataError, "do not belong to 10 labels", forget_labels=FORGET_LABELS[:10])
        self.refused(DataError, "outside the model's 5 classes", forget_labels=FORGET_LABELS + 3)

    def test_an_empty_forget_set(self):
        empty = {"forget_logits": torch.zeros(0, 5), "forget_labels": torch.zeros(0, dtype=torch.int64)}
        self.refused(DataError, "no forgotten or no test sample", **empty)

    def test_a_reference_that_is_not_finite(self):
        models = retrained()
        models[1].test_logits[0, 0] = math.inf
        with pytest.raises(ModelError, match="not finite"):
            judge(retrained=models, trained=trained(), candidate=observed(95))

    def test_a_level_that_is_none(self):
        with pytest.raises(RequestError, match="level"):
            judge(retrained=retrained(), trained=trained(), candidate=observed(95), level=1.0)
