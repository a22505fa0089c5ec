import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.shards import Shard, Shards
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.sharded import divide, train_sharded, trained_from
from expunge.models.ensemble import Ensemble
from federation.small import LINES, Watching, clients, linear, norm_net, scalar_line

PLAN = TrainingPlan(rounds=6, epochs=1, batch_size=4, learning_rate=0.2)
NAMES = ("ada", "bob", "cyd", "dan", "eve", "fay")
DATA = clients(**dict(zip(NAMES, (9, 11, 13, 8, 12, 10), strict=True)))


def watched(build=linear):
    return Watching(build(), CrossEntropy(), DATA)


def sharded(build=linear, *, shards=2, slices=3, **more):
    return train_sharded(watched(build), Snapshot.of(build()), PLAN, shards=shards, slices=slices, **more)


class TestByHand:
    """The line a x + b from a = 1, b = 0; squared error, one full-batch step of 0.1 a stage.

    Slice 1 is ada with (1, 3), slice 2 is bob with (2, 0), (0, 4).
    Stage 1, ada: residual -2, gradient (-2, -2): (1.2, 0.2).
    Stage 2, ada: residual 1.4 - 3 = -1.6, update (0.16, 0.16); bob: residuals 2.6, -3.8, gradient (2.6, -0.6), update
    (-0.26, 0.06). Mean by samples, (0.16 - 0.52, 0.16 + 0.12) / 3: (1.2 - 0.12, 0.2 + 0.28 / 3).
    """

    def test_stages_go_on_from_each_other_and_keep_the_clients_before(self):
        step = TrainingPlan(rounds=1, epochs=1, batch_size=1000, learning_rate=0.1)
        engine = Watching(scalar_line(1, 0), SquaredError(), LINES)
        shard = trained_from(Shard((("ada",), ("bob",)), (Snapshot.of(scalar_line(1, 0)),), (step, step)), engine, 0)
        found = torch.stack([checkpoint.parameters for checkpoint in shard.checkpoints])
        expected = [[1.0, 0.0], [1.2, 0.2], [1.08, 0.2 + 0.28 / 3]]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
        assert shard.model is shard.checkpoints[-1]
        assert [set(asked) for asked in engine.asked] == [{"ada"}, {"ada", "bob"}]


class TestDivision:
    def test_it_is_balanced_seeded_and_whole(self):
        counts = {f"client-{number}": 10 + 7 * number % 23 for number in range(20)}
        parts = divide(counts, 4, seed=0)
        assert sorted(name for part in parts for name in part) == sorted(counts)
        weights = [sum(counts[name] for name in part) for part in parts]
        assert max(weights) - min(weights) <= max(counts.values())
        assert divide(counts, 4, seed=0) == parts
        assert {divide(counts, 4, seed=seed) for seed in range(5)} != {parts}

    def test_equal_clients_are_mixed_by_the_seed_and_every_part_gets_one(self):
        equal = dict.fromkeys("abcdef", 5)
        found = {frozenset(frozenset(part) for part in divide(equal, 3, seed)) for seed in range(20)}
        assert len(found) > 5
        assert all(len(part) == 2 for parts in found for part in parts)
        assert sorted(map(len, divide({"a": 1000, "b": 1, "c": 1}, 3, seed=0))) == [1, 1, 1]
        assert sorted(map(len, divide({"a": 1000, "b": 1, "c": 1, "d": 1}, 2, seed=0))) == [1, 3]  # by samples


