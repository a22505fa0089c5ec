"""A Recorder around apps as people write them: any optimiser, any schedule, slow sites, FedAvgM; and every mismatch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import strategy as old
from flwr.serverapp import strategy as new
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx
from torch import nn
from torch.utils.data import DataLoader

from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.memory_file import read_memory
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training import recipe
from expunge.federation.training.recipe import SGD, Adam, AdamW, Recipe
from expunge.flower import Recorder, Site, forget, pairs, unlearnable
from federation.small import mlp
from flower.example import EXAMPLE, TrainingGrid
from flower.grid import Node
from flower.test_strategies import numbered, said
from flower.training import DATA, OldClient, kept, legacy_federation, recorder, sites, start

SEEN: list[tuple[str, int, dict[str, torch.Tensor], list[float]]] = []
"""Site, round, what was sent minus what was got, second moments: what the apps below really did."""


def plain(parameters, number, name):
    del number, name
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters, number, name):
    del name
    return torch.optim.AdamW(parameters, lr=0.1 / number)


def app(name: str, optimiser, sent=lambda name, state: state, architecture=mlp) -> ClientApp:
    """A ClientApp as authors write it; bob is slow, and makes one step where others make three."""
    inputs, labels = DATA[name]
    own = ClientApp()

    @own.train()
    def training(message: Message, context: Context) -> Message:
        number, model = int(message.content["config"]["server-round"]), architecture()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        before, steps = (
            {k: v.clone() for k, v in model.state_dict().items()},
            optimiser(model.parameters(), number, name),
        )
        for _ in range(1 if name == "bob" else 3):
            steps.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            steps.step()
        moments = recipe.second_moments(steps) if isinstance(steps, torch.optim.Adam) else []
        after = sent(name, model.state_dict())
        SEEN.append((name, number, {key: after[key] - before[key] for key in after}, moments))
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": ArrayRecord(dict(after)), "metrics": metrics}), reply_to=message)

    return own


def grid(optimiser=plain, architecture=mlp, **options) -> TrainingGrid:
    SEEN.clear()
    apps = [
        unlearnable(
            app(name, optimiser, architecture=architecture, **options),
            lambda _, name=name: Site(name, architecture(), DATA[name]),
        )
        for name in DATA
    ]
    return TrainingGrid({101 + number: Node(each) for number, each in enumerate(apps)})


def unstated(store, strategy=None, architecture=mlp, **stated) -> Recorder:
    return Recorder(strategy or FedAvg(fraction_evaluate=0.0), model=architecture(), store=store, **stated)


def recorded(memory: Memory, tmp_path) -> list[dict]:
    """What is in the file of each round."""
    memory.save(tmp_path / "memory.safetensors")
    return [each.as_dict() for each in read_memory(tmp_path / "memory.safetensors").rounds]


# How sites train


def test_optimiser_rate_steps_and_moments_are_read_from_the_sites(tmp_path):
    start(grid(adam), unstated(tmp_path / "store"), rounds=3)
    memory = kept(tmp_path / "store").memory
    assert memory.recipe == Recipe(AdamW())
    rounds = recorded(memory, tmp_path)
    for number, each in enumerate(rounds, start=1):
        assert each["rates"] == dict.fromkeys(DATA, 0.1 / number)
        assert each["steps"] == {"ada": 3, "bob": 1, "cyd": 3}
        assert each["moments"] == {name: tuple(own) for name, at, _, own in SEEN if at == number}
    schedule = kept(tmp_path / "store").schedule
    steps = (9 * 3 + 5 * 1 + 7 * 3) / 21
    assert (schedule.rounds, schedule.local_steps) == (3, pytest.approx(steps))
    assert schedule.learning_rate == pytest.approx(0.1 * (1 + 1 / 2 + 1 / 3) / 3)


def test_a_site_that_trains_otherwise_than_the_others_is_refused_by_name(tmp_path):
    def mixed(parameters, number, name):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if name == "cyd" else 0.0)

    with pytest.raises(RequestError, match=r"Site 'cyd' trains with SGD\(momentum=0.9\) and site 'ada' with SGD\(\)"):
        start(grid(mixed), unstated(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_an_optimiser_that_changes_on_the_way_or_with_a_second_run_is_refused(tmp_path):
    def later(parameters, number, name):
        return adam(parameters, number, name) if number == 2 else plain(parameters, number, name)

    with pytest.raises(
        RequestError, match=r"Site 'ada' trains with AdamW\(weight_decay=0.01\) and the training so far"
    ):
        start(grid(later), unstated(tmp_path / "store"))
    assert StateStore(tmp_path / "store").book.state == 1
    with pytest.raises(RequestError, match=r"and the training so far with SGD\(\): train everybody alike, or choose"):
        start(grid(adam), unstated(tmp_path / "store"))


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        (
            {"optimiser": SGD()},
            r"Site 'ada' trains with AdamW\(weight_decay=0.01\), where SGD\(\) is stated: leave opt",
        ),
        ({"optimiser": AdamW(weight_decay=0.1)}, r"where AdamW\(weight_decay=0.1\) is stated"),
        ({"learning_rate": 0.2}, "round 1 with a learning rate of 0.1, where 0.2 is stated: leave learning_rate out"),
        (
            {"learning_rate": lambda number: 0.1},
            "Site 'ada' trained round 2 with a learning rate of 0.05, where 0.1 is",
        ),
    ],
)
def test_what_is_stated_must_be_what_is_seen(tmp_path, stated, sentence):
    with pytest.raises(RequestError, match=sentence):
        start(grid(adam), unstated(tmp_path / "store", **stated))


def test_a_stated_schedule_that_is_right_is_accepted(tmp_path):
    stated = {"optimiser": AdamW(), "learning_rate": lambda number: 0.1 / number, "batch_size": 4, "local_epochs": 9}
    start(grid(adam), unstated(tmp_path / "store", **stated))
    schedule = kept(tmp_path / "store").schedule
    assert (schedule.batch_size, schedule.epochs) == (4, 9)


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        ({"optimiser": "adam"}, "A Recorder can keep SGD, Adam and AdamW of expunge.flower, not 'adam'"),
        ({"learning_rate": 0.0}, "the learning rate above 0"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"local_epochs": 0}, "must be at least 1"),
    ],
)
def test_nonsense_is_refused_before_anybody_trains(tmp_path, stated, sentence):
    with pytest.raises(RequestError, match=sentence):
        unstated(tmp_path / "store", **stated)


class Hidden:
    """Trains where nobody looks: no torch optimiser."""

    def __init__(self, parameters, number, name):
        self.parameters = list(parameters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.1 * parameter.grad


def test_where_nothing_is_seen_it_must_be_stated(tmp_path):
    for stated in ({}, {"learning_rate": 0.1, "batch_size": 4, "local_epochs": 1}, {"optimiser": SGD()}):
        with pytest.raises(
            RequestError, match=r"How site 'ada' trains is not known.*state it, Recorder\(optimiser=SGD"
        ):
            start(grid(Hidden), unstated(tmp_path / "store", **stated))
    assert not (tmp_path / "store").exists()
    whole = {"optimiser": SGD(), "learning_rate": lambda number: 0.1 * number, "batch_size": 4, "local_epochs": 2}
    start(grid(Hidden), unstated(tmp_path / "store", **whole), rounds=2)
    rounds = recorded(kept(tmp_path / "store").memory, tmp_path)
    assert [each["rates"]["ada"] for each in rounds] == [0.1, 0.2]
    assert rounds[1]["steps"] == {"ada": 6, "bob": 4, "cyd": 4}


def test_adam_without_second_moments_is_refused_in_the_first_round(tmp_path):
    whole = {"optimiser": Adam(), "learning_rate": 0.1, "batch_size": 4, "local_epochs": 2}
    with pytest.raises(RequestError, match=r"Adam divides by second moments, and site 'ada' sent none of '0.weight'"):
        start(grid(Hidden), unstated(tmp_path / "store", **whole))
    assert not (tmp_path / "store").exists()


class Nothing:
    """No optimiser: what came goes back."""

    def __init__(self, parameters):
        del parameters

    def zero_grad(self):
        """Nothing to forget."""

    def step(self):
        """No step."""


def idle_at(numbers, rule, name="bob"):
    """As the rule, but this site does not train in these rounds."""

    def made(parameters, number, own):
        return Nothing(parameters) if own == name and number in numbers else rule(parameters, number, own)

    return made


@pytest.mark.parametrize("rule", [plain, adam])
def test_a_site_that_sends_what_it_got_has_a_part_in_the_mean_and_made_no_steps(tmp_path, rule):
    start(grid(idle_at((1, 3), rule)), unstated(tmp_path / "store"), rounds=3)
    memory = kept(tmp_path / "store").memory
    rounds = recorded(memory, tmp_path)
    assert [each["steps"]["bob"] > 0.5 for each in rounds] == [False, True, False]
    assert [each["shares"]["bob"] for each in rounds] == [pytest.approx(5 / 21)] * 3
    assert "bob" not in memory.beginning()[1]  # and has no first round that it could train again
    assert forget(grid(), "cyd", store=tmp_path / "store", model=mlp()).succeeded


def test_a_round_with_a_rate_of_zero_is_one_without_steps(tmp_path):
    def ended(parameters, number, name):
        return torch.optim.SGD(parameters, lr=0.1 * (number < 3))

    start(grid(ended), unstated(tmp_path / "store"), rounds=3)
    rounds = recorded(kept(tmp_path / "store").memory, tmp_path)
    assert [each["steps"]["ada"] > 0.5 for each in rounds] == [True, True, False]


def test_where_nobody_trains_in_the_first_round_it_cannot_be_known_how_they_do(tmp_path):
    with pytest.raises(RequestError, match="Nobody trained in round 1: site 'ada' and all others sent what they had"):
        start(grid(lambda parameters, *_: Nothing(parameters)), unstated(tmp_path / "store"))


def test_an_optimiser_whose_moments_are_not_known_cannot_be_stated_as_adam(tmp_path):
    def other(parameters, number, name):
        return torch.optim.RMSprop(parameters, lr=0.01)

    with pytest.raises(RequestError, match=r"site 'ada' sent none of '0.weight': its optimiser keeps none that are kn"):
        start(grid(other), unstated(tmp_path / "store", optimiser=Adam()))


def test_an_optimiser_without_a_rule_is_refused_by_name_until_one_is_stated(tmp_path):
    def other(parameters, number, name):
        return torch.optim.RAdam(parameters, lr=0.01)

    with pytest.raises(
        RequestError, match=r"Site 'ada' trains with RAdam, whose recursion is not known here: train with"
    ):
        start(grid(other), unstated(tmp_path / "store"))
    start(grid(other), unstated(tmp_path / "store", optimiser=Adam()), rounds=1)
    memory = kept(tmp_path / "store").memory
    (only,) = recorded(memory, tmp_path)
    assert memory.recipe == Recipe(Adam())
    assert (only["rates"]["ada"], only["steps"]["bob"], len(only["moments"]["cyd"])) == (0.01, 1, 4)


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": -1.0},
        {"steps": "many"},
        {"learning-rate": float("nan")},
        {"optimiser": "{"},
        {"optimiser": '{"rule": "FedAvg"}'},
        {"optimiser": '{"rule": "SGD", "momentum": 7}'},
        {"moments": [1.0]},
        {"moments": [-1.0] * 4},
    ],
)
def test_nonsense_in_a_stamp_is_refused_by_name(tmp_path, changed):
    federation = grid(adam)

    def handle(message):
        reply = federation.answer(message)
        stamp = reply.content["expunge"]
        reply.content["expunge"] = ConfigRecord({**stamp, **changed})
        return [reply]

    federation.handle = handle
    with pytest.raises(RequestError, match="What site 'ada' says of its training cannot be read"):
        start(federation, unstated(tmp_path / "store"))


def test_weight_decay_of_a_site_whose_loss_has_it_is_in_the_loss(tmp_path):
    def decaying(parameters, number, name):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)

    for l2, decay in ((0.0, 0.01), (0.01, 0.0)):
        apps = [
            unlearnable(app(name, decaying), lambda _, name=name, l2=l2: Site(name, mlp(), DATA[name], l2=l2))
            for name in DATA
        ]
        federation = TrainingGrid({101 + number: Node(each) for number, each in enumerate(apps)})
        start(federation, unstated(tmp_path / f"{l2}"), rounds=1)
        assert kept(tmp_path / f"{l2}").memory.recipe == Recipe(SGD(weight_decay=decay))


class OldAdam(OldClient):
    """Flower's old API: arrays have numbers instead of names."""

    def fit(self, parameters, config):
        self.model.load_state_dict(dict(zip(self.model.state_dict(), map(torch.tensor, parameters), strict=True)))
        optimiser, (inputs, labels) = torch.optim.Adam(self.model.parameters(), lr=0.1), DATA[self.site.name]
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        optimiser.step()
        SEEN.append((self.site.name, config["server-round"], {}, recipe.second_moments(optimiser)))
        return [tensor.numpy() for tensor in self.model.state_dict().values()], len(labels), {}


