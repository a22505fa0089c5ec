import dataclasses
import json
from datetime import UTC, datetime

import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.bench.evaluation import Evaluation, noise_ranges, retrain_noise
from expunge.bench.results import Results
from expunge.bench.run_folder import RunFolder, folder_name
from expunge.bench.run_results import run_results
from expunge.bench.scenario import Scenario
from expunge.errors import DataError, ExpungeError, ModelError, RequestError
from expunge.federation.keeping.durable import DurableFolder, require_new
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.report import publish
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain

SCENARIO = Scenario(
    model="softmax", clients=3, plan=TrainingPlan(rounds=1, epochs=1, batch_size=64, learning_rate=0.1), seed=2
)
LEAVING = Request.of("client-1")


@pytest.fixture(scope="module")
def federation():
    return SCENARIO.build()


@pytest.fixture(scope="module")
def state(federation):
    return train(federation.engine(), federation.initial(), SCENARIO.plan)


@pytest.fixture
def run(federation, state, tmp_path):
    return RunFolder.create(tmp_path / "run", federation, state)


def quicker(federation, state, alone):
    """Before the first lock is held, another run makes the folder."""
    waiting = [True]

    def lock(folder, *arguments):
        if waiting and waiting.pop():
            RunFolder.create(folder.path, federation, state)
        return alone(folder, *arguments)

    return lock


def retrained(federation, state, seed):
    plan = dataclasses.replace(SCENARIO.plan, seed=seed)
    return retrain(federation.engine(), state, LEAVING, RetrainOptions(federation.initial(seed), plan))


class TestRoundTrip:
    def test_a_run_comes_back_as_it_was(self, run, federation, state):
        opened = RunFolder.open(run.path)
        assert opened == run
        assert (opened.scenario, opened.schedule, opened.departed) == (SCENARIO, state.schedule, ())
        found = opened.trained(federation)
        assert found.model.digest == state.model.digest
        assert found.schedule == state.schedule
        for name in state.memory.clients:
            assert torch.equal(found.memory.influence([name]), state.memory.influence([name]))

    def test_without_memory(self, federation, state, tmp_path):
        run = RunFolder.create(tmp_path / "run", federation, dataclasses.replace(state, memory=None))
        assert run.trained(federation).memory is None
        assert not (run.state / "memory.safetensors").exists()

    def test_outcomes_are_kept_under_request_and_method(self, run, federation, state):
        outcome = method("retrace-krylov")(federation.engine(), state, LEAVING)
        kept = run.save(LEAVING, outcome, federation)
        assert kept == run.path / "without-client-1" / "retrace-krylov"
        record = json.loads((kept / "outcome.json").read_text())
        assert (record["before"], record["after"]) == (state.model.digest, outcome.state.model.digest)
        assert abs(datetime.now(UTC) - datetime.fromisoformat(record["date"])).total_seconds() < 60
        assert record["cost"] == outcome.cost.as_dict()
        assert record["details"]["source"] == "recorded"
        assert run.requests() == {"without-client-1": LEAVING}
        assert sorted(path.name for path in kept.parent.iterdir()) == ["retrace-krylov"]
        run.save(LEAVING, outcome, federation)  # again takes its place
        assert sorted(path.name for path in kept.parent.iterdir()) == ["retrace-krylov"]
        for number in (1, 2):
            place = run.save(LEAVING, retrained(federation, state, number), federation)
            assert place.name == f"retrain-{number}"

    def test_names_of_folders(self):
        assert folder_name(Request.of(["b", "a"])) == folder_name(Request.of(["a", "b"])) == "without-a+b"
        many = [f"client-{number}" for number in range(100)]
        assert len(folder_name(Request.of(many))) < 120
        assert folder_name(Request.of(many)) != folder_name(Request.of(many[:-1]))
        odd = ["a/b", "a_b", "..", "x/../../y", "🦆" * 90, "nul\0", "\udcff", "a b"]
        names = [folder_name(Request.of(name)) for name in odd]
        assert len(set(names)) == len(odd)
        for name in names:
            assert len(name.encode()) < 120
            assert name.startswith("without-")
            assert "/" not in name
        some, others = (folder_name(Request.of(samples={"a": indices})) for indices in ([0, 1], [0, 2]))
        assert some.startswith("without-a-samples-")
        assert some != others
        assert some == folder_name(Request.of(samples={"a": [1, 0, 1]}))


