"""What stands in a row: whose cost, whose verdict, and what is compared with what."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, median

import pytest

from expunge.bench.cells import ForgottenCell, RetrainedCell, ShardedCell, TrainedCell
from expunge.bench.evaluation import Evaluation, retrain_noise
from expunge.bench.measuring import FAILED, measure
from expunge.bench.results import Series
from expunge.bench.runner import Experiment, all_done, averaged, cells, make_all, missing_cells, run
from expunge.bench.scales import LEAVER, scale_of
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.bench.workers import Workers, one_by_one
from expunge.data import Backdoor
from expunge.unlearning.request import Request

SMOKE = scale_of("smoke")
SCENARIO = SMOKE.base.with_seed(10)
GONE = Forget((LEAVER,))
CONTENDERS = (Contender("fine-tuning"), Contender("gradient-ascent"))
SETTING = Setting("mine", SCENARIO, (GONE,), CONTENDERS, 3, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    own = Store(tmp_path_factory.mktemp("measuring") / "store")
    with one_by_one() as pool:
        make_all(missing_cells(cells(SETTING), own), own, pool, None)
    return own


@pytest.fixture(scope="module")
def part(store):
    return measure(SETTING, None, store)


@pytest.fixture(scope="module")
def kept(store):
    fresh = [store.kept(RetrainedCell(SCENARIO, GONE, number)) for number in range(3)]
    same = [store.kept(RetrainedCell(SCENARIO, GONE, number, fresh=False)) for number in range(2)]
    finished = {own.label: store.kept(ForgottenCell(SCENARIO, own, (GONE,))) for own in CONTENDERS}
    return store.kept(TrainedCell(SCENARIO)), fresh, same, finished


def test_speedups_are_against_retraining_and_not_against_training(part, kept):
    trained, fresh, same, finished = kept
    seconds, gradients = ([getattr(own.cost, name) for own in fresh] for name in ("seconds", "sample_gradients"))
    assert trained.cost.sample_gradients != median(gradients)
    rows = {row.method: row for row in part.rows}
    for label, own in finished.items():
        assert rows[label].speedup == pytest.approx(median(seconds) / own.cost.seconds)
        assert rows[label].speedup_in_gradients == pytest.approx(median(gradients) / own.cost.sample_gradients)
        assert rows[label].seconds == own.cost.seconds
    retrained = [row for row in part.rows if row.method == "retrain"]
    assert [row.seconds for row in retrained] == seconds
    assert [row.speedup_in_gradients for row in retrained] == pytest.approx([1.0] * 3)
    again = [row for row in part.rows if row.method == "retrain-same-start"]
    assert [row.seconds for row in again] == [own.cost.seconds for own in same]
    assert rows["trained"].speedup is rows["trained"].seconds is None


def test_every_row_is_of_its_own_model_and_judged_beside_the_fresh_ones(part, kept, store):
    trained, fresh, same, finished = kept
    evaluation = Evaluation(store.federation(SCENARIO), Request.of(LEAVER))
    before, others = evaluation.measure(trained.state.model), [evaluation.measure(own.state.model) for own in same]
    references = [evaluation.measure(own.state.model) for own in fresh]
    expected = [("trained", before), *(("retrain", own) for own in references)]
    expected += [("retrain-same-start", own) for own in others]
    expected += [(label, evaluation.measure(own.state.model)) for label, own in finished.items()]
    assert [row.method for row in part.rows] == [name for name, _ in expected]
    for row, (name, model) in zip(part.rows, expected, strict=True):
        plain = evaluation.row(name, model, before, references)
        for measure_name in ("test_accuracy", "forget_loss", "mia_auc", "kl", "kl_forget", "accuracy_gap"):
            assert getattr(row, measure_name) == getattr(plain, measure_name), (name, measure_name)
        judged = evaluation.judgement(model, before, references).verdict.value
        assert row.verdict == (None if name == "retrain" else judged), "the yardstick is not judged"
        assert (row.variant, row.seed) == ("mine", 10)
    rows = {row.method: row for row in part.rows}
    assert rows["gradient-ascent"].verdict != rows["trained"].verdict
    assert part.noise == retrain_noise(references)
    assert part.noise_same_init == retrain_noise(others)


def test_a_method_with_a_training_of_its_own_starts_from_that(store):
    """How faithful SISA is, is said by the accuracy of its own sharded models before."""
    scenario = SMOKE.attacked(LEAVER).with_seed(10)
    setting = Setting("sharded", scenario, (GONE,), (Contender("sisa"), Contender("fine-tuning")), 1, 0)
    with one_by_one() as pool:
        make_all(missing_cells(cells(setting), store), store, pool, None)
    rows = {row.method: row for row in measure(setting, None, store).rows}
    right = {name: row.test_accuracy for name, row in rows.items()}
    assert right["trained"] != right["trained-sisa"]
    for name, start in (("sisa", "trained-sisa"), ("fine-tuning", "trained")):
        left, whole = abs(right[name] - right["retrain"]), abs(right[start] - right["retrain"])
        assert rows[name].causal_faithfulness == pytest.approx(1 - left / whole), name


def test_one_departure_that_failed_is_a_failure(store):
    """Of two that left one after another the second was not forgotten."""
    steps = (Forget(("client-1",)), Forget(("client-2",)))
    setting = Setting("two", SCENARIO, steps, CONTENDERS[:1], 1, 0)
    with one_by_one() as pool:
        make_all(missing_cells(cells(setting), store), store, pool, None)

    class SecondFailed(Store):
        def kept(self, cell):
            found = super().kept(cell)
            failed = isinstance(cell, ForgottenCell) and len(cell.forgets) == 2
            return dataclasses.replace(found, record={**found.record, "succeeded": False}) if failed else found

    for own, failed in ((store, False), (SecondFailed(store.root), True)):
        rows = measure(setting, None, own).rows
        (row,) = (row for row in rows if (row.method, row.variant) == ("fine-tuning", "two"))
        assert (row.verdict == FAILED, row.speedup is None) == (failed, failed)


def test_curves_of_departures_show_the_worst_backdoor_and_the_mean_accuracy(store):
    """Two attackers leave; whose trigger works better decides."""
    weak, strong = Backdoor(target=3, size=2, corner="top-left", fraction=0.3), Backdoor(target=7, size=3, boost=4.0)
    scenario = dataclasses.replace(SCENARIO, backdoors={"client-1": strong, "client-2": weak})
    steps = (Forget(("client-1",)), Forget(("client-2",)))
    setting = Setting("two", scenario, steps, CONTENDERS[:1], 1, 0)
    with one_by_one() as pool:
        make_all(missing_cells(cells(setting), store), store, pool, None)
    part = measure(setting, None, store)
    rows = {row.variant: row for row in part.rows if row.method == "fine-tuning"}
    curves = {own.y_name: dict(zip(own.x, own.y, strict=True)) for own in part.series if own.method == "fine-tuning"}
    last = [rows[f"two, after 2: {name}"] for name in ("client-1", "client-2")]
    assert last[0].asr != last[1].asr
    assert curves["worst asr of the departed"] == {
        1.0: rows["two, after 1: client-1"].asr,
        2.0: max(r.asr for r in last),
    }
    assert curves["mean forget accuracy of the departed"][2.0] == pytest.approx(fmean(r.forget_accuracy for r in last))
    assert curves["test accuracy"] == {
        float(step): rows[f"two, after {step}: client-1"].test_accuracy for step in range(3)
    }


def test_results_are_put_together_by_variant(store, part):
    """Two variants of one setting: rows under their labels, noise of their own, numbers as measured."""
    few = Setting("few", SCENARIO, (GONE,), CONTENDERS[:1], 2, 0)
    both = Experiment("both", "Two", lambda scale: [SETTING, few])
    results = run(both, SMOKE, (10,), store, workers=1)
    assert list(results.variants) == ["mine", "few"]
    noise = results.variants["mine"].noise["test_accuracy"]
    values = part.noise["test_accuracy"]
    assert noise == pytest.approx({"low": min(values), "high": max(values), "mean": fmean(values)}, abs=1e-6)
    assert results.variants["few"].noise["test_accuracy"] != noise
    assert results.variants["few"].noise_same_init == {}
    same = part.noise_same_init["kl"]
    assert results.variants["mine"].noise_same_init["kl"]["high"] == pytest.approx(max(same), rel=1e-5)
    (mine,) = (row for row in results.rows if (row.variant, row.method) == ("mine", "fine-tuning"))
    (own,) = (row for row in part.rows if row.method == "fine-tuning")
    assert mine.test_accuracy == pytest.approx(own.test_accuracy, abs=1e-6)
    assert mine.verdict == own.verdict
    assert results.variants["few"].scenario["retrains_per_seed"] == 2


def test_training_keeps_what_the_methods_of_a_setting_need():
    def needed(*names):
        setting = Setting("mine", SCENARIO, (GONE,), tuple(map(Contender, names)), 3, 2)
        return [cell for cell in cells(setting) if isinstance(cell, TrainedCell | ShardedCell)]

    assert needed("fine-tuning") == [TrainedCell(SCENARIO)]
    assert needed("fine-tuning", "fed-eraser") == [TrainedCell(SCENARIO, updates=True)]
    assert needed("sisa") == [TrainedCell(SCENARIO), ShardedCell(SCENARIO)]


def test_curves_of_several_seeds_are_averaged_where_they_share_a_place():
    curves = [Series("m", "v", "x", "y", [0.0, 1.0], [1.0, 2.0]), Series("m", "v", "x", "y", [0.0, 2.0], [3.0, 5.0])]
    other = Series("m", "w", "x", "y", [0.0], [9.0])
    first, second = averaged([*curves, other])
    assert (first.x, first.y) == ([0.0, 1.0, 2.0], [2.0, 2.0, 5.0])
    assert second == other


@pytest.mark.parametrize("apart", [True, False])
def test_curves_are_kept_for_each_seed_where_an_experiment_says_so(store, apart):
    def curves(setting, finished, place):
        assert place is not None
        assert set(finished) == {"fine-tuning"}
        return [Series("m", setting.label, "x", "y", [0.0, 1.0], [1.0, float(setting.scenario.seed)])]

    settings = [Setting("mine", SMOKE.base, (GONE,), CONTENDERS[:1], 3, 1)]
    own = Experiment(f"mine {apart}", "", lambda _: settings, curves=curves, apart=apart)
    found = run(own, SMOKE, (10, 11), store, workers=1).series
    assert [curve.y for curve in found] == ([[1.0, 10.0], [1.0, 11.0]] if apart else [[1.0, 10.5]])


def test_a_row_says_whether_its_method_warned(part, kept, store, monkeypatch):
    rows = {row.method: row for row in part.rows}
    *_, finished = kept
    assert {name: own.record["warnings"] for name, own in finished.items()} == {name: [] for name in finished}
    assert {rows[name].warned for name in finished} == {0.0}
    assert rows["trained"].warned is None
    asked = store.kept

    def warning(cell):
        found = asked(cell)
        return dataclasses.replace(found, record={**found.record, "warnings": ["Look at it."]})

    monkeypatch.setattr(store, "kept", warning)
    assert {row.method: row.warned for row in measure(SETTING, None, store).rows}["fine-tuning"] == 1.0


def test_jobs_come_back_in_their_order(part):
    told = []
    with one_by_one() as pool:
        found = all_done([lambda: part, lambda: SETTING], pool, lambda *now: told.append(now), "measuring")
    assert found == [part, SETTING]
    assert told == [("measuring", 1, 2), ("measuring", 2, 2)]


def test_no_job_waits_for_a_slow_one_before_it():
    others = threading.Event()

    def slow():
        assert others.wait(timeout=30), "the third job was not begun while the first one ran"
        return "slow"

    def last():
        others.set()
        return "last"

    with ThreadPoolExecutor(2) as threads:
        assert all_done([slow, lambda: "quick", last], Workers(threads.submit, 2), None, "") == [
            "slow",
            "quick",
            "last",
        ]
