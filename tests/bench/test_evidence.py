"""The study in small: what is asked of whom, that a record is not believed, and that it can be resumed."""

import dataclasses

import pytest
import torch

from expunge.auditing.statement import Word
from expunge.bench.evaluation import Evaluation
from expunge.bench.evidence import (
    CLAIMED,
    CONTENDERS,
    FORGED,
    HONEST,
    MEMORISED,
    MEMORISING,
    NOTHING,
    POISONED,
    REMEMBERING,
    TRIGGER_ONLY,
    Case,
    candidates,
    run_evidence,
    stated,
)
from expunge.bench.results import Results
from expunge.bench.scales import LEAVER
from expunge.bench.store import Store
from expunge.bench.verdict import SCENARIO
from expunge.bench.verdict_cases import Case as VerdictCase

NAMES = [HONEST, NOTHING, FORGED, *(contender.label for contender in CONTENDERS)]
TINY, TINY_MEMORISED = (
    dataclasses.replace(
        own,
        model="softmax",
        train_samples=300,
        test_samples=100,
        plan=dataclasses.replace(own.plan, rounds=5, epochs=1),
    )
    for own in (SCENARIO, MEMORISED)
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("evidence") / "store")


@pytest.fixture(scope="module")
def tiny(store):
    return run_evidence([10], poisoned=TINY, memorised=TINY_MEMORISED, retrains=3, workers=1, store=store)


def test_rows(tiny):
    for label in (POISONED, TRIGGER_ONLY, MEMORISING):
        rows = tiny.part(label).rows
        assert [row.method for row in rows] == NAMES
        assert {row.evidence for row in rows} <= {word.value for word in Word}
        assert all(row.verdict is not None and row.kept_share is not None for row in rows)
    assert set(REMEMBERING) <= set(NAMES)
    assert list(tiny.variants) == [POISONED, TRIGGER_ONLY, MEMORISING]
    assert "mislabelled" in tiny.variants[MEMORISING].scenario
    assert "mislabelled" not in tiny.variants[POISONED].scenario


def test_what_forgets_nothing_is_not_supported(tiny):
    found = {(row.variant, row.method): row for row in tiny.rows}
    for label in (POISONED, TRIGGER_ONLY, MEMORISING):
        nothing, forged = found[label, NOTHING], found[label, FORGED]
        assert nothing.evidence != "SUPPORTED"
        assert (forged.evidence, forged.verdict, forged.kept_share) == (nothing.evidence, nothing.verdict, 1.0)


def test_the_verdict_does_not_depend_on_what_is_known(tiny):
    known, less = ([row.verdict for row in tiny.part(label).rows] for label in (POISONED, TRIGGER_ONLY))
    assert known == less


def test_a_forged_record_is_that_of_the_method(store, tiny):
    """Everything about it is the other method's, but the model."""
    case = Case(POISONED, TINY.with_seed(10), LEAVER, 3)
    trained, honest = (store.kept(cell).state.model for cell in (case.trained, case.retrained[-1]))
    found = candidates(case, store, trained, honest)
    claimed = found[CLAIMED.label]
    assert (found[FORGED].method, found[FORGED].details) == (claimed.method, claimed.details)
    assert claimed.details
    assert found[FORGED].cost == claimed.cost
    assert torch.equal(found[FORGED].state.model.parameters, trained.parameters)
    assert not torch.equal(claimed.state.model.parameters, trained.parameters)


def test_short_models_never_had_the_leaver_and_are_none_of_those_that_are_judged(store, tiny):
    case = Case(POISONED, TINY.with_seed(10), LEAVER, 3)
    plan = case.scenario.plan
    assert [cell.scenario.plan.rounds for cell in case.short] == [1, 1, 1] != [plan.rounds] * 3
    for cell in case.short:
        counts = {name: len(labels) for name, (_, labels) in store.federation(case.scenario).datasets.items()}
        rest = sum(count for name, count in counts.items() if name != LEAVER)
        assert store.kept(cell).cost.sample_gradients == cell.scenario.plan.epochs * rest
    assert case.retrained[-1].number not in {cell.number for cell in case.short}


def test_the_verdict_also_gets_models_of_the_training_s_own_start(tmp_path, monkeypatch):
    """Beside ten, as in an audit and in the verdict's own study; no row compares with them."""
    seen = []
    judgement = Evaluation.judgement
    monkeypatch.setattr(
        Evaluation, "judgement", lambda self, *models: seen.append(models[2]) or judgement(self, *models)
    )
    case, store = Case(POISONED, TINY.with_seed(10), LEAVER, 10), Store(tmp_path / "store")
    assert case.sharing == VerdictCase(POISONED, case.scenario, LEAVER, 10, "honest").sharing
    for cell in case.cells():
        store.make(cell)
    stated(case, store)
    assert {tuple(own.same_start for own in beside) for beside in seen} == {(False,) * 10 + (True,) * 5}
    start = store.kept(case.trained).state
    assert all(not torch.equal(own.model.parameters, start.model.parameters) for own in seen[0])


def test_both_kinds_share_retrained_models_where_they_train_alike():
    poisoned = Case(POISONED, TINY.with_seed(10), LEAVER, 3)
    spoiled = dataclasses.replace(TINY, backdoors={}, mislabelled=MEMORISED.mislabelled)
    assert poisoned.retrained == Case(MEMORISING, spoiled.with_seed(10), LEAVER, 3).retrained


def test_resumed_it_makes_nothing_and_says_the_same(tiny, store, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "make", lambda *_: pytest.fail("a finished model was made again"))
    again = run_evidence([10], poisoned=TINY, memorised=TINY_MEMORISED, retrains=3, workers=1, store=store)
    assert again.rows == tiny.rows
    tiny.save(tmp_path / "results.json")
    assert [row.evidence for row in Results.load(tmp_path / "results.json").rows] == [row.evidence for row in tiny.rows]


def test_a_seed_whose_training_diverges_is_left_out_and_the_others_are_told(tmp_path):
    """Only the kind of client that diverges with it."""
    plan = dataclasses.replace(TINY_MEMORISED.plan, learning_rate=1e30)
    wild = dataclasses.replace(TINY_MEMORISED, model="digits-net", plan=plan)
    store = Store(tmp_path / "store")
    found = run_evidence([10], poisoned=TINY, memorised=wild, retrains=3, workers=1, store=store)
    assert {row.variant for row in found.rows} == {POISONED, TRIGGER_ONLY}
    assert list(found.variants) == [POISONED, TRIGGER_ONLY]