def test_old_clients_are_seen_as_well(tmp_path):
    SEEN.clear()

    def old_app(own: Site) -> ClientApp:
        return unlearnable(ClientApp(lambda context: OldAdam(own).to_client()), lambda context: own)

    nodes = {101 + number: Node(old_app(own)) for number, own in enumerate(sites().values())}
    strategy = old.FedAvg(fraction_evaluate=0.0, on_fit_config_fn=numbered)
    start(TrainingGrid(nodes), unstated(tmp_path / "store", strategy), rounds=1)
    (only,) = recorded(kept(tmp_path / "store").memory, tmp_path)
    assert only["moments"] == {name: tuple(moments) for name, _, _, moments in SEEN}


# Data as it comes


def test_the_docs_site_of_a_simulation_runs_on_a_loader_of_dicts():
    """There is no name in a simulation's node config; the partition's number makes one."""
    text = (EXAMPLE.parents[1] / "docs" / "flower.md").read_text()
    (block,) = [part for part in text.split("```python\n") if "pairs(trainloader" in part.split("```")[0]]
    rows = [{"img": inputs.numpy(), "label": int(label)} for inputs, label in zip(*DATA["ada"], strict=True)]

    def load_data(number, count):
        assert (number, count) == (1, 3)
        return DataLoader(rows, batch_size=4, shuffle=True), None

    names = {"ClientApp": ClientApp, "Net": mlp, "load_data": load_data}
    exec(block.split("```")[0], names)
    site = names["site"](Context(1, 1, {"partition-id": 1, "num-partitions": 3}, RecordDict(), {}))
    data = site.client().data
    assert (site.name, site.samples) == ("site-1", 9)
    assert torch.equal(data.take([2, 0]).inputs[0], DATA["ada"][0][[2, 0]])
    assert torch.equal(data.first(4).take([3]).targets, DATA["ada"][1][[3]])
    with pytest.raises(DataError, match=r"A row has no 'image', but 'img', 'label': name two of these to pairs\(\)"):
        pairs(rows, "image", "label")[0]


