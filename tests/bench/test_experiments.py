"""Every experiment, at the scale that only shows that it runs: rows for everybody, noise, sound numbers, files."""

import dataclasses
import math
import shutil

import pytest
import torch

from expunge.bench.cells import ForgottenCell, RetrainedCell, TrainedCell
from expunge.bench.experiments import EVERYONE, EXPERIMENTS, OURS, experiment
from expunge.bench.measuring import compared_steps
from expunge.bench.results import Results
from expunge.bench.runner import cells, run
from expunge.bench.scales import LEAVER, scale_of
from expunge.bench.settings import Contender, Forget, Setting, together
from expunge.bench.store import Store
from expunge.errors import DataError, RequestError
from expunge.report import publish
from expunge.unlearning.registry import methods

SMOKE = scale_of("smoke")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("bench") / "smoke")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_and_leaves_what_a_person_looks_at(name, store):
    results = run(experiment(name), SMOKE, SMOKE.seeds, store, workers=1)
    settings = experiment(name).settings(SMOKE)
    if experiment(name).whole is None:  # else it is not made of settings; test_verdict.py looks at it closely
        assert list(results.variants) == [setting.label for setting in settings]
    for setting in settings:
        part = results.part(setting.label)
        wanted = {"trained", "retrain", "retrain-same-init", *(contender.label for contender in setting.contenders)}
        assert wanted <= set(part.methods())
        for method in wanted:
            assert all(0 <= value <= 1 for value in part.values(method, "test_accuracy")), method
            assert part.values(method, "forget_accuracy"), method
        assert part.noise["kl_forget"]["low"] > 0
        assert part.variants[setting.label].noise_same_init["kl_forget"]["low"] > 0
        for contender in setting.contenders:
            for measure in ("seconds", "sample_gradients", "rounds", "bytes", "speedup_in_gradients"):
                assert all(value > 0 for value in part.values(contender.label, measure)), (contender.label, measure)
            assert part.values(contender.label, "stored_bytes")
            assert part.values(contender.label, "training_overhead")
    for curve in results.series:
        assert len(curve.x) == len(curve.y) > 1
        assert all(math.isfinite(value) for value in [*curve.x, *curve.y])
    folder = store.root / name
    publish(results, folder)
    again = Results.load(folder / "results.json")
    assert again.methods() == results.methods()
    assert {"results.json", "rows.csv", "table.md", "report.html"} <= {file.name for file in folder.iterdir()}
    assert list(folder.glob("*.png"))
    assert {file.stem for file in folder.glob("*.png")} == {file.stem for file in folder.glob("*.svg")}


def test_a_finished_cell_is_never_made_again_and_experiments_share_them(store):
    run(experiment("functional"), SMOKE, SMOKE.seeds, store, workers=1)
    before = {file: file.stat().st_mtime_ns for file in store.root.glob("cells/*/cell.json")}
    run(experiment("functional"), SMOKE, SMOKE.seeds, store, workers=1)
    assert {file: file.stat().st_mtime_ns for file in store.root.glob("cells/*/cell.json")} == before
    functional, main = (experiment(name).settings(SMOKE)[0].with_seed(10) for name in ("functional", "main"))
    shared = {store.path(cell) for cell in cells(functional)}
    assert shared <= {store.path(cell) for cell in cells(main)}


def test_every_table_has_every_system_of_the_paper_and_the_controls():
    compared = {contender.method for contender in EVERYONE}
    assert compared >= {"gradient-ascent", "fed-eraser", "sisa", "hf-kcu-paper", "fine-tuning-same-budget"}
    registered = {name for name in methods() if not name.startswith("hf-kcu")} - {"retrain", "do-nothing"}
    assert registered <= compared


def test_the_control_gets_exactly_the_budget_of_the_default(store):
    run(experiment("main"), SMOKE, SMOKE.seeds, store, workers=1)
    scenario = SMOKE.base.with_seed(10)
    control = next(contender for contender in EVERYONE if contender.budget_of is not None)
    assert control.budget_of.method == "hf-kcu"
    tuned, ours = (
        store.kept(ForgottenCell(scenario, contender, (Forget((LEAVER,)),)))
        for contender in (control, control.budget_of)
    )
    assert tuned.cost.sample_gradients == round(ours.cost.sample_gradients)


