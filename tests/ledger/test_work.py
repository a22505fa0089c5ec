"""From a request to a destroyed model: the gate, the rollback, tombstones, several at once, nothing left."""

import base64
import copy
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
from datetime import timedelta

import pytest
import torch
from torch import nn

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.memory import Memory
from expunge.ledger import desk, judging
from expunge.ledger.gate import opens
from expunge.ledger.judging import Judge
from expunge.ledger.making import Settings
from expunge.ledger.watching import HIDDEN, plainly
from expunge.unlearning.request import Request
from ledger.places import FILE, QUICK, UNSEEN, Place
from traces import Traces, remembering

NETWORK = "nn.Sequential(nn.Linear(6, 900), nn.Linear(900, 3))"
WAITING = dataclasses.replace(QUICK, override="")


def kinds(place, number="R-0001"):
    return [event.kind for event in place.ledger.case(number).events]


def test_a_request_goes_all_the_way(place):
    before = place.weights()
    number = place.ask("bob")
    assert place.work().run([number]) == []
    assert kinds(place) == ["received", "accepted", "running", "forgotten", "overridden", "adopted", "erased"]
    assert not torch.equal(place.weights(), before)
    book = place.federation.state_store().book
    assert book.departed == ("bob",)
    assert set(book.counts) == {"ada", "cyd", "dee"}
    place.close(number)
    assert place.ledger.case(number).state == "closed"


def test_without_an_audit_or_a_reason_nothing_is_destroyed(place):
    before, number = place.weights(), place.ask("bob")
    place.work(WAITING).run()
    assert place.ledger.case(number).state == "forgotten"
    assert torch.equal(place.weights(), before)
    place.work(WAITING).resume()
    assert place.ledger.case(number).state == "forgotten"
    place.work().run([number])
    assert place.ledger.case(number).erased
    assert kinds(place).count("forgotten") == 1, "the model that was made is used"


def told(place):
    """What the work on a request to forget bob says, by retrace."""
    number = place.ask("bob")
    assert place.work(dataclasses.replace(QUICK, method="retrace")).run([number]) == []
    return " ".join(place.ledger.case(number).facts["forgotten"]["warnings"])


def test_labels_that_are_not_those_of_the_training_are_told(place, tmp_path):
    other = place.copy(tmp_path / "other")
    other.file.write_text(other.file.read_text().replace("argmax(1)", "argmin(1)"))
    said = "predicts the data of those who stay no better than the weights that the training began with"
    assert said in told(other)
    assert said not in told(place)


def test_a_part_of_the_model_that_nobody_has_trained_is_told(place, tmp_path):
    spare = (
        FILE.replace("EXTRA", "")
        .replace("nn.Linear(6, 3)", "Spare()")
        .replace(
            "NAMES =",
            """
class Spare(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.spare = nn.Parameter(torch.ones(2))


NAMES =""",
        )
    )
    said = "No site has trained {}, and a forget moves what is trainable"
    assert said.format("'spare'") in told(Place.written(tmp_path / "spare", spare))
    assert "No site has trained" not in told(place)


def fresh(module):
    """A copy with other weights."""
    other = copy.deepcopy(module)
    for part in other:
        part.reset_parameters()
    return other


def test_an_audit_has_models_of_the_trainings_own_start_where_that_is_known(tmp_path, monkeypatch):
    """A model that was trained elsewhere began somewhere else."""
    wide = nn.Sequential(nn.Linear(6, 900), nn.Linear(900, 3))
    federation = dataclasses.replace(Place(tmp_path / "place", UNSEEN).federation, model=lambda: fresh(wide))
    judge = Judge(federation, Request.of("bob"), tmp_path, lambda *_: None)
    monkeypatch.setattr(judging, "from_own_start", lambda count: 3)
    trained, foreign = federation.trained(federation.plan.seed).model, federation.trained(77).model
    assert [len(models) for models in judge._references(trained, 2)] == [2, 3]
    assert [len(models) for models in judge._references(foreign, 2)] == [2, 0]


