"""The engine on a Grid: the same numbers as in one process, whatever happens to messages and nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from safetensors.torch import load_file

from expunge import errors
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ModelError, RequestError, SiteError
from expunge.federation.engines.flower import members
from expunge.federation.engines.flower import site as flower_site
from expunge.federation.engines.flower.engine import FlowerEngine
from expunge.federation.engines.flower.records import NAME, TENSORS
from expunge.federation.engines.flower.site import HELLO, TASK, Site
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import CurvatureProduct, Gradient, payload_bytes
from expunge.federation.messages.wire import WIRE_VERSION
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from federation.small import clients, linear, mlp, norm_net, samples
from flower import digits
from flower.grid import InProcessGrid, Node, site_app

DATA = clients(ada=9, bob=5, cyd=7)
NODES = dict(zip(DATA, (101, 102, 103), strict=True))


def sites(model=mlp):
    return {name: Site(name, model(), data) for name, data in DATA.items()}


def engine_on(grid, **options):
    return FlowerEngine(grid, **{"deadline": 1.0, "poll": 0.01, **options})


@pytest.fixture
def grid():
    return InProcessGrid.of(sites())


@pytest.fixture
def model():
    return Snapshot.of(mlp())


def gradients(model):
    return dict.fromkeys(DATA, Gradient(model))


def undisturbed(tasks):
    return LocalEngine(mlp(), CrossEntropy(), DATA).ask(tasks)


def assert_same(replies, expected):
    assert list(replies) == list(expected)
    for name, reply in replies.items():
        assert torch.equal(reply.total, expected[name].total)
        assert (reply.count, reply.sample_gradients) == (expected[name].count, expected[name].sample_gradients)


# The same numbers.


def test_training_is_the_same_as_in_one_process():
    plan = TrainingPlan(rounds=3, epochs=2, batch_size=4, learning_rate=0.1)
    start = Snapshot.of(norm_net())
    over = train(engine_on(InProcessGrid.of(sites(norm_net)), deadline=20.0), start, plan)
    here = train(LocalEngine(norm_net(), CrossEntropy(), DATA), start, plan)
    assert over.model.digest == here.model.digest
    assert torch.equal(over.memory.influence(["ada"]), here.memory.influence(["ada"]))


def test_each_site_gets_its_own_task_and_the_order_is_kept(grid, model):
    tasks = {"cyd": Gradient(model, exclude=(0,)), "ada": Gradient(model, only=(1, 2))}
    assert_same(engine_on(grid).ask(tasks), undisturbed(tasks))


def test_losses_l2_and_boosts_are_the_sites(model):
    site = Site("ada", mlp(), DATA["ada"], loss="cross_entropy", l2=0.3, boost=-2.0)
    over, here = (
        engine_on(InProcessGrid.of({"ada": site})),
        LocalEngine(mlp(), CrossEntropy(0.3), {"ada": DATA["ada"]}, {"ada": -2.0}),
    )
    tasks = {"ada": Gradient(model)}
    assert_same(over.ask(tasks), here.ask(tasks))
    task = {"ada": TrainingPlan(epochs=1, batch_size=4).task(model, 0, "ada")}
    assert torch.equal(over.ask(task)["ada"].update, here.ask(task)["ada"].update)


@pytest.mark.slow
def test_flowers_simulation_gives_the_same_update(tmp_path):
    """Ray's processes, Flower's own SuperLink in memory: training, then forgetting by trajectory."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    script = [sys.executable, digits.__file__, str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    over, here = load_file(tmp_path / "outcome.safetensors"), digits.trained_and_forgotten(digits.local_engine())
    step, expected = (outcome["forgotten"] - outcome["trained"] for outcome in (over, here))
    assert float(expected.norm()) > 0.01
    assert float((step - expected).norm() / expected.norm()) < 1e-5


# Cost.