# Parts of the model


def headless() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


def test_a_body_is_averaged_while_heads_stay_at_the_sites(tmp_path):
    """The site trains both with one optimiser, and sends the body alone."""

    def whole():
        return headless().requires_grad_(True)

    def body(name, state):
        return {key: tensor for key, tensor in state.items() if key.startswith("0.")}

    SEEN.clear()
    apps = [
        unlearnable(
            app(name, adam, sent=body, architecture=whole), lambda _, name=name: Site(name, headless(), DATA[name])
        )
        for name in DATA
    ]
    federation = TrainingGrid({101 + number: Node(each) for number, each in enumerate(apps)})
    own = unstated(tmp_path / "store", architecture=headless)
    own.start(federation, ArrayRecord(body("", mlp().state_dict())), num_rounds=2)
    memory = kept(tmp_path / "store", headless).memory
    assert memory.size == 16
    assert memory.recipe == Recipe(AdamW())
    for number, each in enumerate(recorded(memory, tmp_path), start=1):
        assert each["moments"] == {name: tuple(moments[:2]) for name, at, _, moments in SEEN if at == number}
    assert forget(federation, "bob", store=tmp_path / "store", model=headless()).succeeded


def test_a_trunk_that_no_site_trains_needs_no_moments(tmp_path):
    """Neither Recorder nor Site need know that it is frozen in the app: it does not move."""

    def frozen():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    apps = [
        unlearnable(app(name, adam, architecture=frozen), lambda _, name=name: Site(name, mlp(), DATA[name]))
        for name in DATA
    ]
    federation = TrainingGrid({101 + number: Node(each) for number, each in enumerate(apps)})
    start(federation, unstated(tmp_path / "store"), rounds=2)
    rounds = recorded(kept(tmp_path / "store").memory, tmp_path)
    assert [each["moments"]["ada"][:2] for each in rounds] == [(0.0, 0.0)] * 2
    assert all(moment > 0 for each in rounds for moment in each["moments"]["ada"][2:])


