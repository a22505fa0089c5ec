"""The verdict on made-up values: every kind, its errors, and what it must not be moved by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditing.synthetic import GOAL, KNOWN, beside, model, retrained, trained
from expunge.auditing.measures import MEASURES, compared
from expunge.auditing.references import outliers
from expunge.auditing.verdict import Verdict, judge, level_of
from expunge.errors import RequestError


def verdict(value, count=10, attempt=1, **how):
    return judge(beside(value, count, **how), attempt)


class TestEveryKind:
    def test_equivalent(self):
        found = verdict(model(50, noise=0.5))
        assert found.verdict == Verdict.EQUIVALENT, found.reason
        assert all(one.outcome == "within" for one in found.findings)
        assert "10 retrained models" in found.reason

    @pytest.mark.parametrize("kept", [0.3, 0.6, 1.0, 1.3])
    def test_a_part_of_it_all_of_it_and_more(self, kept):
        found = verdict(model(51, kept=kept))
        assert found.verdict == Verdict.UNDER_FORGOTTEN
        assert "towards the trained model" in found.reason

    @pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name] and MEASURES[name].side != "below"])
    def test_each_measure_of_forgetting_alone_is_enough(self, name):
        """A model that is as retrained ones but in one thing, where it is half-way to the trained one."""
        found = verdict(model(52) | {name: GOAL[name] + 0.5 * KNOWN[name]})
        assert found.verdict == Verdict.UNDER_FORGOTTEN
        assert MEASURES[name].label in found.reason

    def test_a_model_that_looks_past_the_trigger_went_too_far(self):
        found = verdict(model(52) | {"trigger_moves": GOAL["trigger_moves"] - 1.5 * KNOWN["trigger_moves"]})
        assert found.verdict == Verdict.OVER_FORGOTTEN
        assert MEASURES["trigger_moves"].label in found.reason
        above = verdict(model(50, noise=0.5) | {"trigger_moves": GOAL["trigger_moves"] + 0.5 * KNOWN["trigger_moves"]})
        assert above.verdict == Verdict.EQUIVALENT, "that side is the other measures'"

    def test_a_tenth_and_a_little_more_is_never_equivalent(self):
        """What the margin promises: 16% is beyond it (10%) and the noise of the mean."""
        assert verdict(model(53, kept=0.16)).verdict in (Verdict.UNDECIDED, Verdict.UNDER_FORGOTTEN)

    def test_over_forgotten(self):
        found = verdict(model(54, forget_loss=7.0))
        assert found.verdict == Verdict.OVER_FORGOTTEN
        assert "loss on the forgotten data" in found.reason

    def test_a_trigger_that_pushes_away_is_over_forgotten(self):
        """Lower is not better."""
        assert verdict(model(55, trigger_pull=-9.0)).verdict == Verdict.OVER_FORGOTTEN

    def test_a_distance_goes_with_the_direction_of_the_rest(self):
        away = model(56, kept=-0.3) | {"distance": 3.0}
        assert verdict(away).verdict == Verdict.OVER_FORGOTTEN

    @pytest.mark.parametrize(("name", "value"), [("test_accuracy", 0.7), ("test_loss", 1.5)])
    def test_damaged(self, name, value):
        found = verdict(model(57) | {name: value})
        assert found.verdict == Verdict.DAMAGED
        assert MEASURES[name].label in found.reason

    def test_remembering_and_damaged(self):
        found = verdict(model(58, kept=1.0, test_accuracy=0.5))
        assert found.verdict == Verdict.DAMAGED
        assert "towards the trained model: " in found.reason

    def test_damage_that_remembering_explains(self):
        """The leaver had ruined the model itself: what is still ruined as before was not ruined by forgetting."""
        before = trained(test_accuracy=0.6)
        found = judge(compared(model(59, kept=0.9, test_accuracy=0.6), before, retrained(10)))
        assert found.verdict == Verdict.UNDER_FORGOTTEN

    def test_better_use_is_no_fault(self):
        assert verdict(model(60, test_accuracy=0.99, test_loss=0.1)).verdict == Verdict.EQUIVALENT


class TestUndecided:
    @pytest.mark.parametrize("kept", [0.0, 1.0])
    def test_where_nothing_can_be_seen(self, kept):
        found = verdict(model(70, kept=kept, trace=0.01), trace=0.01)
        assert found.verdict == Verdict.UNDECIDED
        assert "too little to be told from noise" in found.reason
        assert found.power.share is None

    def test_damage_and_going_too_far_are_seen_there_all_the_same(self):
        assert verdict(model(71, trace=0.0, test_accuracy=0.5), trace=0.0).verdict == Verdict.DAMAGED
        assert verdict(model(72, trace=0.0, forget_loss=30.0), trace=0.0).verdict == Verdict.OVER_FORGOTTEN

    @pytest.mark.parametrize("count", [3, 4])
    def test_fewer_than_five_are_never_enough(self, count):
        found = verdict(model(73), count)
        assert found.verdict == Verdict.UNDECIDED
        assert f"{5 - count} more retrained model" in found.reason

    @pytest.mark.parametrize("count", [1, 2])
    def test_one_or_two_show_no_noise(self, count):
        found = verdict(model(74), count)
        assert (found.verdict, found.findings, found.power) == (Verdict.UNDECIDED, (), None)
        assert "at least 3 are needed, 5 are better" in found.reason

    def test_nothing_to_compare(self):
        assert judge([]).verdict == Verdict.UNDECIDED

    def test_what_would_decide_does(self):
        """The number that is told is enough, were the spread and the mean to stay: here they do."""
        values = [3.0, 3.02, 2.98, 3.015, 2.985]

        def found(value, more):
            models = [{"forget_loss": x} for x in values * more]
            return judge(compared({"forget_loss": value}, {"forget_loss": 0.0}, models))

        (one,) = found(3.0, 1).findings
        edge = 3.0 + one.margin - 0.5 * one.reach
        few = found(edge, 1)
        assert few.verdict == Verdict.UNDECIDED
        assert "more retrained model" in few.reason
        assert found(edge, 4).verdict == Verdict.EQUIVALENT

    def test_noisy_measures_are_named_and_left_out(self):
        noisy = [one | {"mia_auc": 0.5 + 0.3 * number} for number, one in enumerate(retrained(10))]
        found = judge(compared(model(75, noise=0.5) | {"mia_auc": 1.9}, trained(), noisy))
        assert found.verdict == Verdict.EQUIVALENT
        assert MEASURES["mia_auc"].label in found.power.sentence
        beyond = judge(compared(model(75, noise=0.5) | {"mia_auc": 5.2}, trained(), noisy))
        assert beyond.verdict == Verdict.UNDECIDED, "what no retrained model shows speaks, however noisy"


class TestErrors:
    def test_honest_retrains(self):
        """Normal noise, ten and five references: anything but EQUIVALENT or UNDECIDED in at most 5 of 100."""
        equivalent = {}
        for count, least in ((10, 80), (5, 65)):
            found = [
                judge(compared(model(9000 + seed), trained(), retrained(count, first=20 * seed))) for seed in range(100)
            ]
            equivalent[count] = sum(own.verdict == Verdict.EQUIVALENT for own in found)
            assert sum(own.verdict not in (Verdict.EQUIVALENT, Verdict.UNDECIDED) for own in found) <= 5
            assert equivalent[count] >= least, equivalent

    @pytest.mark.parametrize("count", [5, 10])
    def test_a_model_beyond_a_margin_is_rarely_equivalent(self, count):
        """It deviates in one measure alone, by the margin that is stated for it."""
        passed = 0
        for seed in range(400):
            own, references = model(9000 + seed), retrained(count, first=20 * seed)
            stated = next(
                one
                for one in judge(compared(own, trained(), references)).findings
                if one.measure.name == "trigger_rank"
            )
            beyond = own | {"trigger_rank": GOAL["trigger_rank"] + stated.margin}
            passed += judge(compared(beyond, trained(), references)).verdict == Verdict.EQUIVALENT
        assert passed <= 0.065 * 400

    def test_a_later_attempt_is_told_with_its_own_level(self):
        first, third = (judge(beside(model(50, noise=0.5), 10), attempt) for attempt in (1, 3))
        assert "but for a chance of 5% (" in first.power.sentence
        assert "but for a chance of 1.25% (" in third.power.sentence
        assert third.power.honest_passes < first.power.honest_passes

    def test_power_says_what_honest_retrains_do(self):
        """A lower bound, and not an empty one."""
        found = [judge(compared(model(9000 + seed), trained(), retrained(10, first=20 * seed))) for seed in range(100)]
        told = sum(own.power.honest_passes for own in found) / 100
        passed = sum(own.verdict == Verdict.EQUIVALENT for own in found) / 100
        assert 0.5 < told <= passed + 0.1

    def test_attempts_spend_the_level(self):
        assert [level_of(number) for number in (1, 2, 3)] == [0.05, 0.025, 0.0125]
        with pytest.raises(RequestError, match="counted from 1"):
            level_of(0)
        near = model(80, noise=0.0)
        rank = next(one for one in verdict(near).findings if one.measure.name == "trigger_rank")
        near |= {"trigger_rank": rank.retrained + rank.margin - 1.3 * rank.reach}
        assert verdict(near).verdict == Verdict.EQUIVALENT
        assert verdict(near, attempt=8).verdict == Verdict.UNDECIDED
        assert verdict(near, attempt=8).attempt == 8


class TestReferences:
    def spoiled(self, **changes):
        references = retrained(10)
        references[3] |= changes
        return references

    def test_a_spoiled_one_is_named_and_refused(self):
        found = judge(compared(model(90), trained(), self.spoiled(trigger_rank=5.0)))
        assert [one.number for one in found.refused] == [3]
        assert "retrained[3] is unlike the others" in found.reason
        assert found.power.retrains == 9

    def test_it_hides_nobody(self):
        for kept in (0.25, 0.5):
            references = self.spoiled(**model(3, kept=0.5))
            assert judge(compared(model(91, kept=kept), trained(), references)).verdict == Verdict.UNDER_FORGOTTEN

    def test_an_equivalent_model_stays_so_without_it(self):
        assert judge(compared(model(90), trained(), self.spoiled(**trained()))).verdict == Verdict.EQUIVALENT

    def test_honest_ones_are_hardly_ever_named(self):
        named = sum(bool(outliers(beside(model(1), 10, noise=noise))) for noise in (0.5, 1.0, 2.0))
        for seed in range(100):
            named += bool(outliers(compared(model(1), trained(), retrained(10, first=30 * seed))))
        assert named <= 4

    def test_many_that_disagree_are_judged_by_nobody(self):
        references = retrained(10)
        for number, kept in ((0, 1.0), (1, -3.0), (2, 9.0)):
            references[number] = model(number, kept=kept)
        found = judge(compared(model(92), trained(), references))
        assert (found.verdict, found.findings) == (Verdict.UNDECIDED, ())
        assert "disagree" in found.reason

    def test_five_of_which_one_is_refused_are_four(self):
        references = retrained(5)
        references[2] |= {"trigger_rank": 8.0, "asr": 0.9, "distance": 5.0}
        found = judge(compared(model(93), trained(), references))
        assert found.verdict == Verdict.UNDECIDED
        assert "1 more retrained model" in found.reason


class TestNothingElseMatters:
    @settings(max_examples=25, deadline=None)
    @given(st.permutations(range(10)), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
    def test_the_order_of_the_retrained(self, order, kept):
        models = retrained(10)
        own = model(94, kept=kept)
        first = judge(compared(own, trained(), models))
        second = judge(compared(own, trained(), [models[number] for number in order]))
        assert first.verdict == second.verdict

    @settings(max_examples=25, deadline=None)
    @given(st.floats(0.2, 1.5))
    def test_what_remembers_is_never_equivalent(self, kept):
        assert verdict(model(95, kept=kept)).verdict == Verdict.UNDER_FORGOTTEN

    def test_trained_and_model_exchanged_is_seen(self):
        own, before, references = model(96), trained(), retrained(10)
        assert judge(compared(own, before, references)).verdict == Verdict.EQUIVALENT
        assert judge(compared(before, own, references)).verdict != Verdict.EQUIVALENT

    def test_a_measure_that_one_model_lacks_is_left_out(self):
        references = retrained(10)
        references[4] |= {"asr": None}
        names = {one.measure.name for one in compared(model(97), trained(), references)}
        assert names == set(GOAL) - {"asr"}
