"""The facade on models and data of one's own."""

import dataclasses

import pytest
import torch
from torch import nn

import expunge
from expunge import Memory, Recovery, forget
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ExpungeError, ModelError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.hf_kcu import hf_kcu
from expunge.unlearning.hf_kcu_options import TRAJECTORY
from expunge.unlearning.request import Request
from federation.small import Pairs, clients, digest, digest_of, linear, mlp, norm_net

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


@pytest.mark.parametrize("use", ["hf-kcu", "hf-kcu-paper", "hf-kcu-gradient", "hf-kcu-trajectory"])
@pytest.mark.parametrize("build", [linear, mlp, norm_net, own_module])
def test_any_module_is_forgotten_from_and_not_touched(build, use):
    model, memory = trained(build)
    model.train()
    for module in list(model.modules())[2:3]:
        module.eval()  # a mode of its own, as people who freeze a layer have it
    before, data = digest_of(model), digest(*(tensor for pair in DATA.values() for tensor in pair))
    outcome = forget(model, DATA, "ada", memory=memory, use=use, **SCHEDULE)
    assert digest_of(model) == before
    assert digest(*(tensor for pair in DATA.values() for tensor in pair)) == data
    assert outcome.succeeded
    assert outcome.method == use
    assert set(outcome.memory.clients) == {"bob", "cyd"}
    assert set(memory.clients) == set(DATA)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    outcome.write_to(model)
    assert digest_of(model) != before
    assert Snapshot.of(model).digest == outcome.state.model.digest
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_it_is_the_method_behind_it():
    model, memory = trained()
    outcome = forget(model, DATA, "ada", memory=memory, use="hf-kcu-trajectory", iterations=4, seed=3, **SCHEDULE)
    state = train(LocalEngine(mlp(), CrossEntropy(), DATA), Snapshot.of(mlp()), PLAN)
    options = dataclasses.replace(TRAJECTORY, iterations=4, seed=3, damping=1 / (0.2 * 6 * 3))
    direct = hf_kcu(LocalEngine(mlp(), CrossEntropy(), DATA), state, Request.of("ada"), options)
    assert outcome.state.model.digest == direct.state.model.digest


@pytest.mark.parametrize("use", ["hf-kcu", "hf-kcu-gradient", "hf-kcu-trajectory+recovery"])
def test_a_dataset_of_ones_own_gives_the_same(use):
    model, memory = trained()
    plain = forget(model, DATA, "ada", memory=memory, use=use, **SCHEDULE)
    pairs = {name: Pairs(data) for name, data in DATA.items()}
    assert (
        forget(model, pairs, "ada", memory=memory, use=use, **SCHEDULE).state.model.digest == plain.state.model.digest
    )


class TestTheClientIsGoneAlready:
    STAYING = {name: data for name, data in DATA.items() if name != "ada"}  # noqa: RUF012

    def test_the_memory_is_enough(self):
        model, memory = trained()
        there = forget(model, DATA, "ada", memory=memory, **SCHEDULE)
        gone = forget(model, self.STAYING, "ada", memory=memory, **SCHEDULE)
        assert gone.details["source"] == "trajectory"
        assert gone.state.model.digest == there.state.model.digest
        after = forget(model, {"cyd": DATA["cyd"]}, "bob", memory=gone.memory, **SCHEDULE)
        assert after.memory.clients == ("cyd",)

    def test_without_memory_it_is_refused(self):
        model, memory = trained()
        with pytest.raises(RequestError, match="no client 'ada'; there are bob, cyd"):
            forget(model, self.STAYING, "ada", **SCHEDULE)
        with pytest.raises(RequestError, match="cannot be reached"):
            forget(model, self.STAYING, "ada", memory=memory, use="hf-kcu-gradient", **SCHEDULE)


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
        outcome = forget(model, DATA, "ada", damping=0.5, use="hf-kcu-gradient", tau=100.0)
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
        outcome = forget(model, data, "ada", loss="squared_error", l2=0.1, damping=0.5, scaling="none")
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
        (lambda: forget(mlp(), DATA, "ada"), RequestError, "Give a damping"),
        (lambda: forget(mlp(), DATA, "ada", learning_rate=0.1), RequestError, "local_steps is missing"),
        (lambda: forget(mlp(), DATA, "ada", damping=-1.0), RequestError, "damping"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, iterations=0), RequestError, "iterations"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, curvature="fisher"), RequestError, "ggn, hessian"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, loss="hinge"), RequestError, "hinge"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, use="amnesia"), RequestError, "hf-kcu-gradient"),
        (lambda: forget(mlp(), {}, "ada", damping=0.1), RequestError, "at least one client"),
        (lambda: forget(mlp(), DATA, "ada", damping=0.1, recovery=Recovery()), RequestError, "learning rate"),
        (lambda: forget(mlp(), DATA, "ada", use="retrain"), RequestError, "training plan"),
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
        forget(mlp(), DATA, "ada", damping=0.1, iteration=3)
    assert "'iteration'" in str(caught.value)
    assert all(name in str(caught.value) for name in ("iterations", "tau", "recovery", "damping"))


def test_a_memory_of_another_model_is_refused():
    memory = Memory()
    memory.record({name: torch.ones(5).double() * n for n, name in enumerate(DATA)}, dict.fromkeys(DATA, 1))
    with pytest.raises(ExpungeError):
        forget(mlp(), DATA, "ada", memory=memory, damping=0.1)


def test_what_the_package_offers():
    assert all(hasattr(expunge, name) for name in expunge.__all__)
    assert {"forget", "Memory", "Recovery", "methods"} <= set(expunge.__all__)


def test_a_client_that_stays_but_is_away_is_not_left_out_silently():
    model, memory = trained()
    there = {name: data for name, data in DATA.items() if name == "cyd"}
    with pytest.raises(RequestError, match="'bob' stays but cannot be reached"):
        forget(model, there, "ada", memory=memory, **SCHEDULE)
    outcome = forget(model, there, "ada", memory=memory, missing="leave-out", **SCHEDULE)
    assert any("bob" in warning for warning in outcome.warnings)


def test_the_name_tells_of_a_recovery_round_and_true_will_do():
    model, memory = trained()
    outcome = forget(model, DATA, "ada", memory=memory, recovery=True, **SCHEDULE)
    assert outcome.method == "hf-kcu+recovery"
    assert "recovery" in outcome.details


def test_a_step_that_was_cut_is_told():
    model, memory = trained()
    torch.manual_seed(0)
    loud = memory.copy()
    size = memory.size
    loud.record({"ada": 5 * torch.randn(size).double(), "bob": torch.zeros(size).double()}, {"ada": 1, "bob": 1})
    outcome = forget(model, DATA, "ada", memory=loud, **SCHEDULE)
    length = outcome.details["steps"][0]["length"]
    assert length is None or length < 1
    assert outcome.warnings


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


def test_outputs_with_a_third_dimension_are_refused_instead_of_scaled_wrongly():
    with pytest.raises(RequestError, match="one row of class scores"):
        CrossEntropy().per_sample(torch.zeros(2, 3, 5), torch.zeros(2, 5, dtype=torch.int64))
