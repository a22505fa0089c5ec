"""One suite that every method passes: same signature, inputs untouched, seeded, accounted, refusing early."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, RequestError
from expunge.federation.fedavg import ServerState, TrainingPlan, train
from expunge.federation.local import LocalEngine
from expunge.unlearning.registry import Outcome, methods
from expunge.unlearning.request import Request
from federation.small import clients, digest, linear, mlp, norm_net

PLAN = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.2)
COUNTS = {"ada": 9, "bob": 11, "cyd": 13, "dan": 8}
WHOLE, SOME = Request.of("ada"), Request.of(samples={"ada": [0, 3], "bob": [1]})
FORGETS_SAMPLES = [name for name in methods() if "trajectory" not in name]


def filled(name, model):
    """The registered method; what it cannot know by itself is filled in."""
    found = methods()[name]
    if name == "retrain":
        found = dataclasses.replace(
            found, options=dataclasses.replace(found.options, start=Snapshot.of(model), plan=PLAN)
        )
    return found


def federation(build=mlp):
    model = build()
    datasets = clients(**COUNTS)
    engine = LocalEngine(model, CrossEntropy(l2=0.01), datasets)
    state = train(engine, Snapshot.of(model), PLAN)
    return model, datasets, LocalEngine(model, CrossEntropy(l2=0.01), datasets), state


def traces(state, datasets):
    """Everything that a method was given, as one hash."""
    vectors = [state.memory.influence([name]) for name in state.memory.clients]
    model = [state.model.parameters, *state.model.buffers.values()]
    return digest(*model, *vectors, *(tensor for pair in datasets.values() for tensor in pair))


@pytest.mark.parametrize("build", [mlp, norm_net])
@pytest.mark.parametrize("name", methods())
class TestEveryMethod:
    def test_leaves_its_inputs_alone(self, name, build):
        model, datasets, engine, state = federation(build)
        before, weights, chance = traces(state, datasets), digest(*model.state_dict().values()), torch.get_rng_state()
        mode = [module.training for module in model.modules()]
        filled(name, model)(engine, state, WHOLE)
        assert traces(state, datasets) == before
        assert state.memory.clients == tuple(COUNTS)
        assert state.memory.rounds == 3
        assert engine.clients() == COUNTS
        assert digest(*model.state_dict().values()) == weights
        assert [module.training for module in model.modules()] == mode
        assert torch.equal(torch.get_rng_state(), chance)

    def test_gives_a_finite_model_and_a_memory_without_the_departed(self, name, build):
        model, _, engine, state = federation(build)
        outcome = filled(name, model)(engine, state, WHOLE)
        assert isinstance(outcome, Outcome)
        assert outcome.method == name
        assert outcome.succeeded
        outcome.state.model.require_finite()
        assert outcome.state.model.parameters.shape == state.model.parameters.shape
        assert outcome.state.model.parameters.dtype == torch.float64
        assert outcome.state.model.digest != state.model.digest
        assert set(outcome.memory.clients) == {"bob", "cyd", "dan"}
        for other in outcome.memory.clients:
            assert torch.isfinite(outcome.memory.influence([other])).all()
        json.dumps(outcome.details, allow_nan=False)
        assert all(isinstance(sentence, str) for sentence in outcome.warnings)

    def test_is_deterministic_whatever_happened_before(self, name, build):
        model, _, engine, state = federation(build)
        first = filled(name, model)(engine, state, WHOLE)
        torch.rand(2)
        filled(name, model)(engine, state, Request.of("bob"))  # fills caches with something else
        again = filled(name, model)(engine, state, WHOLE)
        assert again.state.model.digest == first.state.model.digest
        assert again.cost.sample_gradients == pytest.approx(first.cost.sample_gradients)
        assert again.cost.rounds == first.cost.rounds

    def test_accounts_for_its_cost(self, name, build):
        model, _, engine, state = federation(build)
        outcome = filled(name, model)(engine, state, WHOLE)
        for measure in ("seconds", "sample_gradients", "rounds", "bytes_down", "bytes_up"):
            assert getattr(outcome.cost, measure) > 0, measure
        spent = {**engine.cost.as_dict(), "seconds": outcome.cost.seconds}
        assert outcome.cost.as_dict() == spent

    @pytest.mark.parametrize(
        "request_",
        [
            Request.of("zoe"),
            Request.of(["ada", "zoe"]),
            Request.of(list(COUNTS)),
            Request.of(samples={"ada": [9]}),
            Request.of(samples={"ada": [-1]}),
            Request.of(["ada", "bob", "cyd"], samples={"dan": range(8)}),
        ],
        ids=["unknown", "one-unknown", "everybody", "foreign", "negative", "everybody-by-samples"],
    )
    def test_refuses_before_any_work(self, name, build, request_):
        model, _, engine, state = federation(build)
        with pytest.raises(RequestError) as caught:
            filled(name, model)(engine, state, request_)
        assert "\n" not in str(caught.value)
        assert engine.cost.as_dict() == dict.fromkeys(engine.cost.as_dict(), 0)

    def test_several_clients_at_once(self, name, build):
        model, _, engine, state = federation(build)
        outcome = filled(name, model)(engine, state, Request.of(["ada", "cyd"]))
        assert set(outcome.memory.clients) == {"bob", "dan"}
        outcome.state.model.require_finite()

    def test_one_after_another(self, name, build):
        model, _, engine, state = federation(build)
        first = filled(name, model)(engine, state, WHOLE)
        second = filled(name, model)(engine.without(("ada",)), first.state, Request.of("bob"))
        assert set(second.memory.clients) == {"cyd", "dan"}
        second.state.model.require_finite()
        with pytest.raises(RequestError, match="no client 'ada'"):
            filled(name, model)(engine.without(("ada",)), first.state, WHOLE)


@pytest.mark.parametrize("name", FORGETS_SAMPLES)
def test_samples_can_be_forgotten(name):
    model, datasets, engine, state = federation()
    before = traces(state, datasets)
    outcome = filled(name, model)(engine, state, SOME)
    outcome.state.model.require_finite()
    assert outcome.state.model.digest != state.model.digest
    assert set(outcome.memory.clients) == set(COUNTS)
    assert traces(state, datasets) == before


@pytest.mark.parametrize("name", [name for name in methods() if name not in FORGETS_SAMPLES])
def test_the_trajectory_refuses_samples_and_needs_neither_client_nor_data(name):
    model, _, engine, state = federation()
    with pytest.raises(RequestError, match="whole clients only"):
        filled(name, model)(engine, state, SOME)
    assert engine.cost.rounds == 0
    near = filled(name, model)(engine, state, WHOLE)
    far = filled(name, model)(engine.without(("ada",)), state, WHOLE)
    assert near.state.model.digest == far.state.model.digest


@pytest.mark.parametrize("name", [name for name in methods() if name not in ("retrain",)])
def test_a_broken_model_is_refused_before_any_work(name):
    model, _, engine, state = federation(linear)
    broken = ServerState(Snapshot(state.model.parameters * float("nan"), {}), state.schedule, state.memory)
    with pytest.raises(ModelError, match="NaN"):
        filled(name, model)(engine, broken, WHOLE)
    assert engine.cost.rounds == 0


@pytest.mark.parametrize("name", [name for name in methods() if "recovery" in name])
def test_a_recovery_that_cannot_be_made_is_refused_before_any_work(name):
    _, _, engine, state = federation(linear)
    options = dataclasses.replace(methods()[name].options, damping=0.1)
    bare = ServerState(state.model, None, state.memory)  # no learning rate known
    with pytest.raises(RequestError, match="learning rate and a batch size"):
        methods()[name].function(engine, bare, WHOLE, options)
    assert engine.cost.rounds == 0


def test_the_filter_of_the_rounds_needs_a_schedule_from_the_start():
    _, _, engine, state = federation(linear)
    found = methods()["hf-kcu-gradient"]
    bare = ServerState(state.model, None, state.memory)
    options = dataclasses.replace(found.options, filter="rounds", damping=0.1)
    with pytest.raises(RequestError, match="filter of the rounds"):
        found.function(engine, bare, WHOLE, options)
    assert engine.cost.rounds == 0


def test_writing_an_outcome_into_a_model():
    model, _, engine, state = federation(norm_net)
    outcome = filled("hf-kcu", model)(engine, state, WHOLE)
    mine = norm_net(seed=8)
    outcome.write_to(mine)
    assert Snapshot.of(mine).digest == outcome.state.model.digest
    with pytest.raises(ModelError):
        outcome.write_to(nn.Linear(2, 2))