def test_the_trajectory_does_without_the_leaver_and_the_gradient_does_not(store):
    scenario = SMOKE.base.with_seed(10)
    for contender, asked in ((OURS[1], 4), (OURS[2], 3)):
        cell = ForgottenCell(scenario, contender, (Forget((LEAVER,)),))
        store.make(cell)
        counts = store.kept(cell).record["details"]["steps"][0]["contributions"]
        assert LEAVER in counts
        assert len(store.federation(scenario).engine().clients()) == 4 >= asked


def test_a_cell_is_named_by_what_determines_its_model_and_nothing_else(store):
    scenario = SMOKE.base.with_seed(10)
    cell = ForgottenCell(scenario, Contender("hf-kcu-gradient", {"damping": 0.1}, "mine"), (Forget((LEAVER,)),))
    same = dataclasses.replace(cell, contender=dataclasses.replace(cell.contender, label="yours"))
    assert store.path(same) == store.path(cell)
    assert store.path(TrainedCell(scenario, updates=True)) == store.path(TrainedCell(scenario))
    others = [
        dataclasses.replace(cell, contender=Contender("hf-kcu-gradient", {"damping": 0.2})),
        dataclasses.replace(cell, scenario=SMOKE.base.with_seed(11)),
        dataclasses.replace(cell, forgets=(Forget(("client-1",)),)),
        dataclasses.replace(cell, tamper="flipped"),
    ]
    assert len({store.path(other) for other in [cell, *others]}) == 5
    retrained = RetrainedCell(scenario, Forget((LEAVER,)), 0)
    assert store.path(retrained) != store.path(dataclasses.replace(retrained, fresh=False))
    assert store.path(retrained) != store.path(dataclasses.replace(retrained, number=1))


def test_a_training_without_stored_updates_is_made_again_where_a_method_needs_them(tmp_path):
    own = Store(tmp_path / "own")
    plain, more = (TrainedCell(SMOKE.base.with_seed(10), updates=updates) for updates in (False, True))
    own.make(plain)
    assert own.has(plain)
    assert not own.has(more)
    before = own.kept(plain).state
    own.make(more)
    after = own.kept(plain).state
    assert own.has(more)
    assert before.history is None
    assert after.history.clients == tuple(SMOKE.base.names)
    assert after.model.digest == before.model.digest


def test_a_folder_of_another_version_or_of_somebody_else_is_refused(tmp_path):
    Store(tmp_path / "bench")
    Store(tmp_path / "bench")
    (tmp_path / "bench" / "bench.json").write_text('{"format": 0, "expunge": "0.0.1"}')
    with pytest.raises(RequestError, match=r"0\.0\.1 \(format 0\).*not mixed"):
        Store(tmp_path / "bench")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("hello")
    with pytest.raises(RequestError, match="not a folder of bench"):
        Store(tmp_path / "mine")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(RequestError, match="main, datasets, backdoor"):
        experiment("mian")
    with pytest.raises(RequestError, match="smoke, small, paper"):
        scale_of("huge")
    with pytest.raises(RequestError, match="fed-eraser"):
        Contender("fed-erase")
    with pytest.raises(RequestError, match="same name"):
        Setting("x", SMOKE.base, (Forget((LEAVER,)),), (OURS[0], OURS[0]))


def test_what_is_forgotten_follows_from_the_federation():
    federation = SMOKE.attacked(LEAVER).with_seed(10).build()
    request = Forget(shares={"client-1": 0.5}).request(federation)
    count = len(federation.datasets["client-1"][1])
    assert len(request.samples["client-1"]) == round(0.5 * count)
    assert request == Forget(shares={"client-1": 0.5}).request(federation)
    poisoned = Forget(triggered=(LEAVER,)).request(federation)
    assert federation.triggered[LEAVER][list(poisoned.samples[LEAVER])].all()
    assert len(poisoned.samples[LEAVER]) == int(federation.triggered[LEAVER].sum())
    both = together((Forget(("client-1",)), Forget(("client-2",), {"client-3": 0.5})))
    assert (both.clients, dict(both.shares)) == (("client-1", "client-2"), {"client-3": 0.5})