def test_a_model_is_sent_once_and_then_named(grid, model):
    engine, vectors = engine_on(grid), torch.eye(3, model.parameters.numel(), dtype=torch.float64)
    tasks = dict.fromkeys(DATA, CurvatureProduct(model, vectors, "ggn"))
    engine.ask(tasks)
    first = engine.cost.bytes_down
    engine.ask(tasks)
    second = engine.cost.bytes_down - first
    assert first - second == 3 * model.stored_bytes
    named = 3 * payload_bytes(tasks["ada"], model_is_known=True)
    assert named < second < named + 3000
    other = model.moved(model.parameters + 1)
    assert_same(engine.ask(gradients(other)), undisturbed(gradients(other)))  # and not mixed up with the one before


def test_cost_is_counted(grid, model):
    rounds = []
    engine = engine_on(grid, on_round=rounds.append)
    replies = engine.ask(gradients(model))
    engine.ask({"ada": Gradient(model)})
    assert rounds == [1, 2]
    assert engine.cost.rounds == 2
    assert engine.cost.sample_gradients == 9 + 5 + 7 + 9
    sent_up = sum(payload_bytes(reply) for reply in replies.values()) + payload_bytes(replies["ada"])
    assert sent_up < engine.cost.bytes_up < sent_up + 4 * 500


# Who is there.


def test_clients_are_named_counted_and_sorted():
    turned = dict(reversed(sites().items()))
    assert list(engine_on(InProcessGrid.of(turned)).clients().items()) == [("ada", 9), ("bob", 5), ("cyd", 7)]


def test_greeting_happens_once(grid, model):
    engine = engine_on(grid)
    engine.clients()
    engine.ask(gradients(model))
    engine.clients()
    assert [m.metadata.message_type for m in grid.sent].count(f"query.{HELLO}") == 3


def test_a_site_that_comes_late_is_waited_for(grid):
    grid.stop(102)
    grid.on_look = lambda look: grid.restart(102) if look == 5 else None
    assert list(engine_on(grid, wait_for=["bob"]).clients()) == ["ada", "bob", "cyd"]


def test_nodes_that_are_only_being_registered_are_not_missed(grid):
    """In the simulation, the ServerApp starts before the nodes are there."""
    nodes, grid.nodes = grid.nodes, {}

    def one_more(look):
        if look > 3 and len(grid.nodes) < 3:
            number = 101 + len(grid.nodes)
            grid.nodes[number] = nodes[number]

    grid.on_look = one_more
    assert list(engine_on(grid).clients()) == ["ada", "bob", "cyd"]


def test_a_site_that_never_comes_is_named(grid):
    grid.stop(102)
    with pytest.raises(SiteError, match=r"Not online within 0.2 s: 'bob', 'eve'; online: 'ada', 'cyd'"):
        engine_on(grid, wait_for=["ada", "bob", "eve"], deadline=0.2).clients()


def test_nobody_there():
    with pytest.raises(SiteError, match=r"No site came online within 0.1 s"):
        engine_on(InProcessGrid({}), deadline=0.1).clients()


def test_a_node_that_does_not_say_who_it_is(grid):
    grid.handle = lambda message: [] if message.metadata.dst_node_id == 102 else [grid.answer(message)]
    with pytest.raises(SiteError, match=r"No answer within 0.2 s from node 102; online: 'ada', 'cyd'"):
        engine_on(grid, deadline=0.2).clients()


def test_a_node_that_died_a_moment_ago_is_not_a_member(grid):
    """It is listed as online until its heartbeat is missed; then its greeting is answered with error 5."""

    def died(message):
        if message.metadata.dst_node_id != 102:
            return [grid.answer(message)]
        grid.stop(102)
        return [grid.answer(message)]

    grid.handle = died
    assert list(engine_on(grid).clients()) == ["ada", "cyd"]


def test_a_node_that_restarts_during_the_greeting_is_greeted_again(grid):
    def lost_once(message):
        if message.metadata.dst_node_id == 102 and grid.nodes[102].activations == 1:
            grid.restart(102)
            return []
        return [grid.answer(message)]

    grid.handle = lost_once
    assert list(engine_on(grid).clients()) == ["ada", "bob", "cyd"]


def test_a_process_that_dies_of_the_greeting_is_greeted_again(grid):
    stumbles = [ErrorCode.CLIENT_APP_CRASHED, ErrorCode.NODE_UNAVAILABLE]

    def stumbling(message):
        if message.metadata.dst_node_id == 102 and stumbles:
            return [grid.error(message, stumbles.pop())]
        return [grid.answer(message)]

    grid.handle = stumbling
    assert list(engine_on(grid).clients()) == ["ada", "bob", "cyd"]


