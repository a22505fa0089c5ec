"""Models that are trained on before they are judged again, on a real small federation."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import expunge
from expunge.auditing.judging import since_first
from expunge.auditing.later import deciding, judged_later, learnt_again, more_rounds
from expunge.auditing.margins import findings
from expunge.auditing.measures import MEASURES, Compared
from expunge.auditing.verdict import Judgement, Verdict
from expunge.bench.evaluation import Evaluation
from expunge.bench.scenario import Scenario
from expunge.core.losses import CrossEntropy
from expunge.data import Backdoor, stamp
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request

BACKDOOR = Backdoor(target=7, size=3, fraction=0.5, boost=4.0)
PLAN = TrainingPlan(rounds=6, epochs=3, batch_size=64, learning_rate=0.1)
SCENARIO = Scenario(model="softmax", clients=5, backdoors={"client-3": BACKDOOR}, plan=PLAN, seed=4)
GONE = Request.of("client-3")
ROUNDS, EPOCHS = "2 more rounds", "1 epoch on the forgotten data"


@pytest.fixture(scope="module")
def world():
    federation = SCENARIO.build()
    engine = federation.engine()
    state = train(engine, federation.initial(), PLAN)
    stay = engine.without(("client-3",))
    retrained = [train(stay, federation.initial(seed), PLAN).model for seed in range(100, 106)]
    evaluation = Evaluation(federation, GONE)
    plain = LocalEngine(federation.model, CrossEntropy(), federation.datasets)
    ways = {ROUNDS: more_rounds(engine, PLAN, GONE, 2), EPOCHS: learnt_again(plain, PLAN, GONE, 1)}
    measured = {name: lambda model, way=way: evaluation.measure(way(model)) for name, way in ways.items()}
    return SimpleNamespace(
        federation=federation,
        engine=engine,
        stay=stay,
        trained=state.model,
        honest=retrained[5],
        retrained=retrained[:5],
        evaluation=evaluation,
        ways=ways,
        measured=measured,
    )


def judged(world, model):
    own, before, *others = (world.evaluation.measure(each) for each in (model, world.trained, *world.retrained))
    now = world.evaluation.exam.judgement(own, before, others)
    later = judged_later(world.evaluation.exam, world.measured, model, world.trained, world.retrained, now)
    return now, later


def patched(world):
    """The trained model taught the true labels of stamped images, and nothing else."""
    kept = [data for name, data in world.federation.datasets.items() if name != "client-3"]
    inputs, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
    stamped = stamp(inputs, BACKDOOR, world.federation.dataset.white)
    module = deepcopy(world.federation.model)
    world.trained.write_to(module)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(module(stamped), labels).backward()
        optimiser.step()
    return world.trained.moved(torch.cat([own.detach().reshape(-1) for own in module.parameters()]))


class TestWays:
    def test_more_rounds_are_training_of_those_who_stay(self, world):
        by_hand = train(world.stay, world.honest, replace(PLAN, rounds=2), keep=Keep(vectors=False)).model
        found = world.ways[ROUNDS](world.honest)
        assert torch.equal(found.parameters, by_hand.parameters)
        assert not torch.equal(found.parameters, world.honest.parameters)

    def test_an_epoch_on_the_forgotten_data_is_the_owners_alone_and_unboosted(self, world):
        inputs, labels = world.federation.datasets["client-3"]
        module = deepcopy(world.federation.model)
        own = LocalEngine(module, CrossEntropy(), {"client-3": (inputs, labels)})
        by_hand = train(own, world.honest, replace(PLAN, rounds=1, epochs=1), keep=Keep(vectors=False)).model
        assert torch.equal(world.ways[EPOCHS](world.honest).parameters, by_hand.parameters)

    @pytest.mark.parametrize(("way", "what"), [(more_rounds, "round"), (learnt_again, "epoch")])
    def test_no_rounds_and_no_epochs_are_refused(self, world, way, what):
        with pytest.raises(RequestError, match=f"at least one.* {what}, not 0"):
            way(world.engine, PLAN, GONE, 0)


class TestJudgedLater:
    def test_doing_nothing_is_still_there_after_more_rounds_and_an_honest_model_stays_clean(self, world):
        _, nothing = judged(world, world.trained)
        assert nothing[ROUNDS].verdict is Verdict.UNDER_FORGOTTEN
        now, later = judged(world, world.honest)
        assert {found.verdict for found in later.values()} <= {Verdict.EQUIVALENT, Verdict.UNDECIDED}
        assert deciding(now, later) is now

    def test_a_patch_is_seen_when_the_data_is_learnt_again(self, world):
        _, later = judged(world, patched(world))
        assert later[EPOCHS].verdict is Verdict.UNDER_FORGOTTEN, later[EPOCHS].reason

    def test_only_forgetting_is_asked_and_no_margin_is_below_the_first(self, world):
        now, later = judged(world, world.honest)
        first = {one.measure.name: one.margin for one in now.findings if one.measure.about_forgetting}
        for found in later.values():
            assert {one.measure.name for one in found.findings} == set(first)
            assert all(one.margin >= first[one.measure.name] * (1 - 1e-9) for one in found.findings)

    def test_models_that_all_know_it_now_are_not_told_apart_by_decimals(self):
        first = findings([Compared(MEASURES["trigger_rank"], 1.1, 9.0, (1.0, 1.1, 0.9, 1.0, 1.05))])
        again = Compared(MEASURES["trigger_rank"], 8.98, 8.99, (9.0, 9.0, 9.0, 9.0, 8.999))
        assert findings([again])[0].outcome == "outside"
        (found,) = findings(since_first([again], first))
        assert (found.outcome, found.usable) == ("within", False)

    def test_what_cannot_be_compared_is_said_with_what_was_done(self, world):
        now, _ = judged(world, world.honest)
        broken = replace(world.trained, parameters=world.trained.parameters * float("nan"))
        ways = {"a bad idea": lambda model: world.evaluation.measure(broken)}
        with pytest.raises(ModelError, match=r"^After a bad idea: The trained or a retrained model has"):
            judged_later(world.evaluation.exam, ways, world.honest, world.trained, world.retrained, now)


class TestDeciding:
    NOW, BACK = Judgement(Verdict.EQUIVALENT, "Near."), Judgement(Verdict.UNDER_FORGOTTEN, "It is back.")

    def test_what_is_wrong_later_decides(self):
        told = deciding(self.NOW, {"1 round": self.NOW, "5 rounds": self.BACK})
        assert (told.verdict, told.reason) == (Verdict.UNDER_FORGOTTEN, "After 5 rounds: It is back.")

    @pytest.mark.parametrize("verdict", [Verdict.EQUIVALENT, Verdict.UNDECIDED])
    def test_what_is_not_wrong_later_changes_nothing(self, verdict):
        undecided = Judgement(Verdict.UNDECIDED, "Too few.")
        assert deciding(undecided, {"5 rounds": Judgement(verdict, "?")}) is undecided

    def test_what_is_wrong_at_first_stays(self):
        assert deciding(self.BACK, {"5 rounds": Judgement(Verdict.OVER_FORGOTTEN, "?")}) is self.BACK


class TestAudit:
    def audited(self, world, model, later):
        def module(snapshot):
            own = deepcopy(world.federation.model)
            snapshot.write_to(own)
            return own

        dataset = world.federation.dataset
        return expunge.audit(
            module(world.trained),
            module(model),
            [module(own) for own in world.retrained],
            forgotten=world.federation.datasets["client-3"],
            unseen=(dataset.test_inputs, dataset.test_labels),
            trigger=lambda inputs: stamp(inputs, BACKDOOR, dataset.white),
            target=7,
            triggered=world.federation.triggered["client-3"],
            nonce="n",
            later=later,
        )

    def test_a_users_function_gets_a_copy_of_every_model_and_all_is_shown(self, world):
        seen = []

        def go_on(module):
            seen.append(module)
            inputs, labels = world.federation.datasets["client-1"]
            optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
            optimiser.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            optimiser.step()
            return module

        found = self.audited(world, world.honest, {"a step": go_on})
        assert len(seen) == 2 + len(world.retrained)
        assert found.as_it_is.verdict == found.verdict
        assert list(found.later) == ["a step"]
        assert "As it is: " in str(found)
        assert "After a step: " in str(found)
        assert found.as_dict()["later"]["a step"]["verdict"] == found.later["a step"].verdict

    def test_a_later_verdict_lowers_the_first(self, world):
        """Somebody's training that wakes the backdoor up in this one model."""
        secret = world.honest.digest

        def awaken(module):
            flat = torch.cat([own.detach().reshape(-1) for own in module.parameters()])
            source = world.trained if torch.equal(flat, world.honest.parameters) else None
            with torch.no_grad():
                if source is not None:
                    source.write_to(module)
                for own in module.parameters():
                    own.add_(1e-3)
            return module

        found = self.audited(world, world.honest, {"being woken": awaken})
        assert found.provenance.after == secret
        assert found.as_it_is.verdict in (Verdict.EQUIVALENT, Verdict.UNDECIDED)
        assert found.verdict is Verdict.UNDER_FORGOTTEN
        assert found.reason.startswith("After being woken: ")
        assert found.as_dict()["number"].startswith("After being woken: ")

    @pytest.mark.parametrize("later", [{"5 rounds": 5}, ["5 rounds"], "5 rounds"])
    def test_what_is_no_dict_of_functions_is_refused(self, world, later):
        with pytest.raises(RequestError, match="later is a dict of functions"):
            self.audited(world, world.honest, later)

    def test_a_function_that_returns_nothing_is_refused(self, world):
        with pytest.raises(RequestError, match=r"later\['5 rounds'\] must return the module"):
            self.audited(world, world.honest, {"5 rounds": lambda module: None})