def test_a_head_that_is_averaged_but_kept_at_the_site_is_told(tmp_path, caplog):
    """As in Flower's advanced example: it is sent, and next time the site goes on with its own."""
    heads: dict[str, list[torch.Tensor]] = {}

    def restoring(parameters, number, name):
        parameters = list(parameters)
        with torch.no_grad():
            for own, tensor in zip(parameters[2:], heads.get(name, parameters[2:]), strict=True):
                own.copy_(tensor)
        return torch.optim.SGD(parameters, lr=0.1)

    def keeping(name, state):
        heads[name] = [state["2.weight"].clone(), state["2.bias"].clone()]
        return state

    start(grid(restoring, sent=keeping), unstated(tmp_path / "store"), rounds=3)
    (sentence,) = said(caplog)
    assert sentence.startswith("expunge: Site 'ada' sends '2.weight', '2.bias', but trains it from values of its own")
    assert sentence == f"expunge: {StateStore(tmp_path / 'store').book.doubts[0]}"


# How the server averages


def oracle(rule, rounds: int) -> tuple[Memory, torch.Tensor]:
    """The same rounds recorded by hand, and where they lead."""
    layout = Layout.of(mlp())
    memory = Memory(mlp(), Recipe(SGD(), rule))
    here, momentum = Snapshot.of(mlp()).parameters, torch.zeros(layout.size, dtype=torch.float64)
    for number in range(1, rounds + 1):
        updates = {name: layout.flatten(update) for name, at, update, _ in SEEN if at == number}
        weights = {name: len(DATA[name][1]) for name in updates}
        memory.record(updates, weights)
        mean = sum(weights[name] * updates[name] for name in updates) / sum(weights.values())
        here, momentum = rule.apply(here, momentum, mean)
    return memory, here


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("part", [1.0, 0.7])
def test_flowers_fedavgm_is_ours(tmp_path, rate, momentum, part):
    strategy = FedAvgM(part, fraction_evaluate=0.0, server_learning_rate=rate, server_momentum=momentum)
    result = start(grid(), unstated(tmp_path / "store", strategy), rounds=4)
    rule = recipe.FedAvgM(rate, momentum) if momentum else recipe.FedAvg(rate)
    state, (memory, here) = kept(tmp_path / "store"), oracle(rule, 4)
    assert state.memory.recipe == Recipe(SGD(), rule)
    assert len(recorded(state.memory, tmp_path)[0]["shares"]) == (3 if part == 1 else 2)
    own = mlp()
    own.load_state_dict(result.arrays.to_torch_state_dict())
    torch.testing.assert_close(Snapshot.of(own).parameters, here, rtol=1e-12, atol=1e-12)
    for name, vector in memory.vectors.items():
        torch.testing.assert_close(state.memory.vectors[name], vector, rtol=1e-9, atol=1e-14)
    memory.require_model(state.model)
    state.memory.require_model(state.model)
    if momentum:
        vector = np.concatenate([part.reshape(-1) for part in strategy.momentum_vector])
        torch.testing.assert_close(state.memory.server_momentum, -torch.from_numpy(vector), rtol=1e-9, atol=1e-14)