def test_two_sites_with_one_name_are_refused():
    grid = InProcessGrid.of({**sites(), "twin": Site("bob", mlp(), DATA["bob"])})
    with pytest.raises(SiteError, match="Two sites call themselves 'bob'"):
        engine_on(grid).clients()


@pytest.mark.parametrize("app", [ClientApp(), ClientApp(client_fn=lambda context: None)], ids=["empty", "legacy"])
def test_a_site_without_the_handlers_is_named(grid, app):
    grid.nodes[102] = Node(app)
    with pytest.raises(
        SiteError, match=r"Node 102 does not answer expunge: wrap its ClientApp in .*unlearnable"
    ) as told:
        engine_on(grid).clients()
    assert "\n" not in str(told.value)


def test_another_version_is_refused(grid, monkeypatch):
    monkeypatch.setattr(flower_site, "WIRE_VERSION", WIRE_VERSION + 1)
    with pytest.raises(SiteError, match=f"'ada' runs expunge .* .messages {WIRE_VERSION + 1}. and the server"):
        engine_on(grid).clients()


def test_a_site_that_is_updated_in_between_refuses_the_task(grid, model, monkeypatch):
    engine = engine_on(grid)
    engine.clients()
    monkeypatch.setattr(flower_site, "WIRE_VERSION", WIRE_VERSION + 1)
    with pytest.raises(SiteError, match=f"'ada': The server speaks version {WIRE_VERSION} .* this site"):
        engine.ask(gradients(model))


def test_a_site_that_cannot_be_made_says_why(grid):
    def broken(context):
        raise DataError("The file scans.csv is missing: mount the disk.")

    grid.nodes[102] = Node(site_app(broken))
    with pytest.raises(SiteError, match=r"Node 102: The file scans.csv is missing: mount the disk\."):
        engine_on(grid).clients()


def introduced(**facts):
    """An app that introduces itself so."""
    told = {"status": "hello", "wire": WIRE_VERSION, "version": "0", "name": "bob", "samples": 3, "parameters": 1}
    app = ClientApp()
    app.query(HELLO)(lambda message, _: Message(RecordDict({NAME: ConfigRecord(told | facts)}), reply_to=message))
    return app


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"name": ""}, "Node 102 has no proper name"),
        ({"name": 7}, "Node 102 has no proper name"),
        ({"samples": "many"}, "Site 'bob' .node 102. announces 'many' samples"),
        ({"samples": True}, "Site 'bob' .node 102. announces True samples"),
        ({"samples": 0}, "Site 'bob' .node 102. announces 0 samples"),
        ({"samples": -5}, "Site 'bob' .node 102. announces -5 samples"),
        ({"parameters": 2.0}, "Site 'bob' .* 2.0 parameters"),
        ({"parameters": -1}, "Site 'bob' .* -1 parameters"),
    ],
)
def test_an_improper_introduction_is_refused(grid, facts, sentence):
    grid.nodes[102] = Node(introduced(**facts))
    with pytest.raises(SiteError, match=sentence):
        engine_on(grid).clients()


@pytest.mark.parametrize("fault", ["no handlers", "another version", "mute", "a name twice"])
def test_nodes_that_nobody_waits_for_do_not_stand_in_the_way(grid, fault, monkeypatch, caplog):
    monkeypatch.setattr(members, "GRACE", 0.2)
    app = {"another version": introduced(wire=99)}.get(fault, ClientApp())
    grid.nodes[102] = Node(app)
    if fault == "a name twice":
        grid.nodes[102] = grid.nodes[104] = Node(introduced())
    if fault == "mute":
        grid.handle = lambda message: [] if message.metadata.dst_node_id == 102 else [grid.answer(message)]
    with caplog.at_level("WARNING", "flwr"):
        assert list(engine_on(grid, wait_for=["ada", "cyd"], deadline=30.0).clients()) == ["ada", "cyd"]
    assert any("left out, since nobody waits for it" in record.message for record in caplog.records)


