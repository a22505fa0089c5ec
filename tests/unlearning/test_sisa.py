import dataclasses

import pytest
import torch

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.keeping.shards import Shard, Shards
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.sharded import train_sharded, trained_from
from expunge.models.ensemble import Ensemble
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from expunge.unlearning.sisa import SisaOptions, sisa
from federation.small import LINES, Watching, clients, linear, norm_net, scalar_line

STEP = TrainingPlan(rounds=1, epochs=1, batch_size=1000, learning_rate=0.1)


def line():
    return Watching(scalar_line(1, 0), SquaredError(), LINES)


def two_shards():
    """Shard 0 has the slices ada, bob; shard 1 has cyd. Every stage is one step from (1, 0) on, see test_shards."""
    start = Snapshot.of(scalar_line(1, 0))
    first = trained_from(Shard((("ada",), ("bob",)), (start,), (STEP, STEP)), line(), 0)
    second = trained_from(Shard((("cyd",),), (start,), (STEP,)), line(), 0)
    shards = Shards((first, second))
    return ServerState(shards.model, STEP.schedule({"ada": 1, "bob": 2, "cyd": 3}), shards=shards)


class TestByHand:
    """The trained shards are (1.08, 0.2 + 0.28/3), with (1.2, 0.2) after stage 1, and (1, 0.1)."""

    def forget(self, request, engine=None):
        engine = engine or line()
        outcome = sisa(engine, two_shards(), request, SisaOptions())
        return outcome, outcome.state.model.parameters.tolist(), [set(asked) for asked in getattr(engine, "asked", [])]

    def test_before(self):
        expected = torch.tensor([1.08, 0.2 + 0.28 / 3, 1.0, 0.1], dtype=torch.float64)
        torch.testing.assert_close(two_shards().model.parameters, expected)

    def test_the_second_slice_leaves_the_first_checkpoint_stands(self):
        # From (1.2, 0.2), ada alone: residual -1.6, update (0.16, 0.16).
        outcome, found, asked = self.forget(Request.of("bob"))
        assert found == pytest.approx([1.36, 0.36, 1.0, 0.1])
        assert asked == [{"ada"}]
        assert outcome.details["retrained"] == [{"shard": 0, "from_stage": 1, "stages": 2}]
        assert outcome.state.shards.shards[0].slices == (("ada",), ())

    def test_the_first_slice_leaves_from_the_start(self):
        # Stage 1 has nobody; stage 2 is bob from (1, 0): residuals 2, -4, gradient (2, -1).
        outcome, found, asked = self.forget(Request.of("ada"))
        assert found == pytest.approx([0.8, 0.1, 1.0, 0.1])
        assert asked == [{"bob"}]
        assert outcome.state.shards.shards[0].slices == ((), ("bob",))

    def test_samples(self):
        # bob keeps (0, 4): at (1.2, 0.2) residual -3.8, update (0, 0.38), as many samples as ada with (0.16, 0.16).
        outcome, found, asked = self.forget(Request.of(samples={"bob": [0]}))
        assert found == pytest.approx([1.28, 0.47, 1.0, 0.1])
        assert asked == [{"ada", "bob"}]
        assert dict(outcome.state.shards.shards[0].left_out) == {"bob": (0,)}

    def test_a_shard_without_clients_leaves_the_ensemble(self):
        outcome, found, asked = self.forget(Request.of("cyd"))
        assert found == pytest.approx([1.08, 0.2 + 0.28 / 3])
        assert asked == []
        assert outcome.details["emptied"] == [1]
        assert outcome.state.model.layout == Snapshot.of(Ensemble(scalar_line(1, 0), 1)).layout
        outcome, found, _ = self.forget(Request.of(["ada", "bob"]))
        assert found == pytest.approx([1.0, 0.1])
        assert outcome.details["emptied"] == [0]

    def test_leavers_in_both_shards(self):
        outcome, found, _ = self.forget(Request.of("bob", samples={"cyd": [0, 1]}))
        # cyd keeps (0, 3): at (1, 0) residual -3, update (0, 0.3).
        assert found == pytest.approx([1.36, 0.36, 1.0, 0.3])
        assert [part["shard"] for part in outcome.details["retrained"]] == [0, 1]

    def test_the_leaver_need_not_be_there_nor_the_other_shard(self):
        _, found, _ = self.forget(Request.of("bob"), line().without(("bob", "cyd")))
        assert found == pytest.approx([1.36, 0.36, 1.0, 0.1])


PLAN = TrainingPlan(rounds=6, epochs=2, batch_size=4, learning_rate=0.2)
NAMES = ("ada", "bob", "cyd", "dan", "eve", "fay")
DATA = clients(**dict(zip(NAMES, (9, 11, 13, 8, 12, 10), strict=True)))


def watched(build=norm_net):
    return Watching(build(), CrossEntropy(), DATA)


