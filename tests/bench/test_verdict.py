"""The study in small: what is called what, that it can be resumed, and that its parts are the right ones."""

import dataclasses
import json

import pytest
import torch

from expunge.auditing.cheats import cheats
from expunge.auditing.verdict import Verdict
from expunge.bench.court import ATTEMPTS, Court, Models, remembering
from expunge.bench.hearings import BESIDE, BEST, HONEST, MIXED, Hearing
from expunge.bench.measuring import SAME_INIT
from expunge.bench.results import Results
from expunge.bench.store import Store
from expunge.bench.verdict import (
    ATTACKED,
    CLEAN,
    SCENARIO,
    SHOWN,
    fashion_scenario,
    run_verdicts,
)
from expunge.bench.verdict_cases import RELEARNING, Case, judged, verdicts_again
from expunge.bench.verdict_curves import CALLED, SIMULATED, TOLD, level_curves
from expunge.federation.training.fedavg import train

TRICKS = ["no-op", "wrong-sign", "one-epoch", "gradient-ascent", "roll-back", "masked-label"]
MIXTURES = [f"weights-{percent}{end}" for percent in MIXED for end in ("", "-same-start")]
SPECIAL = [
    name + end
    for end in ("", "-same-start")
    for name in ("best-of-five", "spoiled-reference-mixed", "spoiled-reference-noisy")
]
FEWER = [f"{BESIDE}3"]
TINY = dataclasses.replace(
    SCENARIO,
    model="softmax",
    train_samples=300,
    test_samples=100,
    plan=dataclasses.replace(SCENARIO.plan, rounds=5, epochs=1),
)


def count_verdicts(results, variant=ATTACKED, seeds=range(1000)):
    """How often each method of a variant was called what."""
    counts = {}
    for row in results.rows:
        if row.variant == variant and row.seed in seeds:
            counts.setdefault(row.method, {verdict.value: 0 for verdict in Verdict})[row.verdict] += 1
    return counts


def row_values(row):
    return [name for name, value in dataclasses.asdict(row).items() if value is not None]


def study(store):
    return run_verdicts(
        [10, 11],
        scenario=TINY,
        retrains=5,
        cheated_seeds=1,
        clean_seeds=1,
        draws=20,
        workers=1,
        store=store,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("verdict") / "store")


@pytest.fixture(scope="module")
def tiny(store):
    return study(store)


@pytest.fixture(scope="module")
def court(tiny, store):
    case = Case(ATTACKED, TINY.with_seed(10), "client-3", 5, "honest")
    *references, honest, same = (store.kept(cell).state.model for cell in (*case.retrained, case.same_start))
    models = Models(store.kept(case.trained).state, store.kept(case.early).state.model, references, honest, same)
    return Court(store.federation(case.scenario), "client-3", models, 0.05)