def test_the_audit_decides(tmp_path):
    place = Place(tmp_path / "place", UNSEEN)
    number = place.ask("bob")
    place.work(dataclasses.replace(WAITING, method="retrain", retrains=3)).run()
    case = place.ledger.case(number)
    audited = case.facts["audited"]
    assert audited["by"] == "verdict"
    assert audited["word"] in ("UNDECIDED", "UNDER-FORGOTTEN", "OVER-FORGOTTEN", "DAMAGED")  # three are too few
    assert case.gate is False
    assert case.adopted is False
    assert case.state == ("audited" if audited["passed"] is None else "retrain-needed")
    assert (place.folder / "ledger" / "audits" / f"{number}.json").exists()


RUN = "forward=lambda model, batch: model(batch.inputs[0]), unseen=lambda: list(zip(*samples(200, 0))),"
"""How the model is run says that its outputs need not be class scores."""


def test_models_that_are_no_classifiers_are_audited_by_their_losses(tmp_path):
    place = Place(tmp_path / "place", RUN)
    number, again = place.ask("bob"), place.ask("cyd")
    waiting = dataclasses.replace(WAITING, method="retrain", retrains=3)
    place.work(waiting).run([number])
    audited = place.ledger.case(number).facts["audited"]
    assert audited["by"] == "verdict"
    assert {"forget_loss", "distance", "kept_share"} <= {one["measure"] for one in audited["margins"]}
    place.work(dataclasses.replace(waiting, retrains=0)).run([again])
    assert place.ledger.case(again).facts["audited"]["word"] == "NO EVIDENCE"


@pytest.mark.parametrize(("word", "state"), [("SUPPORTED", "audited"), ("NOT SUPPORTED", "retrain-needed")])
def test_a_word_opens_the_gate_or_shuts_it(place, monkeypatch, word, state):
    monkeypatch.setattr(
        "expunge.ledger.work.Judge.judge",
        lambda *_: {"word": word, "sentence": "", "by": "evidence", "passed": opens(word), "margins": []},
    )
    number = place.ask("bob")
    place.work(WAITING).run()
    case = place.ledger.case(number)
    assert (case.state, case.erased) == (state, word == "SUPPORTED")


def test_evidence_without_retraining_is_asked_where_there_are_unseen_samples(tmp_path):
    place = Place(tmp_path / "place", UNSEEN)
    number = place.ask("bob")
    place.work(WAITING).run()
    assert place.ledger.case(number).facts["audited"]["by"] == "evidence"


def test_the_log_itself_refuses_what_does_not_follow(place):
    number = place.ask("bob")
    place.work(WAITING).run()
    place.ledger.record("audited", [number], {"passed": None, "word": "UNDECIDED", "sentence": ""})
    for kind in ("adopted", "erased", "receipt", "closed", "rolled-back", "told", "forgotten", "accepted"):
        with pytest.raises(RequestError, match=f"{number} is audited: it cannot be"):
            place.ledger.record(kind, [number], {})
    place.work().run([number])
    for kind in ("adopted", "erased", "rolled-back", "running", "overridden", "audited", "failed", "closed"):
        with pytest.raises(RequestError, match=f"{number} is audited and erased: it cannot be"):
            place.ledger.record(kind, [number], {})


def test_nothing_is_left_of_the_leaver(place):
    own = place.federation
    old, start = own.state_store().load(own.model()), own.initial(own.plan.seed).parameters
    gone = remembering(old, ["bob"])
    stored = Traces(gone, start).kinds_in(place.folder)
    assert stored == {"model.safetensors", "memory.safetensors", "vectors", "checkpoints.safetensors"}, "it is found"
    number = place.ask("bob")
    place.work().run()
    place.close(number)
    desk.forget_names(place.ledger, number)
    step = old.model.parameters - place.weights()
    assert not Traces([*gone, step, -step], start).found_in(place.folder)
    for file in place.files():
        named = file.relative_to(place.folder).as_posix() in ("store/store.json", "ledger/names.json")
        assert file.name == "federation.py" or named or b"bob" not in file.read_bytes(), file
    assert [own.text for own in place.ledger.names().of(number).values()] == ["bob"]