class TestResults:
    def test_equal_direct_measuring(self, run, federation, state):
        outcome = method("retrace-krylov")(federation.engine(), state, LEAVING)
        again = [retrained(federation, state, seed) for seed in (1, 2)]
        for each in (outcome, *again):
            run.save(LEAVING, each, federation)
        results = run_results(run, "without-client-1", federation)
        evaluation = Evaluation(federation, LEAVING)
        before, after = (evaluation.measure(each.model) for each in (state, outcome.state))
        references = [evaluation.measure(each.state.model) for each in again]
        costs = [each.cost for each in again]
        expected = [
            evaluation.row("trained", before, before, references),
            *(
                evaluation.row("retrain", own, before, references, c, costs)
                for own, c in zip(references, costs, strict=True)
            ),
            evaluation.row("retrace-krylov", after, before, references, outcome.cost, costs),
        ]
        assert [dataclasses.replace(row, verdict=None) for row in results.rows] == expected
        models = [each.model for each in (state, *(own.state for own in (*again, outcome)))]
        assert [row.digest for row in results.rows] == [model.digest for model in models]
        assert abs(datetime.now(UTC) - datetime.fromisoformat(results.date)).total_seconds() < 60
        few = "UNDECIDED"  # two retrained models show no noise, and are not judged themselves
        assert [row.verdict for row in results.rows] == [few, None, None, few]
        assert results.noise == noise_ranges([retrain_noise(references)])
        assert results.experiment == "run/without-client-1"
        results.save(run.path / "results.json")

    def test_without_retraining_there_is_no_crash(self, run, federation, state):
        run.save(LEAVING, method("hf-kcu")(federation.engine(), state, LEAVING), federation)
        results = run_results(run, "without-client-1", federation)
        assert results.methods() == ["trained", "hf-kcu"]
        assert all(row.kl is None and row.speedup is None for row in results.rows)
        assert all(row.test_accuracy is not None for row in results.rows)
        assert results.noise == {}


class TestDerived:
    """What is made of results goes when one of them changes; another request's stays."""

    def test_what_was_shown_goes_with_a_new_try(self, run, federation, state):
        other = Request.of("client-0")
        for asked in (LEAVING, other):
            outcome = method("fine-tuning")(federation.engine(), state, asked)
            publish(
                run_results(run, run.save(asked, outcome, federation).parent.name, federation),
                run.path / folder_name(asked),
            )
        shown = {path.name for path in (run.path / "without-client-1").iterdir()}
        assert {"results.json", "report.html", "table.md", "rows.csv"} <= shown
        for name in ("audit.json", "audit.html", "audit-roc.png", "notes.txt"):
            (run.path / "without-client-1" / name).write_text("mine")
        run.save(LEAVING, retrained(federation, state, 1), federation)
        left = {path.name for path in (run.path / "without-client-1").iterdir()}
        assert left == {"fine-tuning", "retrain-1", "notes.txt"}
        assert {path.name for path in (run.path / "without-client-0").iterdir()} == shown

    def test_what_was_shown_stays_as_evidence_when_somebody_leaves_for_good(self, run, federation, state):
        outcome = method("fine-tuning")(federation.engine(), state, LEAVING)
        run.save(LEAVING, outcome, federation)
        publish(run_results(run, "without-client-1", federation), run.path / "without-client-1")
        after = run.erase(LEAVING, outcome, federation)
        results = Results.load(run.path / "without-client-1" / "results.json")
        (record,) = after.book.forgotten
        assert results.rows[-1].digest == record["after"]  # it is of the model that the run goes on with
        assert results.rows[0].digest == record["before"]
        assert record["method"] == "fine-tuning"


