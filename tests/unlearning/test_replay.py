"""Replay: what data did in a round, found again from checkpoints, beside the rounds themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.checkpoints import Checkpoints
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import Adam, FedAvg, FedAvgM, Recipe
from expunge.unlearning import estimate
from expunge.unlearning.estimate import Size
from expunge.unlearning.pulls import Replay
from expunge.unlearning.request import Request
from expunge.unlearning.retrain import RetrainOptions, retrain
from federation.small import clients, linear, mlp
from unlearning.presets import KRYLOV, RETRACE, forgotten

DATA = clients(ada=9, bob=11, cyd=13, dan=8)
PLAN = TrainingPlan(rounds=3, epochs=2, batch_size=100, learning_rate=0.2)  # whole batches: nothing is shuffled
SAMPLES = Request.of(samples={"ada": [0, 3, 7], "bob": [1]})
REQUESTS = {
    "samples": SAMPLES,
    "client": Request.of("cyd"),
    "both": Request.of("cyd", samples={"ada": [2, 4]}),
    "all of its samples": Request.of(samples={"dan": range(8)}),
}


def trained(plan=PLAN, build=linear, **keep):
    """A federation, and what it has kept; vectors only where they are asked for."""
    engine = LocalEngine(build(), CrossEntropy(0.01), DATA)
    return engine, train(engine, Snapshot.of(build()), plan, keep=Keep(**{"vectors": False, **keep}))


def replayed(engine, state, request):
    replay = Replay(state, request.parties(engine.clients()))
    replay.require_possible()
    return replay(engine)


def mean_update(engine, model, number, request, plan) -> Tensor:
    """What a round adds to the model, trained by those who are left with what is left."""
    parties = request.parties(engine.clients()) if request is not None else None
    left = parties.retained if parties is not None else dict.fromkeys(engine.clients(), ())
    sent = {n: engine.ask({n: plan.task(model, number, n, gone)})[n] for n, gone in left.items()}
    total = sum(len(DATA[name][1]) - len(gone) for name, gone in left.items())
    return sum((len(DATA[n][1]) - len(left[n])) * reply.update for n, reply in sent.items()) / total


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(server=FedAvg(0.5)), Recipe(Adam())], ids=["SGD", "server rate", "Adam"]
)
def test_a_pull_of_one_round_is_the_difference_of_the_two_mean_updates(name, recipe):
    plan = dataclasses.replace(PLAN, recipe=recipe, learning_rate=0.02 if recipe.client.adaptive else 0.2)
    engine, state = trained(plan)
    assert list(state.checkpoints.models) == [0, 1, 2]
    pull = replayed(engine, state, REQUESTS[name])
    assert pull.source == "replay"
    for number, model in state.checkpoints.models.items():
        everyone, left = (mean_update(engine, model, number, own, plan) for own in (None, REQUESTS[name]))
        torch.testing.assert_close(pull.vectors[number], everyone - left, rtol=1e-9, atol=1e-12)
        assert float(pull.vectors[number].norm()) > 1e-4
    torch.testing.assert_close(pull.spreads, torch.eye(3, dtype=torch.float64))


def test_a_checkpoint_stands_for_the_rounds_around_it_by_how_far_they_went():
    plan = dataclasses.replace(PLAN, rounds=5, cosine=True)
    engine, state = trained(plan, vectors=True, checkpoints=2)
    assert list(state.checkpoints.models) == [1, 3]
    pull = replayed(engine, state, SAMPLES)
    rates = torch.tensor([plan.rate(number) for number in range(5)], dtype=torch.float64)
    for row, (number, rounds) in enumerate(((1, range(0, 2)), (3, range(2, 5)))):
        model, after = state.checkpoints.models[number], {1: state.checkpoints.models[3], 3: state.model}[number]
        parties, here = SAMPLES.parties(engine.clients()), model
        mean = (after.parameters - here.parameters) / 2
        own = -4 * mean
        for name, gone in parties.partly.items():
            task = dataclasses.replace(plan.task(here, number, name), learning_rate=plan.rate(number))
            whole = engine.ask({name: task})[name]
            part = engine.ask({name: dataclasses.replace(task, exclude=gone)})[name]
            own = own + whole.count * whole.update - part.count * part.update
        together = rates[list(rounds)].sum() / rates[number]
        torch.testing.assert_close(pull.vectors[row], together * own / (41 - 4), rtol=1e-9, atol=1e-12)
        expected = torch.zeros(5, dtype=torch.float64)
        expected[list(rounds)] = rates[list(rounds)] / rates[list(rounds)].sum()
        torch.testing.assert_close(pull.spreads[row], expected)


def test_a_round_in_which_nobody_worked_has_no_pull():
    """Nobody who stays was there in the checkpoint's round: the nearest round with work says how a round trains."""
    engine, state = trained(vectors=True)
    kept = state.memory._kept
    kept[1] = dataclasses.replace(kept[1], shares={"cyd": 1.0})
    pull = replayed(engine, state, REQUESTS["client"])
    assert bool(torch.isfinite(pull.vectors).all())
    assert float(pull.vectors[1].norm()) == 0.0
    assert any("In 1 of 3 rounds nobody took part but who is to be forgotten" in note for note in pull.notes)
    assert not any("nobody took part" in note for note in replayed(engine, trained(vectors=True)[1], SAMPLES).notes)
    assert float(pull.vectors[2].norm()) > 1e-4


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_replayed_comes_near_to_retraining(name):
    plan = dataclasses.replace(PLAN, rounds=6, epochs=1)
    engine, state = trained(plan)
    options = RetrainOptions(Snapshot.of(linear()), plan, same_draws=True)
    truth = retrain(engine, state, REQUESTS[name], options).state.model.parameters
    for preset in (dataclasses.replace(RETRACE, tau=None), dataclasses.replace(KRYLOV, tau=None, filter="response")):
        outcome = forgotten(engine, state, REQUESTS[name], dataclasses.replace(preset, curvature_samples=None))
        assert outcome.details["source"] == "replay"
        left = outcome.state.model.parameters - truth
        assert float(left.norm()) < 0.25 * float((state.model.parameters - truth).norm())