def test_paper_scale_is_the_papers_protocol():
    paper = scale_of("paper")
    base, plan = paper.base, paper.base.plan
    assert (base.dataset, base.model, base.clients, base.alpha) == ("cifar10", "cnn", 10, 0.5)
    assert (plan.rounds, plan.epochs, plan.batch_size, plan.learning_rate) == (20, 5, 64, 0.01)
    assert min(paper.seeds) >= 10
    attacks = {
        setting.label: [(b.size, b.boost) for b in setting.scenario.backdoors.values()]
        for setting in experiment("backdoor").settings(paper)
    }
    assert attacks == {
        "cifar10, printed protocol": [(4, 1.0)],
        "cifar10, strong": [(6, 4.0)],
        "fashion-mnist, printed protocol": [(4, 1.0)],
        "fashion-mnist, strong": [(6, 4.0)],
        "mnist, printed protocol": [(4, 1.0)],
        "mnist, strong": [(4, 2.0)],
    }
    assert [setting.scenario.alpha for setting in experiment("heterogeneity").settings(paper)] == [0.1, 0.5, 1.0]
    assert [setting.scenario.clients for setting in experiment("clients").settings(paper)] == [10, 100, 200]
    (leaving,) = experiment("sequential").settings(paper)
    assert (leaving.scenario.clients, len(leaving.forgets)) == (20, 10)
    assert len({(b.target, b.corner) for b in leaving.scenario.backdoors.values()}) == 3
    assert set(leaving.scenario.backdoors) <= {name for forget in leaving.forgets for name in forget.clients}
    assert compared_steps(len(leaving.forgets)) == [1, 5]
    assert [len(s.forgets[0].clients) for s in experiment("several").settings(paper)] == [2, 3, 5]
    every = [s for each in EXPERIMENTS.values() for s in each.seeded(paper, each.default_seeds(paper))]
    forgotten = [forget for setting in every for forget in setting.forgets]
    assert not any("client-0" in (*forget.clients, *forget.triggered) for forget in forgotten)


def test_at_the_papers_scale_another_client_leaves_for_every_seed():
    paper, each = scale_of("paper"), experiment("backdoor")
    assert each.default_seeds(paper) == (10, 11, 12, 13, 14)
    settings = each.seeded(paper, each.default_seeds(paper))
    assert [s.scenario.seed for s in settings[:6]] == [10, 11, 12, 13, 14, 10]
    leaving = [setting.forgets[0].clients for setting in settings[:5]]
    assert len(set(leaving)) == 5
    for setting in settings:  # who is attacked is who leaves
        assert tuple(setting.scenario.backdoors) == setting.forgets[0].clients
    small = scale_of("smoke")
    assert {s.forgets[0].clients for s in each.seeded(small, (10, 11))} == {(small.leaver,)}


def test_what_was_measured_is_put_together_without_the_models(store, tmp_path):
    """Seeds measured elsewhere: their small files suffice, and say where they were measured."""
    first = run(experiment("functional"), SMOKE, (10,), store, workers=1)
    second = run(experiment("functional"), SMOKE, (11,), store, workers=1)
    elsewhere = Store(tmp_path / "elsewhere")
    shutil.copytree(store.root / "measured", elsewhere.root / "measured")
    both = run(experiment("functional"), SMOKE, (10, 11), elsewhere, workers=1)
    assert not list(elsewhere.root.glob("cells/*"))
    assert both.rows == [*first.rows, *second.rows]
    assert both.environment["torch"] == first.environment["torch"]
    variant = both.variants["digits"]
    for name, own in variant.noise.items():
        parts = [results.variants["digits"].noise[name] for results in (first, second)]
        assert own["low"] == min(part["low"] for part in parts)
        assert own["high"] == max(part["high"] for part in parts)


def test_a_damaged_measurement_is_refused_and_a_missing_gpu_is_said(store, tmp_path):
    run(experiment("functional"), SMOKE, (10,), store, workers=1)
    elsewhere = Store(tmp_path / "elsewhere")
    shutil.copytree(store.root / "measured", elsewhere.root / "measured")
    for file in (elsewhere.root / "measured").iterdir():
        file.write_text('{"rows": [{"method": "x"}], "series": []}')
    with pytest.raises(DataError, match="damaged"):
        run(experiment("functional"), SMOKE, (10,), elsewhere, workers=1)
    if not torch.cuda.is_available():
        with pytest.raises(RequestError, match="no GPU here"):
            run(experiment("functional"), SMOKE, (10,), Store(tmp_path / "gpu", device="cuda"), workers=1)
