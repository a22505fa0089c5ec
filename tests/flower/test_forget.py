"""Forgetting in a Flower federation, weeks after training: what it leaves in the store, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from expunge.core.losses import CrossEntropy
from expunge.errors import DataError, RequestError, SiteError
from expunge.federation.engines.flower.site import HELLO
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state_store import StateStore
from expunge.flower import Site, abandon, forget, resume, unlearnable
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from flower import example
from flower.example import HOSPITALS, grid, run
from flower.grid import Node
from flower_app import task
from flower_app.task import ATTACKER, Net, load_data, load_images

DATA = {name: load_data(name, number, len(HOSPITALS)) for number, name in enumerate(HOSPITALS)}
STAY = tuple(name for name in HOSPITALS if name != ATTACKER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store in which the four hospitals have trained; tests get a copy."""
    store = tmp_path_factory.mktemp("trained") / "store"
    run(grid(), store)
    return store


@pytest.fixture
def store(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "store")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def measured(store) -> dict[str, float]:
    model = Net()
    StateStore(store).load(model).model.write_to(model)
    return task.test(model)


def forgotten_here(store, leaving, names, use="retrace", **options):
    """The same request on our own engine, with those who are online."""
    engine = LocalEngine(Net(), CrossEntropy(), {name: DATA[name] for name in names})
    return method(use).configured(options)(engine, StateStore(store).load(Net()), Request.of(leaving))


def test_a_poisoned_site_that_has_gone_is_forgotten(store):
    before = measured(store)
    assert before["accuracy"] > 0.9
    assert before["backdoor"] > 0.9
    expected = forgotten_here(store, ATTACKER, STAY)
    run(grid(STAY), store, forget=ATTACKER)
    after = measured(store)
    assert after["backdoor"] < 0.02
    assert after["accuracy"] > before["accuracy"] - 0.02
    state = StateStore(store).load(Net())
    torch.testing.assert_close(state.model.parameters, expected.state.model.parameters, rtol=1e-5, atol=1e-6)
    assert set(state.memory.clients) == set(STAY)


def test_a_loss_that_is_another_one_than_the_sites_say_is_warned_of(store, tmp_path, monkeypatch):
    """One of those who stay trains the first round again, by the loss that its site gives."""

    def told(folder):
        outcome = forget(grid(STAY), ATTACKER, store=folder, model=Net())
        return [warning for warning in outcome.warnings if "Trained again by what is told here" in warning]

    assert told(store) == []
    plain = task.F.cross_entropy
    with monkeypatch.context() as patch:
        patch.setattr(task.F, "cross_entropy", lambda *given: plain(*given) / 5)
        run(grid(), tmp_path / "other")
    assert told(tmp_path / "other")


def test_nothing_of_the_leaver_is_left_in_the_store(store):
    (old,) = store.glob("state-*")
    run(grid(STAY), store, forget=ATTACKER)
    (new,) = store.glob("state-*")
    assert new != old
    assert {path.name for path in store.iterdir()} == {new.name, "store.json", ".lock"}
    book = StateStore(store).book
    assert (book.departed, sorted(book.counts), book.pending) == ((ATTACKER,), list(STAY), None)
    (record,) = book.forgotten
    assert record["clients"] == [ATTACKER]
    assert record["cost"]["rounds"] >= 2


def test_one_after_another_while_those_who_left_are_still_online(store):
    """In the simulation nobody can be switched off: who was forgotten must play no part all the same."""
    run(grid(), store, forget=ATTACKER)
    staying = [name for name in STAY if name != "hospital-4"]
    expected = forgotten_here(store, "hospital-4", staying)
    everyone = grid()
    run(everyone, store, forget="hospital-4")
    torch.testing.assert_close(
        StateStore(store).load(Net()).model.parameters, expected.state.model.parameters, rtol=1e-5, atol=1e-6
    )
    asked = {message.metadata.dst_node_id for message in everyone.tasks_sent()}
    assert asked == {101, 103}
    assert StateStore(store).book.departed == (ATTACKER, "hospital-4")
    after = measured(store)
    assert after["accuracy"] > 0.88
    assert after["backdoor"] < 0.1


