"""What a cell really does: who was asked, from where it started, what it costs and keeps."""

import dataclasses
import os

import pytest
import torch

from expunge.bench.adversary import LIES, Tampering
from expunge.bench.cells import ForgottenCell, RetrainedCell, ShardedCell, TrainedCell
from expunge.bench.measuring import FAILED, measure
from expunge.bench.scales import LEAVER, scale_of
from expunge.bench.scenario import Federation
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.store import Store
from expunge.data import Backdoor
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.files import appear, tidy
from expunge.federation.messages.tasks import Gradient
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan

SMOKE = scale_of("smoke")
SCENARIO = SMOKE.base.with_seed(10)
GONE = Forget((LEAVER,))
PLAN = SCENARIO.plan


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("cells") / "store")


@pytest.fixture
def asked(monkeypatch):
    """Who was asked for what while a cell was made, the warm-up left out."""
    seen = []
    ask = LocalEngine.ask

    def watched(self, tasks):
        seen.append({name: type(task).__name__ for name, task in tasks.items()})
        return ask(self, tasks)

    monkeypatch.setattr(LocalEngine, "ask", watched)
    return seen


def made(store, cell):
    store.make(cell)
    return store.kept(cell)


def counts():
    return {name: len(labels) for name, (_, labels) in SCENARIO.build().datasets.items()}


WARM_UP = 4
"""Messages of warming up, which anybody may get who is still there."""


class TestRetraining:
    def test_the_leaver_takes_no_part(self, store):
        kept = made(store, RetrainedCell(SCENARIO, GONE, 0))
        retained = sum(count for name, count in counts().items() if name != LEAVER)
        assert kept.cost.sample_gradients == PLAN.rounds * PLAN.epochs * retained
        assert kept.cost.rounds == PLAN.rounds

    @pytest.mark.parametrize("fresh", [True, False])
    def test_where_it_starts(self, store, monkeypatch, fresh):
        """One round of almost no step ends where it began: at the training's own initialisation only if not fresh."""
        still = dataclasses.replace(SCENARIO, plan=dataclasses.replace(PLAN, rounds=1, learning_rate=1e-12))
        model = made(store, RetrainedCell(still, GONE, 0, fresh)).state.model.parameters
        same = torch.allclose(model, SCENARIO.build().initial().parameters, atol=1e-6)
        assert same is not fresh

    def test_what_the_leaver_did_to_its_data_plays_no_part(self, store):
        attacked = dataclasses.replace(SCENARIO, backdoors={LEAVER: Backdoor(size=3), "client-1": Backdoor(size=3)})
        cell = RetrainedCell(attacked, GONE, 0)
        assert list(cell.scenario.backdoors) == ["client-1"]
        partly = RetrainedCell(attacked, Forget(triggered=(LEAVER,)), 0)
        assert set(partly.scenario.backdoors) == {LEAVER, "client-1"}