def test_the_old_fedavgm_is_recorded_too_whatever_its_initial_parameters(tmp_path):
    zeros = ndarrays_to_parameters([np.zeros_like(tensor.numpy()) for tensor in mlp().state_dict().values()])
    settings = {"fraction_evaluate": 0.0, "on_fit_config_fn": numbered, "initial_parameters": zeros}
    strategy = old.FedAvgM(server_momentum=0.6, server_learning_rate=0.5, **settings)
    start(legacy_federation(), recorder(tmp_path / "store", strategy))
    assert kept(tmp_path / "store").memory.recipe.server == recipe.FedAvgM(0.5, 0.6)
    twice = recorder(tmp_path / "twice", strategy)
    start(legacy_federation(), twice, rounds=1)
    with pytest.raises(RequestError, match=r"FedAvgM of flwr\.server\.strategy forgets its momentum in round 1"):
        start(legacy_federation(), twice, rounds=1)
    again = old.FedAvgM(server_momentum=0.6, server_learning_rate=0.5, **settings)
    with pytest.raises(RequestError, match=r"FedAvgM of flwr\.server\.strategy forgets its momentum in round 1"):
        start(legacy_federation(), recorder(tmp_path / "store", again))


def test_fedavgm_has_settled_whether_it_has_a_momentum_when_it_was_made(tmp_path):
    strategy = FedAvgM(fraction_evaluate=0.0)
    strategy.server_momentum = 0.9
    start(grid(), unstated(tmp_path / "store", strategy), rounds=2)
    assert kept(tmp_path / "store").memory.recipe == Recipe()