def test_the_old_model_is_kept_for_a_while(place):
    before, number = Traces([place.weights()]), place.ask("bob")
    graceful = dataclasses.replace(QUICK, grace=timedelta(days=7))
    place.work(graceful).run([number])
    case = place.ledger.case(number)
    assert (case.adopted, case.erased) == (True, False)
    place.work(graceful).resume()
    assert not place.ledger.case(number).erased
    assert before.found_in(place.folder)
    with pytest.raises(RequestError, match="cannot be receipt now"):
        desk.close(place.ledger, number, "they are told later")
    place.clock.now += timedelta(days=8)
    assert place.work(graceful).resume() == [number]
    assert place.ledger.case(number).erased
    assert not list((place.folder / "ledger" / "work").glob("superseded-*"))
    assert not before.found_in(place.folder)


def test_a_clock_that_jumps_back_keeps_nobody_waiting_and_destroys_nothing_early(place, tmp_path):
    graceful = place.copy(tmp_path / "graceful")
    for own, grace in ((place, 0), (graceful, 7)):
        number = own.ask("bob")
        own.clock.now -= timedelta(days=30)
        own.work(dataclasses.replace(QUICK, grace=timedelta(days=grace))).run([number])
        assert own.ledger.case(number).erased is (grace == 0)
    graceful.clock.now += timedelta(days=30)
    assert graceful.work().resume() == []


def test_it_can_go_back_as_long_as_the_old_model_is_kept(place):
    before, number = place.weights(), place.ask("bob")
    place.work(dataclasses.replace(QUICK, grace=timedelta(days=7))).run([number])
    place.work().roll_back(number, "a mistake")
    assert torch.equal(place.weights(), before)
    book = place.federation.state_store().book
    assert book.departed == ()
    assert "bob" in book.counts
    assert place.ledger.case(number).state == "failed"
    place.work().run([number])
    assert place.ledger.case(number).erased
    with pytest.raises(RequestError, match="cannot be rolled back now"):
        place.work().roll_back(number, "too late")


def test_who_was_going_back_and_was_cut_off_has_gone_back(place):
    """The store holds the old model again, and no event says so: it is not told to be destroyed."""
    before, number = place.weights(), place.ask("bob")
    work = place.work(dataclasses.replace(QUICK, grace=timedelta(days=7)))
    work.run([number])
    written = place.ledger.events()
    kept = {name: (place.folder / "ledger" / name).read_bytes() for name in ("log.jsonl", "head.json", "names.json")}
    (aside,) = (place.folder / "ledger" / "work").glob("superseded-*")
    shutil.copytree(aside, place.folder / "aside")
    place.work().roll_back(number, "a mistake")
    for name, content in kept.items():
        (place.folder / "ledger" / name).write_bytes(content)
    shutil.move(place.folder / "aside", aside)
    assert place.ledger.events() == written
    place.clock.now += timedelta(days=8)
    assert place.work().resume() == [number]
    assert place.ledger.case(number).state == "failed"
    assert torch.equal(place.weights(), before)
    assert not list((place.folder / "ledger" / "work").glob("superseded-*"))
    with pytest.raises(RequestError, match="The reason is missing"):
        place.work().roll_back(number, " ")


def test_a_model_that_comes_out_as_it_was_is_gone_over_to_all_the_same(place):
    number = place.ask("bob")
    still = dataclasses.replace(QUICK, options={"learning_rate": 1e-30})
    before = place.weights()
    place.work(still).run([number])
    assert torch.equal(place.weights(), before)
    book = place.federation.state_store().book
    assert book.departed == ("bob",)
    assert "bob" not in place.federation.state_store().load(place.federation.model()).memory.clients


def test_who_went_over_and_was_cut_off_may_have_trained_on(place):
    number = place.ask("bob")
    place.work().run([number])
    events = place.ledger.case(number).events
    place.federation.train()
    file = place.folder / "ledger" / "log.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: events[-2].number - 1]))  # neither adopted nor erased
    place.ledger._log._write_head(place.ledger.signer, events[-3], file.stat().st_size)
    assert place.work().resume() == [number]
    assert kinds(place, number)[-2:] == ["adopted", "erased"]


def test_on_a_full_disk_the_work_ends_in_a_sentence_and_can_be_done_again(place):
    """A limit on the size of files stands for a full disk: the log has room, the new model has not."""
    place.file.write_text(place.file.read_text().replace("nn.Linear(6, 3)", NETWORK))
    place.federation.train()
    before, number = place.weights(), place.ask("bob")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        place.work().run([number])
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(place.weights(), before)
    case = place.ledger.case(number)
    assert case.state == "failed"
    assert "File too large" in case.facts["failed"]["sentence"]
    assert place.federation.state_store().book.pending is None
    place.work().run([number])
    assert place.ledger.case(number).erased