def trained(build=norm_net):
    return train_sharded(watched(build), Snapshot.of(build()), PLAN, shards=2, slices=3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_shard_is_untouched_and_this_one_is_as_trained_without(stage):
    state, engine = trained(), watched()
    touched, other = state.shards.shards
    leaver = touched.slices[stage][0]
    after = sisa(engine, state, Request.of(leaver), SisaOptions()).state.shards
    assert [c.digest for c in after.shards[1].checkpoints] == [c.digest for c in other.checkpoints]
    kept = [c.digest for c in touched.checkpoints[: stage + 1]]
    assert [c.digest for c in after.shards[0].checkpoints[: stage + 1]] == kept
    model = touched.checkpoints[stage]
    for number in range(stage, 3):
        members = {n: () for part in touched.slices[: number + 1] for n in part if n != leaver}
        model = train(watched(), model, touched.plans[number], clients=members).model if members else model
        assert after.shards[0].checkpoints[number + 1].digest == model.digest
    assert all(set(asked) <= set(touched.clients) - {leaver} for asked in engine.asked)
    assert after.clients == tuple(name for name in state.shards.clients if name != leaver)


def test_the_predictions_are_the_mean_of_the_shards():
    state = trained()
    outcome = method("sisa")(watched(), state, Request.of("ada"))
    ensemble = Ensemble(norm_net(), count=2).eval()
    outcome.write_to(ensemble)
    inputs = DATA["bob"][0]
    each = []
    for shard in outcome.state.shards.shards:
        member = norm_net().eval()
        shard.model.write_to(member)
        each.append(member(inputs).softmax(dim=1))
    torch.testing.assert_close(ensemble(inputs).exp(), (each[0] + each[1]) / 2)


def test_samples_that_were_forgotten_do_not_come_back():
    state = trained(linear)
    shard = state.shards.shards[0]
    owner, leaver = shard.slices[0][0], shard.slices[1][0]
    first = sisa(watched(linear), state, Request.of(samples={owner: [3, 1]}), SisaOptions()).state
    engine = watched(linear)
    second = sisa(engine, first, Request.of(leaver), SisaOptions()).state
    assert {task.exclude for asked in engine.asked for name, task in asked.items() if name == owner} == {(1, 3)}
    more = sisa(watched(linear), second, Request.of(samples={owner: [0]}), SisaOptions()).state
    assert dict(more.shards.shards[0].left_out) == {owner: (0, 1, 3)}
    rest = [index for index in range(len(DATA[owner][0])) if index not in (0, 1, 3)]
    gone = sisa(watched(linear), more, Request.of(samples={owner: rest}), SisaOptions()).state
    assert owner not in gone.shards.clients
    assert dict(gone.shards.shards[0].left_out) == {}


def test_what_forgets_next_begins_where_this_ended():
    state, leavers = trained(linear), trained(linear).shards.shards[0].clients
    for name in leavers[:2]:
        state = sisa(watched(linear), state, Request.of(name), SisaOptions()).state
    together = sisa(watched(linear), trained(linear), Request.of(leavers[:2]), SisaOptions()).state
    assert state.model.digest == together.model.digest


def test_progress():
    seen, state = [], trained(linear)
    leaver = state.shards.shards[1].slices[1][0]
    sisa(watched(linear), state, Request.of(leaver), SisaOptions(lambda *said: seen.append(said)))
    assert seen == [("training", done, 6) for done in range(1, 7)]  # two stages of three rounds


class TestRefusals:
    @staticmethod
    def refused(match, state, request, engine=None):
        engine = engine or watched(linear)
        with pytest.raises(RequestError, match=match) as caught:
            sisa(engine, state, request, SisaOptions())
        assert "\n" not in str(caught.value)
        assert engine.cost.rounds == 0

    def test_a_plain_training(self):
        self.refused("no shards", train(watched(linear), Snapshot.of(linear()), PLAN), Request.of("ada"))

    def test_one_who_stays_in_the_shard_and_is_away(self):
        state = trained(linear)
        away, leaver, *_ = state.shards.shards[0].clients
        engine = watched(linear).without((away,))
        self.refused(f"'{away}' stays but cannot be reached", state, Request.of(leaver), engine)

    def test_somebody_who_was_never_in_a_shard(self):
        members = {name: () for name in NAMES if name != "fay"}
        state = train_sharded(watched(linear), Snapshot.of(linear()), PLAN, shards=2, slices=1, clients=members)
        self.refused("no client 'fay'", state, Request.of("fay"))

    def test_everybody_in_two_steps(self):
        state = trained(linear)
        for shard in state.shards.shards:
            assert shard.clients
        almost = sisa(watched(linear), state, Request.of([*NAMES[:5]]), SisaOptions()).state
        some = sisa(watched(linear), almost, Request.of(samples={"fay": range(9)}), SisaOptions()).state
        self.refused("no client in any shard", some, Request.of(samples={"fay": [9]}))


def test_the_given_state_is_untouched():
    state = trained()
    before = [c.digest for shard in state.shards.shards for c in shard.checkpoints]
    outcome = sisa(watched(), dataclasses.replace(state), Request.of("ada"), SisaOptions())
    assert [c.digest for shard in state.shards.shards for c in shard.checkpoints] == before
    assert "ada" in state.shards.clients
    assert outcome.memory is None
    assert outcome.state.history is None


def test_everybody_else_of_a_slice_stays_in_it():
    names = ("ada", "bob", "cyd", "dan", "eve", "fay")
    datasets = clients(**dict.fromkeys(names, 6))
    engine = Watching(linear(), CrossEntropy(), datasets)
    plan = TrainingPlan(rounds=2, epochs=1, batch_size=3, learning_rate=0.1)
    state = train_sharded(engine, Snapshot.of(linear()), plan, shards=2, slices=1)
    own = next(shard for shard in state.shards.shards if "bob" in shard.clients)
    assert len(own.clients) == 3
    del engine.asked[:]
    outcome = sisa(engine, state, Request.of("bob"), SisaOptions())
    left = {name for name in own.clients if name != "bob"}
    assert {name for asked in engine.asked for name in asked} == left
    assert set(outcome.state.shards.clients) == set(names) - {"bob"}
