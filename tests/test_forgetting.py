"""The facade on models and data of one's own."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import expunge
from expunge import SGD, Adam, Memory, Recipe, Recovery, forget, second_moments
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ExpungeError, ModelError, RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.forgetting import choose
from expunge.unlearning.request import Request
from federation.small import Pairs, clients, digest, digest_of, linear, mlp, norm_net, theta
from unlearning.convex import digits_softmax, ridge, ridge_closed_form
from unlearning.presets import KRYLOV, forgotten

DATA = clients(ada=12, bob=14, cyd=10)
PLAN = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.2)
SCHEDULE = {"learning_rate": 0.2, "local_steps": 6, "rounds": 3, "batch_size": 4}


class Gated(nn.Module):
    """A module of one's own: a buffer that is no statistic, a frozen layer, a skip."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        return self.last(hidden + self.scale * self.frozen(hidden))


def trained(build=mlp):
    """A user's own loop would do the same: a model that holds the trained weights, and the memory."""
    model = build()
    state = train(LocalEngine(model, CrossEntropy(), DATA), Snapshot.of(model), PLAN)
    state.model.write_to(model)
    return model, state.memory


def own_module():
    torch.manual_seed(3)
    return Gated().double()


@pytest.mark.parametrize("method", ["retrace", "hf-kcu-paper", "hf-kcu", "retrace-krylov"])
@pytest.mark.parametrize("build", [linear, mlp, norm_net, own_module])
def test_any_module_is_forgotten_from_and_not_touched(build, method):
    model, memory = trained(build)
    model.train()
    for module in list(model.modules())[2:3]:
        module.eval()  # a mode of its own, as people who freeze a layer have it
    before, data = digest_of(model), digest(*(tensor for pair in DATA.values() for tensor in pair))
    outcome = forget(model, DATA, "ada", memory=memory, method=method, **SCHEDULE)
    assert digest_of(model) == before
    assert digest(*(tensor for pair in DATA.values() for tensor in pair)) == data
    assert outcome.succeeded
    assert outcome.method == method
    assert set(outcome.memory.clients) == {"bob", "cyd"}
    assert set(memory.clients) == set(DATA)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    outcome.write_to(model)
    assert digest_of(model) != before
    assert Snapshot.of(model).digest == outcome.state.model.digest
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_it_is_the_method_behind_it():
    model, memory = trained()
    outcome = forget(model, DATA, "ada", memory=memory, method="retrace-krylov", iterations=4, seed=3, **SCHEDULE)
    state = train(LocalEngine(mlp(), CrossEntropy(), DATA), Snapshot.of(mlp()), PLAN)
    options = dataclasses.replace(KRYLOV, iterations=4, seed=3)
    direct = forgotten(LocalEngine(mlp(), CrossEntropy(), DATA), state, Request.of("ada"), options)
    assert outcome.state.model.digest == direct.state.model.digest


@pytest.mark.parametrize("method", ["retrace", "hf-kcu", "retrace-krylov+recovery"])
def test_a_dataset_of_ones_own_gives_the_same(method):
    model, memory = trained()
    plain = forget(model, DATA, "ada", memory=memory, method=method, **SCHEDULE)
    pairs = {name: Pairs(data) for name, data in DATA.items()}
    assert (
        forget(model, pairs, "ada", memory=memory, method=method, **SCHEDULE).state.model.digest
        == plain.state.model.digest
    )


class TestTheClientIsGoneAlready:
    STAYING = {name: data for name, data in DATA.items() if name != "ada"}  # noqa: RUF012

    def test_the_memory_is_enough(self):
        model, memory = trained()
        there = forget(model, DATA, "ada", memory=memory, **SCHEDULE)
        gone = forget(model, self.STAYING, "ada", memory=memory, **SCHEDULE)
        assert gone.details["source"] == "recorded"
        assert gone.state.model.digest == there.state.model.digest
        gone.write_to(model)
        after = forget(model, {"cyd": DATA["cyd"]}, "bob", memory=gone.memory, **SCHEDULE)
        assert after.memory.clients == ("cyd",)

    def test_without_memory_it_is_refused(self):
        model, memory = trained()
        with pytest.raises(RequestError, match="no client 'ada'; there are bob, cyd"):
            forget(model, self.STAYING, "ada", **SCHEDULE)
        with pytest.raises(RequestError, match="cannot be reached"):
            forget(model, self.STAYING, "ada", memory=memory, method="hf-kcu", **SCHEDULE)


def test_a_memory_recorded_from_state_dicts():
    """As somebody with a federation of their own would do it."""
    model, server = norm_net(), norm_net()
    memory = Memory(model)
    names = list(DATA)
    for number in range(3):
        received = {key: tensor.clone() for key, tensor in server.state_dict().items()}
        differences = {}
        for name in names:
            client = norm_net()
            client.load_state_dict(received)
            torch.manual_seed(number)
            optimiser = torch.optim.SGD(client.parameters(), lr=0.2)
            nn.functional.cross_entropy(client(DATA[name][0]), DATA[name][1]).backward()
            optimiser.step()
            differences[name] = {key: tensor - received[key] for key, tensor in client.state_dict().items()}
        counts = {name: len(DATA[name][1]) for name in names}
        memory.record(differences, counts)
        mean = {
            key: sum(counts[name] / 36 * differences[name][key] for name in names)
            for key, tensor in received.items()
            if tensor.is_floating_point()
        }
        server.load_state_dict({key: tensor + mean.get(key, 0) for key, tensor in received.items()})
    outcome = forget(
        server, {n: DATA[n] for n in ("bob", "cyd")}, "ada", memory=memory, learning_rate=0.2, local_steps=1
    )
    assert outcome.details["damping"] == pytest.approx(1 / (0.2 * 1 * 3))
    outcome.state.model.require_finite()
    assert outcome.memory.clients == ("bob", "cyd")