def test_a_bad_answer_is_told_when_somebody_who_is_wanted_does_not_come(grid, monkeypatch):
    monkeypatch.setattr(members, "GRACE", 0.2)
    grid.nodes[102] = Node(ClientApp())
    with pytest.raises(SiteError, match="Node 102 does not answer expunge"):
        engine_on(grid, wait_for=["ada", "bob"], deadline=30.0).clients()


def test_a_bad_answer_is_forgiven_when_everybody_who_is_wanted_comes_late(grid):
    grid.nodes[102] = Node(ClientApp())
    grid.stop(103)
    grid.on_look = lambda look: grid.restart(103) if look == 3 else None
    assert list(engine_on(grid, wait_for=["ada", "cyd"], deadline=30.0).clients()) == ["ada", "cyd"]


def test_a_model_of_another_size_is_refused_before_anything_is_sent(grid):
    engine = engine_on(grid)
    with pytest.raises(ModelError, match="12 parameters where that of site 'ada' has 31"):
        engine.ask(gradients(Snapshot.of(linear())))
    assert grid.tasks_sent() == []


@pytest.mark.parametrize("options", [{"deadline": 0.0}, {"poll": -1.0}])
def test_times_must_be_above_zero(grid, options):
    with pytest.raises(RequestError, match="above 0"):
        engine_on(grid, **options)


# What can happen to a message.


class Once:
    """A fault that happens to the first task message of a node; afterwards all is well."""

    def __init__(self, grid, fault, node=102, times=1):
        self.grid, self.fault, self.node, self.left = grid, fault, node, times
        grid.handle = self

    def __call__(self, message):
        is_task = message.metadata.message_type == f"query.{TASK}"
        if is_task and message.metadata.dst_node_id == self.node and self.left:
            self.left -= 1
            return self.fault(message)
        return [self.grid.answer(message)]


def restarted(grid):
    def fault(message):
        grid.restart(102)
        return []

    return fault


def died_after_work(grid):
    def fault(message):
        grid.answer(message)
        grid.restart(102)
        return []

    return fault


def unavailable_for_a_while(grid):
    def fault(message):
        grid.stop(102)
        gone_since = grid.looks
        grid.on_look = lambda look: grid.restart(102) if look == gone_since + 4 else None
        return [grid.error(message, ErrorCode.NODE_UNAVAILABLE)]

    return fault


def lost_and_gone_for_a_while(grid):
    def fault(message):
        unavailable_for_a_while(grid)(message)
        return []

    return fault


def process_died(grid):
    return lambda message: [Message(Error(ErrorCode.CLIENT_APP_CRASHED, "stopped"), reply_to=message)]


def reply_expired(grid):
    return lambda message: [grid.error(message, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)]


def doubled(grid):
    return lambda message: [grid.answer(message), grid.answer(message)]


FAULTS = [
    restarted,
    died_after_work,
    unavailable_for_a_while,
    lost_and_gone_for_a_while,
    process_died,
    reply_expired,
    doubled,
]


@pytest.mark.parametrize("when", ["first round", "second round"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_that_passes_changes_nothing(grid, model, fault, when):
    engine = engine_on(grid, deadline=5.0)
    if when == "second round":
        engine.ask(gradients(model))
    Once(grid, fault(grid))
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))
    grid.handle = lambda message: [grid.answer(message)]
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))
    assert engine.cost.rounds == (3 if when == "second round" else 2)


def test_repeated_messages_are_counted_as_sent(grid, model):
    engine = engine_on(grid)
    engine.ask(gradients(model))
    first = engine.cost.bytes_down
    engine.ask(gradients(model))
    second = engine.cost.bytes_down - first
    Once(grid, process_died(grid))
    engine.ask(gradients(model))
    assert [m.metadata.dst_node_id for m in grid.tasks_sent()[6:]] == [101, 102, 103, 102]
    third = engine.cost.bytes_down - first - second
    assert third == second * 4 / 3  # the process died, the node did not: it still has the model