class TestLost:
    """A file of vectors that is missing is told by name, in the outcome and in results."""

    def test_vectors(self, run, federation, state):
        (run.state / "memory.safetensors").unlink()
        found = RunFolder.open(run.path).trained(federation)
        (sentence,) = found.lost
        assert f"{run.state / 'memory.safetensors'} is missing, though vectors were kept" in sentence
        outcome = method("fine-tuning")(run.engine(federation), found, LEAVING)
        assert sentence in outcome.warnings
        kept = run.save(LEAVING, outcome, federation)
        assert sentence in json.loads((kept / "outcome.json").read_text())["warnings"]
        assert run_results(run, "without-client-1", federation).scenario["warnings"] == [sentence]

    def test_updates(self, federation, tmp_path):
        state = train(federation.engine(), federation.initial(), SCENARIO.plan, keep=Keep(updates_every=1))
        run = RunFolder.create(tmp_path / "other", federation, state)
        assert run.trained(federation).lost == ()
        (run.state / "history.safetensors").unlink()
        assert "history.safetensors is missing, though updates were kept" in run.trained(federation).lost[0]

    def test_what_was_never_kept_is_not_missed(self, federation, state, tmp_path):
        run = RunFolder.create(tmp_path / "other", federation, dataclasses.replace(state, memory=None))
        assert RunFolder.open(run.path).trained(federation).lost == ()


class TestErasing:
    def test_nothing_of_the_departed_is_left_and_the_run_goes_on(self, run, federation, state):
        gone = state.memory.vectors["client-1"].numpy().tobytes()
        for name in ("hf-kcu", "retrace-krylov"):
            outcome = method(name)(federation.engine(), state, LEAVING)
            run.save(LEAVING, outcome, federation)
        run.save(Request.of("client-0"), method(name)(federation.engine(), state, Request.of("client-0")), federation)
        (holder,) = (file for file in run.path.rglob("*") if file.is_file() and gone in file.read_bytes())
        assert holder.parent == run.state / "vectors"
        after = run.erase(LEAVING, outcome, federation)
        assert sorted(path.name for path in run.path.iterdir()) == [".lock", "run.json", "state-2"]
        assert not [file for file in run.path.rglob("*") if file.is_file() and gone in file.read_bytes()]
        assert RunFolder.open(run.path) == after
        assert after.departed == ("client-1",)
        assert after.engine(federation).clients().keys() == {"client-0", "client-2"}
        now = after.trained(federation)
        assert set(now.memory.clients) == {"client-0", "client-2"}
        assert now.model.digest == outcome.state.model.digest
        second = method("retrace")(after.engine(federation), now, Request.of("client-0"))
        after.erase(Request.of("client-0"), second, federation)
        assert RunFolder.open(run.path).departed == ("client-1", "client-0")