class TestKindsOfModels:
    def test_batch_norm_statistics_are_those_of_the_clients_that_stay(self):
        """A norm on the raw inputs: its mean must be the retained data's, not the federation's."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 3)).double()
        with torch.no_grad():
            model[0].running_mean.fill_(5.0)
        outcome = forget(model, DATA, "ada", damping=0.5, method="hf-kcu", tau=100.0)
        kept = torch.cat([DATA["bob"][0], DATA["cyd"][0]])
        torch.testing.assert_close(outcome.state.model.buffers["0.running_mean"], kept.mean(dim=0))

    def test_single_precision(self):
        single = {name: (inputs.float(), labels) for name, (inputs, labels) in DATA.items()}
        outcome = forget(mlp().float(), single, "ada", damping=0.5)
        assert outcome.state.model.parameters.dtype == torch.float32

    def test_squared_error_with_l2_is_the_dense_step(self):
        """theta + w/(1-w) (H_r + lambda)^-1 g_u, all written out for a linear model."""
        data = {name: (inputs, inputs @ torch.ones(3, 1).double() + 1) for name, (inputs, _) in DATA.items()}
        model = nn.Linear(3, 1, bias=False).double()
        outcome = forget(model, data, "ada", loss="squared_error", l2=0.1, damping=0.5, tau=None)
        theta = model.weight.detach().flatten()
        (x, y), kept = data["ada"], torch.cat([data["bob"][0], data["cyd"][0]])
        gradient = x.T @ (x @ theta - y.flatten()) / 12 + 0.1 * theta
        matrix = kept.T @ kept / 24 + (0.1 + 0.5) * torch.eye(3, dtype=torch.float64)
        expected = theta + (12 / 36) / (24 / 36) * torch.linalg.solve(matrix, gradient)
        torch.testing.assert_close(outcome.state.model.parameters, expected)

    def test_recovery(self):
        model, memory = trained(norm_net)
        outcome = forget(model, DATA, "ada", memory=memory, recovery=Recovery(), **SCHEDULE)
        assert 0 <= outcome.details["recovery"]["length"] <= 1

    def test_samples(self):
        model, memory = trained()
        outcome = forget(model, DATA, samples={"ada": [0, 1], "bob": [3]}, memory=memory, **SCHEDULE)
        assert outcome.details["source"] == "gradient"
        assert set(outcome.memory.clients) == set(DATA)


def nan_in(model, name):
    with torch.no_grad():
        dict([*model.named_parameters(), *model.named_buffers()])[name].view(-1)[0] = float("nan")
    return model


def nan_data(as_pairs):
    inputs, labels = DATA["bob"]
    inputs = inputs.clone()
    inputs[3, 1] = float("nan")
    return {**DATA, "bob": Pairs((inputs, labels)) if as_pairs else (inputs, labels)}


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: forget(nan_in(mlp(), "0.weight"), DATA, "ada", damping=0.1), ModelError, "NaN"),
        (lambda: forget(nan_in(norm_net(), "1.running_var"), DATA, "ada", damping=0.1), ModelError, "running_var"),
        (lambda: forget(mlp(), nan_data(False), "ada", damping=0.1), DataError, "'bob'"),
        (lambda: forget(mlp(), nan_data(True), "ada", damping=0.1), DataError, "'bob'"),
        (lambda: forget(mlp(), DATA, "zoe", damping=0.1), RequestError, "ada, bob, cyd"),
        (lambda: forget(mlp(), DATA, damping=0.1), RequestError, "nothing to forget"),
        (lambda: forget(mlp(), DATA, list(DATA), damping=0.1), RequestError, "every client"),
        (lambda: forget(mlp(), DATA, samples={"ada": []}, damping=0.1), RequestError, "no samples"),
        (lambda: forget(mlp(), DATA, samples={"ada": [12]}, damping=0.1), RequestError, "0 to 11"),
        (lambda: forget(mlp(), DATA, "ada", samples="auto", damping=0.1), RequestError, "curvature_samples"),
        (lambda: forget(mlp(), DATA, "ada", samples=10_000, damping=0.1), RequestError, "curvature_samples"),
        (lambda: forget(mlp(), DATA, "ada", rounds=5, damping=0.1), RequestError, "rounds alone changes nothing"),
        (lambda: forget(mlp(), DATA, "ada", batch_size=5, damping=0.1), RequestError, "batch_size alone changes"),
        (lambda: forget(mlp(), DATA, "ada"), RequestError, "Give a damping"),
        (lambda: forget(mlp(), DATA, "ada", learning_rate=0.1), RequestError, "local_steps is missing"),
        (lambda: forget(mlp(), DATA, "ada", damping=-1.0), RequestError, "damping"),
        (lambda: forget(mlp(), DATA, "ada", learning_rate=0.1, local_steps=2, rounds=0), RequestError, "above 0"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, method="hf-kcu", iterations=0), RequestError, "iterations"),
        (
            lambda: forget(mlp(), DATA, "ada", damping=0.1, method="hf-kcu", curvature="fisher"),
            RequestError,
            "ggn, hessian",
        ),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, loss="hinge"), RequestError, "hinge"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, method="amnesia"), RequestError, "hf-kcu"),
        (lambda: forget(mlp(), {}, "ada", damping=0.1), RequestError, "at least one client"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, recovery=Recovery()), RequestError, "learning rate"),
        (lambda: forget(mlp(), DATA, "ada", method="retrain"), RequestError, "training plan"),
        (lambda: forget(mlp().state_dict(), DATA, "ada", damping=0.1), ModelError, "the trained model itself"),
        (lambda: forget(mlp(), list(DATA.values()), "ada", damping=0.1), RequestError, "Clients are given by name"),
        (lambda: forget(mlp(), DATA, leaving=1, damping=0.1), RequestError, "Who leaves is named by a text"),
        (lambda: forget(mlp(), DATA, "ada", memory={}, damping=0.1), RequestError, "recorded while training"),
        (lambda: forget(mlp(), DATA, "ada", recipe=torch.optim.SGD, damping=0.1), RequestError, "stated as a Recipe"),
        (lambda: forget(mlp(), DATA, "ada", checkpoints=[mlp()], damping=0.1), RequestError, "number of rounds before"),
        (lambda: forget(mlp(), DATA, "ada", learning_rate="0.1", local_steps=2), RequestError, "must be a number"),
        (lambda: forget(mlp(), DATA, "ada", loss=nn.CrossEntropyLoss, damping=0.1), RequestError, "CrossEntropyLoss()"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(call, kind, said):
    with pytest.raises(kind) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ExpungeError)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(RequestError) as caught:
        forget(mlp(), DATA, "ada", damping=0.1, method="hf-kcu", iteration=3)
    assert "'iteration'" in str(caught.value)
    assert all(name in str(caught.value) for name in ("iterations", "tau", "recovery", "damping"))
    with pytest.raises(RequestError, match=r"methods that have it: hf-kcu, .*retrace-krylov"):
        forget(mlp(), DATA, "ada", damping=0.1, iterations=3)


def test_a_memory_of_another_model_is_refused():
    memory = Memory()
    memory.record({name: torch.ones(5).double() * n for n, name in enumerate(DATA)}, dict.fromkeys(DATA, 1))
    with pytest.raises(ExpungeError):
        forget(mlp(), DATA, "ada", memory=memory, damping=0.1)


def test_what_the_package_offers():
    assert all(hasattr(expunge, name) for name in expunge.__all__)
    assert {"forget", "Memory", "Recovery", "methods"} <= set(expunge.__all__)


@pytest.mark.parametrize(("method", "here"), [("auto", "c"), ("retrace-krylov", "c"), ("hf-kcu", "ac")])
def test_a_client_that_stays_but_is_away_is_not_left_out_silently(method, here):
    model, memory = trained()
    there = {name: data for name, data in DATA.items() if name[0] in here}
    with pytest.raises(RequestError, match="'bob' stays but cannot be reached"):
        forget(model, there, "ada", memory=memory, method=method, **SCHEDULE)
    outcome = forget(model, there, "ada", memory=memory, method=method, missing="leave-out", **SCHEDULE)
    assert any("bob" in warning for warning in outcome.warnings)


def test_the_name_tells_of_a_recovery_round_and_true_will_do():
    model, memory = trained()
    outcome = forget(model, DATA, "ada", memory=memory, recovery=True, **SCHEDULE)
    assert outcome.method == "retrace+recovery"
    assert "recovery" in outcome.details


def test_a_step_that_was_cut_is_told():
    model, memory = trained()
    torch.manual_seed(0)
    loud = memory.copy()
    size = memory.size
    loud.record({"ada": 5 * torch.randn(size).double(), "bob": torch.zeros(size).double()}, {"ada": 1, "bob": 1})
    loud = loud.bound_to(Snapshot.of(model))
    outcome = forget(model, DATA, "ada", memory=loud, **SCHEDULE)
    length = outcome.details["steps"][0]["length"]
    assert length is None or length < 1
    assert outcome.warnings


@pytest.mark.parametrize("method", ["retrace", "retrace-krylov", "hf-kcu"])
def test_however_little_was_cut_it_is_told(method):
    model, memory = trained()
    call = {"memory": memory, "method": method, "tau": 10.0, **SCHEDULE}
    call |= {"filter": "response"} if method == "retrace-krylov" else {}  # the damped one is warned of
    outcome = forget(model, DATA, "ada", lengths=(0.9,), **call)
    assert outcome.details["steps"][0]["length"] == 0.9
    assert any("Only 90% of the predicted step" in warning for warning in outcome.warnings)
    assert not forget(model, DATA, "ada", lengths=(1.0, 0.9), **call).warnings


@pytest.mark.parametrize(
    ("more", "said"), [({}, 1), ({"filter": "response"}, 0), ({"damping": 0.1}, 0), ({"filter": "none"}, 0)]
)
def test_the_damped_filter_is_warned_of_where_the_response_is_known(more, said):
    model, memory = trained()
    outcome = forget(model, DATA, "ada", memory=memory, method="retrace-krylov", tau=10.0, **SCHEDULE, **more)
    assert sum("The damped filter left" in warning for warning in outcome.warnings) == said


def test_a_recovery_round_follows_the_last_step_alone():
    model, memory = trained()
    call = {"memory": memory, "method": "hf-kcu", "iterations": 3, "steps": 2, "tau": 10.0, **SCHEDULE}
    bare, recovered = (forget(model, DATA, "ada", recovery=recovery, **call) for recovery in (False, True))
    assert recovered.cost.rounds == bare.cost.rounds + 2
    assert bare.cost.rounds == 2 * (1 + 3 + 1) + 1  # and once whether their data fit


@pytest.mark.parametrize("leaving", ["ada", "bob"])
def test_a_recovery_round_after_the_printed_update_does_not_lead_back(leaving):
    model, memory = trained()
    theta = Snapshot.of(model).parameters
    call = {"memory": memory, "method": "hf-kcu-paper", **SCHEDULE}
    after = forget(model, DATA, leaving, **call).state.model.parameters
    recovered = forget(model, DATA, leaving, recovery=True, **call)
    way = recovered.state.model.parameters - after
    assert recovered.details["recovery"]["length"] > 0
    assert float(way @ (theta - after)) <= 1e-9 * float(way.norm() * (theta - after).norm())


@pytest.mark.parametrize("method", ["hf-kcu", "hf-kcu-paper"])
def test_what_the_vectors_of_those_who_stay_still_hold_is_told(method):
    model, memory = trained()
    call = {"memory": memory, "method": method, **SCHEDULE}
    outcome = forget(model, DATA, samples={"ada": [0, 1], "bob": [3]}, **call)
    assert any("vectors kept of ada, bob still hold" in warning for warning in outcome.warnings)
    assert not any("still hold" in warning for warning in forget(model, DATA, "ada", **call).warnings)


def test_numbers_are_no_class_labels_and_a_foreign_memory_is_no_memory():
    numbers = {name: (inputs, torch.rand(len(inputs)).double()) for name, (inputs, _) in DATA.items()}
    with pytest.raises(DataError, match="squared_error"):
        forget(mlp(), numbers, "ada", damping=0.1)
    _, foreign = trained(linear)
    with pytest.raises(RequestError, match="another model"):
        forget(mlp(), DATA, "ada", memory=foreign, **SCHEDULE)
    beyond = {**DATA, "bob": (DATA["bob"][0], DATA["bob"][1] + 100)}
    with pytest.raises(DataError, match="classes apart"):
        forget(mlp(), beyond, "ada", damping=0.1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda labels: labels.int(), "labels of type torch.int32.*labels.long"),
        (lambda labels: labels > 0, "labels of type torch.bool.*labels.long"),
        (lambda labels: labels.to(torch.uint16), "labels of type torch.uint16.*labels.long"),
        (lambda labels: nn.functional.one_hot(labels, 3), "one-hot labels.*argmax"),
        (lambda labels: labels.float(), "needs class labels.*labels.long"),
        (lambda labels: labels.numpy().astype("str"), "arrays that are no numbers"),
    ],
)
def test_labels_of_another_kind_are_refused(changed, said):
    inputs, labels = DATA["bob"]
    inputs = inputs if isinstance(changed(labels), torch.Tensor) else inputs.numpy()
    with pytest.raises(DataError, match=f"'bob'.*{said}"):
        forget(mlp(), {**DATA, "bob": (inputs, changed(labels))}, "ada", damping=0.1)


class Odd(Pairs):
    """A dataset that does something else at one of its later samples."""

    def __init__(self, data, odd):
        super().__init__(data)
        self._odd = odd

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return self._odd(inputs, label) if index == 7 else (inputs, label)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda inputs, label: (inputs, 5), "'bob'.*(labels 0 to 5, but the model tells 3|Target 5 is out of bounds)"),
        (
            lambda inputs, label: (inputs, -1),
            "'bob'.*(labels -1 to 2, but the model tells 3|Target -1 is out of bounds)",
        ),
        (lambda inputs, label: (inputs, 1 // 0), "'bob' does not give its sample 7 .ZeroDivisionError"),
        (lambda inputs, label: {}["image"], "'bob' does not give its sample 7 .KeyError: 'image'"),
        (lambda inputs, label: (inputs * float("nan"), label), "'bob' has a NaN"),
    ],
)
@pytest.mark.parametrize("method", ["retrace", "hf-kcu", "fine-tuning"])
def test_a_later_sample_of_a_dataset_is_refused_as_the_first_ones_are(odd, said, method):
    model, memory = trained()
    data = {**DATA, "bob": Odd(DATA["bob"], odd)}
    with pytest.raises(DataError, match=said):
        forget(model, data, "ada", memory=memory, method=method, **SCHEDULE)


def test_outputs_with_a_third_dimension_are_summed_by_sample_and_refused_where_the_labels_do_not_fit():
    assert CrossEntropy().per_sample(torch.zeros(2, 3, 5), torch.zeros(2, 5, dtype=torch.int64)).shape == (2,)
    with pytest.raises(RequestError, match="one row of class scores"):
        CrossEntropy().per_sample(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))


class TestWhatNoRoundHasChanged:
    """A head that is trained on a trunk which its optimiser does not know, whatever the memory was told."""

    @staticmethod
    def federate(parameters=None, recipe=None, make=None, start=0, **more):
        make = make or (lambda own: torch.optim.SGD(own, lr=0.3))
        model = mlp(start)
        memory = Memory(model, recipe, parameters=parameters)
        for _ in range(4):
            state, updates, moments = copy.deepcopy(model.state_dict()), {}, {}
            for name, (inputs, labels) in DATA.items():
                local = copy.deepcopy(model)
                optimiser = make(local[2].parameters())
                for _ in range(5):
                    local.zero_grad()
                    nn.functional.cross_entropy(local(inputs), labels).backward()
                    optimiser.step()
                updates[name] = {key: value - state[key] for key, value in local.state_dict().items()}
                if more:
                    own = second_moments(optimiser)
                    moments[name] = own if parameters is not None else [0.0, 0.0, *own]
            told = {"moments": moments} if more else {}
            memory.record(updates, dict.fromkeys(DATA, 1), learning_rate=0.3, steps=5, **told)
            model.load_state_dict(
                {k: own + sum(update[k] for update in updates.values()) / 3 for k, own in state.items()}
            )
        return model, memory

    @pytest.mark.parametrize(
        ("recipe", "make", "more"),
        [
            (None, None, {}),
            (Recipe(SGD(momentum=0.5)), lambda own: torch.optim.SGD(own, lr=0.3, momentum=0.5), {}),
            (Recipe(Adam()), lambda own: torch.optim.Adam(own, lr=0.3), {"moments": True}),
        ],
    )
    def test_it_is_forgotten_as_if_the_memory_had_been_told(self, recipe, make, more):
        outcomes = []
        for parameters in (None, ["2"]):
            model, memory = self.federate(parameters, recipe, make, **more)
            rest = {name: own for name, own in DATA.items() if name != "ada"}
            outcome = forget(model, rest, leaving="ada", memory=memory)
            after = copy.deepcopy(model)
            outcome.write_to(after)
            assert torch.equal(after[0].weight, model[0].weight)
            assert not torch.equal(after[2].weight, model[2].weight)
            second = forget(after, {"cyd": DATA["cyd"]}, leaving="bob", memory=outcome.memory)
            second.write_to(after)
            outcomes.append((outcome, second, after))
        for one, other in zip(*(pair[:2] for pair in outcomes), strict=True):
            assert one.details["steps"][0]["norm"] == pytest.approx(other.details["steps"][0]["norm"])
            assert one.warnings == other.warnings
        torch.testing.assert_close(theta(outcomes[0][2]), theta(outcomes[1][2]))

    def test_what_is_left_of_the_memory_knows_the_whole_model(self):
        model, memory = self.federate()
        rest = {name: own for name, own in DATA.items() if name != "ada"}
        outcome = forget(model, rest, leaving="ada", memory=memory)
        assert outcome.memory.size == memory.size
        assert outcome.memory.clients == ("bob", "cyd")
        outcome.write_to(model)
        outcome.memory.require_model(Snapshot.of(model))
        held = forget(model, rest, leaving="bob", memory=outcome.memory, tau=1e-9, validation=DATA["bob"])
        assert (held.succeeded, held.memory) == (False, outcome.memory)
        moved = {name: torch.ones(memory.size, dtype=torch.float64) for name in rest}
        outcome.memory.record(moved, dict.fromkeys(rest, 1))


class TestWhichMethodRuns:
    """``auto``: retrace where vectors were kept of everybody who leaves, else hf-kcu, and why."""

    def test_retrace_where_vectors_exist_without_a_word(self):
        model, memory = trained()
        outcome = forget(model, DATA, "ada", memory=memory, **SCHEDULE)
        assert outcome.method == "retrace"
        assert not any("hf-kcu runs" in warning for warning in outcome.warnings)
        same = forget(model, DATA, "ada", memory=memory, method="retrace", **SCHEDULE)
        assert outcome.state.model.digest == same.state.model.digest

    @pytest.mark.parametrize(
        ("kept", "asked", "said"),
        [
            (False, {"leaving": "ada"}, "No vectors were kept while training"),
            (True, {"samples": {"ada": [0, 1]}}, "Samples whose client stays"),
            (True, {"leaving": ["ada", "dan"]}, "No vector of dan was kept"),
        ],
    )
    def test_else_hf_kcu_with_a_warning(self, kept, asked, said):
        model, memory = trained()
        everyone = {**DATA, "dan": DATA["cyd"]}
        outcome = forget(model, everyone, **asked, memory=memory if kept else None, **SCHEDULE)
        assert outcome.method == "hf-kcu"
        assert [warning for warning in outcome.warnings if said in warning and "hf-kcu runs" in warning]
        named = forget(model, everyone, **asked, memory=memory if kept else None, method="hf-kcu", **SCHEDULE)
        assert named.state.model.digest == outcome.state.model.digest
        assert not any("hf-kcu runs" in warning for warning in named.warnings)

    @pytest.mark.parametrize("recovery", [False, None])
    def test_no_recovery_may_be_said_so(self, recovery):
        model, memory = trained()
        outcome = forget(model, DATA, "ada", memory=memory, recovery=recovery, **SCHEDULE)
        assert outcome.method == "retrace"
        assert "recovery" not in outcome.details

    def test_all_samples_of_a_client_are_the_client(self):
        model, memory = trained()
        outcome = forget(model, DATA, samples={"ada": range(12)}, memory=memory, **SCHEDULE)
        whole = forget(model, DATA, "ada", memory=memory, **SCHEDULE)
        assert outcome.method == "retrace"
        assert not outcome.warnings
        assert outcome.state.model.digest == whole.state.model.digest

    def test_one_of_several_that_has_no_vector_is_found_wherever_it_stands(self):
        model, memory = trained()
        everyone = {**DATA, "dan": DATA["cyd"]}
        for leaving in (["ada", "dan"], ["dan", "ada"]):
            assert forget(model, everyone, leaving, memory=memory, **SCHEDULE).method == "hf-kcu"

    @pytest.mark.parametrize("kept", [False, True])
    def test_options_are_handed_on(self, kept):
        model, memory = trained()
        call = {"memory": memory if kept else None, "curvature_samples": 6, "seed": 4, "tau": 0.01, **SCHEDULE}
        name = "retrace" if kept else "hf-kcu"
        chosen, named = forget(model, DATA, "ada", **call), forget(model, DATA, "ada", method=name, **call)
        assert (chosen.method, chosen.state.model.digest) == (name, named.state.model.digest)


def test_a_client_that_never_took_part_has_nothing_to_take_back():
    model, memory = trained()
    nothing = torch.zeros(memory.size).double()
    memory.record({"dan": nothing, "bob": nothing}, {"dan": 0, "bob": 1})
    everyone = {**DATA, "dan": DATA["cyd"]}
    outcome = forget(model, everyone, "dan", memory=memory, method="retrace-krylov", **SCHEDULE)
    assert outcome.details["steps"][0]["norm"] == 0
    assert torch.equal(outcome.state.model.parameters, Snapshot.of(model).parameters)


@pytest.mark.parametrize("method", ["retrace", "retrace-krylov", "hf-kcu"])
def test_whole_numbers_are_lengths_too(method):
    model, memory = trained()
    outcome = forget(model, DATA, "ada", memory=memory, method=method, lengths=[1], **SCHEDULE)
    same = forget(model, DATA, "ada", memory=memory, method=method, lengths=(1.0,), **SCHEDULE)
    assert outcome.succeeded
    assert outcome.state.model.digest == same.state.model.digest


class TestDryRun:
    def test_it_tells_what_would_be_done_and_does_nothing(self):
        model, memory = trained()
        before = digest_of(model)
        planned = forget(model, DATA, "ada", memory=memory, dry_run=True, **SCHEDULE)
        assert digest_of(model) == before
        assert set(memory.clients) == set(DATA)
        assert (planned.method, planned.leaving, planned.staying) == ("retrace", ("ada",), ("bob", "cyd"))
        assert not planned.asked_owners
        assert "retrace would forget ada; it asks 2 clients that stay." in str(planned)
        json.dumps(planned.as_dict(), allow_nan=False)

    @pytest.mark.parametrize("recovery", [False, True])
    @pytest.mark.parametrize("method", ["retrace", "retrace-krylov", "hf-kcu", "hf-kcu-paper"])
    def test_what_it_costs_is_at_most_what_was_said(self, method, recovery):
        model, memory = trained()
        call = {"memory": memory, "method": method, "recovery": recovery, **SCHEDULE}
        planned = forget(model, DATA, "ada", dry_run=True, **call)
        cost = forget(model, DATA, "ada", **call).cost
        assert 0 < cost.rounds <= planned.estimate.messages
        assert 0 < cost.sample_gradients <= planned.estimate.sample_gradients <= 12 * cost.sample_gradients
        assert 0 < cost.bytes_down <= planned.estimate.bytes_down <= 13 * cost.bytes_down
        assert 0 < cost.bytes_up <= planned.estimate.bytes_up <= 12 * cost.bytes_up
        assert planned.seconds > 0

    @pytest.mark.parametrize("method", ["retrace", "retrace-krylov"])
    @pytest.mark.parametrize("request_", [{"leaving": "ada"}, {"samples": {"ada": [0, 2], "bob": [1]}}])
    def test_a_replay_by_the_owners_is_in_the_bill(self, method, request_):
        model, _ = trained()
        way = {number: mlp(seed=number) for number in (0, 1)}
        call = {"method": method, "checkpoints": way, **SCHEDULE, **request_}
        planned, cost = forget(model, DATA, dry_run=True, **call), forget(model, DATA, **call).cost
        assert planned.asked_owners
        assert cost.rounds <= planned.estimate.messages
        # What a replay will bring is not known before: products half way are in the bill, and may not be asked for.
        assert cost.sample_gradients <= planned.estimate.sample_gradients <= 15 * cost.sample_gradients
        assert cost.bytes_down <= planned.estimate.bytes_down
        assert cost.bytes_up <= planned.estimate.bytes_up

    def test_retraining_is_every_round_of_everybody_who_stays(self):
        model, memory = trained()
        call = {"memory": memory, "method": "retrain", "start": Snapshot.of(mlp(seed=4)), "plan": PLAN}
        planned, cost = forget(model, DATA, "ada", dry_run=True, **call), forget(model, DATA, "ada", **call).cost
        assert cost.rounds == planned.estimate.messages == PLAN.rounds
        assert cost.sample_gradients == planned.estimate.sample_gradients
        assert cost.bytes_down <= planned.estimate.bytes_down <= 3 * cost.bytes_down
        assert cost.bytes_up <= planned.estimate.bytes_up <= 3 * cost.bytes_up
        for dry_run in (False, True):
            with pytest.raises(RequestError, match="needs a start model and a training plan"):
                forget(model, DATA, "ada", memory=memory, method="retrain", dry_run=dry_run)

    def test_doing_nothing_asks_nobody(self):
        model, memory = trained()
        planned = forget(model, DATA, "ada", memory=memory, method="do-nothing", dry_run=True)
        assert "would forget ada; it asks nobody" in str(planned)
        assert (planned.estimate.messages, planned.seconds) == (0, 0.0)

    @pytest.mark.parametrize("build", [mlp, norm_net])
    @pytest.mark.parametrize(
        ("method", "more"),
        [
            ("retrace", {}),
            ("retrace", {"recovery": {"lengths": [0]}}),
            ("retrace", {"correction_lengths": [0], "round_lengths": [0], "long_step_ratio": 0.0}),
            ("retrace-krylov", {"recovery": {"lengths": [0]}}),
            ("retrace-krylov", {"preconditioner_rank": 2}),
            ("hf-kcu", {"recovery": {"lengths": [0]}}),
            ("hf-kcu", {"steps": 3}),
            ("hf-kcu", {"steps": 2, "gradient_of": "retained", "influence_decay": False}),
            ("hf-kcu", {"curvature_of": "everyone", "tau": None}),
            ("hf-kcu", {"steps": 3, "tau": None, "influence_decay": False}),
            ("hf-kcu-paper", {"causal_weights": "none"}),
        ],
    )
    def test_at_its_worst_it_is_still_at_most_that(self, method, more, build):
        """A pull that hurts, no length but the last is safe, and what is repaired is repaired in vain."""
        model, memory = trained(build)
        torch.manual_seed(0)
        away = {name: torch.randn(memory.size).double() for name in ("ada", "bob")}
        memory.record(away, {"ada": 1, "bob": 1})
        memory = memory.bound_to(Snapshot.of(model))
        call = {"memory": memory, "method": method, **SCHEDULE, **more}
        if method != "hf-kcu-paper" and "tau" not in more:
            whole = forget(model, DATA, "ada", **call | {"tau": 1e6})
            rise = whole.details["steps"][0]["retained_rise"]
            call |= {"tau": abs(rise) / 2.9, "lengths": (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 1e-6)}
        planned = forget(model, DATA, "ada", dry_run=True, **call)
        cost = forget(model, DATA, "ada", **call).cost
        assert cost.rounds <= planned.estimate.messages
        assert cost.sample_gradients <= planned.estimate.sample_gradients
        assert cost.bytes_down <= planned.estimate.bytes_down
        assert cost.bytes_up <= planned.estimate.bytes_up

    def test_every_client_draws_one_and_the_servers_samples_count(self):
        model, _ = trained()
        many = {f"client-{number}": (inputs, labels) for number in range(9) for inputs, labels in [DATA["ada"]]}
        big = tuple(part.repeat(50, *[1] * (part.dim() - 1)) for part in DATA["bob"])
        for more in ({"curvature_samples": 1}, {"curvature_samples": 1, "validation": big}):
            call = {"method": "hf-kcu", **SCHEDULE, **more}
            planned = forget(model, many, "client-0", dry_run=True, **call)
            cost = forget(model, many, "client-0", **call).cost
            assert cost.sample_gradients <= planned.estimate.sample_gradients

    def test_nobodys_account_is_charged_and_the_reason_is_told(self):
        model, _ = trained()
        engine, request = LocalEngine(model, CrossEntropy(), DATA), Request.of("ada")
        state = ServerState(Snapshot.of(model), Schedule(0.2, 6, 3, 4))
        planned = choose(state, request.parties(engine.clients())).dry_run(engine, state, request)
        assert engine.cost == Cost()
        assert planned.method == "hf-kcu"
        assert any("No vectors were kept" in warning for warning in planned.warnings)
        assert "No vectors were kept" in str(planned)

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ({"method": "retrace", **SCHEDULE}, "No vectors were kept"),
            ({"method": "hf-kcu"}, "Give a damping"),
            ({"method": "hf-kcu", "damping": 0.1, "recovery": True}, "learning rate"),
        ],
    )
    def test_what_the_run_would_refuse_is_refused(self, call, said):
        for dry_run in (True, False):
            with pytest.raises(RequestError, match=said):
                forget(mlp(), DATA, "ada", dry_run=dry_run, **call)

    def test_a_bad_request_is_refused_there_too(self):
        model, memory = trained()
        with pytest.raises(RequestError, match="no client 'zoe'"):
            forget(model, DATA, "zoe", memory=memory, dry_run=True, **SCHEDULE)


class TestExactThroughTheFacade:
    """More than 100 retained samples: all of them are asked for by name, not by the keyword for samples to forget."""

    EXACT = {  # noqa: RUF012
        "method": "hf-kcu",
        "curvature_samples": None,
        "damping": 0.0,
        "iterations": 400,
        "tolerance": 1e-12,
        "tau": None,
    }

    def test_ridge(self):
        few = ridge(3)
        data = {name: (x.repeat(20, 1), y.repeat(20, 1)) for name, (x, y) in few.datasets.items()}
        assert sum(len(x) for name, (x, _) in data.items() if name != "client-1") > 1000
        repeated = dataclasses.replace(few, datasets=data)
        model = repeated.model
        Snapshot(ridge_closed_form(repeated, {}), {}, Snapshot.of(model).layout).write_to(model)
        outcome = forget(model, data, "client-1", loss="squared_error", l2=few.loss.l2, **self.EXACT)
        truth = ridge_closed_form(repeated, {"client-1": None})
        assert float((outcome.state.model.parameters - truth).norm() / truth.norm()) < 1e-6
        drawn = forget(
            model, data, "client-1", loss="squared_error", l2=few.loss.l2, **{**self.EXACT, "curvature_samples": 20}
        )
        assert float((drawn.state.model.parameters - truth).norm() / truth.norm()) > 1e-4

    def test_softmax(self):
        federation = digits_softmax(0.01)
        model, data = federation.model, federation.datasets
        Snapshot(federation.optimum(), {}, Snapshot.of(model).layout).write_to(model)
        before = Snapshot.of(model).parameters
        outcome = forget(model, data, "client-0", l2=0.01, steps=3, **self.EXACT)
        truth = federation.optimum({"client-0": None})
        assert float((outcome.state.model.parameters - truth).norm() / (before - truth).norm()) < 1e-3


def own_loop(model, data, optimiser, rounds=6, recipe=None, folder=None):
    """FedAvg as people write it down, with a local optimiser that is made anew in each round."""
    memory, weights = Memory(model, recipe, folder=folder), {name: len(targets) for name, (_, targets) in data.items()}
    for _ in range(rounds):
        before, updates, moments = copy.deepcopy(model.state_dict()), {}, {}
        for name, (inputs, targets) in data.items():
            model.load_state_dict(before)
            local = optimiser(model)
            for _ in range(5):
                local.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                local.step()
            updates[name] = {key: own.detach() - before[key] for key, own in model.state_dict().items()}
            moments |= {name: expunge.second_moments(local)} if isinstance(local, torch.optim.Adam) else {}
        memory.record(updates, weights, learning_rate=local.defaults["lr"], steps=5, moments=moments)
        total = sum(weights.values())
        means = {key: sum(weights[name] * own[key] for name, own in updates.items()) / total for key in before}
        model.load_state_dict({key: own + means[key] for key, own in before.items()})
    return memory


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def test_what_no_optimiser_was_given_is_named_where_vectors_are_on_disk(tmp_path):
    model = three_layers()
    memory = own_loop(
        model, DATA, lambda own: torch.optim.SGD(own[2:].parameters(), lr=0.3), folder=tmp_path / "memory"
    )
    outcome = forget(model, DATA, "ada", memory=memory)
    assert any("0.weight, 0.bias" in each and "parameters=" in each for each in outcome.warnings)


def test_statistics_of_a_norm_whose_scale_is_not_trained_go_on_being_mended():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    trained = [*model[0].parameters(), *model[3].parameters()]
    memory = own_loop(model, DATA, lambda own: torch.optim.SGD(trained, lr=0.3))
    outcome = forget(model.eval(), DATA, "ada", memory=memory)
    assert "1.running_mean" in outcome.state.model.buffers


class Tokens(nn.Module):
    """Rows of a table, by what is largest in each half of the inputs."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(3, 4, sparse=sparse), nn.Linear(4, 3)
        self.double()

    def forward(self, inputs):
        return self.last(torch.tanh(self.table(inputs.argmax(dim=1))))