class TestTraining:
    def test_each_shard_is_a_federation_of_its_own(self):
        engine = watched()
        state = train_sharded(engine, Snapshot.of(linear()), PLAN, shards=2, slices=1)
        first, second = state.shards.shards
        assert set(first.clients) | set(second.clients) == set(NAMES)
        assert not set(first.clients) & set(second.clients)
        asked = [set(tasks) for tasks in engine.asked]
        assert asked == [set(first.clients)] * 6 + [set(second.clients)] * 6
        for shard in state.shards.shards:
            alone = train(watched(), Snapshot.of(linear()), shard.plans[0], clients=dict.fromkeys(shard.clients, ()))
            assert shard.model.digest == alone.model.digest
        assert first.plans[0].seed != second.plans[0].seed
        assert state.memory is None
        assert state.history is None

    @pytest.mark.parametrize(("slices", "rounds"), [(1, 6), (2, 4), (3, 3)])
    def test_a_stage_takes_so_many_rounds_that_the_work_is_that_of_plain_training(self, slices, rounds):
        for shard in sharded(slices=slices).shards.shards:
            assert len(shard.slices) == slices
            assert len(shard.checkpoints) == slices + 1
            assert [plan.rounds for plan in shard.plans] == [rounds] * slices  # 2 * 6 / (slices + 1)
            assert len({plan.seed for plan in shard.plans}) == slices

    def test_the_work_of_equal_clients_is_exactly_that_of_plain_training(self):
        data = clients(**dict.fromkeys(NAMES, 8))
        plain, split = Watching(linear(), CrossEntropy(), data), Watching(linear(), CrossEntropy(), data)
        train(plain, Snapshot.of(linear()), PLAN)
        train_sharded(split, Snapshot.of(linear()), PLAN, shards=2, slices=3)
        assert split.cost.sample_gradients == plain.cost.sample_gradients

    def test_never_less_than_a_round_and_no_more_slices_than_clients(self):
        plan = dataclasses.replace(PLAN, rounds=1)
        state = train_sharded(watched(), Snapshot.of(linear()), plan, shards=2, slices=9)
        for shard in state.shards.shards:
            assert len(shard.slices) == len(shard.clients) == 3
            assert all(stage.rounds == 1 for stage in shard.plans)

    def test_the_model_is_the_ensemble(self):
        state = sharded(norm_net)
        ensemble = Ensemble(norm_net(), count=2)
        assert state.model.layout == Layout.of(ensemble)
        state.model.write_to(ensemble)
        for member, shard in zip(ensemble.members, state.shards.shards, strict=True):
            assert Snapshot.of(member).digest == shard.model.digest

    def test_starts_of_their_own(self):
        starts = [Snapshot.of(linear(seed)) for seed in (1, 2)]
        state = train_sharded(watched(), starts, PLAN, shards=2, slices=1)
        assert [shard.checkpoints[0].digest for shard in state.shards.shards] == [start.digest for start in starts]

    def test_seeded(self):
        assert sharded().model.digest == sharded().model.digest

    def test_left_out_samples_and_progress(self):
        seen, engine = [], watched()
        state = train_sharded(
            engine,
            Snapshot.of(linear()),
            PLAN,
            shards=1,
            slices=2,
            clients={"ada": (0, 2), "bob": ()},
            progress=lambda *said: seen.append(said),
        )
        assert {task.exclude for tasks in engine.asked for name, task in tasks.items() if name == "ada"} == {(0, 2)}
        assert dict(state.shards.shards[0].left_out) == {"ada": (0, 2)}
        assert seen == [("training", done, 8) for done in range(1, 9)]
        assert state.schedule == PLAN.schedule({"ada": 7, "bob": 11})

    @pytest.mark.parametrize("values", [{"shards": 0}, {"shards": 7}, {"slices": 0}])
    def test_meaningless_numbers_are_refused(self, values):
        with pytest.raises(RequestError, match="1 to 6 shards"):
            sharded(**values)

    def test_too_few_starts_are_refused(self):
        engine = watched()
        with pytest.raises(RequestError, match="one for each of the 2 shards, not 1"):
            train_sharded(engine, [Snapshot.of(linear())], PLAN, shards=2, slices=1)
        assert engine.cost.rounds == 0


def content(shards):
    return [(s.slices, s.plans, dict(s.left_out), [c.digest for c in s.checkpoints]) for s in shards.shards]


class TestOnDisk:
    def test_what_it_costs(self):
        one = 12 * 8  # parameters of 8 bytes
        assert sharded(shards=2, slices=3).shards.stored_bytes == (1 + 2 * 3) * one  # one start for both
        starts = [Snapshot.of(linear(seed)) for seed in (1, 2)]
        apart = train_sharded(watched(), starts, PLAN, shards=2, slices=3)
        assert apart.shards.stored_bytes == (2 + 2 * 3) * one

    @pytest.mark.parametrize("build", [linear, norm_net])
    def test_round_trip(self, tmp_path, build):
        shards = sharded(build, clients={**dict.fromkeys(NAMES, ()), "cyd": (1, 4)}).shards
        shards.save(tmp_path / "shards.safetensors")
        loaded = Shards.load(tmp_path / "shards.safetensors")
        assert content(loaded) == content(shards)
        assert loaded.model.digest == shards.model.digest
        assert loaded.model.layout == shards.model.layout
        assert loaded.stored_bytes == shards.stored_bytes

    @pytest.mark.parametrize("cut", [0, 4, 100, -1])
    def test_a_damaged_file_is_refused(self, tmp_path, cut):
        path = tmp_path / "shards.safetensors"
        sharded().shards.save(path)
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(DataError, match="cannot be read") as caught:
            Shards.load(path)
        assert "\n" not in str(caught.value)

    def test_changed_weights_and_other_files_are_refused(self, tmp_path):
        path = tmp_path / "changed.safetensors"
        sharded().shards.save(path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
        save_file({"a": torch.ones(2)}, tmp_path / "odd.safetensors", metadata={"shards": "not json"})
        for name in ("changed", "plain", "odd", "absent"):
            with pytest.raises(DataError, match="cannot be read"):
                Shards.load(tmp_path / f"{name}.safetensors")


def test_nothing_is_recorded_inside(monkeypatch):
    keeps = []
    monkeypatch.setattr(
        "expunge.federation.training.sharded.train", lambda *_, **kw: keeps.append(kw["keep"]) or train(*_, **kw)
    )
    sharded()
    assert set(keeps) == {Keep(vectors=False, checkpoints=0)}