class TestRefusals:
    def test_weights_of_another_architecture_nan_or_damaged(self, run, federation):
        path = run.state / "model.safetensors"
        good = load_file(path)
        for tensors in (
            {"other": torch.zeros(2)},
            {**good, "more": torch.zeros(1)},
            {"layer.weight": torch.zeros(2, 2)},
        ):
            save_file(tensors, path)
            with pytest.raises(ModelError, match="another architecture"):
                run.trained(federation)
        save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}, path)
        with pytest.raises(ModelError, match="NaN"):
            run.trained(federation)
        path.write_bytes(b"not safetensors at all")
        with pytest.raises(DataError, match="damaged"):
            run.trained(federation)
        path.unlink()
        with pytest.raises(DataError, match="missing"):
            run.trained(federation)

    def test_a_damaged_memory(self, run, federation):
        (run.state / "memory.safetensors").write_bytes(b"\0" * 10)
        with pytest.raises(DataError, match="memory"):
            run.trained(federation)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "3",
            "null",
            "{}",
            '{"scenario": {}, "schedule": null, "departed": []}',
            "\udcff",
            '{"scenario": 3}',
            "[1]",
            "[" * 100_000,
        ],
        ids=lambda text: text[:8],
    )
    def test_a_damaged_description(self, run, text):
        (run.path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=r"run\.json cannot be read: it is damaged|older expunge") as caught:
            RunFolder.open(run.path)
        assert "\n" not in str(caught.value)

    def test_a_damaged_outcome(self, run, federation, state):
        kept = run.save(LEAVING, method("retrace")(federation.engine(), state, LEAVING), federation)
        (kept / "outcome.json").write_text("{")
        with pytest.raises(DataError, match="damaged"):
            run.requests()

    @pytest.mark.parametrize("text", ["[]", "{}", '{"request": 3}', '{"request": {"clients": [], "samples": 3}}'])
    def test_an_odd_outcome(self, run, federation, state, text):
        kept = run.save(LEAVING, method("fine-tuning")(federation.engine(), state, LEAVING), federation)
        (kept / "outcome.json").write_text(text)
        for look in (run.requests, lambda: run.tried("without-client-1", federation)):
            with pytest.raises(DataError, match=f"{kept / 'outcome.json'} cannot be read"):
                look()

    @pytest.mark.parametrize(
        "change",
        [
            {"details": [1]},
            {"details": {"steps": [{"solves": [1]}]}},
            {"details": {"steps": [{"solves": {"server": {"residual_norms": "x"}}}]}},
            {"warnings": "mind"},
            {"method": None},
            {"cost": {"seconds": "long"}},
        ],
    )
    def test_an_outcome_that_an_audit_could_not_read(self, run, federation, state, change):
        kept = run.save(LEAVING, method("fine-tuning")(federation.engine(), state, LEAVING), federation)
        record = json.loads((kept / "outcome.json").read_text())
        (kept / "outcome.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(DataError, match=f"{kept / 'outcome.json'} cannot be read"):
            run.tried("without-client-1", federation)

    def test_another_version(self, run):
        content = json.loads((run.path / "run.json").read_text())
        del content["digest"]
        for version in (1, 3, None, "2"):
            (run.path / "run.json").write_text(json.dumps({**content, "version": version}))
            with pytest.raises(DataError, match=r"run.json is of version .*: use the expunge that made it"):
                RunFolder.open(run.path)
        first = {name: content[name] for name in ("scenario", "schedule", "departed")}
        (run.path / "run.json").write_text(json.dumps(first))
        with pytest.raises(DataError, match="methods had other names: train again, in a new folder"):
            RunFolder.open(run.path)

    def test_a_first_writing_that_was_cut_off_is_nothing(self, run, federation, state, tmp_path):
        (run.path / "run.json").unlink()
        (run.path / ".staging-1-x").mkdir()
        with pytest.raises(DataError, match="not a run folder"):
            RunFolder.open(run.path)
        again = RunFolder.create(run.path, federation, state)
        assert sorted(path.name for path in run.path.iterdir()) == [".lock", "run.json", "state-1"]
        assert RunFolder.open(run.path) == again

    def test_no_run_folder(self, tmp_path):
        with pytest.raises(DataError, match="not a run folder"):
            RunFolder.open(tmp_path / "nowhere")
        (tmp_path / "file").write_text("")
        with pytest.raises(ExpungeError):
            RunFolder.open(tmp_path / "file")

    def test_nothing_is_written_over(self, run, federation, state, tmp_path):
        with pytest.raises(RequestError, match="not empty"):
            RunFolder.create(run.path, federation, state)
        (tmp_path / "file").write_text("mine")
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(RequestError):
                require_new(path)
        assert (tmp_path / "file").read_text() == "mine"
        (tmp_path / "empty").mkdir()
        require_new(tmp_path / "empty")
        require_new(tmp_path / "new" / "deep")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "run"]

    def test_of_two_trainings_into_one_folder_the_second_is_refused(self, federation, state, tmp_path, monkeypatch):
        """Both found the folder new, before their work."""
        other = dataclasses.replace(state, model=federation.initial(9))
        monkeypatch.setattr(
            "expunge.bench.run_folder.DurableFolder.alone", quicker(federation, other, DurableFolder.alone)
        )
        with pytest.raises(RequestError, match="exists already"):
            RunFolder.create(tmp_path / "run", federation, state)
        assert RunFolder.open(tmp_path / "run").trained(federation).model.digest == other.model.digest

    def test_a_write_that_fails_leaves_nothing_half_done(self, run, federation, state, tmp_path):
        outcome = method("retrace")(federation.engine(), state, LEAVING)
        broken = dataclasses.replace(outcome, details={"thing": object()})
        with pytest.raises(TypeError):
            run.save(LEAVING, broken, federation)
        assert not (run.path / "without-client-1").exists()
        nan = state.model.moved(state.model.parameters * float("nan"))
        broken = dataclasses.replace(outcome, state=dataclasses.replace(state, model=nan))
        with pytest.raises(ModelError, match="NaN"):
            run.save(LEAVING, broken, federation)
        assert list((run.path / "without-client-1").iterdir()) == []