def test_an_embedding_with_sparse_gradients_is_one_with_dense_ones():
    found = []
    for sparse in (False, True):
        model = Tokens(sparse)
        memory = own_loop(model, DATA, lambda own: torch.optim.SGD(own.parameters(), lr=0.3))
        outcome = forget(model, DATA, "ada", memory=memory)
        found.append(outcome.state.model.parameters)
        assert model.table.sparse == sparse
    torch.testing.assert_close(*found)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.EmbeddingBag(5, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, inputs):
        return self.last(torch.tanh(self.table((inputs > 0).long())))


def test_what_cannot_be_differentiated_twice_is_refused_in_one_sentence_that_helps():
    model = Bags()
    memory = own_loop(model, DATA, lambda own: torch.optim.SGD(own.parameters(), lr=0.3))
    with pytest.raises(ModelError, match="coupled=False"):
        forget(model, DATA, "ada", memory=memory)
    said = forget(model, DATA, "ada", memory=memory, method="retrace", coupled=False).warnings
    assert any("Of table.weight a diagonal is all" in each for each in said)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, inputs):
        return nn.functional.dropout(self.layer(inputs))  # training=True is its default


def test_a_model_that_is_random_in_evaluation_mode_is_refused():
    with pytest.raises(ModelError, match="when it is asked again"):
        forget(Noisy(), DATA, "ada", method="hf-kcu", damping=0.1)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, inputs):
        return self.layer(inputs - inputs.mean(dim=0))