def test_an_owner_counts_by_its_weight_in_the_rounds_that_it_took_part_in():
    """Two of four a round: beside every checkpoint the replayed pull of a client is the one that was recorded."""
    plan = dataclasses.replace(PLAN, rounds=6, participation=0.5)
    engine, state = trained(plan, vectors=True, checkpoints=6)
    assert sum(len(shares) for shares in state.memory.shares) == 12
    for name in DATA:
        taken = torch.tensor([bool(shares.get(name)) for shares in state.memory.shares])
        pull = replayed(engine, state, Request.of(name))
        assert torch.equal(pull.spreads.sum(dim=1) > 0, taken)
        for number in (at for at in range(6) if taken[at]):
            shares, model = state.memory.shares[number], state.checkpoints.models[number]
            sent = {n: engine.ask({n: plan.task(model, number, n)})[n].update for n in shares}
            everyone = sum(share * sent[n] for n, share in shares.items())
            left = sum(share * sent[n] for n, share in shares.items() if n != name) / (1 - shares[name])
            torch.testing.assert_close(pull.vectors[number], everyone - left, rtol=1e-9, atol=1e-12)


def test_a_batch_size_that_nobody_stated_changes_the_pull_by_little():
    """Steps were recorded: another batch size than the training's makes about as many, and counts for as many."""
    engine, state = trained(dataclasses.replace(PLAN, batch_size=3, learning_rate=0.02), vectors=True)
    schedule, known = dataclasses.replace(state.schedule, epochs=None), state.memory.influence(["cyd"])
    for size in (1, 64):  # the rest is the noise of thirteen samples in another order
        other = dataclasses.replace(state, schedule=dataclasses.replace(schedule, batch_size=size))
        found = replayed(engine, other, REQUESTS["client"]).total
        assert float((found - known).norm()) < 0.3 * float(known.norm())


def test_checkpoints_that_begin_late_are_said():
    engine, state = trained(dataclasses.replace(PLAN, rounds=6), vectors=True, checkpoints=6)
    models = state.checkpoints.models
    late = dataclasses.replace(state, checkpoints=Checkpoints({4: models[4], 5: models[5]}))
    assert any("comes after 4 of 6 rounds" in each for each in forgotten(engine, late, SAMPLES, RETRACE).warnings)
    assert not any("comes after" in each for each in forgotten(engine, state, SAMPLES, RETRACE).warnings)


def test_vectors_come_first_and_are_the_same_pull():
    engine, state = trained(vectors=True)
    outcome = forgotten(engine.without(("cyd",)), state, REQUESTS["client"], RETRACE)
    assert outcome.details["source"] == "recorded"
    replay = replayed(engine, dataclasses.replace(state, memory=None), REQUESTS["client"])
    torch.testing.assert_close(replay.total, state.memory.influence(["cyd"]), rtol=1e-9, atol=1e-12)


