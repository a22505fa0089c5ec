"""One suite that every method passes: same signature, inputs untouched, seeded, accounted, refusing early."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.sharded import train_sharded
from expunge.unlearning.registry import Outcome, methods
from expunge.unlearning.request import Request
from federation.small import clients, digest, linear, mlp, norm_net, theta

PLAN = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.2)
COUNTS = {"ada": 9, "bob": 11, "cyd": 13, "dan": 8}
WHOLE, SOME = Request.of("ada"), Request.of(samples={"ada": [0, 3], "bob": [1]})
WHOLE_CLIENTS_ONLY = [name for name, known in methods().items() if known.needs == "vectors" and name != "auto"]
FORGETS_SAMPLES = [name for name in methods() if name not in WHOLE_CLIENTS_ONLY]
TRAINS_LOCALLY = ["fed-osd", "fine-tuning", "fine-tuning-same-budget", "gradient-ascent", "not"]
TRAINS_LOCALLY += ["projected-gradient-ascent"]
BUDGET = 77  # of 32 retained samples: two whole epochs and a part


def filled(name, model):
    """The registered method; what it cannot know by itself is filled in."""
    found = methods()[name]
    if name == "retrain":
        found = dataclasses.replace(
            found, options=dataclasses.replace(found.options, start=Snapshot.of(model), plan=PLAN)
        )
    if name == "fine-tuning-same-budget":
        found = found.configured({"budget": BUDGET})
    return found


def federation(build=mlp, name="retrace"):
    """A federation trained as the method needs it; all but the sharded one keep vectors and updates."""
    model = build()
    datasets = clients(**COUNTS)
    engine = LocalEngine(model, CrossEntropy(l2=0.01), datasets)
    if methods()[name].needs == "shards":
        state = train_sharded(engine, Snapshot.of(model), PLAN, shards=2, slices=2)
    else:
        state = train(engine, Snapshot.of(model), PLAN, keep=Keep(updates_every=2))
    return model, datasets, LocalEngine(model, CrossEntropy(l2=0.01), datasets), state


def traces(state, datasets):
    """Everything that a method was given, as one hash."""
    kept = [state.model.parameters, *state.model.buffers.values()]
    if state.memory is not None:
        kept += [state.memory.influence([name]) for name in state.memory.clients]
    if state.history is not None:
        kept += [update for stored in state.history.rounds for update in stored.updates.values()]
    if state.shards is not None:
        kept += [checkpoint.parameters for shard in state.shards.shards for checkpoint in shard.checkpoints]
    return digest(*kept, *(tensor for pair in datasets.values() for tensor in pair))


def remembered(name, state):
    """The clients in what the method needs; nobody else is in anything that is kept."""
    kept = {"vectors": state.memory, "updates": state.history, "shards": state.shards}
    found = set(kept[methods()[name].needs or "vectors"].clients)
    assert all(set(place.clients) <= found for place in kept.values() if place is not None)
    return found


@pytest.mark.parametrize("build", [mlp, norm_net])
@pytest.mark.parametrize("name", methods())
class TestEveryMethod:
    def test_leaves_its_inputs_alone(self, name, build):
        model, datasets, engine, state = federation(build, name)
        before, weights, chance = traces(state, datasets), digest(*model.state_dict().values()), torch.get_rng_state()
        mode = [module.training for module in model.modules()]
        filled(name, model)(engine, state, WHOLE)
        assert traces(state, datasets) == before
        assert remembered(name, state) == set(COUNTS)
        assert engine.clients() == COUNTS
        assert digest(*model.state_dict().values()) == weights
        assert [module.training for module in model.modules()] == mode
        assert torch.equal(torch.get_rng_state(), chance)

    def test_gives_a_finite_model_and_a_memory_without_the_departed(self, name, build):
        model, _, engine, state = federation(build, name)
        outcome = filled(name, model)(engine, state, WHOLE)
        assert isinstance(outcome, Outcome)
        assert outcome.method == ("retrace" if name == "auto" else name)
        assert outcome.succeeded
        outcome.state.model.require_finite()
        assert outcome.state.model.parameters.shape == state.model.parameters.shape
        assert outcome.state.model.parameters.dtype == torch.float64
        assert (outcome.state.model.digest != state.model.digest) == (name != "do-nothing")
        assert remembered(name, outcome.state) == {"bob", "cyd", "dan"}
        assert outcome.state.checkpoints is None or name == "retrain"  # they remember everybody
        for other in outcome.memory.clients if outcome.memory is not None else ():
            assert torch.isfinite(outcome.memory.influence([other])).all()
        json.dumps(outcome.details, allow_nan=False)
        assert all(isinstance(sentence, str) for sentence in outcome.warnings)

    def test_is_deterministic_whatever_happened_before(self, name, build):
        model, _, engine, state = federation(build, name)
        first = filled(name, model)(engine, state, WHOLE)
        torch.rand(2)
        filled(name, model)(engine, state, Request.of("bob"))  # fills caches with something else
        again = filled(name, model)(engine, state, WHOLE)
        assert again.state.model.digest == first.state.model.digest
        assert again.cost.sample_gradients == pytest.approx(first.cost.sample_gradients)
        assert again.cost.rounds == first.cost.rounds

    def test_accounts_for_its_cost(self, name, build):
        model, _, engine, state = federation(build, name)
        outcome = filled(name, model)(engine, state, WHOLE)
        for measure in ("seconds", "sample_gradients", "rounds", "bytes_down", "bytes_up"):
            assert (getattr(outcome.cost, measure) > 0) == (name != "do-nothing"), measure
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
        model, _, engine, state = federation(build, name)
        with pytest.raises(RequestError) as caught:
            filled(name, model)(engine, state, request_)
        assert "\n" not in str(caught.value)
        assert engine.cost.as_dict() == dict.fromkeys(engine.cost.as_dict(), 0)

    def test_several_clients_at_once(self, name, build):
        model, _, engine, state = federation(build, name)
        outcome = filled(name, model)(engine, state, Request.of(["ada", "cyd"]))
        assert remembered(name, outcome.state) == {"bob", "dan"}
        outcome.state.model.require_finite()

    def test_one_after_another(self, name, build):
        model, _, engine, state = federation(build, name)
        first = filled(name, model)(engine, state, WHOLE)
        second = filled(name, model)(engine.without(("ada",)), first.state, Request.of("bob"))
        assert remembered(name, second.state) == {"cyd", "dan"}
        second.state.model.require_finite()
        with pytest.raises(RequestError, match="no client 'ada'"):
            filled(name, model)(engine.without(("ada",)), first.state, WHOLE)


@pytest.mark.parametrize("name", FORGETS_SAMPLES)
def test_samples_can_be_forgotten(name):
    model, datasets, engine, state = federation(mlp, name)
    before = traces(state, datasets)
    outcome = filled(name, model)(engine, state, SOME)
    outcome.state.model.require_finite()
    assert (outcome.state.model.digest != state.model.digest) == (name != "do-nothing")
    assert remembered(name, outcome.state) == set(COUNTS)
    assert traces(state, datasets) == before


@pytest.mark.parametrize("name", WHOLE_CLIENTS_ONLY)
def test_the_trajectory_replays_samples_and_needs_neither_client_nor_data_of_whole_clients(name):
    model, datasets, engine, state = federation()
    with pytest.raises(RequestError, match="no checkpoints to replay from: use hf-kcu"):
        filled(name, model)(engine, dataclasses.replace(state, checkpoints=None), SOME)
    assert engine.cost.rounds == 0
    before = traces(state, datasets)
    replayed = filled(name, model)(engine, state, SOME)
    assert replayed.details["source"] == "replay"
    assert replayed.state.model.digest != state.model.digest
    assert replayed.state.checkpoints is None
    assert remembered(name, replayed.state) == set(COUNTS)
    assert traces(state, datasets) == before
    near = filled(name, model)(engine, state, WHOLE)
    far = filled(name, model)(engine.without(("ada",)), state, WHOLE)
    assert near.state.model.digest == far.state.model.digest


@pytest.mark.parametrize("name", [name for name in methods() if name not in ("retrain",)])
def test_a_broken_model_is_refused_before_any_work(name):
    model, _, engine, state = federation(linear, name)
    broken = dataclasses.replace(state, model=Snapshot(state.model.parameters * float("nan"), {}))
    with pytest.raises(ModelError, match="NaN"):
        filled(name, model)(engine, broken, WHOLE)
    assert engine.cost.rounds == 0


@pytest.mark.parametrize("name", [name for name in methods() if "recovery" in name])
def test_a_recovery_that_cannot_be_made_is_refused_before_any_work(name):
    _, _, engine, state = federation(linear)
    options = methods()[name].options
    if name != "unfiltered+recovery":
        options = dataclasses.replace(options, damping=0.1)
    bare = ServerState(state.model, None, state.memory)  # no learning rate known
    with pytest.raises(RequestError, match="learning rate and a batch size"):
        methods()[name].function(engine, bare, WHOLE, options)
    assert engine.cost.rounds == 0


@pytest.mark.parametrize("build", [mlp, norm_net])
@pytest.mark.parametrize("budget", [1, 31, 32, 33, BUDGET])
def test_the_same_budget_is_spent_exactly(budget, build):
    model, _, engine, state = federation(build=build)
    outcome = filled("fine-tuning-same-budget", model).configured({"budget": budget})(engine, state, WHOLE)
    assert outcome.cost.sample_gradients == engine.cost.sample_gradients == budget


@pytest.mark.parametrize("name", TRAINS_LOCALLY)
def test_local_training_without_a_learning_rate_is_refused_before_any_work(name):
    model, _, engine, state = federation()
    bare = ServerState(state.model, None, state.memory)
    with pytest.raises(RequestError, match="learning rate and a batch size"):
        filled(name, model)(engine, bare, WHOLE)
    assert engine.cost.rounds == 0
    given = filled(name, model).configured({"learning_rate": 0.1, "batch_size": 4})
    given(engine, bare, WHOLE).state.model.require_finite()


@pytest.mark.parametrize("name", ["fed-osd", "gradient-ascent", "projected-gradient-ascent"])
def test_a_leaver_whose_data_is_needed_must_be_there(name):
    model, _, engine, state = federation()
    alone = engine.without(("ada",))
    with pytest.raises(RequestError, match="'ada' cannot be reached"):
        filled(name, model)(alone, state, WHOLE)
    assert alone.cost.rounds == 0


@pytest.mark.parametrize("name", ["fine-tuning", "not"])
def test_neither_the_leaver_nor_its_data_is_needed(name):
    model, _, engine, state = federation()
    near = filled(name, model)(engine, state, WHOLE)
    far = filled(name, model)(engine.without(("ada",)), state, WHOLE)
    assert near.state.model.digest == far.state.model.digest


@pytest.mark.parametrize("name", TRAINS_LOCALLY)
def test_a_client_that_stays_but_is_away_is_not_left_out(name):
    model, _, engine, state = federation()
    alone = engine.without(("bob",))
    with pytest.raises(RequestError, match="'bob' stays but cannot be reached"):
        filled(name, model)(alone, state, WHOLE)
    assert alone.cost.rounds == 0


def test_the_response_needs_a_schedule_from_the_start():
    _, _, engine, state = federation(linear)
    found = methods()["retrace-krylov"]
    memory = Memory(Snapshot.of(linear()))  # neither rate nor steps were recorded
    memory.record(dict.fromkeys(COUNTS, state.model.parameters - theta(linear())), COUNTS)
    bare = ServerState(state.model, None, memory)
    options = dataclasses.replace(found.options, filter="response")
    with pytest.raises(RequestError, match="response needs its learning rate"):
        found.function(engine, bare, WHOLE, options)
    assert engine.cost.rounds == 0


@pytest.mark.parametrize("name", [name for name, known in methods().items() if known.needs in ("updates", "shards")])
def test_what_training_did_not_keep_is_told_in_a_sentence(name):
    model, _, engine, state = federation()
    with pytest.raises(RequestError, match="train"):
        filled(name, model)(engine, ServerState(state.model, state.schedule, state.memory), WHOLE)
    assert engine.cost.rounds == 0


def test_writing_an_outcome_into_a_model():
    model, _, engine, state = federation(norm_net)
    outcome = filled("retrace", model)(engine, state, WHOLE)
    mine = norm_net(seed=8)
    outcome.write_to(mine)
    assert Snapshot.of(mine).digest == outcome.state.model.digest
    with pytest.raises(ModelError):
        outcome.write_to(nn.Linear(2, 2))