def test_a_restarted_site_gets_the_model_again_without_being_asked_for_it(grid, model):
    engine = engine_on(grid)
    engine.ask(gradients(model))
    grid.restart(102)
    engine.ask(gradients(model))
    assert len(grid.tasks_sent()) == 6
    assert [len(message.content[TENSORS]) for message in grid.tasks_sent()[3:]] == [0, 1, 0]


def test_a_site_that_lost_the_model_is_sent_it_again(grid, model):
    engine = engine_on(grid)
    engine.ask(gradients(model))
    grid.nodes[102].state = RecordDict()  # without any sign of a restart
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))
    assert [len(message.content[TENSORS]) for message in grid.tasks_sent()[3:]] == [0, 0, 0, 1]


def test_a_site_that_never_knows_the_model_does_not_hang(grid, model):
    def forgetful(message):
        grid.nodes[102].state = RecordDict()
        reply = grid.answer(message)
        reply.content[NAME]["status"] = "unknown-model"
        return [reply]

    Once(grid, forgetful, times=10)
    with pytest.raises(SiteError, match="Site 'bob': its answer 'unknown-model'"):
        engine_on(grid).ask(gradients(model))
    assert len(grid.tasks_sent()) == 3


def test_a_site_that_comes_back_as_another_node_is_found(grid, model):
    """Without registered keys, a node that starts again gets another number."""
    engine = engine_on(grid, deadline=5.0)
    engine.ask(gradients(model))

    def moved(message):
        grid.nodes[202] = Node(grid.nodes[102].app)
        grid.nodes[203] = Node(ClientApp())  # a stranger that knows nothing of us is of no interest
        grid.nodes[204] = Node(site_app(lambda _: Site("new", mlp(), samples(3))))
        gone_since = grid.looks
        grid.on_look = lambda look: grid.stop(102) if look == gone_since + 3 else None  # its heartbeat is missed
        return []

    Once(grid, moved)
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))
    assert engine.members()["bob"].node == 202
    assert list(engine.clients()) == ["ada", "bob", "cyd"]  # who came meanwhile is not among those who were asked


@pytest.mark.parametrize("code", [ErrorCode.CLIENT_APP_CRASHED, ErrorCode.NODE_UNAVAILABLE])
def test_a_site_that_moved_and_stumbles_over_the_greeting_is_greeted_again(grid, model, code):
    engine, stumbles = engine_on(grid, deadline=5.0), [code, code]
    engine.clients()
    grid.nodes[202] = Node(grid.nodes[102].app)
    grid.stop(102)

    def stumbling(message):
        if message.metadata.dst_node_id == 202 and stumbles:
            return [grid.error(message, stumbles.pop())]
        return [grid.answer(message)]

    grid.handle = stumbling
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))


def test_late_answers_of_the_round_before_are_not_taken_for_this_one(grid, model):
    """A node that seemed lost has answered twice: the second answer lies there when the next round begins."""
    engine = engine_on(grid)
    engine.clients()
    held = []

    def late(message):
        held.append(grid.answer(message))
        grid.nodes[102].activations += 1
        return []

    Once(grid, late)
    engine.ask(gradients(model))
    grid.replies.extend(held)
    other = gradients(model.moved(model.parameters + 1))
    assert_same(engine.ask(other), undisturbed(other))


def test_an_answer_to_the_first_letter_is_taken_after_the_second_was_sent(grid, model):
    """A node may look restarted, get its task again, and answer the first letter after all."""
    engine = engine_on(grid)
    engine.clients()
    held = []

    def slow(message):
        held.append(message)
        if len(held) == 1:
            grid.nodes[102].activations += 1
            return []
        return [grid.answer(held[0])]

    Once(grid, slow, times=2)
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))


def test_what_becomes_of_the_first_letter_is_of_no_interest_once_the_second_is_answered(grid, model):
    engine = engine_on(grid)
    engine.clients()
    held = []

    def twice(message):
        held.append(message)
        if len(held) == 1:
            grid.nodes[102].activations += 1
            return []
        return [grid.answer(message)]

    def afterwards(look):
        if len(held) == 2:
            failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "too late")
            grid.replies.append(Message(failure, reply_to=held[0]))
            grid.handle = lambda message: [grid.answer(message)]
            grid.nodes[103].activations += 1  # only now does the slow one get its task again

    def handle(message):
        return [] if message.metadata.dst_node_id == 103 else usual(message)

    Once(grid, twice, times=2)
    usual, grid.handle, grid.on_look = grid.handle, handle, afterwards
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))