def test_a_forget_drops_the_checkpoints():
    engine, state = trained(vectors=True)
    for request in (REQUESTS["client"], SAMPLES):
        outcome = forgotten(engine, state, request, RETRACE)
        assert outcome.succeeded
        assert state.checkpoints is not None
        assert outcome.state.checkpoints is None
        with pytest.raises(RequestError, match="no checkpoints to replay from"):
            forgotten(engine, outcome.state, Request.of(samples={"bob": [2]}), RETRACE)


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(server=FedAvg(0.5)), Recipe(Adam())], ids=["SGD", "server rate", "Adam"]
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_checkpoints_of_another_training_or_round_are_refused(recipe, participation):
    rate = 0.02 if recipe.client.adaptive else 0.2
    plan = dataclasses.replace(PLAN, rounds=6, recipe=recipe, learning_rate=rate, participation=participation)
    engine, state = trained(plan, build=mlp, vectors=True, checkpoints=6)
    assert forgotten(engine, state, SAMPLES, RETRACE).details["source"] == "replay"
    models = state.checkpoints.models
    swapped = {0: models[0], 2: models[4], 4: models[2]}
    other = trained(dataclasses.replace(plan, learning_rate=1.1 * rate), build=mlp, checkpoints=6)[1].checkpoints.models
    for wrong, number in ((swapped, 2), ({1: models[1], 3: other[3]}, 3), ({4: models[5]}, 4)):
        lying = dataclasses.replace(state, checkpoints=Checkpoints(wrong))
        with pytest.raises(RequestError, match=f"do not lead from the checkpoint under {number} to the model"):
            forgotten(engine, lying, SAMPLES, RETRACE)


def loud(build):
    """A federation of whom dan, who has few samples, boosts its updates."""
    engine = LocalEngine(build(), CrossEntropy(0.01), DATA, {"dan": 30.0})
    state = train(engine, Snapshot.of(build()), dataclasses.replace(PLAN, learning_rate=0.005))
    assert state.memory.loudness(["dan"]) > 3
    return engine, state


def test_only_vectors_tell_how_loud_a_client_was_and_only_several_layers_need_to_know():
    options, dan = dataclasses.replace(RETRACE, tau=None), Request.of("dan")
    engine, state = loud(mlp)
    further = forgotten(engine, state, dan, options)
    assert further.details["reach"] == pytest.approx(1.2)
    apart = further.details["steps"][0]["norm"] / 1.2
    assert forgotten(engine, state, Request.of("cyd"), options).details["reach"] == 1.0
    bare = forgotten(engine, dataclasses.replace(state, memory=None), dan, options).details
    assert (bare["source"], bare["reach"]) == ("replay", 1.0)
    assert bare["steps"][0]["norm"] == pytest.approx(apart, rel=0.05)
    engine, state = loud(linear)  # in one layer the response is right
    assert forgotten(engine, state, dan, options).details["reach"] == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoints": None}, "no checkpoints to replay from"),
        ({"schedule": None}, "give its learning_rate, local_steps and rounds"),
        ({"recipe": Recipe(server=FedAvgM())}, "follows FedAvg, not FedAvgM"),
        ({"checkpoints": Checkpoints({3: Snapshot.of(linear())})}, "a training of 3 did not have"),
        ({"checkpoints": Checkpoints({0: Snapshot.of(mlp())})}, "another number of parameters"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anybody_is_asked(changes, said):
    engine, state = trained()
    engine = LocalEngine(linear(), CrossEntropy(0.01), DATA)
    with pytest.raises(RequestError, match=said):
        forgotten(engine, dataclasses.replace(state, **changes), SAMPLES, RETRACE)
    with pytest.raises(RequestError, match="'cyd' cannot be reached"):
        forgotten(engine.without(("cyd",)), dataclasses.replace(state, memory=trained(vectors=True)[1].memory), *away())
    assert engine.cost.rounds == 0


def away():
    """A client that is remembered but gone, beside samples: only a replay could tell, and it needs its data."""
    return REQUESTS["both"], RETRACE


@pytest.mark.parametrize("vectors", [True, False])
def test_a_dear_replay_has_fewer_epochs_which_count_for_all_of_them(vectors, monkeypatch):
    """With steps so short that a round is as good as straight, half of one counts twice; the estimate knows."""
    plan = dataclasses.replace(PLAN, rounds=4, epochs=4, learning_rate=1e-4)
    engine, state = trained(plan, vectors=vectors)
    request = REQUESTS["both"] if not vectors else SAMPLES
    parties = request.parties(engine.clients())
    whole, before = replayed(engine, state, request), engine.cost.sample_gradients
    full = Size.of(state, parties).replayed
    monkeypatch.setattr(estimate, "CHEAP", full / 2)
    fewer = replayed(engine, state, request)
    spent = engine.cost.sample_gradients - before
    assert spent == Size.of(state, parties).replayed == full / 2
    torch.testing.assert_close(fewer.vectors, whole.vectors, rtol=0.01, atol=1e-9)
    torch.testing.assert_close(fewer.spreads, whole.spreads)
    monkeypatch.setattr(estimate, "CHEAP", 0)  # a round of one epoch is the least
    assert Size.of(state, parties).replayed == full / 4
    monkeypatch.setattr(estimate, "REPLAYED", 1)  # one in so many of the samples of all rounds: 4 x 4 x 41
    assert Size.of(state, parties).replayed == full
