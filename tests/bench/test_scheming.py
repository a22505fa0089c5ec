"""Attackers who know the method: each sends what its scheme says, in its rounds, and nobody else's reply changes."""

from dataclasses import replace

import pytest
import torch

from expunge.bench.adversary import Between
from expunge.bench.cells import RetrainedCell
from expunge.bench.insiders import insiders
from expunge.bench.scales import scale_of
from expunge.bench.scenario import CANCELLING, CREDIT, EARLY, SCHEMES, Scenario
from expunge.bench.scheming import Scheming
from expunge.bench.settings import Forget
from expunge.bench.store import Store
from expunge.core.losses import CrossEntropy
from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import Gradient
from expunge.federation.training.fedavg import Keep, train
from federation.masking import MaskedEngine
from federation.small import clients, linear

SMOKE = scale_of("smoke")
LEAVER = SMOKE.leaver
PLAIN = SMOKE.attacked(LEAVER, strong=True).with_seed(4)
PLAIN = replace(PLAIN, plan=replace(PLAIN.plan, rounds=8))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("bench") / "smoke")


def scheming(scheme):
    return replace(PLAIN, schemes={LEAVER: scheme})


def updates(store, scenario, number):
    """What everybody sends in one round from the start."""
    federation, engine = store.engine(scenario)
    start = federation.initial()
    tasks = {name: PLAIN.plan.task(start, number, name) for name in engine.clients()}
    return {name: reply.update for name, reply in engine.ask(tasks).items()}


@pytest.mark.parametrize(("number", "honest"), [(0, False), (1, False), (2, True), (7, True)])
def test_who_pulls_early_is_honest_after_a_quarter_of_the_rounds(store, number, honest):
    found, attacked = (updates(store, own, number) for own in (scheming(EARLY), PLAIN))
    clean = updates(store, PLAIN.without_deeds((LEAVER,)), number)
    assert torch.equal(found[LEAVER], clean[LEAVER] if honest else attacked[LEAVER])
    assert not torch.equal(clean[LEAVER], attacked[LEAVER])
    assert list(found) == list(attacked)
    assert all(torch.equal(found[name], attacked[name]) for name in found if name != LEAVER)


def test_what_cancels_is_all_that_would_have_been_pulled(store):
    federation, engine = store.engine(scheming(CANCELLING))
    start, own = federation.initial(), store.engine(PLAIN)[1]
    pulled = train(own, start, PLAIN.plan, keep=Keep(checkpoints=0)).memory.vectors[LEAVER]
    counts = engine.clients()
    share, given = counts[LEAVER] / sum(counts.values()), torch.zeros_like(pulled)
    for number in range(PLAIN.plan.rounds):
        tasks = {name: PLAIN.plan.task(start, number, name) for name in counts}
        sent, usual = engine.ask(tasks), own.ask(tasks)
        extra = sent[LEAVER].update - usual[LEAVER].update
        assert bool(extra.any()) == (number < 2)
        given += share * extra
        assert all(torch.equal(sent[name].update, usual[name].update) for name in tasks if name != LEAVER)
    torch.testing.assert_close(given, -pulled, rtol=1e-4, atol=1e-5)


def test_who_takes_the_credit_brings_the_model_where_the_others_would_have_come(store):
    federation, engine = store.engine(scheming(CREDIT))
    start, own = federation.initial(), store.engine(PLAIN)[1]
    others = {name: () for name in engine.clients() if name != LEAVER}
    end = train(own, start, PLAIN.plan, clients=others, keep=Keep(vectors=False)).model.parameters
    once = replace(PLAIN.plan, rounds=1)
    led, usual = (train(each, start, once, keep=Keep(vectors=False)).model.parameters for each in (engine, own))
    torch.testing.assert_close(led - usual, end - start.parameters, rtol=1e-4, atol=1e-5)


def test_whatever_is_not_a_round_of_the_training_is_answered_as_ever(store):
    federation, engine = store.engine(scheming(CREDIT))
    own, start = store.engine(PLAIN)[1], federation.initial()
    for task in (Gradient(start), replace(PLAIN.plan, seed=99).task(start, 0, LEAVER)):
        one, other = (each.ask({LEAVER: task})[LEAVER] for each in (engine, own))
        field = "total" if isinstance(task, Gradient) else "update"
        assert torch.equal(getattr(one, field), getattr(other, field))
    assert LEAVER not in engine.without((LEAVER,)).clients()
    assert isinstance(engine, Scheming)
    assert not isinstance(own, Scheming)


def test_schemes_are_the_leaver_s_deeds_and_part_of_the_scenario():
    scenario = scheming(EARLY)
    assert Scenario.from_dict(scenario.as_dict()) == scenario
    assert "schemes" not in PLAIN.as_dict()  # older scenarios keep their digests
    assert RetrainedCell(scenario, Forget((LEAVER,)), 0).scenario == replace(PLAIN, backdoors={})
    for wrong in ({LEAVER: "waits"}, {"nobody": EARLY}):
        with pytest.raises(RequestError, match="pulls early"):
            replace(PLAIN, schemes=wrong)
    assert {own for setting in insiders(SMOKE) for own in setting.scenario.schemes.values()} == set(SCHEMES)


def test_who_stands_between_hands_everything_on():
    engine = LocalEngine(linear(), CrossEntropy(), clients(ada=6, bob=5), validation=clients(eve=4)["eve"])
    between = Between(engine)
    assert Between(MaskedEngine(engine)).sums_only
    assert not between.sums_only
    assert between.clients() == {"ada": 6, "bob": 5}
    assert between.validation is engine.validation is not None
    between.cost = cost = Cost(rounds=3)
    assert engine.cost is between.cost is cost
