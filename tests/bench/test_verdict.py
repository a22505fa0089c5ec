"""The study in small: what is called what, that it can be resumed, and that its parts are the right ones."""

import dataclasses

import pytest
import torch

from expunge.auditing.verdict import Verdict
from expunge.bench.evaluation import Evaluation
from expunge.bench.results import Results
from expunge.bench.store import Store
from expunge.bench.verdict import (
    ATTACKED,
    CLEAN,
    HONEST,
    RELEARNING,
    SCENARIO,
    Case,
    run_verdicts,
)
from expunge.federation.training.fedavg import train
from expunge.unlearning.request import Request

TRICKS = ["no-op", "wrong-sign", "one-epoch", "gradient-ascent", "roll-back", "masked-label"]
TINY = dataclasses.replace(
    SCENARIO,
    model="softmax",
    train_samples=300,
    test_samples=100,
    plan=dataclasses.replace(SCENARIO.plan, rounds=5, epochs=1),
)


def count_verdicts(results, variant=ATTACKED):
    """How often each method of a variant was called what."""
    counts = {}
    for row in results.rows:
        if row.variant == variant:
            counts.setdefault(row.method, {verdict.value: 0 for verdict in Verdict})[row.verdict] += 1
    return counts


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("verdict") / "store")


@pytest.fixture(scope="module")
def tiny(store):
    return run_verdicts([10, 11], scenario=TINY, retrains=3, clean_seeds=1, workers=1, store=store)


class TestStudy:
    def test_rows(self, tiny):
        attacked = [(row.method, row.seed) for row in tiny.rows if row.variant == ATTACKED]
        assert attacked == [(name, seed) for seed in (10, 11) for name in (HONEST, *TRICKS)]
        assert [row.method for row in tiny.rows if row.variant == CLEAN] == [HONEST, *TRICKS]
        assert {row.verdict for row in tiny.rows} <= {verdict.value for verdict in Verdict}
        assert all(row.asr is not None for row in tiny.rows if row.variant == ATTACKED)
        assert all(row.asr is None for row in tiny.rows if row.variant == CLEAN)
        assert all(row.kl_forget is not None for row in tiny.rows), "the honest one is none of the references"
        nothing = [row for row in tiny.rows if row.method == "no-op"]
        assert all(row.asr_reduction in (None, 0.0) for row in nothing)

    def test_counts_and_series(self, tiny):
        counts = count_verdicts(tiny)
        assert {name: sum(own.values()) for name, own in counts.items()} == dict.fromkeys([HONEST, *TRICKS], 2)
        assert {(curve.method, curve.variant) for curve in tiny.series} == {
            (name, variant) for name in (HONEST, *TRICKS) for variant in (ATTACKED, CLEAN)
        }
        assert all((curve.x_name, curve.x[0]) == (RELEARNING, 0.0) for curve in tiny.series)
        assert set(next(c for c in tiny.series if c.method == "no-op").y) == {1.0}, "nothing was lost"
        assert all(curve.y == sorted(curve.y) for curve in tiny.series)

    def test_resumed_it_makes_nothing_and_says_the_same(self, tiny, store, tmp_path, monkeypatch):
        monkeypatch.setattr(Store, "make", lambda *_: pytest.fail("a finished model was made again"))
        again = run_verdicts([10, 11], scenario=TINY, retrains=3, clean_seeds=1, workers=1, store=store)
        assert again.rows == tiny.rows
        tiny.save(tmp_path / "results.json")
        assert count_verdicts(Results.load(tmp_path / "results.json")) == count_verdicts(tiny)

    def test_the_leaver_has_no_part_in_what_is_retrained(self):
        """With or without its backdoor the retrained models are the same ones."""
        attacked = Case(ATTACKED, TINY.with_seed(10), "client-3", 3)
        clean = Case(CLEAN, dataclasses.replace(TINY, backdoors={}).with_seed(10), "client-3", 3)
        assert attacked.retrained == clean.retrained
        assert len(attacked.retrained) == 4
        assert attacked.trained != clean.trained

    def test_the_early_model_is_on_the_way(self, store):
        """Its cell is the training's first round, and is really the early model."""
        case = Case(ATTACKED, TINY.with_seed(10), "client-3", 3)
        federation, plan = store.federation(case.scenario), dataclasses.replace(TINY.with_seed(10).plan, rounds=1)
        by_hand = train(federation.engine(), federation.initial(), plan).model
        store.make(case.early)
        assert store.kept(case.early).state.model.digest == by_hand.digest

    def test_what_the_verdict_gets(self, store):
        federation = store.federation(TINY.with_seed(10))
        model = federation.initial()
        evaluation = Evaluation(federation, Request.of("client-3"))
        measured = evaluation.measure(model)
        own = evaluation.exam.observed(measured)
        assert torch.equal(own.forget_labels, federation.datasets["client-3"][1])
        assert torch.equal(own.test_logits, measured.test_logits)
        assert (own.asr, own.forget_auc) == (measured.alone["asr"], measured.alone["mia_auc"])
        assert own.retained_auc == pytest.approx(0.5, abs=0.1), "untrained, it knows nobody"


@pytest.mark.slow
def test_three_seeds_of_it(tmp_path):
    """No trick is called EQUIVALENT, and honest retrains are."""
    found = run_verdicts([10, 11, 12], clean_seeds=1, workers=1, store=Store(tmp_path / "store"))
    counts = count_verdicts(found)
    assert counts[HONEST]["EQUIVALENT"] == 3
    assert all(counts[name]["EQUIVALENT"] == 0 for name in TRICKS)
    assert counts["no-op"]["UNDER-FORGOTTEN"] == 3
    assert counts["gradient-ascent"]["DAMAGED"] == 3
    assert all(row.asr >= 0.8 for row in found.rows if row.method == "no-op" and row.variant == ATTACKED)
    assert count_verdicts(found, CLEAN)[HONEST]["UNDECIDED"] == 1
