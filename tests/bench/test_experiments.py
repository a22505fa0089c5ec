"""Every experiment, at the scale that only shows that it runs: rows for everybody, noise, sound numbers, files."""

import dataclasses
import math
import shutil

import pytest
import torch

from bench.test_verdict import TRICKS, count_verdicts
from expunge.bench.cells import ForgottenCell, RetrainedCell, TrainedCell
from expunge.bench.experiments import EVERYONE, EXPERIMENTS, OURS, experiment
from expunge.bench.hearings import HONEST
from expunge.bench.measuring import compared_steps
from expunge.bench.results import Results
from expunge.bench.runner import Experiment, cells, described, run, unmeasured
from expunge.bench.scales import LEAVER, Scale, scale_of
from expunge.bench.settings import Contender, Forget, Setting, together
from expunge.bench.store import Store
from expunge.bench.verdict import ATTACKED, CLEAN, run_verdicts
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
        wanted = {"trained", "retrain", "retrain-same-start", *(contender.label for contender in setting.contenders)}
        assert wanted <= set(part.methods())
        for method in wanted:
            assert all(0 <= value <= 1 for value in part.values(method, "test_accuracy")), method
            assert part.values(method, "forget_accuracy"), method
        assert part.noise["kl_forget"]["low"] > 0
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


@pytest.mark.slow
def test_three_seeds_of_the_verdict(store):
    """Nothing that a server could do instead of forgetting is called EQUIVALENT.

    Here since the experiment above has trained half of its models, beside which it judges fewer.
    """
    found = run_verdicts([10, 11, 12], cheated_seeds=3, clean_seeds=1, draws=0, workers=1, store=store)
    counts = count_verdicts(found)
    assert counts[HONEST]["EQUIVALENT"] >= 2
    assert all(counts[name]["EQUIVALENT"] == 0 for name in TRICKS)
    assert counts["no-op"]["UNDER-FORGOTTEN"] == 3
    assert counts["gradient-ascent"]["DAMAGED"] == 3
    for name in ("patched", "moved-near", "moved-far", "learnt-probes", "probabilities-20", "weights-50"):
        assert counts[name]["EQUIVALENT"] == 0
    assert all(row.asr >= 0.8 for row in found.rows if row.method == "no-op" and row.variant == ATTACKED)
    assert count_verdicts(found, CLEAN)[HONEST]["EQUIVALENT"] == 0


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
    ours = {name for name in methods() if name.startswith(("retrace", "hf-kcu"))}
    assert {name for name in methods() if name not in {*ours, "auto", "retrain", "do-nothing"}} <= compared
    assert {"retrace", "retrace-krylov", "hf-kcu", "hf-kcu-paper"} <= compared


def test_the_control_gets_exactly_the_budget_of_the_default(store):
    run(experiment("main"), SMOKE, SMOKE.seeds, store, workers=1)
    scenario = SMOKE.base.with_seed(10)
    control = next(contender for contender in EVERYONE if contender.budget_of is not None)
    assert control.budget_of.method == "retrace"
    tuned, ours = (
        store.kept(ForgottenCell(scenario, contender, (Forget((LEAVER,)),)))
        for contender in (control, control.budget_of)
    )
    assert tuned.cost.sample_gradients == round(ours.cost.sample_gradients)


def test_who_never_took_part_is_asked_since_no_vector_of_it_was_kept(store):
    plan = dataclasses.replace(SMOKE.base.plan, rounds=1, participation=0.5)
    scenario = dataclasses.replace(SMOKE.base, plan=plan).with_seed(10)
    store.make(TrainedCell(scenario))
    kept = store.kept(TrainedCell(scenario)).state.memory.clients
    assert len(kept) == 2
    for name in scenario.names:
        cell = ForgottenCell(scenario, Contender("auto"), (Forget((name,)),))
        store.make(cell)
        details = store.kept(cell).record["details"]
        assert details["source"] == ("recorded" if name in kept else "replay")


