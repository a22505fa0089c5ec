"""On the way back to the trained model: what mixtures show there, and who is asked at all."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import expunge
from expunge.auditing.answers import directions, log_odds
from expunge.auditing.margins import findings
from expunge.auditing.measures import BACK_PULL, MEASURES, ON_THE_WAY, Compared, compared
from expunge.auditing.verdict import Verdict, judge
from expunge.auditing.way_back import FAR, NEAR
from expunge.bench.cells import RetrainedCell, TrainedCell
from expunge.bench.evaluation import Evaluation
from expunge.bench.settings import Forget
from expunge.bench.store import Store
from expunge.bench.verdict import SCENARIO
from expunge.data import stamp
from expunge.errors import RequestError
from expunge.unlearning.request import Request

LEAVER, SEED = "client-0", 3
FRESH, OWN = 5, 5


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A network with a backdoor, five fresh retrained ones, five from its own start, and one of each to be judged."""
    scenario = replace(SCENARIO, backdoors={LEAVER: SCENARIO.backdoors["client-3"]}).with_seed(SEED)
    store = Store(tmp_path_factory.mktemp("store"))

    def made(cell):
        store.make(cell)
        return store.kept(cell).state.model

    trained, gone = made(TrainedCell(scenario)), Forget((LEAVER,))
    fresh = [made(RetrainedCell(scenario, gone, number)) for number in range(FRESH + 1)]
    numbers = range(FRESH + 1, FRESH + 1 + OWN)
    own = [made(RetrainedCell(scenario, gone, number, fresh=False, same_batches=False)) for number in numbers]
    same = made(RetrainedCell(scenario, gone, 0, fresh=False))
    federation = store.federation(scenario)
    return SimpleNamespace(
        federation=federation,
        evaluation=Evaluation(federation, Request.of(LEAVER)),
        trained=trained,
        fresh=fresh[:FRESH],
        honest=fresh[FRESH],
        own=own,
        same=same,
    )


def judged(world, model, *, own=OWN):
    measure, trained = world.evaluation.measure, world.trained
    references = [measure(each, trained) for each in world.fresh]
    references += [measure(each, trained, same_start=True) for each in world.own[:own]]
    return world.evaluation.judgement(measure(model, trained), measure(trained, trained), references)


def shares(found):
    return {one.measure.name: one.share for one in found.findings if one.measure.name in ON_THE_WAY}


class TestOnARealNetwork:
    @pytest.mark.parametrize("percent", [20, 30])
    def test_a_mixture_of_the_trained_weights_is_told(self, world, percent):
        found = judged(world, world.same.towards(world.trained, percent / 100))
        assert found.verdict is Verdict.UNDER_FORGOTTEN
        assert set(shares(found)) == set(ON_THE_WAY)
        assert all(0.1 < share < 2 * percent / 100 for share in shares(found).values())

    @pytest.mark.parametrize("model", ["same", "honest"])
    def test_honest_models_of_either_start_are_not(self, world, model):
        found = judged(world, getattr(world, model))
        assert found.verdict in (Verdict.EQUIVALENT, Verdict.UNDECIDED)
        assert all(one.outcome == "within" for one in found.findings if one.measure.name in ON_THE_WAY)

    def test_more_of_the_trained_weights_shows_more(self, world):
        parts = [judged(world, world.same.towards(world.trained, part)) for part in (0.0, 0.1, 0.2, 0.4)]
        for name in ON_THE_WAY:
            values = [shares(found)[name] for found in parts]
            assert values == sorted(values)

    def test_the_trained_model_shows_all_of_it(self, world):
        assert all(share == pytest.approx(1.0) for share in shares(judged(world, world.trained)).values())

    def test_nobody_is_asked_beside_fewer_than_three_of_its_start(self, world):
        assert shares(judged(world, world.same.towards(world.trained, 0.2), own=2)) == {}

    def test_both_values_by_hand(self, world):
        exam, module = world.evaluation.exam, world.federation.model
        measured = world.evaluation.measure(world.same, world.trained)
        trigger, usable = exam.triggers[0], exam.unseen[1] != exam.triggers[0].target
        inputs = exam.unseen[0][usable]

        def answers(share, asked):
            weights = (1 - share) * world.same.parameters + share * world.trained.parameters
            other = deepcopy(module).eval()
            replace(world.same, parameters=weights).write_to(other)
            with torch.no_grad():
                return other(asked)

        turned = directions(answers(NEAR, trigger.stamp(inputs))) - directions(answers(NEAR, inputs))
        by_hand = torch.cat([directions(answers(NEAR, exam.forgotten[0])), turned])
        assert torch.allclose(measured.back.directions, by_hand, atol=1e-5)
        pull = log_odds(answers(FAR, trigger.stamp(inputs))) - log_odds(answers(FAR, inputs))
        assert measured.back.pull == pytest.approx(float(pull[:, trigger.target].mean()), rel=1e-4)

    @pytest.mark.parametrize(("group", "name"), [("fresh", "retrained"), ("own", "same_start")])
    def test_a_copy_of_either_kind_is_told(self, world, group, name):
        """Those of one start are nearer to each other than fresh ones, which must not hide a copy of these."""
        source = getattr(world, group)[1]
        other = getattr(world, group)[2]
        found = judged(world, source.towards(other, 0.02))
        assert found.verdict is Verdict.UNDECIDED
        assert f"{name}[1]" in found.reason

    def test_a_fresh_model_given_as_one_of_its_start_is_named_and_left_out(self, world):
        found = judged(with_own(world, [*world.own[:-1], world.honest]), world.same)
        assert "Left out: same_start[4], no nearer" in found.reason
        assert "was not asked" not in found.reason
        alone = judged(with_own(world, world.own[:-1]), world.same, own=4)
        assert values(found) == values(alone)

    def test_where_all_of_them_are_no_mixture_is_asked_for_and_that_is_said(self, world):
        few = SimpleNamespace(**{**vars(world), "fresh": world.fresh[:3]})
        found = judged(with_own(few, [world.honest, *world.fresh[3:]]), world.same)
        assert "same_start[0] and same_start[1] and same_start[2]" in found.reason
        assert "mixed in was not asked" in found.reason
        assert not any(one.measure.name in ON_THE_WAY for one in found.findings)