def test_several_at_once_and_other_methods_and_options(store):
    outcome = forget(
        grid(),
        [ATTACKER, "hospital-4"],
        store=store,
        model=Net(),
        method="hf-kcu",
        iterations=2,
        recovery=True,
    )
    assert outcome.method == "hf-kcu+recovery"
    assert StateStore(store).load(Net()).memory.clients == ("hospital-1", "hospital-3")


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(store):
    before = files(store)
    planned = forget(grid(STAY), ATTACKER, store=store, model=Net(), dry_run=True)
    assert (planned.method, planned.leaving, set(planned.staying)) == ("retrace", (ATTACKER,), set(STAY))
    assert planned.estimate.messages > 0
    assert planned.seconds is None
    assert "the time depends on the clients" in str(planned)
    assert files(store) == before


def test_some_samples_of_a_site_that_stays(store):
    outcome = forget(grid(), samples={"hospital-1": [0, 5, 7]}, store=store, model=Net(), tau=0.2)
    assert outcome.succeeded
    assert (outcome.method, outcome.details["source"]) == ("retrace", "replay")
    assert "Samples whose client stays" in outcome.warnings[0]
    assert StateStore(store).book.departed == ()
    assert sorted(StateStore(store).load(Net()).memory.clients) == list(HOSPITALS)


def test_training_goes_on_without_the_leaver_and_never_with_it(store, caplog):
    run(grid(STAY), store, forget=ATTACKER)
    run(grid(), store, num_server_rounds=1)
    assert "left out of the training: site 'hospital-2' has left" in caplog.text
    assert ATTACKER not in StateStore(store).load(Net()).memory.clients
    run(grid(STAY), store, num_server_rounds=1)
    assert StateStore(store).book.departed == (ATTACKER,)
    assert measured(store)["backdoor"] < 0.02


def test_the_safety_belt_leaves_model_and_vectors_as_they_were(store):
    (state,) = store.glob("state-*")
    before = files(state)
    outcome = forget(grid(), "hospital-1", store=store, model=Net(), tau=0.0, method="retrace-krylov", filter="none")
    assert not outcome.succeeded
    assert files(state) == before
    book = StateStore(store).book
    assert book.departed == ()
    assert [record["succeeded"] for record in book.forgotten] == [False]


def test_validation_data_of_the_server_is_looked_at(store):
    images, labels = load_images()
    outcome = forget(grid(STAY), ATTACKER, store=store, model=Net(), validation=(images[:100], labels[:100]))
    expected = forgotten_here(store, "hospital-4", ("hospital-1", "hospital-3"))  # the store goes on
    assert outcome.succeeded
    assert expected.succeeded
    step = outcome.details.get("calibration", outcome.details["steps"][0])  # the last one that looked
    model = Net()
    StateStore(store).load(model).model.write_to(model)
    loss = torch.nn.functional.cross_entropy(model(images[:100]), labels[:100]).item()
    assert step["retained_loss_after"] == pytest.approx(loss, rel=1e-3)


class Gone(BaseException):
    """The server's process dies."""


@pytest.mark.parametrize("dies_at", [0, 1, 3, 5])
def test_a_request_that_a_crash_cut_off_is_finished_by_resume(store, tmp_path, dies_at):
    settings = {"method": "retrace-krylov", "iterations": 4}
    whole = shutil.copytree(store, tmp_path / "whole")
    undisturbed = forget(grid(STAY), ATTACKER, store=whole, model=Net(), **settings)
    dying = grid(STAY)

    def handle(message: Message) -> list[Message]:
        if len(dying.tasks_sent()) > len(STAY) * dies_at:
            raise Gone
        return [dying.answer(message)]

    dying.handle = handle
    with pytest.raises(Gone):
        forget(dying, ATTACKER, store=store, model=Net(), **settings)
    assert StateStore(store).book.pending["clients"] == [ATTACKER]
    assert measured(store)["backdoor"] > 0.9
    with pytest.raises(RequestError, match=f"forget {ATTACKER} is unfinished"):
        forget(grid(STAY), "hospital-4", store=store, model=Net())
    with pytest.raises(RequestError, match="A request to forget is unfinished"):
        run(grid(STAY), store)
    after = grid(STAY)
    run(after, store, resume=True)
    new, old = StateStore(store).load(Net()), StateStore(whole).load(Net())
    assert torch.equal(new.model.parameters, old.model.parameters)
    assert torch.equal(new.memory.influence(["hospital-1"]), old.memory.influence(["hospital-1"]))
    alone = 1  # trains the first round again, in the last message round
    assert len(after.tasks_sent()) == len(STAY) * (undisturbed.cost.rounds - 1 - dies_at) + alone
    (record,) = StateStore(store).book.forgotten
    assert record["cost"]["rounds"] == undisturbed.cost.rounds
    assert not (store / "journal").exists()