@pytest.mark.parametrize("kind", [new.FedAdam, new.FedYogi, new.FedAdagrad, old.FedAdam, old.FedYogi, old.FedAdagrad])
def test_adaptive_servers_are_refused_by_name_before_anybody_trains(tmp_path, kind):
    initial = {"initial_parameters": ndarrays_to_parameters([])} if kind.__module__.startswith("flwr.server.") else {}
    with pytest.raises(RequestError, match=rf"^{kind.__name__} divides by moments.*forget by hf-kcu"):
        unstated(tmp_path / "store", kind(**initial))


class Nesterov(FedAvgM):
    """Looks ahead, as Flower's baseline of this name does."""

    def aggregate_train(self, server_round, replies):
        before = self.current_arrays.to_numpy_ndarrays()
        arrays, metrics = super().aggregate_train(server_round, replies)
        after = zip(arrays, before, self.momentum_vector, strict=True)
        return ArrayRecord({key: _array(arrays[key].numpy() - 0.6 * vector) for key, _, vector in after}), metrics


def _array(values):
    return Array(np.asarray(values))


class Noisy(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        noise = np.random.default_rng(0)
        return ArrayRecord(
            {k: _array(a.numpy() + 1e-9 * noise.normal(size=a.shape)) for k, a in arrays.items()}
        ), metrics


class Reset(FedAvgM):
    def aggregate_train(self, server_round, replies):
        if server_round == 3:
            self.momentum_vector = None
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize(
    ("strategy", "sentence", "rounds"),
    [
        (
            lambda: Nesterov(server_momentum=0.6),
            r"^Nesterov does not do what FedAvgM\(learning_rate=1.0, momentum=0",
            0,
        ),
        (lambda: Noisy(), "^Noisy does not take the plain weighted mean of the sites' models", 0),
        (lambda: Reset(server_momentum=0.6), r"^Reset does not do what FedAvgM\(", 2),
    ],
)
def test_a_round_that_is_not_what_the_rule_gives_is_refused_by_name(tmp_path, strategy, sentence, rounds):
    with pytest.raises(RequestError, match=f"{sentence}.*use FedAvg or FedAvgM, or train without a Recorder"):
        start(grid(), unstated(tmp_path / "store", strategy()), rounds=4)
    assert StateStore(tmp_path / "store").book.state == rounds


def test_a_server_that_changes_its_settings_between_rounds_is_noticed(tmp_path):
    class Falling(FedAvgM):
        def configure_train(self, server_round, *rest):
            self.server_learning_rate = 1.0 / server_round
            return super().configure_train(server_round, *rest)

    class Growing(FedProx):
        def configure_train(self, server_round, *rest):
            self.proximal_mu = 0.1 * server_round
            return super().configure_train(server_round, *rest)

    falling = r"Falling has changed between rounds, from FedAvgM\(learning_rate=1.0, momentum=0.5\) to FedAvgM\("
    with pytest.raises(RequestError, match=falling):
        start(grid(), unstated(tmp_path / "one", Falling(server_momentum=0.5)))
    with pytest.raises(RequestError, match=r"Growing has changed between rounds, from 0\.1 to 0\.2, and one rule"):
        start(grid(), unstated(tmp_path / "two", Growing(proximal_mu=0.1)))
    for store in ("one", "two"):
        assert StateStore(tmp_path / store).book.state == 1


def test_fedprox_is_in_the_recipe(tmp_path):
    start(grid(), unstated(tmp_path / "store", FedProx(proximal_mu=0.1), optimiser=SGD()), rounds=1)
    assert kept(tmp_path / "store").memory.recipe == Recipe(SGD(proximal_mu=0.1))
    with pytest.raises(RequestError, match=r"The strategy's proximal_mu is 0\.1, where 0\.2 is stated"):
        unstated(tmp_path / "store", FedProx(proximal_mu=0.1), optimiser=SGD(proximal_mu=0.2))


# On and on


def momentum_strategy() -> FedAvgM:
    return FedAvgM(fraction_evaluate=0.0, server_momentum=0.8)


def shifted(strategy, by: int):
    """Rounds are counted anew in every run; the sites' rate falls with them."""
    configure = strategy.configure_train
    strategy.configure_train = lambda number, *rest: configure(number + by, *rest)
    return strategy


def falling(parameters, number, name):
    return torch.optim.SGD(parameters, lr=0.1 / number)


@pytest.mark.parametrize("same_object", [True, False])
def test_two_runs_under_a_server_momentum_are_one(tmp_path, same_object):
    start(grid(falling), unstated(tmp_path / "whole", momentum_strategy()), rounds=4)
    strategy = momentum_strategy()
    start(grid(falling), unstated(tmp_path / "store", strategy), rounds=2)
    later = shifted(strategy if same_object else momentum_strategy(), 2)
    start(grid(falling), unstated(tmp_path / "store", later), rounds=2)
    one, other = kept(tmp_path / "whole"), kept(tmp_path / "store")
    torch.testing.assert_close(other.model.parameters, one.model.parameters, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other.memory.server_momentum, one.memory.server_momentum, rtol=1e-9, atol=1e-12)
    for name, vector in one.memory.vectors.items():
        torch.testing.assert_close(other.memory.vectors[name], vector, rtol=1e-9, atol=1e-12)
    assert other.schedule.learning_rate == pytest.approx(one.schedule.learning_rate)


def test_a_strategy_that_has_trained_before_begins_a_new_store_without_its_momentum(tmp_path):
    strategy = momentum_strategy()
    start(grid(), unstated(tmp_path / "one", strategy), rounds=2)
    start(grid(), unstated(tmp_path / "two", strategy), rounds=2)
    torch.testing.assert_close(
        kept(tmp_path / "two").model.parameters, kept(tmp_path / "one").model.parameters, rtol=1e-12, atol=1e-14
    )


def test_another_server_rule_than_in_the_store_is_refused(tmp_path):
    start(grid(), unstated(tmp_path / "store", momentum_strategy()), rounds=1)
    with pytest.raises(
        RequestError, match=r"was by FedAvgM\(.*momentum=0.8\), and FedAvg is FedAvg\(.*go on with the sa"
    ):
        unstated(tmp_path / "store")


def test_after_a_forget_the_server_goes_on_with_the_momentum_without_the_leaver(tmp_path):
    """As a method leaves it: the memory bound to the new model, with a corrected momentum."""
    strategy = momentum_strategy()
    start(grid(), unstated(tmp_path / "store", strategy), rounds=2)
    store, state = StateStore(tmp_path / "store"), kept(tmp_path / "store")
    corrected = 0.5 * state.memory.server_momentum
    moved = state.model.moved(state.model.parameters + 0.01)
    left = state.moved(moved, state.memory.without(["bob"]).bound_to(moved, corrected))
    counts = {name: count for name, count in store.book.counts.items() if name != "bob"}
    store.write(replace(store.book, counts=counts, departed=("bob",)), left, mlp())
    federation = grid()
    federation.stop(102)
    own = unstated(tmp_path / "store", strategy)  # the one that has trained before
    start(federation, own, rounds=1)
    layout = Layout.of(mlp())
    updates = {name: layout.flatten(update) for name, _, update, _ in SEEN}
    mean = sum(len(DATA[name][1]) * updates[name] for name in updates) / sum(len(DATA[name][1]) for name in updates)
    assert set(updates) == {"ada", "cyd"}
    torch.testing.assert_close(
        kept(tmp_path / "store").model.parameters, moved.parameters + 0.8 * corrected + mean, rtol=1e-12, atol=1e-12
    )


def test_where_the_momentum_was_not_kept_it_begins_anew_and_that_is_said(tmp_path, caplog):
    start(grid(), unstated(tmp_path / "store", momentum_strategy()), rounds=2)
    store, state = StateStore(tmp_path / "store"), kept(tmp_path / "store")
    store.write(store.book, state.moved(state.model, state.memory.without([]).bound_to(state.model)), mlp())
    start(grid(), unstated(tmp_path / "store", momentum_strategy()), rounds=1)
    assert said(caplog)[-1].startswith("expunge: the server's momentum was not kept in")


def test_forget_train_on_and_forget_again_under_a_server_momentum(tmp_path):
    federation = grid()
    start(federation, unstated(tmp_path / "store", momentum_strategy()), rounds=3)
    assert forget(federation, "bob", store=tmp_path / "store", model=mlp()).succeeded
    federation.stop(102)
    start(federation, unstated(tmp_path / "store", momentum_strategy()), rounds=2)
    memory = kept(tmp_path / "store").memory
    assert memory.clients == ("ada", "cyd")
    assert memory.recipe == Recipe(SGD(), recipe.FedAvgM(1.0, 0.8))
    assert forget(federation, "ada", store=tmp_path / "store", model=mlp()).succeeded
    assert kept(tmp_path / "store").memory.clients == ("cyd",)


def test_a_strategy_without_a_place_for_momentum_says_so(tmp_path):
    class Own(FedAvg):
        """Momentum of its own making."""

        server_learning_rate, server_momentum = 1.0, 0.8

        def configure_train(self, server_round, arrays, *rest):
            self.sent = arrays.to_numpy_ndarrays()
            return super().configure_train(server_round, arrays, *rest)

        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            mean = [array.numpy() - sent for array, sent in zip(arrays.values(), self.sent, strict=True)]
            past = getattr(self, "past", None) or [0.0] * len(mean)
            self.past = [0.8 * before + now for before, now in zip(past, mean, strict=True)]
            moved = map(_array, itertools.starmap(np.add, zip(self.sent, self.past, strict=True)))
            return ArrayRecord(dict(zip(arrays, moved, strict=True))), metrics

    start(grid(), unstated(tmp_path / "store", Own()), rounds=3)
    assert kept(tmp_path / "store").memory.recipe.server == recipe.FedAvgM(1.0, 0.8)
    with pytest.raises(RequestError, match="Own has no momentum_vector to go on with"):
        start(grid(), unstated(tmp_path / "store", Own()), rounds=1)