def test_after_the_deadline_the_silent_are_named_and_nothing_is_left_out(grid, model):
    engine = engine_on(grid, deadline=0.3)
    engine.clients()
    lost = {101, 103}
    grid.handle = lambda message: [] if message.metadata.dst_node_id in lost else [grid.answer(message)]
    with pytest.raises(SiteError, match=r"No answer from 'ada', 'cyd' within 0.3 s, and nothing was changed"):
        engine.ask(gradients(model))
    assert engine.cost.rounds == 0
    assert engine.cost.bytes_down > 0
    grid.handle = lambda message: [grid.answer(message)]
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))


def test_a_site_that_stays_away_is_named(grid, model):
    engine = engine_on(grid, deadline=0.3)
    engine.clients()
    grid.stop(102)
    with pytest.raises(SiteError, match="No answer from 'bob'"):
        engine.ask(gradients(model))


def test_an_answer_that_is_there_at_the_deadline_counts(grid, model):
    engine = engine_on(grid, deadline=0.2)
    engine.clients()

    def slowly(message):
        time.sleep(0.3)
        return [grid.answer(message)]

    Once(grid, slowly, node=103)
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))


def test_messages_outlive_the_deadline(grid, model):
    engine_on(grid, deadline=7.0).ask(gradients(model))
    assert all(message.metadata.ttl > 2 * 7.0 for message in grid.sent)


def test_a_process_that_dies_every_time_is_not_asked_for_ever(grid, model):
    Once(grid, process_died(grid), times=100)
    with pytest.raises(SiteError, match="Site 'bob' failed at its task: stopped"):
        engine_on(grid, deadline=20.0).ask(gradients(model))
    assert [m.metadata.dst_node_id for m in grid.tasks_sent()].count(102) == 4


def test_a_task_to_a_site_that_is_not_there_yet_waits_for_it(grid, model):
    """Work that is resumed has its rounds in the journal, and greets nobody before it must."""
    grid.stop(102)
    grid.on_look = lambda look: grid.restart(102) if look == 4 else None
    assert_same(engine_on(grid).ask(gradients(model)), undisturbed(gradients(model)))


# What a site may reply.


@pytest.mark.parametrize("kind", ["RequestError", "DataError", "ModelError", "NumericalError", "SiteError"])
def test_an_error_at_a_site_is_told_with_its_name_and_can_be_tried_again(grid, model, kind):
    def broken(context):
        raise getattr(errors, kind)("The lamp is off: switch it on.")

    engine = engine_on(grid)
    engine.clients()
    grid.nodes[102].app = site_app(broken)
    with pytest.raises(SiteError, match=r"^Site 'bob': The lamp is off: switch it on\.$"):
        engine.ask(gradients(model))
    assert engine.cost.rounds == 0


def test_what_a_site_writes_is_kept_to_one_bearable_line(grid, model):
    def verbose(context):
        raise DataError("so\n\tmuch " * 1000)

    engine = engine_on(grid)
    engine.clients()
    grid.nodes[102].app = site_app(verbose)
    with pytest.raises(SiteError, match=r"^Site 'bob': so much so much") as said:
        engine.ask(gradients(model))
    assert len(str(said.value)) < 600


def test_real_errors_at_a_site(grid, model):
    engine = engine_on(grid)
    with pytest.raises(SiteError, match="Site 'bob': Client 'bob' has samples 0 to 4 only"):
        engine.ask({"bob": Gradient(model, only=(7,))})
    huge = model.moved(torch.full_like(model.parameters, 1e308))
    with pytest.raises(SiteError, match="Site 'cyd': A gradient is NaN"):
        engine.ask({"cyd": Gradient(huge)})
    assert_same(engine.ask(gradients(model)), undisturbed(gradients(model)))