def with_own(world, models):
    return SimpleNamespace(**{**vars(world), "own": models})


def values(found):
    return {one.measure.name: (one.value, one.retrained, one.margin) for one in found.findings}


class TestTheDoor:
    """The same through expunge.audit."""

    def audited(self, world, after, **more):
        def module(snapshot):
            own = deepcopy(world.federation.model).eval()
            snapshot.write_to(own)
            return own

        exam, dataset = world.evaluation.exam, world.federation.dataset
        backdoor = world.federation.scenario.backdoors[LEAVER]
        return expunge.audit(
            module(world.trained),
            module(after) if not isinstance(after, torch.nn.Module) else after,
            [module(each) for each in world.fresh],
            exam.forgotten,
            exam.unseen,
            trigger=lambda inputs: stamp(inputs, backdoor, dataset.white),
            target=backdoor.target,
            triggered=exam.triggered > 0,
            same_start=[module(each) for each in world.own],
            nonce="the auditor's",
            **more,
        )

    def test_a_mixture_is_told_and_the_models_of_its_start_are_named(self, world):
        found = self.audited(world, world.same.towards(world.trained, 0.2))
        assert found.verdict is Verdict.UNDER_FORGOTTEN
        named = found.as_dict()["models"]
        assert (len(named["retrained"]), len({*named["same_start"], *named["retrained"]})) == (FRESH, FRESH + OWN)

    def test_another_architecture_is_never_equivalent(self, world):
        class Wrapped(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, inputs):
                return self.inner(inputs)

        inner = deepcopy(world.federation.model).eval()
        world.honest.write_to(inner)
        plain, wrapped = self.audited(world, world.honest), self.audited(world, Wrapped(inner).eval())
        assert plain.verdict is Verdict.EQUIVALENT
        assert wrapped.verdict is not Verdict.EQUIVALENT
        assert not any(one.measure.name in ON_THE_WAY for one in wrapped.findings)

    def test_a_list_is_asked_for(self, world):
        with pytest.raises(RequestError, match="same_start is a list"):
            expunge.audit(torch.nn.Linear(1, 2), {}, [], (), (), same_start={})


class TestTheyStandApart:
    def test_the_others_know_nothing_of_them(self, world):
        alone, beside = (judged(world, world.honest, own=own).findings for own in (0, OWN))
        values = {one.measure.name: (one.value, one.retrained, one.margin) for one in beside}
        assert {one.measure.name: (one.value, one.retrained, one.margin) for one in alone} == {
            name: value for name, value in values.items() if name not in ON_THE_WAY
        }

    def test_a_measure_of_the_way_has_their_values_alone(self):
        sharing = [{BACK_PULL: value, "asr": 0.5} for value in (1.0, 1.1, 1.2)]
        values = {"asr": 0.0, BACK_PULL: 2.0}, {"asr": 0.9, BACK_PULL: 9.0}, [{"asr": 0.0}, {"asr": 0.01}]
        asr, back = compared(*values, own_start=sharing)
        assert (asr.retrained, back.retrained) == ((0.0, 0.01), (1.0, 1.1, 1.2))
        assert [one.measure.name for one in compared(*values, own_start=sharing[:2])] == ["asr"]
        assert findings([back])[0].models == 3

    def test_a_retrained_model_that_is_refused_takes_none_of_them_along(self):
        asr = Compared(MEASURES["asr"], 0.01, 0.9, (0.010, 0.012, 0.011, 0.013, 0.009, 0.010, 0.5))
        back = Compared(MEASURES[BACK_PULL], 0.0, 9.0, (1.0, 1.1, 1.2))
        found = judge([asr, back])
        assert [one.number for one in found.refused] == [6]
        assert {one.measure.name: one.models for one in found.findings} == {"asr": 6, BACK_PULL: 3}

    def test_only_above_counts(self):
        values = (1.0, 1.1, 1.2, 1.0, 1.1)
        low, high = (findings([Compared(MEASURES[BACK_PULL], value, 9.0, values)])[0] for value in (-5.0, 3.5))
        assert (low.outcome, high.outcome) == ("within", "outside")