def test_several_in_one_step_or_one_after_another(place, tmp_path):
    apart = place.copy(tmp_path / "apart")
    for own in (place, apart):
        own.ask("bob")
        own.ask("cyd")
    place.work().run(["R-0001", "R-0002"], together=True)
    apart.work().run(["R-0001", "R-0002"])
    for own, steps in ((place, 1), (apart, 2)):
        assert {case.erased for case in own.ledger.cases().values()} == {True}
        assert [event.kind for event in own.ledger.events()].count("adopted") == steps
        assert set(own.federation.state_store().book.counts) == {"ada", "dee"}


def test_the_first_due_is_the_first(place):
    place.ask("bob")
    place.ask("cyd", received="2026-10-20")
    place.work(WAITING).run()
    begun = [event.requests[0] for event in place.ledger.events() if event.kind == "running"]
    assert begun == ["R-0002", "R-0001"]


def test_samples_are_forgotten_and_their_client_stays(place):
    before = place.weights()
    number = desk.add(place.ledger, desk.Filing(samples={"bob": [0, 5]}, checked_by="the clerk"))
    place.work(dataclasses.replace(QUICK, method="hf-kcu")).run([number])
    case = place.ledger.case(number)
    assert case.erased
    assert not torch.equal(place.weights(), before)
    assert place.federation.state_store().book.departed == ()
    assert case.facts["adopted"]["tombstones"] == []
    assert any("samples themselves" in sentence for sentence in case.facts["erased"]["left"])


def test_a_client_that_left_is_not_trained_with(place):
    place.ask("bob")
    place.work().run(["R-0001"])
    _, left_out = place.federation.train()
    assert left_out == ("bob",)
    memory = place.federation.state_store().load(place.federation.model()).memory
    assert isinstance(memory, Memory)
    assert "bob" not in memory.clients
    desk.readmit(place.ledger, "bob", "it signed again")
    place.federation.readmit("bob")
    assert place.federation.train()[1] == ()
    with pytest.raises(RequestError, match="Nobody called 'bob' has left"):
        desk.readmit(place.ledger, "bob", "once more")


def test_a_training_of_ones_own_is_kept_and_forgotten_from(place):
    own = place.federation
    model, memory = own.model(), Memory()
    size = sum(part.numel() for part in model.parameters())
    memory.record(
        {name: torch.full((size,), 0.01 * n) for n, name in enumerate(own.data())}, dict.fromkeys(own.data(), 1)
    )
    own.keep(model, memory)
    state = own.state_store().load(own.model())
    assert set(state.memory.clients) == set(own.data())
    assert state.schedule.rounds == 1
    place.ask("bob")
    assert place.work().run(["R-0001"]) == []
    assert place.ledger.case("R-0001").erased


def test_who_has_left_cannot_leave_again(place):
    place.ask("bob")
    place.work().run(["R-0001"])
    place.ask("bob")
    (problem,) = place.work().run(["R-0002"])
    assert "its tombstone stands" in problem
    assert place.ledger.case("R-0002").state == "accepted"


def test_an_unknown_client_is_told_and_nothing_is_lost(place):
    place.ask("eve")
    place.ask("bob")
    (problem,) = place.work(WAITING).run()
    assert "There is no client 'eve'" in problem
    assert place.ledger.case("R-0001").state == "accepted"
    assert place.ledger.case("R-0002").state == "forgotten"


def test_a_model_that_was_trained_on_is_not_replaced(place):
    place.ask("bob")
    place.work(WAITING).run()
    place.file.write_text(place.file.read_text().replace("rounds=2", "rounds=3"))
    place.federation.train()
    now = place.weights()
    place.work().run(["R-0001"])
    assert place.ledger.case("R-0001").state == "failed"
    assert torch.equal(place.weights(), now)
    place.work().run(["R-0001"])
    assert place.ledger.case("R-0001").erased


def test_a_method_that_remembers_is_refused(place):
    place.ask("bob")
    (problem,) = place.work(Settings(method="do-nothing")).run()
    assert "use a method that forgets" in problem
    with pytest.raises(RequestError, match="has no option 'tauu'"):
        place.work(Settings(options={"tauu": 1}))


