"""The commands: what they print, JSON, and one sentence for whatever is wrong, with nothing lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest

from ledger.places import QUICK


@pytest.fixture
def at(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("EXPUNGE_BY", "the desk")
    monkeypatch.setenv("COLUMNS", "200")
    return place


def test_from_the_desk_to_the_receipt(at, expunge):
    code, out, _ = expunge("request", "add", "--client", "bob", "--note", "by post", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "received"
    assert json.loads(expunge("request", "accept", "R-0001", "--checked-by", "the clerk", "--json")[1])["open"] is True
    code, out, _ = expunge("request", "extend", "R-0001", "--reason", "we are few", "--json")
    assert json.loads(out)["days"] > 60
    code, _, said = expunge("request", "run", "--method", "fine-tuning", "--grace", "1s")
    assert code == 0
    assert "forgotten by fine-tuning" in said
    assert "--override TEXT" in said
    code, out, said = expunge("request", "run", "R-0001", "--override", "looked at", "--json")
    assert code == 0
    assert [event["kind"] for event in json.loads(out)][:2] == ["overridden", "adopted"]
    while "erased" not in (out := expunge("request", "show", "R-0001", "--json")[1]):
        assert expunge("request", "resume")[0] == 0
    assert json.loads(out)["recipients"] == [{"name": name, "told": None} for name in ("ada", "cyd", "dee")]
    code, out, said = expunge("request", "close", "R-0001", "--told", "ada", "--untold", "unknown", "--forget-names")
    assert code == 0, said
    assert "R-0001.intoto.jsonl" in said
    assert json.loads(expunge("status", "--json")[1])["tombstones"][0]["name"] == "bob"
    code, out, _ = expunge(
        "receipt", "verify", "ledger/receipts/R-0001.intoto.jsonl", "--key", "ledger/key.pub", "--json"
    )
    assert json.loads(out)["receipt"]["recipients"]["told"] == 1
    papers = ("ledger/receipts/R-0001.intoto.jsonl", "--key", "ledger/key.pub", "--out", "page.html", "--for", "<bob>")
    assert expunge("receipt", "certificate", *papers)[0] == 0
    assert "&lt;bob&gt;" in (at.folder / "page.html").read_text()
    assert "bob" not in (at.folder / "ledger" / "receipts" / "R-0001.html").read_text()


def test_status_says_what_is_due_when(at, expunge):
    for client, received in (("ada", "2026-11-10"), ("bob", "2026-10-01")):
        expunge("request", "add", "--client", client, "--received", received)
    _, out, _ = expunge("status")
    assert re.search(r"R-0002 +bob .*R-0001 +ada", out, re.S), "the first due is the first"
    assert "late" in out
    assert "2 open" in out
    assert "The log is whole: 3 events" in out


WRONG = {
    "nobody": (["request", "add"], "names nothing to forget"),
    "a due date in the past": (["request", "add", "--client", "x", "--due", "2020-01-01"], "is past"),
    "a due date too late": (["request", "add", "--client", "x", "--due", "2190-01-01"], "at the latest"),
    "tomorrow's letter": (["request", "add", "--client", "x", "--received", "2190-01-01"], "still to be"),
    "no date": (["request", "add", "--client", "x", "--received", "today"], "such as 2026-11-16"),
    "no ground": (["request", "add", "--client", "x", "--ground", "q"], "Article 17(1)"),
    "a blank name": (["request", "add", "--client", " "], "is missing"),
    "too long a name": (["request", "add", "--client", "x" * 70_000], "at most 65536 characters"),
    "both": (["request", "add", "--client", "x", "--samples", "x:1"], "choose one"),
    "samples that are none": (["request", "add", "--samples", "x:a"], "whole numbers"),
    "no such request": (["request", "show", "R-0009"], "There is no request 'R-0009'"),
    "a path": (["request", "show", "../../key"], "There is no request"),
    "refused without a reason": (["request", "refuse", "R-0001", "--reason", " "], "is missing"),
    "an exception that is none": (["request", "refuse", "R-0001", "--reason", "x", "--exception", "z"], "17(3)"),
    "extended into the past": (["request", "extend", "R-0001", "--reason", "x", "--until", "2020-01-01"], "is past"),
    "extended too far": (["request", "extend", "R-0001", "--reason", "x", "--until", "2190-01-01"], "at the latest"),
    "closed too early": (["request", "close", "R-0001", "--told-all"], "cannot be told now"),
    "a strange span": (["request", "run", "--grace", "soon"], "such as 7d"),
    "an override of nobody": (["request", "run", "--override", "x"], "Say which request"),
    "an unknown request": (["request", "run", "R-0007"], "There is no request"),
    "an unknown method": (["request", "run", "--method", "magic"], "There is no method"),
    "an unknown option": (["request", "run", "--option", "x=1"], "has no option"),
    "an option that is none": (["request", "run", "--option", "x"], "NAME=VALUE"),
    "no way back": (["request", "rollback", "R-0001", "--reason", "x"], "cannot be rolled back"),
    "nobody to readmit": (["request", "readmit", "ada", "--reason", "x"], "Nobody called 'ada' has left"),
    "no ledger": (["status", "--federation", "elsewhere/federation.py"], "expunge init"),
    "no receipt": (["receipt", "verify", "nowhere", "--key", "ledger/key.pub"], "cannot be read"),
    "a folder": (["receipt", "verify", "ledger", "--key", "ledger/key.pub"], "cannot be read"),
    "a device": (["receipt", "verify", "/dev/zero", "--key", "ledger/key.pub"], "it is no file"),
    "a device as key": (["receipt", "verify", "federation.py", "--key", "/dev/zero"], "no public key"),
    "the private key": (["receipt", "verify", "federation.py", "--key", "ledger/key"], "no public key"),
    "no key": (["receipt", "verify", "federation.py", "--key", "federation.py"], "no public key"),
    "trained twice": (["train", "--federation", "federation.py"], "--again replaces it"),
    "both trainings": (["train", "--federation", "federation.py", "--rounds", "3"], "leave --rounds out"),
    "no training": (["train"], "--out FOLDER"),
    "a folder that cannot be": (["init", "--folder", "federation.py/x"], "cannot be made"),
}


@pytest.mark.parametrize(("words", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_sentence_and_nothing_is_lost(at, expunge, words, told):
    at.ask("bob")
    before = at.ledger.events()
    code, out, said = expunge(*words)
    assert code == 1
    assert out == ""
    assert told in said
    assert len([line for line in said.splitlines() if line.startswith("error:")]) == 1
    assert "Traceback" not in said
    assert at.ledger.events() == before


def test_what_is_said_twice_is_asked_once(at, expunge):
    found = json.loads(expunge("request", "add", "--client", "bob", "--client", "bob", "--json")[1])
    assert found["clients"] == ["bob"]
    expunge("request", "add", "--samples", "bob:3,3")
    assert "1 sample of bob" in expunge("status")[1]


def test_what_has_ended_is_not_run_again_and_that_is_said(at, expunge):
    at.ask("bob")
    expunge("request", "refuse", "R-0001", "--reason", "not here")
    code, _, said = expunge("request", "run", "R-0001")
    assert code == 0
    assert "R-0001 is refused: there is nothing left to do" in said


def test_who_watches_destroys_the_old_model_when_its_time_is_over(at):
    number = at.ask("bob")
    words = ["request", "run", number, "--watch", "--method", "fine-tuning", "--override", "looked at", "--grace", "2s"]
    program = [sys.executable, "-c", "from expunge.cli import main; main()", *words]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not at.ledger.case(number).erased and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    adopted, erased = (event for event in at.ledger.case(number).events if event.kind in ("adopted", "erased"))
    assert datetime.fromisoformat(erased.time) - datetime.fromisoformat(adopted.time) >= timedelta(seconds=2)


def test_init_leaves_what_is_there(at, expunge):
    before = {file: file.read_bytes() for file in at.files() if file.name != ".lock"}
    assert expunge("init")[0] == 0
    assert {file: file.read_bytes() for file in at.files() if file.name != ".lock"} == before


def test_training_again_leaves_the_departed_out_and_says_so(at, expunge):
    at.ask("bob")
    at.work(QUICK).run(["R-0001"])
    code, _, said = expunge("train", "--federation", "federation.py", "--again")
    assert code == 0
    assert "Client 'bob' has left: it was not trained with" in said
    assert expunge("request", "readmit", "bob", "--reason", "signed again")[0] == 0
    assert "bob" not in expunge("train", "--federation", "federation.py", "--again")[2]


@pytest.mark.parametrize("words", [["status"], ["request", "list"], ["request", "show", "R-0001"], ["request", "add"]])
def test_the_desk_needs_no_torch(at, words):
    at.ask("bob")
    program = (
        "import sys; sys.argv = ['expunge', *sys.argv[1:]]\nfrom expunge.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules, 'torch'"
    )
    more = ["--client", "ada"] if words[-1] == "add" else []
    done = subprocess.run(
        [sys.executable, "-c", program, *words, *more], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