def test_a_cell_is_named_by_what_determines_its_model_and_nothing_else(store):
    scenario = SMOKE.base.with_seed(10)
    cell = ForgottenCell(scenario, Contender("hf-kcu", {"damping": 0.1}, "mine"), (Forget((LEAVER,)),))
    same = dataclasses.replace(cell, contender=dataclasses.replace(cell.contender, label="yours"))
    assert store.path(same) == store.path(cell)
    assert store.path(TrainedCell(scenario, updates=True)) == store.path(TrainedCell(scenario))
    others = [
        dataclasses.replace(cell, contender=Contender("hf-kcu", {"damping": 0.2})),
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
        setting.label: [(b.size, b.boost, b.share) for b in setting.scenario.backdoors.values()]
        for setting in experiment("backdoor").settings(paper)
    }
    assert attacks == {
        "cifar10, printed protocol": [(4, 1.0, 0.0)],
        "cifar10, strong": [(6, 4.0, 0.5)],
        "fashion-mnist, printed protocol": [(4, 1.0, 0.0)],
        "fashion-mnist, strong": [(6, 4.0, 0.5)],
        "mnist, printed protocol": [(4, 1.0, 0.0)],
        "mnist, strong": [(4, 2.0, 0.25)],
    }
    assert [setting.scenario.alpha for setting in experiment("heterogeneity").settings(paper)] == [0.1, 0.5, 1.0]
    assert [setting.scenario.clients for setting in experiment("clients").settings(paper)] == [10, 100, 200]
    (leaving,) = experiment("sequential").settings(paper)
    assert (leaving.scenario.clients, len(leaving.forgets)) == (20, 10)
    assert [b.share for b in leaving.scenario.backdoors.values()] == [0.25] * 3
    leader, *friends = experiment("adversary").settings(paper)[0].scenario.backdoors.values()
    assert (leader.size, leader.share) == (6, 0.5)
    assert {(friend.size, friend.boost, friend.share) for friend in friends} == {(6, 1.0, 0.0)}
    assert len({(b.target, b.corner) for b in leaving.scenario.backdoors.values()}) == 3
    assert set(leaving.scenario.backdoors) <= {name for forget in leaving.forgets for name in forget.clients}
    assert compared_steps(len(leaving.forgets)) == [1, 5]
    assert [len(s.forgets[0].clients) for s in experiment("several").settings(paper)] == [2, 5]
    for name, each in EXPERIMENTS.items():
        every = each.seeded(paper, each.default_seeds(paper))
        leaving = {owner for setting in every for f in setting.forgets for owner in (*f.clients, *f.triggered)}
        seeds = {setting.scenario.seed for setting in every}
        if name == "tried":  # on the client and the seeds that settings were chosen on, and on no others
            assert (leaving, seeds) == ({"client-0"}, {0, 1, 2})
        else:
            assert "client-0" not in leaving, name
            assert all(seed >= 10 for seed in seeds), name


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


def test_the_large_models_take_one_seed_and_two_retrains_and_the_others_all_that_are_asked_for():
    paper = scale_of("paper")
    for name, others in (("datasets", 2), ("wallclock", 1)):
        settings = experiment(name).seeded(paper, (12, 10, 11))
        large = [setting for setting in settings if setting.scenario.model.endswith("-bf16")]
        assert {s.scenario.model for s in large} == {"resnet18-bf16", "vit-lite-bf16"}
        assert [(s.scenario.seed, s.retrains, s.same_init) for s in large] == [(12, 2, 0)] * 2
        assert all(setting.scenario.model in setting.label for setting in large)  # so the label says bfloat16
        rest = [s.scenario.seed for s in settings if s not in large]
        assert rest == [12, 10, 11] * others
    whole = [s.scenario.seed for s in experiment("datasets").seeded(SMOKE, (10, 11))]
    assert whole == [10, 11, 10, 11]


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_the_fresh_seeds_are_in_no_other_experiment_and_the_default_is_alone_there(scale):
    size, each = scale_of(scale), experiment("fresh")
    own = each.seeded(size, each.default_seeds(size))
    others = {
        s
        for name, e in EXPERIMENTS.items()
        if name not in ("fresh", "verdict", "evidence")
        for s in e.default_seeds(size)
    }
    assert {setting.scenario.seed for setting in own}.isdisjoint(others)
    assert all(setting.contenders == (Contender("retrace"),) for setting in own)
    assert {setting.retrains for setting in own} == {size.other_retrains}
    for setting in own:
        attackers = setting.forgets[0].clients if setting.label.endswith(", strong") else ()
        assert tuple(setting.scenario.backdoors) == attackers
    counts = dict.fromkeys(("cifar10", "fashion-mnist", "mnist") if scale == "paper" else (size.base.dataset,), 3)
    for label in ("clean", "strong"):
        of_label = [s.scenario.dataset for s in own if s.label.endswith(label)]
        assert {name: of_label.count(name) for name in of_label} == counts


