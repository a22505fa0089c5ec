import pytest
import torch
from safetensors.torch import save_file

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.history import History
from expunge.federation.messages.tasks import Trained
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from federation.small import Watching, clients, linear, norm_net

PLAN = TrainingPlan(rounds=5, epochs=1, batch_size=4, learning_rate=0.2)
DATA = clients(ada=9, bob=11, cyd=13)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def small_history():
    """ada alone in round 0, everybody in round 2."""
    history = History(Snapshot(vector(1.0, 2.0), {"mean": vector(0.5)}))
    history.record(0, {"ada": vector(0.1, 0.2)}, {"ada": 3})
    history.record(2, {"ada": vector(1, 2), "bob": vector(3, 4), "cyd": vector(5, 6)}, {"ada": 3, "bob": 4, "cyd": 5})
    return history


def content(history):
    return [
        (stored.number, dict(stored.counts), {name: update.tolist() for name, update in stored.updates.items()})
        for stored in history.rounds
    ]


class TestTraining:
    def test_every_second_round_is_stored_as_it_was_sent_beginning_with_the_first(self):
        engine = Watching(linear(), CrossEntropy(), DATA)
        start = Snapshot.of(linear())
        history = train(engine, start, PLAN, keep=Keep(updates_every=2)).history
        assert [stored.number for stored in history.rounds] == [0, 2, 4]
        assert history.initial.digest == start.digest
        for stored in history.rounds:
            replies = engine.replied[stored.number]
            assert dict(stored.counts) == {"ada": 9, "bob": 11, "cyd": 13}
            for name, update in stored.updates.items():
                assert isinstance(replies[name], Trained)
                assert torch.equal(update, replies[name].update)
                assert update.data_ptr() != replies[name].update.data_ptr()  # its own: nobody can change it later

    @pytest.mark.parametrize(("every", "stored"), [(1, 5), (2, 3), (4, 2), (5, 1), (100, 1)])
    def test_what_it_costs(self, every, stored):
        engine = LocalEngine(linear(), CrossEntropy(), DATA)
        state = train(engine, Snapshot.of(linear()), PLAN, keep=Keep(vectors=False, updates_every=every))
        assert len(state.history.rounds) == stored
        assert state.history.stored_bytes == (1 + 3 * stored) * 12 * 8  # 12 parameters of 8 bytes
        assert state.memory is None
        assert set(state.keeping_seconds) == {"updates"}
        assert state.keeping_seconds["updates"] > 0

    def test_nothing_is_kept_that_was_not_asked_for_and_keeping_changes_no_model(self):
        keeps = {
            Keep(): {"vectors"},
            Keep(vectors=False): set(),
            Keep(updates_every=1): {"vectors", "updates"},
        }
        digests = set()
        for keep, kept in keeps.items():
            state = train(LocalEngine(linear(), CrossEntropy(), DATA), Snapshot.of(linear()), PLAN, keep=keep)
            assert set(state.keeping_seconds) == kept
            assert all(0 < seconds < 1 for seconds in state.keeping_seconds.values())
            assert (state.memory is not None, state.history is not None) == ("vectors" in kept, "updates" in kept)
            digests.add(state.model.digest)
        assert len(digests) == 1

    @pytest.mark.parametrize("every", [0, -1])
    def test_a_meaningless_interval_is_refused(self, every):
        with pytest.raises(RequestError, match="every few"):
            Keep(updates_every=every)

    def test_only_participants_are_stored(self):
        plan = TrainingPlan(rounds=6, epochs=1, batch_size=4, learning_rate=0.2, participation=0.4)
        engine = Watching(linear(), CrossEntropy(), DATA)
        history = train(engine, Snapshot.of(linear()), plan, keep=Keep(updates_every=1)).history
        assert [set(stored.updates) for stored in history.rounds] == [set(asked) for asked in engine.asked]