class TestStudy:
    def test_rows(self, tiny):
        unforgotten = [*TRICKS, SAME_INIT, *MIXTURES, *cheats(), *SPECIAL]
        attacked = [(row.method, row.seed) for row in tiny.rows if row.variant == ATTACKED]
        assert attacked == [
            *((name, 10) for name in unforgotten),
            *((name, seed) for seed in (10, 11) for name in (HONEST, *FEWER)),
        ]
        assert [row.method for row in tiny.rows if row.variant == CLEAN] == [*TRICKS, HONEST, *FEWER]
        assert {row.verdict for row in tiny.rows} <= {verdict.value for verdict in Verdict}
        assert all(row.asr is not None for row in tiny.rows if row.variant == ATTACKED)
        assert all(row.asr is None for row in tiny.rows if row.variant == CLEAN)
        assert all(row.distance is not None for row in tiny.rows), "the honest one is none of the references"
        kept = {"method", "seed", "variant", "verdict", *SHOWN}
        assert all(set(row_values(row)) <= kept for row in tiny.rows), "and results stay small"
        assert tiny.variants[ATTACKED].scenario["seeds"] == [10, 11]
        assert tiny.variants[ATTACKED].noise["asr"]["high"] < 0.5

    def test_the_trained_model_is_never_equivalent_nor_is_anything_beside_three(self, tiny):
        assert count_verdicts(tiny)["no-op"]["EQUIVALENT"] == 0
        assert count_verdicts(tiny)[f"{BESIDE}3"]["EQUIVALENT"] == 0

    def test_curves_are_the_rows_counted(self, tiny):
        counts, mixed = count_verdicts(tiny), count_verdicts(tiny, seeds=[10])
        curves = {(c.method, c.y_name): c for c in tiny.series if c.variant == ATTACKED}
        power = curves[HONEST, f"honest retrains: {CALLED}"]
        assert power.x == [3.0, 5.0]
        assert power.y == [counts[name]["EQUIVALENT"] / 2 for name in (*FEWER, HONEST)]
        for start, end, honest in (("fresh start", "", HONEST), ("same start", "-same-start", SAME_INIT)):
            names = [honest, *(f"weights-{percent}{end}" for percent in MIXED)]
            curve = curves[start, f"mixtures: {CALLED}"]
            assert curve.x == [0.0, *map(float, MIXED)]
            assert curve.y == [mixed[n]["EQUIVALENT"] / sum(mixed[n].values()) for n in names]
            told = curves[start, f"mixtures: {TOLD}"]
            assert told.y == [
                1 - (mixed[n]["EQUIVALENT"] + mixed[n]["UNDECIDED"]) / sum(mixed[n].values()) for n in names
            ]

    def test_relearning(self, tiny):
        relearnt = [curve for curve in tiny.series if curve.x_name == RELEARNING]
        assert {(curve.method, curve.variant) for curve in relearnt} == {
            (name, variant) for name in (HONEST, *TRICKS) for variant in (ATTACKED, CLEAN)
        }
        assert all(curve.x[0] == 0.0 for curve in relearnt)
        assert set(next(c for c in relearnt if c.method == "no-op").y) == {1.0}, "nothing was lost"
        assert all(curve.y == sorted(curve.y) for curve in relearnt)

    def test_resumed_it_makes_and_judges_nothing_and_says_the_same(self, tiny, store, tmp_path, monkeypatch):
        monkeypatch.setattr(Store, "make", lambda *_: pytest.fail("a finished model was made again"))
        monkeypatch.setattr(Court, "hearing", lambda *_: pytest.fail("a model was judged again"))
        again = study(store)
        tiny.save(tmp_path / "results.json")
        again.save(tmp_path / "again.json")
        assert json.loads((tmp_path / "again.json").read_text()) == json.loads((tmp_path / "results.json").read_text())
        assert count_verdicts(Results.load(tmp_path / "results.json")) == count_verdicts(tiny)

    def test_the_leaver_has_no_part_in_what_is_retrained(self, store):
        """With or without its backdoor the retrained models are the same ones."""
        attacked = Case(ATTACKED, TINY.with_seed(10), "client-3", 5, "honest")
        clean = dataclasses.replace(attacked, scenario=dataclasses.replace(TINY, backdoors={}).with_seed(10))
        assert attacked.retrained == clean.retrained
        assert len(attacked.retrained) == 6
        assert attacked.trained != clean.trained
        other = dataclasses.replace(attacked, judged="tricks")
        assert len({case.path(store) for case in (attacked, clean, other)}) == 3

    def test_the_early_model_is_on_the_way(self, store):
        """Its cell is the training's first round, and is really the early model."""
        case = Case(ATTACKED, TINY.with_seed(10), "client-3", 5, "honest")
        federation, plan = store.federation(case.scenario), dataclasses.replace(TINY.with_seed(10).plan, rounds=1)
        by_hand = train(federation.engine(), federation.initial(), plan).model
        store.make(case.early)
        assert store.kept(case.early).state.model.digest == by_hand.digest

    def test_fashion_only_where_its_data_is(self, tmp_path):
        assert fashion_scenario(tmp_path) is None


