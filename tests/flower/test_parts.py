"""Parts of a model that are not trained together: a site must answer with those that it trains with."""

from __future__ import annotations

import itertools
import textwrap

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from expunge.errors import ModelError, RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import Recorder, Site, forget, unlearnable
from flower.example import EXAMPLE, TrainingGrid
from flower.grid import Node
from flower.test_strategies import said

NAMES = ("ada", "bob", "cyd")
STRANGE = (
    "Site 'ada' trains with another '2.weight', '2.bias' than the model of its Site(...) has: let site(context) put"
)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def body(seed: int = 0) -> nn.Module:
    """Its head is not trained together."""
    model = network(seed)
    model[2].requires_grad_(False)
    return model


def head(seed: int = 0) -> nn.Module:
    """On a trunk that nobody trains."""
    model = network(seed)
    model[0].requires_grad_(False)
    return model


def samples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(NAMES.index(name))
    inputs = torch.randn(24, 4, generator=chance)
    return inputs, (inputs[:, 0] > 0).long()


def app(name: str, site, sends, trains=lambda model: model.parameters(), keeps: bool = False) -> ClientApp:
    """As an author writes it; a head that stays is in the node's state."""
    own = ClientApp()

    @own.train()
    def training(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        if "head" in context.state:
            model[2].load_state_dict(context.state["head"].to_torch_state_dict())
        optimiser, (inputs, labels) = torch.optim.SGD(trains(model), lr=0.5), samples(name)
        for _ in range(4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
        if keeps:
            context.state["head"] = ArrayRecord(model[2].state_dict())
        arrays = ArrayRecord({key: tensor for key, tensor in model.state_dict().items() if sends(key)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(labels)})})
        return Message(content, reply_to=message)

    return unlearnable(own, lambda context: site(name, context))


def trained(folder, architecture, site, sends=lambda key: True, **options) -> TrainingGrid:
    """Two rounds; the grid on which they were trained."""
    nodes = {101 + number: Node(app(name, site, sends, **options)) for number, name in enumerate(NAMES)}
    grid, recorder = TrainingGrid(nodes), Recorder(FedAvg(fraction_evaluate=0.0), model=architecture(), store=folder)
    arrays = {key: tensor for key, tensor in recorder.arrays.to_torch_state_dict().items() if sends(key)}
    recorder.start(grid, ArrayRecord(arrays), num_rounds=2)
    return grid


def as_made(name, context) -> Site:
    """As the architecture comes, whatever the site has trained."""
    return Site(name, body(), samples(name))


def with_its_own(name, context) -> Site:
    site = as_made(name, context)
    if "head" in context.state:
        site.model[2].load_state_dict(context.state["head"].to_torch_state_dict())
    return site


def is_body(key: str) -> bool:
    return key.startswith("0.")


@pytest.mark.parametrize("sends", [is_body, lambda key: True], ids=["body", "all"])
def test_a_site_that_answers_with_another_head_than_its_own_is_told_and_every_forget_says_so(tmp_path, caplog, sends):
    grid = trained(tmp_path / "store", body, as_made, sends, keeps=True)
    (sentence,) = said(caplog)
    assert sentence.startswith(f"expunge: {STRANGE}")
    assert StateStore(tmp_path / "store").book.doubts == (sentence.removeprefix("expunge: "),)
    outcome = forget(grid, "bob", store=tmp_path / "store", model=body())
    assert sentence.removeprefix("expunge: ") in outcome.warnings
    dry = forget(grid, "ada", store=tmp_path / "store", model=body(), method="hf-kcu", dry_run=True)
    assert sentence.removeprefix("expunge: ") in dry.warnings


@pytest.mark.parametrize("sends", [is_body, lambda key: True], ids=["body", "all"])
def test_with_its_own_head_nothing_is_said_and_nobody_trains_the_first_round_again(tmp_path, caplog, sends):
    """The heads have gone on since: what the first round was cannot be done again."""
    grid = trained(tmp_path / "store", body, with_its_own, sends, keeps=True)
    assert said(caplog) == []
    assert StateStore(tmp_path / "store").load(body()).memory.beginning() is None
    outcome = forget(grid, "bob", store=tmp_path / "store", model=body())
    assert not any(STRANGE[:20] in warning or "Trained again" in warning for warning in outcome.warnings)