def test_the_same_request_goes_on_as_well_and_can_be_given_up(store):
    dying = grid(STAY)

    def handle(message: Message) -> list[Message]:
        if len(dying.tasks_sent()) > len(STAY):
            raise Gone
        return [dying.answer(message)]

    dying.handle = handle
    before = files(store)
    with pytest.raises(Gone):
        forget(dying, ATTACKER, store=store, model=Net())
    assert (store / "journal").exists()
    abandon(store)
    assert files(store) == before
    with pytest.raises(Gone):
        forget(dying, ATTACKER, store=store, model=Net())
    assert forget(grid(STAY), ATTACKER, store=store, model=Net()).succeeded


def no_handlers() -> ClientApp:
    app = ClientApp()

    @app.train()
    def training(message, context):
        return Message(RecordDict(), reply_to=message)

    return app


def with_nan() -> ClientApp:
    inputs, labels = DATA["hospital-3"]
    return unlearnable(ClientApp(), lambda context: Site("hospital-3", Net(), (inputs * float("nan"), labels)))


REFUSED = {
    "an unknown site": (
        lambda: grid(),
        {"sites": "hospital-9"},
        RequestError,
        "There is no client 'hospital-9'; there are hospital-1, hospital-2, hospital-3, hospital-4.",
    ),
    "everybody": (lambda: grid(), {"sites": HOSPITALS}, RequestError, "The request would forget every client"),
    "nobody": (lambda: grid(), {"sites": ()}, RequestError, "The request names nothing to forget"),
    "samples of nobody": (lambda: grid(), {"samples": {"hospital-1": [999]}}, RequestError, "has samples 0 to"),
    "samples by trajectory": (
        lambda: grid(),
        {"sites": (), "samples": {"hospital-1": [0]}, "method": "retrace", "source": "recorded"},
        RequestError,
        "Samples whose client stays have no vector of their own",
    ),
    "an unknown method": (lambda: grid(), {"method": "magic"}, RequestError, "There is no method 'magic'; there are"),
    "an unknown option": (
        lambda: grid(),
        {"speed": 3},
        RequestError,
        "has no option 'speed'; it has curvature_samples",
    ),
    "an option that is no plain value": (
        lambda: grid(),
        {"method": "retrain", "start": torch.zeros(1)},
        RequestError,
        "Options must be plain values",
    ),
    "a method that remembers": (
        lambda: grid(),
        {"method": "do-nothing"},
        RequestError,
        "The model that do-nothing leaves remembers",
    ),
    "the printed update": (
        lambda: grid(),
        {"method": "hf-kcu-paper+recovery"},
        RequestError,
        "use a method that forgets, or force=True.",
    ),
    "too few online": (
        lambda: grid(["hospital-1", "hospital-4"]),
        {"deadline": 0.2},
        SiteError,
        "'hospital-3'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_told_in_one_line_and_changes_nothing(store, case):
    make, changes, kind, sentence = REFUSED[case]
    before = files(store)
    with pytest.raises(kind) as refused:
        forget(make(), **{"sites": ATTACKER, "store": store, "model": Net(), "deadline": 5.0, **changes})
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert files(store) == before


def test_a_control_may_be_forced(store):
    before = StateStore(store).load(Net()).model.digest
    outcome = forget(grid(), ATTACKER, store=store, model=Net(), method="do-nothing", force=True)
    assert outcome.succeeded
    assert StateStore(store).book.departed == (ATTACKER,)
    assert StateStore(store).load(Net()).model.digest == before


def spoiled_hello(on, **facts):
    """One site speaks another version than it does."""

    def handle(message: Message) -> list[Message]:
        reply = on.answer(message)
        if message.metadata.message_type.endswith(HELLO) and message.metadata.dst_node_id == 103:
            told = next(iter(reply.content.config_records.values()))
            for name, value in facts.items():
                if name in told:
                    told[name] = value
        return [reply]

    on.handle = handle
    return on


def test_another_version_at_a_site_is_refused_by_name(store):
    before = files(store)
    with pytest.raises(SiteError, match=r"hospital-3.*version") as refused:
        forget(spoiled_hello(grid(STAY), wire=99), ATTACKER, store=store, model=Net(), deadline=0.5)
    assert "\n" not in str(refused.value)
    assert files(store) == before


def test_a_site_without_handlers_is_refused(store):
    on = grid(STAY)
    on.nodes[103] = Node(no_handlers())
    before = files(store)
    with pytest.raises(SiteError, match="unlearnable") as refused:
        forget(on, ATTACKER, store=store, model=Net(), deadline=0.5)
    assert "\n" not in str(refused.value)
    assert files(store) == before


def test_a_site_whose_data_is_broken_is_refused_by_name(store):
    on = grid(STAY)
    on.nodes[103] = Node(with_nan())
    before = files(store)
    with pytest.raises(SiteError, match="hospital-3"):
        forget(on, ATTACKER, store=store, model=Net(), deadline=0.5)
    assert files(store) == before


def test_forgotten_already_and_nothing_to_resume_and_no_training(store, tmp_path):
    run(grid(STAY), store, forget=ATTACKER)
    before = files(store)
    with pytest.raises(RequestError, match=f"'{ATTACKER}' was forgotten already"):
        run(grid(STAY), store, forget=ATTACKER)
    with pytest.raises(RequestError, match="Nothing is unfinished"):
        resume(grid(STAY), store=store, model=Net())
    assert files(store) == before
    with pytest.raises(DataError, match="There is no trained federation in"):
        run(grid(), tmp_path / "nowhere", forget=ATTACKER)
    assert not (tmp_path / "nowhere").exists()


def test_a_second_run_on_the_same_store_is_refused_at_once(store):
    """Two requests at once: the slower one would bring back what the other has forgotten."""
    slow = grid(STAY)
    refused = []

    def handle(message: Message) -> list[Message]:
        if len(slow.tasks_sent()) == 1 and not refused:
            before = files(store)
            other = StateStore(store)
            for second in (
                lambda: forget(grid(STAY), ATTACKER, store=store, model=Net()),
                lambda: resume(grid(STAY), store=store, model=Net()),
                lambda: abandon(store),
                lambda: other.write(other.book, other.load(Net()), Net()),
            ):
                with pytest.raises(RequestError, match=r"Another run is at work on .*: wait until it has ended"):
                    second()
                refused.append(second)
            in_another_process = f"from expunge.flower import abandon; abandon({str(store)!r})"
            done = subprocess.run([sys.executable, "-c", in_another_process], capture_output=True, text=True)
            assert "Another run is at work on" in done.stderr
            assert files(store) == before
        return [slow.answer(message)]

    slow.handle = handle
    assert forget(slow, ATTACKER, store=store, model=Net()).succeeded
    assert len(refused) == 4
    assert forget(grid(STAY), "hospital-4", store=store, model=Net()).succeeded


def test_a_store_that_was_changed_since_it_was_read_is_not_written(store):
    one, other = StateStore(store), StateStore(store)
    one.write(one.book, one.load(Net()), Net())
    with pytest.raises(RequestError, match="Another run has changed"):
        other.write(other.book)


def grown(on, name, more=5, wrap=lambda *pair: pair):
    """The site has got samples since it trained: copies of its first ones, at the end."""
    inputs, labels = (torch.cat([part, part[:more]]) for part in DATA[name])
    on.nodes[101 + HOSPITALS.index(name)] = Node(
        unlearnable(ClientApp(), lambda _: Site(name, Net(), wrap(inputs, labels)))
    )
    return on


@pytest.mark.parametrize("wrap", [lambda *pair: pair, lambda *pair: Pictures(*pair)], ids=["tensors", "dataset"])
def test_a_site_that_has_got_samples_since_answers_with_those_it_trained_with(store, wrap):
    expected, count = forgotten_here(store, ATTACKER, STAY), len(DATA["hospital-3"][1])
    planned = forget(grown(grid(STAY), "hospital-3", wrap=wrap), ATTACKER, store=store, model=Net(), dry_run=True)
    outcome = forget(grown(grid(STAY), "hospital-3", wrap=wrap), ATTACKER, store=store, model=Net())
    state = StateStore(store).load(Net())
    torch.testing.assert_close(state.model.parameters, expected.state.model.parameters, rtol=1e-5, atol=1e-6)
    sentence = (
        f"Site 'hospital-3' has {count + 5} samples where it trained with {count}: "
        f"its first {count} are used, so new ones must come last in its data."
    )
    assert sentence in outcome.warnings
    assert sentence in planned.warnings
    assert sentence in StateStore(store).book.forgotten[-1]["warnings"]


def test_samples_of_a_site_that_has_grown_are_those_it_trained_with(store):
    """What is new has no part in the model: it cannot be forgotten, and is not asked about."""
    count = len(DATA["hospital-1"][1])
    with pytest.raises(RequestError, match=f"'hospital-1' has samples 0 to {count - 1} only"):
        forget(grown(grid(), "hospital-1"), samples={"hospital-1": [count]}, store=store, model=Net(), tau=0.2)
    twin = shutil.copytree(store, store.parent / "twin")
    request = {"samples": {"hospital-1": [0, count - 1]}, "model": Net(), "tau": 0.2}
    outcome = forget(grown(grid(), "hospital-1"), store=store, **request)
    unchanged = forget(grid(), store=twin, **request)
    torch.testing.assert_close(outcome.state.model.parameters, unchanged.state.model.parameters, rtol=1e-5, atol=1e-6)


def test_a_site_that_announces_more_samples_than_it_has_is_refused_by_name(store):
    more = len(DATA["hospital-3"][1]) + 1
    on = spoiled_hello(grid(STAY), samples=more)

    def handle(message: Message, answer=on.handle) -> list[Message]:
        """It does not do what it is asked for: it answers with all that it has."""
        for record in message.content.config_records.values():
            record.pop("first-samples", None)
        return answer(message)

    on.handle = handle
    with pytest.raises(SiteError, match=f"'hospital-3': its reply is for the first-samples None where {more - 1} was"):
        forget(on, ATTACKER, store=store, model=Net(), deadline=5.0)


def test_fewer_samples_than_in_training_will_do(store):
    inputs, labels = DATA["hospital-3"]
    on = grid(STAY)
    on.nodes[103] = Node(unlearnable(ClientApp(), lambda _: Site("hospital-3", Net(), (inputs[1:], labels[1:]))))
    assert forget(on, ATTACKER, store=store, model=Net(), deadline=5.0).succeeded


class Pictures:
    """A map-style dataset."""

    def __init__(self, inputs, labels) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


@pytest.mark.parametrize("wrap", [lambda *pair: pair, Pictures], ids=["tensors", "dataset"])
def test_a_request_goes_on_with_the_same_validation_data_only(store, wrap):
    images, labels = load_images()
    same, other = wrap(images[:60], labels[:60]), wrap(images[1:61], labels[1:61])
    dying = grid(STAY)

    def handle(message: Message) -> list[Message]:
        if dying.tasks_sent():
            raise Gone
        return [dying.answer(message)]

    dying.handle = handle
    with pytest.raises(Gone):
        forget(dying, ATTACKER, store=store, model=Net(), validation=same)
    before = files(store)
    for changed in ({"validation": other}, {}, {"validation": same, "l2": 0.1}):
        with pytest.raises(RequestError, match="give the same validation data"):
            resume(grid(STAY), store=store, model=Net(), **changed)
        with pytest.raises(RequestError, match="give the same validation data"):
            forget(grid(STAY), ATTACKER, store=store, model=Net(), **changed)
    assert files(store) == before
    assert resume(grid(STAY), store=store, model=Net(), validation=same).succeeded


def test_an_error_that_a_site_tells_leaves_the_request_to_be_resumed(store):
    on = grid(STAY)

    def handle(message: Message) -> list[Message]:
        if len(on.tasks_sent()) > len(STAY) and message.metadata.dst_node_id == 103:
            on.nodes[103] = Node(with_nan())
        return [on.answer(message)]

    on.handle = handle
    with pytest.raises(SiteError, match=r"Site 'hospital-3': .*NaN"):
        forget(on, ATTACKER, store=store, model=Net(), deadline=5.0)
    assert StateStore(store).book.pending["clients"] == [ATTACKER]
    assert resume(grid(STAY), store=store, model=Net()).succeeded


def test_a_leaver_that_answers_badly_does_not_stand_in_the_way_unless_it_is_asked(store):
    on = grid()
    on.nodes[102] = Node(no_handlers())
    with pytest.raises(SiteError, match="Node 102 does not answer expunge"):
        forget(on, ATTACKER, store=store, model=Net(), method="hf-kcu", deadline=0.5)
    assert forget(on, ATTACKER, store=store, model=Net(), deadline=5.0).succeeded


def test_the_store_says_what_is_in_it(store, tmp_path):
    content = json.loads((store / "store.json").read_text())
    assert content["counts"] == {name: len(labels) for name, (_, labels) in DATA.items()}
    assert content["schedule"]["rounds"] == example.CONFIG["num-server-rounds"]
    (store / "store.json").write_text("{")
    with pytest.raises(DataError, match=r"store.json cannot be read: it is damaged"):
        StateStore(store)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(RequestError, match=r"is not empty and has no store.json"):
        StateStore(tmp_path / "mine")