class TestCourt:
    def test_everybody_gets_the_candidates_own_questions(self, court):
        honest, other = (court.hearing(court.candidate(m)) for m in (court.models.honest, court.models.same_start))
        assert honest.evaluation.exam.seed != other.evaluation.exam.seed
        by_hand = honest.evaluation.measure(court.models.references[1])
        assert torch.equal(honest.references[1].test_logits, by_hand.test_logits)
        assert torch.equal(
            honest.trained.forget_logits, honest.evaluation.measure(court.models.state.model).forget_logits
        )

    def test_answers_that_are_remembered_are_those_that_were_given(self, court):
        calls = []

        def answers(inputs):
            calls.append(len(inputs))
            return inputs.flatten(1)[:, :2] * 3

        ask, inputs = remembering(answers), torch.rand(6, 1, 2, 2)
        assert torch.equal(ask(inputs[:4]), answers(inputs[:4]))
        assert torch.equal(ask(inputs[[5, 1, 1, 4]]), answers(inputs[[5, 1, 1, 4]]))
        assert torch.equal(ask(inputs), answers(inputs))
        assert [calls[0], calls[2]] == [4, 2], "only what is new is asked"
        assert calls[4:] == [6], "and nothing that is known"

    def test_the_insider_knows_another_draw(self, court):
        asked = court.insider().asked
        assert len(asked) <= len(court.federation.dataset.test_inputs)
        assert court.insider().trained.digest == court.models.state.model.digest

    def test_five_attempts_are_five_models_each_judged_as_the_attempt_that_it_is(self, court, monkeypatch):
        asked, hear = [], Hearing.heard

        def watched(self, name, count=None, attempt=1):
            asked.append((self.own.model.digest, attempt))
            return hear(self, name, count, attempt)

        monkeypatch.setattr(Hearing, "heard", watched)
        found = list(court._five_attempts(court.insider(), same_start=False))
        assert [attempt for _, attempt in asked] == [one.attempt for one in found] == [1, 2, 3, 4, 5]
        assert len({digest for digest, _ in asked}) == len(ATTEMPTS) == 5

    def test_later_attempts_are_judged_more_strictly(self, court):
        """At a level near nothing no interval fits into a margin."""
        hearing = court._honest
        first, last = (
            hearing.evaluation.exam.judgement(hearing.own, hearing.trained, hearing.references, attempt)
            for attempt in (1, 5)
        )
        assert all(late.reach > early.reach for early, late in zip(first.findings, last.findings, strict=True))

    def test_beside_fewer_means_the_first_ones(self, court):
        hearing = court._honest
        by_hand = hearing.evaluation.row("x", hearing.own, hearing.trained, hearing.references[:3])
        assert hearing.heard("x", 3).row.kl_forget == by_hand.kl_forget != hearing.heard("x").row.kl_forget

    def test_a_spoiled_reference_takes_the_place_of_an_honest_one(self, court, monkeypatch):
        heard, hearing = [], Court.hearing

        def watched(self, candidate, references=None):
            heard.append(references)
            return hearing(self, candidate, references)

        monkeypatch.setattr(Court, "hearing", watched)
        rows = list(court._beside_a_spoiled_one(court.insider(), same_start=False))
        assert [one.row.method for one in rows] == SPECIAL[1:3]
        for references in heard:
            assert [model.digest for model in references[1:]] == [m.digest for m in court.models.references[1:]]
            assert references[0].digest != court.models.references[0].digest


@pytest.fixture(scope="module")
def special(tiny, store):
    return judged(Case(ATTACKED, TINY.with_seed(10), "client-3", 5, "special"), store)


class TestKeptValues:
    def test_they_give_the_verdicts_again(self, special):
        assert len(special.values) == len(special.rows) == 2 * (len(ATTEMPTS) + 2)
        assert all(values["attempt"] and len(values["forget_loss"]) == 3 + 5 for values in special.values)
        again = verdicts_again(special)
        spoiled = {row.method: row.verdict for row in special.rows if not row.method.startswith(BEST)}
        assert {row.method: row.verdict for row in again.rows if not row.method.startswith(BEST)} == spoiled
        assert [row.method for row in again.rows] == SPECIAL, "of five attempts one row is left"

    def test_another_rule_gives_others_and_nobody_is_asked(self, special, monkeypatch):
        monkeypatch.setattr(Court, "hearing", lambda *_: pytest.fail("a model was asked again"))
        monkeypatch.setattr("expunge.auditing.margins.SHARE", 50.0)
        monkeypatch.setattr("expunge.auditing.margins.USABLE", 100.0)
        before = [row.verdict for row in verdicts_again(special).rows]
        monkeypatch.setattr("expunge.auditing.margins.SHARE", 1e-6)
        monkeypatch.setattr("expunge.auditing.margins.SPREADS", 1e-6)
        after = [row.verdict for row in verdicts_again(special).rows]
        assert before != after
        assert "UNDER-FORGOTTEN" in after

    def test_what_was_told_without_values_stays(self, special):
        row = dataclasses.replace(special.rows[5], verdict="UNDECIDED")
        part = dataclasses.replace(special, rows=[row], values=[{"attempt": [1.0]}])
        assert verdicts_again(part).rows == [row]


class TestLevel:
    def test_a_model_at_its_margin_passes_once_in_twenty(self):
        curves = level_curves(150, seed=1)
        assert {curve.variant for curve in curves} == {SIMULATED}
        for curve in curves:
            assert curve.x == [3.0, 5.0, 8.0, 10.0]
            assert curve.y[0] == 0.0, "three references never make it"
            assert max(curve.y) <= 0.1
        at_the_edge = [curve for curve in curves if curve.method.startswith("at the margin")]
        assert sum(sum(curve.y[1:]) for curve in at_the_edge) >= 0.15, "the level is spent, not wasted"

    def test_no_draws_no_curves(self):
        assert level_curves(0) == []