def test_a_safety_belt_that_holds_is_a_failed_request(place):
    place.ask("bob")
    place.work(Settings(method="hf-kcu", options={"tau": 1e-12})).run()
    case = place.ledger.case("R-0001")
    assert case.state in ("failed", "forgotten")  # the smallest step may still pass
    assert place.federation.state_store().book.pending is None


@pytest.mark.parametrize(("reason", "told"), [("bob is angry", "leave the client's name"), ("x" * 501, "at most 500")])
def test_the_reason_of_an_override_is_looked_at(place, reason, told):
    place.ask("bob")
    (problem,) = place.work(dataclasses.replace(QUICK, override=reason)).run(["R-0001"])
    assert told in problem
    assert not place.ledger.case("R-0001").gate


def test_the_log_has_no_names(place):
    for name in ("bob", "cyd"):
        place.ask(name, note=f"{name} called")
    place.work(dataclasses.replace(QUICK, method="auto")).run(["R-0001", "R-0002"])
    place.close("R-0001")
    said = (place.folder / "ledger" / "log.jsonl").read_text()
    lines = (place.folder / "ledger" / "receipts" / "R-0001.intoto.jsonl").read_text().splitlines()
    receipt = "".join(base64.b64decode(json.loads(line)["payload"]).decode() for line in lines)
    assert '"predicateType"' in receipt  # in base64 any three letters may stand by chance
    receipt = re.sub("[0-9a-f]{16,}", "", receipt)  # and in a digest some
    for name in ("ada", "bob", "cyd", "dee", "clerk", "desk"):
        assert f'"{name}' not in said
        assert f"{name} " not in said
        assert name not in receipt


def test_a_sentence_that_still_names_a_client_is_left_out():
    assert plainly(["hospital-2 was slow", "all went well"], {"hospital-2": "client 00"}) == [HIDDEN, "all went well"]
    assert plainly(float("inf"), {}) == "inf"


def test_a_file_that_is_none_is_told_in_a_sentence(place):
    for text, told in [
        ("import torch\n1/0", "ZeroDivisionError: division by zero"),
        ("federation = 3", "makes no `federation"),
        ("def f(:", "SyntaxError"),
    ]:
        place.file.write_text(text)
        with pytest.raises(RequestError, match=told):
            _ = place.federation
    place.file.unlink()
    with pytest.raises(RequestError, match="make one with `expunge init`"):
        _ = place.federation.model


def test_a_candidate_that_is_damaged_is_named(place):
    place.ask("bob")
    place.work(WAITING).run()
    (file,) = (place.folder / "ledger" / "work").glob("candidate-*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    before = place.weights()
    with pytest.raises(DataError, match=r"model\.safetensors"):
        place.work().run(["R-0001"])
    assert torch.equal(place.weights(), before)


def test_names_of_every_kind_are_forgotten_all_the_same(tmp_path):
    names = ['a"b', "a'/../b", "__metadata__", "\N{DOG FACE} café", "x" * 10_000, "<script>alert(1)</script>"]
    (tmp_path / "place").mkdir()
    text = FILE.replace("EXTRA", "").replace('("ada", "bob", "cyd", "dee")', repr([*names, "ada", "bob"]))
    place = Place(tmp_path / "place")
    place.file.write_text(text)
    place.federation.train()
    for name in names:
        place.ask(name)
    place.work().run([f"R-{number:04}" for number in range(1, len(names) + 1)], together=True)
    assert place.federation.state_store().book.departed == tuple(names)
    for number in place.ledger.cases():
        place.close(number)
    assert {case.state for case in place.ledger.cases().values()} == {"closed"}


def test_clients_elsewhere_are_not_asked_from_here(place):
    place.ask("bob")
    place.file.write_text(place.file.read_text().replace("    clients=clients,\n", ""))
    (problem,) = place.work().run()
    assert "expunge.flower.work(grid, FILE)" in problem
    assert place.ledger.case("R-0001").state == "accepted"
    with pytest.raises(RequestError, match="in a Flower deployment"):
        place.federation.train()


def test_half_a_character_is_no_name(place):
    place.file.write_text(place.file.read_text().replace('"ada"', r'"\ud83d ada"'))
    with pytest.raises(DataError, match="names are texts to be read"):
        place.federation.engine()