class TestForgetting:
    def test_the_trajectory_source_cannot_reach_the_leaver_and_the_gradient_source_does(self, store, asked):
        for method, reached in (("retrace-krylov+recovery", False), ("hf-kcu", True)):
            store.make(TrainedCell(SCENARIO))
            del asked[:]
            store.make(ForgottenCell(SCENARIO, Contender(method), (GONE,)))
            assert any(LEAVER in round_ for round_ in asked[WARM_UP:]) is reached, method
            if not reached:
                assert not any(LEAVER in round_ for round_ in asked), "not even while warming up"

    @pytest.mark.parametrize("method", ["fed-eraser", "not", "fine-tuning", "sisa"])
    def test_what_needs_nothing_of_the_leaver_asks_nothing_of_it(self, store, asked, method):
        cell = ForgottenCell(SCENARIO, Contender(method), (GONE,))
        store.make(cell.before)
        del asked[:]
        store.make(cell)
        assert len(asked) > WARM_UP
        assert not any(LEAVER in round_ for round_ in asked[WARM_UP:])

    def test_who_left_before_is_gone(self, store, asked):
        first = (Forget(("client-1",)),)
        store.make(ForgottenCell(SCENARIO, Contender("fine-tuning"), first))
        del asked[:]
        store.make(ForgottenCell(SCENARIO, Contender("fine-tuning"), (*first, GONE)))
        assert not any("client-1" in round_ for round_ in asked)

    def test_every_method_pays_for_sending_the_model(self, store):
        kept = made(store, ForgottenCell(SCENARIO, Contender("fine-tuning"), (GONE,)))
        size = store.federation(SCENARIO).initial().stored_bytes
        assert kept.cost.bytes_down == 3 * size
        assert kept.cost.rounds == 1

    def test_only_what_is_needed_is_kept_for_it(self, store):
        size = store.federation(SCENARIO).initial().stored_bytes
        stored = {
            name: made(store, ForgottenCell(SCENARIO, Contender(name), (GONE,))).record["stored_bytes"]
            for name in ("retrace-krylov", "fine-tuning", "fed-eraser", "sisa")
        }
        assert stored["retrace-krylov"] == 4 * size
        assert stored["fine-tuning"] == 0
        assert stored["fed-eraser"] == (1 + 2 * 4) * size  # the start, and two of three rounds of four clients
        assert stored["sisa"] >= 2 * 3 * size  # three shards, each its start and at least one stage
        assert made(store, ForgottenCell(SCENARIO, Contender("fine-tuning"), (GONE,))).state.memory is None

    def test_seeds_differ_by_scenario_and_step_unless_chosen(self):
        def seed(scenario, forgets, **options):
            return ForgottenCell(scenario, Contender("fine-tuning", options), forgets).configured().options.seed

        one, two = (GONE,), (Forget(("client-1",)), GONE)
        assert len({seed(SCENARIO, one), seed(SMOKE.base.with_seed(11), one), seed(SCENARIO, two)}) == 3
        assert seed(SCENARIO, one, seed=5) == 5

    def test_a_new_default_is_another_cell_and_an_option_at_its_default_is_the_same(self, store):
        plain, same, other = (
            ForgottenCell(SCENARIO, Contender("hf-kcu", options), (GONE,))
            for options in ({}, {"tau": 0.05}, {"tau": 0.5})
        )
        assert store.path(plain) == store.path(same) != store.path(other)

    def test_a_lie_changes_the_model_and_one_that_is_no_number_leaves_it(self, store):
        honest, flipped, broken = (
            made(store, ForgottenCell(SCENARIO, Contender("hf-kcu"), (GONE,), tamper))
            for tamper in ("", "flipped", "not a number")
        )
        assert flipped.state.model.digest != honest.state.model.digest
        assert not broken.record["succeeded"]
        assert broken.state.model.digest == store.kept(TrainedCell(SCENARIO)).state.model.digest
        assert broken.cost.rounds >= 1

    def test_after_a_failure_the_next_departure_still_works(self, store):
        strict = Contender("retrace-krylov", {"tau": 0.0, "curvature_samples": None})
        failing = dataclasses.replace(strict, options={**strict.options, "damping": 1e-9, "iterations": 1})
        both = (Forget(("client-1",)), GONE)
        for step in (1, 2):
            kept = made(store, ForgottenCell(SCENARIO, failing, both[:step]))
        assert set(kept.state.memory.clients) == {"client-0", "client-2"}


def test_liars_lie_about_their_gradient_and_nobody_else_does():
    federation: Federation = SCENARIO.build()
    model = federation.initial()
    tasks = {name: Gradient(model) for name in ("client-1", LEAVER)}
    honest = federation.engine().ask(tasks)
    told = Tampering(federation.engine(), (LEAVER,), "flipped", seed=0).ask(tasks)
    assert torch.equal(told["client-1"].total, honest["client-1"].total)
    assert torch.equal(told[LEAVER].total, -honest[LEAVER].total)
    tenfold = Tampering(federation.engine(), (LEAVER,), "hundredfold", seed=0).ask(tasks)
    torch.testing.assert_close(tenfold[LEAVER].total, 100 * honest[LEAVER].total)
    noise = Tampering(federation.engine(), (LEAVER,), "random", seed=0).ask(tasks)[LEAVER].total
    assert float(noise.norm()) == pytest.approx(float(honest[LEAVER].total.norm()), rel=1e-4)
    assert abs(float(torch.nn.functional.cosine_similarity(noise, honest[LEAVER].total, dim=0))) < 0.2
    with pytest.raises(RequestError, match=", ".join(list(LIES)[:2])):
        Tampering(federation.engine(), (LEAVER,), "silence", seed=0)