def test_where_the_two_tables_retrain_anyway_all_their_models_are_used_and_elsewhere_fewer(tmp_path):
    own, paper = Store(tmp_path / "own"), scale_of("paper")

    def retrained(name: str) -> list[tuple[int, set]]:
        settings = [s for s in experiment(name).seeded(paper, paper.seeds) if s.scenario.model == "cnn"]
        found = [[cell for cell in cells(setting) if isinstance(cell, RetrainedCell)] for setting in settings]
        return [(s.retrains, {own.path(cell) for cell in each}) for s, each in zip(settings, found, strict=True)]

    known = set().union(*(paths for name in ("main", "backdoor") for _, paths in retrained(name)))
    counts = {"components": {5, 3}, "damping": {5}, "heterogeneity": {5, 3}, "clients": {5, 3}, "several": {3}}
    counts |= {"functional": {5}, "convergence": {5}, "sequential": {3}, "samples": {3}, "adversary": {5, 3}}
    for name, expected in {**counts, "datasets": {5}, "wallclock": {5}}.items():
        parts = retrained(name)
        assert {retrains for retrains, _ in parts} == expected, name
        for retrains, paths in parts:
            assert (retrains == 5) == (paths <= known), name
    assert {retrains for name in ("main", "backdoor") for retrains, _ in retrained(name)} == {5}


def test_several_that_leave_are_those_of_the_backdoor_and_others(tmp_path):
    own, paper = Store(tmp_path / "own"), scale_of("paper")
    trained = [
        {own.path(TrainedCell(setting.scenario)) for setting in experiment(name).seeded(paper, paper.seeds)}
        for name in ("several", "convergence", "backdoor", "main")
    ]
    assert trained[0] | trained[1] <= trained[2] | trained[3]
    for setting in experiment("several").seeded(paper, paper.seeds):
        leaving = setting.forgets[0].clients
        assert (leaving[0],) == tuple(setting.scenario.backdoors)
        assert len(set(leaving)) == len(leaving)
        assert "client-0" not in leaving


def test_a_variant_names_the_leavers_and_the_attackers_of_all_its_seeds():
    settings = experiment("several").seeded(scale_of("paper"), (10, 11, 12))
    said = described(*(setting for setting in settings if setting.label == "5 at once"))
    attackers = ["client-1", "client-3", "client-5"]
    assert (list(said["backdoors"]), said["attackers"], said["seeds"]) == (attackers[:1], attackers, [10, 11, 12])
    assert sorted(said["forgotten"]) == [f"client-{number}" for number in range(1, 6)]


def test_one_seed_and_two_retrains_are_said_and_give_no_verdict(store):
    few = Experiment("datasets", "Few beside many", few_and_many)
    results = run(few, SMOKE, (10, 11), store, workers=1)
    many, large = (results.part(label) for label in ("many", "few"))
    assert {row.seed for row in many.rows} == {10, 11}
    assert {row.seed for row in large.rows} == {10}
    assert (large.scenario["seeds"], large.scenario["retrains_per_seed"]) == ([10], 2)
    assert many.scenario["seeds"] == [10, 11]
    assert {row.verdict for row in large.rows if row.method != "retrain"} == {"UNDECIDED"}
    assert large.noise["kl_forget"]["low"] > 0  # of the one pair, in its two directions
    folder = store.root / "few"
    publish(results, folder)
    text, page = (folder / "table.md").read_text(), (folder / "report.html").read_text()
    assert "; seed 10, 2 retrained models (too few for a verdict)." in text
    assert "; seeds 10, 11, 3 retrained models each." in text
    assert "over 1 to 2 seeds" in text
    assert "no mark if it is undecided" in text
    table = text.split("#### few")[1].split("\n\n")[2]
    assert "**" not in table
    assert "!" not in table
    captions = [part.split("</figcaption>")[0] for part in page.split("<figcaption>")[1:]]
    assert sum("seed 10, 2 retrained models" in each for each in captions) == 2
    before = {file: file.stat().st_mtime_ns for file in store.root.glob("cells/*/cell.json")}
    again = run(few, SMOKE, (10, 11), store, workers=1)
    assert again.rows == results.rows
    assert {file: file.stat().st_mtime_ns for file in store.root.glob("cells/*/cell.json")} == before


def few_and_many(scale: Scale) -> list[Setting]:
    gone = (Forget((scale.leaver,)),)
    many = Setting("many", scale.base, gone, OURS[2:4], 3, 0)
    return [many, dataclasses.replace(many, label="few", retrains=2, seeds=1)]


def test_what_was_measured_is_put_together_without_the_models(store, tmp_path):
    """Seeds measured elsewhere: their small files suffice, and say where they were measured."""
    first = run(experiment("functional"), SMOKE, (10,), store, workers=1)
    second = run(experiment("functional"), SMOKE, (11,), store, workers=1)
    elsewhere = Store(tmp_path / "elsewhere")
    shutil.copytree(store.root / "measured", elsewhere.root / "measured")
    assert unmeasured(experiment("functional"), SMOKE, (10, 11), elsewhere) == []
    left = unmeasured(experiment("functional"), SMOKE, (11, 12), elsewhere)
    assert {own.scenario.seed for own in left} == {12}
    assert [own.contenders for own in left] == [(contender,) for contender in OURS]
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