class TestWithout:
    def test_the_leavers_updates_are_gone_and_a_round_of_theirs_alone_with_them(self):
        history = small_history()
        assert content(history.without(["ada"])) == [(2, {"bob": 4, "cyd": 5}, {"bob": [3, 4], "cyd": [5, 6]})]
        assert history.without(["ada"]).clients == ("bob", "cyd")
        assert history.without(["ada", "bob", "cyd"]).rounds == ()
        assert history.clients == ("ada", "bob", "cyd")  # the old one is untouched

    def test_a_copy_is_its_own(self):
        history = small_history()
        copied = history.copy()
        copied.record(7, {"dan": vector(0, 0)}, {"dan": 1})
        assert len(history.rounds) == 2
        assert content(copied)[:2] == content(history)


class TestRefusals:
    @pytest.mark.parametrize(
        ("number", "updates", "counts"),
        [
            (3, {}, {}),
            (3, {"ada": vector(1, 2)}, {"bob": 1}),
            (3, {"ada": vector(1, 2)}, {"ada": 0}),
            (2, {"ada": vector(1, 2)}, {"ada": 1}),
            (1, {"ada": vector(1, 2)}, {"ada": 1}),
            (3, {"ada": vector(1, 2, 3)}, {"ada": 1}),
            (3, {"ada": vector(1, 2).reshape(1, 2)}, {"ada": 1}),
        ],
        ids=["nobody", "another", "no-samples", "twice", "too-late", "length", "shape"],
    )
    def test_a_round_that_makes_no_sense(self, number, updates, counts):
        history = small_history()
        with pytest.raises(RequestError):
            history.record(number, updates, counts)
        assert content(history) == content(small_history())

    def test_a_nan(self):
        history = small_history()
        with pytest.raises(DataError, match="'ada' has a NaN"):
            history.record(3, {"ada": vector(1, float("nan"))}, {"ada": 1})
        assert content(history) == content(small_history())


class TestOnDisk:
    def test_round_trip(self, tmp_path):
        small_history().save(tmp_path / "history.safetensors")
        loaded = History.load(tmp_path / "history.safetensors")
        assert content(loaded) == content(small_history())
        assert loaded.initial.digest == small_history().initial.digest
        assert loaded.stored_bytes == small_history().stored_bytes

    def test_a_trained_one_with_buffers_and_layers(self, tmp_path):
        engine = LocalEngine(norm_net(), CrossEntropy(), DATA)
        history = train(engine, Snapshot.of(norm_net()), PLAN, keep=Keep(updates_every=2)).history
        history.save(tmp_path / "history.safetensors")
        loaded = History.load(tmp_path / "history.safetensors")
        assert content(loaded) == content(history)
        assert loaded.initial.layers() == history.initial.layers()
        assert loaded.initial.digest == history.initial.digest

    @pytest.mark.parametrize("cut", [0, 4, 100, -1])
    def test_a_damaged_file_is_refused(self, tmp_path, cut):
        path = tmp_path / "history.safetensors"
        small_history().save(path)
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(DataError, match="cannot be read") as caught:
            History.load(path)
        assert "\n" not in str(caught.value)

    def test_changed_weights_are_refused(self, tmp_path):
        path = tmp_path / "history.safetensors"
        small_history().save(path)
        changed = path.read_bytes().replace(vector(2.0).numpy().tobytes(), vector(2.5).numpy().tobytes())
        path.write_bytes(changed)
        with pytest.raises(DataError, match="not the one that was written"):
            History.load(path)

    def test_other_files_are_refused(self, tmp_path):
        save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
        save_file({"a": torch.ones(2)}, tmp_path / "odd.safetensors", metadata={"history": "not json"})
        save_file({"a": torch.ones(2)}, tmp_path / "list.safetensors", metadata={"history": "[]"})
        for name in ("plain", "odd", "list", "absent"):
            with pytest.raises(DataError, match="cannot be read"):
                History.load(tmp_path / f"{name}.safetensors")

    def test_the_departed_leave_no_trace_in_the_bytes(self, tmp_path):
        history = small_history()
        history.save(tmp_path / "before")
        history.without(["cyd"]).save(tmp_path / "after")
        before, after = (tmp_path / "before").read_bytes(), (tmp_path / "after").read_bytes()
        for trace in (b"cyd", vector(5, 6).numpy().tobytes(), vector(6).numpy().tobytes()):
            assert trace in before
            assert trace not in after