class TestMeasuring:
    def test_the_last_of_several_departures_the_mean_cost_and_what_training_kept(self, store):
        forgets = (Forget(("client-1",)), Forget(("client-2",)))
        setting = Setting("two", SCENARIO, forgets, (Contender("retrace-krylov"),), retrains=3, same_init=2)
        for cell in [TrainedCell(SCENARIO), *(RetrainedCell(SCENARIO, Forget(("client-1",)), 0),)]:
            store.make(cell)
        steps = [made(store, ForgottenCell(SCENARIO, setting.contenders[0], forgets[:n])) for n in (1, 2)]
        for number in range(3):
            store.make(RetrainedCell(SCENARIO, Forget(("client-1", "client-2")), number))
        for number in range(2):
            store.make(RetrainedCell(SCENARIO, Forget(("client-1", "client-2")), number, fresh=False))
        part = measure(setting, None, store)
        (row,) = (row for row in part.rows if row.method == "retrace-krylov" and row.variant == "two")
        spent = [step.cost.sample_gradients for step in steps]
        assert row.sample_gradients == pytest.approx(sum(spent) / 2)
        assert row.stored_bytes == steps[0].record["stored_bytes"] > steps[1].record["stored_bytes"]
        after = {row.variant: row for row in part.rows if row.method == "retrace-krylov"}
        assert set(after) == {
            "two",
            "two, after 0: client-1",
            "two, after 1: client-1",
            "two, after 2: client-1",
            "two, after 2: client-2",
        }
        assert after["two"].test_accuracy == after["two, after 2: client-2"].test_accuracy
        curves = {(c.method, c.y_name): dict(zip(c.x, c.y, strict=True)) for c in part.series}
        assert set(curves["retrain", "test accuracy"]) == {1.0, 2.0}
        assert curves["trained", "test accuracy"][0.0] == curves["trained", "test accuracy"][2.0]
        assert part.noise["kl"] != part.noise_same_init["kl"]
        assert len(part.noise["kl"]) == 6
        assert len(part.noise_same_init["kl"]) == 2

    def test_a_method_that_gave_up_is_called_failed_and_has_no_speedup(self, store):
        setting = Setting("lie", SCENARIO, (GONE,), (Contender("hf-kcu"),), 3, 0, tamper="not a number")
        store.make(TrainedCell(SCENARIO))
        for number in range(3):
            store.make(RetrainedCell(SCENARIO, GONE, number))
        store.make(ForgottenCell(SCENARIO, setting.contenders[0], (GONE,), "not a number"))
        (row,) = (row for row in measure(setting, None, store).rows if row.method == "hf-kcu")
        assert (row.verdict, row.speedup, row.speedup_in_gradients) == (FAILED, None, None)
        assert row.sample_gradients is not None

    def test_overheads(self, store):
        names = ("retrace-krylov", "fine-tuning", "fed-eraser", "sisa")
        contenders = tuple(Contender(name) for name in names)
        setting = Setting("over", SCENARIO, (GONE,), contenders, 3, 0)
        for cell in (TrainedCell(SCENARIO, updates=True), ShardedCell(SCENARIO)):
            store.make(cell)
        for number in range(3):
            store.make(RetrainedCell(SCENARIO, GONE, number))
        for contender in contenders:
            store.make(ForgottenCell(SCENARIO, contender, (GONE,)))
        rows = {row.method: row for row in measure(setting, None, store).rows}
        trained, sharded = store.kept(TrainedCell(SCENARIO)), store.kept(ShardedCell(SCENARIO))
        kept = trained.record["keeping_seconds"]
        rest = trained.cost.seconds - sum(kept.values())
        assert rows["retrace-krylov"].training_overhead == pytest.approx(kept["vectors"] / rest)
        assert rows["fed-eraser"].training_overhead == pytest.approx(kept["updates"] / rest)
        assert rows["fine-tuning"].training_overhead == 0
        more = sharded.cost.sample_gradients / trained.cost.sample_gradients - 1
        assert rows["sisa"].training_overhead == pytest.approx(more)


class TestFolders:
    def test_a_rival_that_was_quicker_is_accepted_and_an_older_one_replaced(self, tmp_path):
        target = tmp_path / "cell"

        def fill(text):
            return lambda folder: (folder / "cell.json").write_text(text)

        appear(target, fill("first"))
        appear(target, fill("second"))
        assert (target / "cell.json").read_text() == "second"

        def rival(folder):
            appear(target.with_name("other"), fill("rival"))
            (folder / "cell.json").write_text("slow")

        appear(target.with_name("other"), rival)
        assert (target.with_name("other") / "cell.json").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cell", "other"]

    def test_what_the_dead_left_half_made_is_removed_and_the_living_keep_theirs(self, tmp_path):
        dead, living = tmp_path / ".staging-999999999-x", tmp_path / f".staging-{os.getpid()}-x"
        dead.mkdir()
        living.mkdir()
        tidy(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [living.name]


def test_the_trained_cell_is_plain_training(store):
    kept = made(store, TrainedCell(SCENARIO))
    federation = SCENARIO.build()
    assert isinstance(PLAN, TrainingPlan)
    assert kept.state.model.digest == train(federation.engine(), federation.initial(), PLAN).model.digest