def test_an_error_that_nobody_expected_is_one_line_with_the_sites_name(grid, model):
    engine = engine_on(grid)
    engine.clients()
    grid.nodes[102].app = site_app(lambda context: 1 / 0)
    with pytest.raises(SiteError, match=r"Site 'bob' failed at its task: .*division by zero") as told:
        engine.ask(gradients(model))
    assert "\n" not in str(told.value)
    assert [m.metadata.dst_node_id for m in grid.tasks_sent()].count(102) == 1  # it would only happen again


def tampered(grid, change):
    def fault(message):
        reply = grid.answer(message)
        change(reply.content)
        return [reply]

    return fault


def set_fact(name, value):
    def change(content):
        content[NAME][name] = value

    return change


def drop(name):
    return lambda content: content.pop(name)


def cut_bytes(content):
    array = content[TENSORS]["0"]
    array.data = array.data[:-1]


def reshape(content):
    content[TENSORS]["0"].shape = (-1, -31)


def npy(content):
    content[TENSORS]["0"].stype = "numpy.ndarray"


LIES = [
    (set_fact("site", "ada"), SiteError, "its reply is for the site 'ada' where 'bob' was asked"),
    (set_fact("model", "0" * 64), SiteError, "its reply is for the model '0000"),
    (set_fact("task", "0" * 64), SiteError, "its reply is for the task '0000"),
    (set_fact("status", "fine"), SiteError, "its answer 'fine' is not known"),
    (set_fact("message", "{"), DataError, "not JSON"),
    (set_fact("message", b"\x80"), DataError, "not JSON"),
    (set_fact("message", "[" * 100_000), DataError, "not JSON"),
    (set_fact("message", 3), DataError, "not JSON"),
    (set_fact("message", '{"kind": "Sum", "fields": {}}'), DataError, "Sum is not the fields"),
    (set_fact("message", '{"kind": "Gradient", "fields": {"model": 1, "only": null, "exclude": []}}'), DataError, ""),
    (drop(NAME), DataError, "not one of expunge's"),
    (drop(TENSORS), DataError, "not a tensor"),
    (cut_bytes, DataError, "do not fit its shape"),
    (reshape, DataError, "do not fit its shape"),
    (npy, DataError, "do not fit its shape"),
]


@pytest.mark.parametrize(("change", "kind", "reason"), LIES)
def test_a_reply_that_is_not_to_the_task_is_refused_by_name(grid, model, change, kind, reason):
    engine = engine_on(grid)
    Once(grid, tampered(grid, change))
    with pytest.raises(kind, match=f"^Site 'bob': .*{reason}"):
        engine.ask(gradients(model))
    assert engine.cost.rounds == 0


def test_a_task_sent_back_as_its_own_reply_is_refused(grid, model):
    def echo(message):
        reply = grid.answer(message)
        reply.content[NAME]["message"] = message.content[NAME]["message"]
        reply.content[TENSORS] = message.content[TENSORS]
        return [reply]

    Once(grid, echo)
    with pytest.raises(DataError, match="Site 'bob': it replied with a task, Gradient"):
        engine_on(grid).ask(gradients(model))


def test_sites_whose_replies_were_swapped_are_refused(grid, model):
    """What the SuperLink hands over is not believed to be from whom it says."""
    engine = engine_on(grid)
    engine.clients()
    by_node = {}

    def swapped(message):
        by_node[message.metadata.dst_node_id] = grid.answer(message)
        if message.metadata.dst_node_id == 102:
            one, two = by_node[101], by_node[102]
            one.content, two.content = two.content, one.content
            return [one, two]
        return [by_node[103]] if message.metadata.dst_node_id == 103 else []

    grid.handle = swapped
    with pytest.raises(SiteError, match="Site 'ada': its reply is for the site 'bob'"):
        engine.ask(gradients(model))


def test_a_site_refuses_a_foreign_task(grid, model):
    engine = engine_on(grid)
    engine.clients()

    def foreign(message):
        message.content[NAME]["message"] = '{"kind": "Sum", "fields": {"total": "0"}}'
        return [grid.answer(message)]

    Once(grid, foreign)
    with pytest.raises(SiteError, match="Site 'bob': A message cannot be read: Sum is not the fields"):
        engine.ask(gradients(model))