@pytest.mark.parametrize(("seed", "warnings"), [(0, 0), (3, 1)])
def test_a_trunk_that_comes_from_the_server_must_be_in_the_sites_model_too(tmp_path, caplog, seed, warnings):
    def site(name, context):
        return Site(name, head(seed), samples(name))

    trained(tmp_path / "store", head, site, trains=lambda model: model[2].parameters())
    assert [sentence[:47] for sentence in said(caplog)] == [
        "expunge: Site 'ada' trains with another '0.weight"[:47]
    ] * warnings
    assert StateStore(tmp_path / "store").load(head()).memory.beginning() is not None  # the trunk is as it was


def test_what_no_site_has_trained_is_told_with_every_forget(tmp_path):
    def site(name, context):
        return Site(name, network(), samples(name))

    grid = trained(tmp_path / "store", network, site, trains=lambda model: model[2].parameters())
    outcome = forget(grid, "bob", store=tmp_path / "store", model=network())
    assert "No site has trained '0.bias', '0.weight', and a forget moves what is trainable" in " ".join(
        outcome.warnings
    )
    grid = trained(tmp_path / "other", network, site)
    outcome = forget(grid, "bob", store=tmp_path / "other", model=network())
    assert "No site has trained" not in " ".join(outcome.warnings)


def test_arrays_of_a_part_without_a_word_are_refused_with_the_way_out(tmp_path):
    def site(name, context):
        return Site(name, network(), samples(name))

    with pytest.raises(ModelError, match=r"'2.weight' among them. What stays at the sites needs requires_grad=False"):
        trained(tmp_path / "store", network, site, is_body, keeps=True)


def test_a_site_with_more_to_train_than_the_recorder_knows_is_refused_in_the_first_round(tmp_path):
    def site(name, context):
        return Site(name, network(), samples(name))

    sentence = r"The model of Site\('ada'\) has 44 trainable parameters where the Recorder's has 30: give both the same"
    with pytest.raises(RequestError, match=sentence):
        trained(tmp_path / "store", body, site)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("where", ["inputs", "order", "grown"])
def test_samples_that_are_others_in_every_round_are_told(tmp_path, caplog, where):
    """Random transforms, or a split without a seed; one that grows at its end is as it was."""
    asked = itertools.count()

    def site(name, context):
        inputs, labels = samples(name)
        turn = next(asked) if name == "bob" else 0
        if where == "inputs":
            inputs = inputs + turn
        elif where == "order":
            inputs, labels = inputs.roll(turn, 0), labels.roll(turn)
        else:
            inputs, labels = inputs[: 20 + turn], labels[: 20 + turn]
        return Site(name, network(), (inputs, labels))

    grid = trained(tmp_path / "store", network, site)
    told = [sentence for sentence in said(caplog) if "Site 'bob' has other samples under the same numbers" in sentence]
    assert len(told) == (where != "grown")
    outcome = forget(grid, "cyd", store=tmp_path / "store", model=network())
    assert any("has other samples under the same" in warning for warning in outcome.warnings) == (where != "grown")


@pytest.mark.parametrize(("shift", "warned"), [(0, False), (1, True)])
def test_labels_that_are_not_those_of_the_training_are_told_with_a_forget(tmp_path, shift, warned):
    def site(name, context):
        inputs, labels = samples(name)
        return Site(name, network(), (inputs, (labels + shift) % 2))

    grid = trained(tmp_path / "store", network, site)
    outcome = forget(grid, "bob", store=tmp_path / "store", model=network())
    assert any("no better than the weights that the training began" in own for own in outcome.warnings) == warned


def test_the_docs_site_with_its_own_head_is_believed(tmp_path):
    text = (EXAMPLE.parents[1] / "docs" / "flower.md").read_text()
    (block,) = [part for part in text.split("```python\n") if "model.head.requires_grad_" in part.split("```")[0]]

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(*network())

        @property
        def head(self):
            return self[2]

    names = {"Net": Net, "Site": Site, "name_of": lambda context: context.node_config["name"]}
    names["load_data"] = lambda context: samples(context.node_config["name"])
    exec(textwrap.dedent(block.split("```")[0]), names)
    state = RecordDict({"head": ArrayRecord(network(5)[2].state_dict())})
    site = names["site"](Context(1, 1, {"name": "bob"}, state, {}))
    assert torch.equal(site.model.head.weight, network(5)[2].weight)
    assert [each.requires_grad for each in site.model.parameters()] == [True, True, False, False]