def test_a_model_whose_answers_depend_on_the_other_samples_is_refused():
    with pytest.raises(ModelError, match="when it comes alone"):
        forget(Centred(), DATA, "ada", method="hf-kcu", damping=0.1)


class TestLossesWithoutFactors:
    """A function of outputs and targets: Krylov products, by the training's own response."""

    @staticmethod
    def forgotten(loss, **more):
        model, memory = trained()
        here = {name: own for name, own in DATA.items() if name != "ada"}
        return forget(model, here, "ada", memory=memory, loss=loss, **SCHEDULE, **more)

    @staticmethod
    def smooth(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    @staticmethod
    def hinge(outputs, labels):
        return (1 + outputs - outputs.gather(1, labels[:, None])).clamp(min=0).sum(dim=1)

    def test_the_response_is_followed_unless_a_damping_is_given(self):
        found = self.forgotten(self.smooth)
        assert (found.method, found.details["steps"][0]["filter"]) == ("retrace-krylov", "response")
        assert sum("'smooth' has no Kronecker factors" in each for each in found.warnings) == 1
        assert self.forgotten(self.smooth, damping=0.5).details["steps"][0]["filter"] == "damped"

    @pytest.mark.parametrize(("loss", "said"), [("smooth", 0), ("hinge", 1)])
    def test_a_loss_without_curvature_is_said(self, loss, said):
        found = self.forgotten(getattr(self, loss), tau=None)
        assert sum("has no curvature where the model is" in each for each in found.warnings) == said


@pytest.mark.parametrize(
    ("rounds", "said"), [(({"ada": 9, "bob": 1},), 1), (({"ada": 1}, {"bob": 1}), 1), (({"ada": 2, "bob": 1},), 0)]
)
def test_leavers_who_made_most_of_the_model_are_warned_of(rounds, said):
    model = mlp()
    memory = Memory(model)
    for weights in rounds:
        memory.record({name: 0.01 * torch.ones(memory.place.now.numel()) for name in weights}, weights)
    assert sum("had" in each and "of the weight in the rounds" in each for each in memory.doubts(None, ["ada"])) == said
    assert not any("of the weight in the rounds" in each for each in memory.doubts(None, []))
