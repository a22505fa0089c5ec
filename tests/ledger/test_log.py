"""The log and the table of names: chained, signed, whole after a crash; every bit counts."""

import os
import random
import resource
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from expunge.errors import DataError, ExpungeError, RequestError
from expunge.ledger import desk
from expunge.ledger.keys import PublicKey, Signer
from expunge.ledger.ledger import Ledger
from expunge.ledger.log import checked_events
from expunge.ledger.names import ERASED
from ledger.flips import flipped
from ledger.places import Clock


@pytest.fixture
def ledger(tmp_path):
    own = Ledger.create(tmp_path / "ledger", "the desk", Clock())
    for name in ("ada", "bob", "cyd"):
        desk.add(own, desk.Filing((name,), checked_by="the clerk"))
    return own


def again(ledger):
    return Ledger(ledger.folder, "the desk", Clock())


def test_it_is_one_chain(ledger):
    events = ledger.events()
    assert [event.number for event in events] == list(range(1, 8))
    assert len({event.hash for event in events}) == 7
    assert [event.kind for event in events[:3]] == ["opened", "received", "accepted"]
    assert again(ledger).events() == events


def test_an_event_that_is_removed_moved_or_repeated_is_told(ledger):
    file = ledger.folder / "log.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    changes = {
        "removed": lines[:3] + lines[4:],
        "moved": [*lines[:3], lines[4], lines[3], *lines[5:]],
        "repeated": [*lines[:3], lines[2], *lines[3:]],
        "the first removed": lines[1:],
        "cut off": lines[:-1],
        "half": [*lines[:-1], lines[-1][:40]],
        "nothing": [],
    }
    for changed in changes.values():
        file.write_bytes(b"".join(changed))
        with pytest.raises(DataError, match=r"log\.jsonl"):
            again(ledger).events()
    file.unlink()
    with pytest.raises(DataError, match=r"log\.jsonl"):
        again(ledger).events()
    file.write_bytes(b"".join(lines))
    (ledger.folder / "head.json").unlink()
    with pytest.raises(DataError, match=r"head\.json is missing"):
        again(ledger).events()


def test_an_event_of_another_history_is_told(ledger, tmp_path):
    """Signed by the same key, with the right number, but after other events."""
    file = ledger.folder / "log.jsonl"
    before = {name: (ledger.folder / name).read_bytes() for name in ("log.jsonl", "head.json")}
    desk.add(ledger, desk.Filing(("dee",), checked_by="the clerk"))
    other = file.read_bytes().splitlines(keepends=True)
    for name, content in before.items():
        (ledger.folder / name).write_bytes(content)
    desk.add(again(ledger), desk.Filing(("eve",), checked_by="the clerk"))
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(other) == 9
    with pytest.raises(DataError, match="Event 9 of it does not follow"):
        checked_events(b"".join([*lines[:-1], other[-1]]), ledger.key, "it")


def test_no_flipped_bit_passes(ledger):
    key = PublicKey.load(ledger.folder / "key.pub")
    content = (ledger.folder / "log.jsonl").read_bytes()
    for changed in flipped(content, 4000, seed=1):
        with pytest.raises(ExpungeError):
            checked_events(changed, key, "log.jsonl")
    for name in ("head.json", "names.json"):
        file = ledger.folder / name
        whole = file.read_bytes()
        for changed in flipped(whole[:-1], 300, seed=2):
            file.write_bytes(changed + b"\n")
            with pytest.raises(ExpungeError, match=name.replace(".", r"\.")):
                desk.accept(again(ledger), "R-0001", "nobody")
        file.write_bytes(whole)


def test_another_ledgers_log_is_refused(ledger, tmp_path):
    other = Ledger.create(tmp_path / "other")
    for name in ("log.jsonl", "head.json"):
        (ledger.folder / name).write_bytes((other.folder / name).read_bytes())
    with pytest.raises(DataError, match="not signed by this"):
        again(ledger).events()


def test_a_foreign_private_key_is_refused(ledger, tmp_path):
    Signer.make(ledger.folder / "key", tmp_path / "key.pub")
    with pytest.raises(DataError, match=r"is not the key of key\.pub"):
        desk.add(again(ledger), desk.Filing(("dee",)))
    assert len(again(ledger).events()) == 7


@pytest.mark.parametrize("cut", [0, 1, 60, -1])
def test_half_an_event_is_cut_off_and_a_whole_one_taken_over(ledger, cut):
    """A crash inside the append, or between the append and the head."""
    before = (ledger.folder / "head.json").read_bytes()
    whole = (ledger.folder / "log.jsonl").read_bytes()
    desk.accept(ledger, desk.add(ledger, desk.Filing(("dee",))), "the clerk")
    lines = (ledger.folder / "log.jsonl").read_bytes()[len(whole) :].splitlines(keepends=True)
    (ledger.folder / "head.json").write_bytes(before)
    (ledger.folder / "log.jsonl").write_bytes(whole + (lines[0] if cut == -1 else lines[0][:cut]))
    number = desk.add(again(ledger), desk.Filing(("eve",)))
    assert number == ("R-0005" if cut == -1 else "R-0004")
    assert [event.number for event in again(ledger).events()] == list(range(1, 10 if cut == -1 else 9))


def test_two_events_beyond_the_head_are_of_nobody(ledger):
    before = (ledger.folder / "head.json").read_bytes()
    desk.add(ledger, desk.Filing(("dee",), checked_by="the clerk"))
    (ledger.folder / "head.json").write_bytes(before)
    with pytest.raises(DataError, match="has events that"):
        desk.add(again(ledger), desk.Filing(("eve",)))


def test_a_clock_that_jumps_back_is_told_and_time_does_not(ledger):
    last = ledger.head().time
    ledger.clock.now -= timedelta(days=40)
    desk.add(ledger, desk.Filing(("dee",)))
    assert ledger.head().time == last
    assert "The clock is behind the last event" in ledger.notes[0]
    assert [event.time for event in ledger.events()] == sorted(event.time for event in ledger.events())


def test_names_can_be_erased(ledger):
    number = desk.add(ledger, desk.Filing(("dee",), note="call 555", checked_by="the clerk"))
    desk.refuse(ledger, number, "dee was never here", "e")
    events = ledger.events()
    assert desk.forget_names(ledger, number) == 4
    assert ledger.events() == events
    assert not ledger.names().of(number)
    assert ledger.names().text(events[-1].content["reason"]) == ERASED
    for file in ledger.folder.rglob("*"):
        assert file.is_dir() or not {b"dee", b"555"} & set(file.read_bytes().split(b'"'))
    with pytest.raises(RequestError, match="once it has ended"):
        desk.forget_names(ledger, "R-0001")


def test_the_same_name_has_another_digest_in_every_request(ledger):
    desk.add(ledger, desk.Filing(("ada",)))
    first, second = (ledger.case(number).facts["received"]["scope"]["clients"] for number in ("R-0001", "R-0004"))
    assert first != second


def test_a_name_that_no_event_knows_goes_with_the_next_change(ledger):
    names = ledger.names()
    orphan = names.add("left by a crash", "client", "R-0004")
    names.write()
    desk.add(ledger, desk.Filing(("dee",)))
    assert orphan not in ledger.names().all()


def test_a_table_that_is_missing_or_older_than_the_log_is_told(ledger):
    """Or everybody would be (erased), and the next event would make that true."""
    file = ledger.folder / "names.json"
    older = file.read_bytes()
    desk.add(ledger, desk.Filing(("dee",)))
    now = file.read_bytes()
    file.write_bytes(older)
    with pytest.raises(DataError, match=r"names\.json does not know whom R-0004 is about"):
        desk.add(again(ledger), desk.Filing(("eve",)))
    file.unlink()
    with pytest.raises(DataError, match=r"names\.json is missing or empty"):
        desk.add(again(ledger), desk.Filing(("eve",)))
    file.write_bytes(now)
    assert desk.add(again(ledger), desk.Filing(("eve",))) == "R-0005"


WRITER = """
import sys
from pathlib import Path
from expunge.ledger import desk
from expunge.ledger.ledger import Ledger
for number in range(10):
    desk.add(Ledger(Path(sys.argv[1])), desk.Filing((f"{sys.argv[2]}-{number}",)))
"""


def test_two_processes_lose_nothing(ledger):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, ledger.folder, name]) for name in ("x", "y")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    names = again(ledger).names()
    found = [case.facts["received"]["scope"]["clients"][0] for case in again(ledger).cases().values()]
    asked = {f"{name}-{number}" for name in ("x", "y") for number in range(10)}
    assert sorted(map(names.text, found)) == sorted({"ada", "bob", "cyd"} | asked)


def test_a_second_worker_is_told_who_is_at_work(ledger):
    with (
        ledger.working(),
        pytest.raises(RequestError, match=f"locked by process {os.getpid()} since 20"),
        again(ledger).working(),
    ):
        pytest.fail("two at once")
    with again(ledger).working():
        pass


@pytest.mark.parametrize("room", [0, 1, 100])
def test_on_a_full_disk_nothing_is_lost(ledger, room):
    """A limit on the size of files stands for a full disk."""
    size = (ledger.folder / "log.jsonl").stat().st_size
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, size + room))
        try:
            desk.add(again(ledger), desk.Filing(("dee",)))
        except RequestError as problem:
            os._exit(7 if "cannot be written: File too large" in str(problem) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(again(ledger).events()) == 7
    assert desk.add(again(ledger), desk.Filing(("dee",))) == "R-0004"


def test_random_bytes_are_never_a_log(ledger):
    chance = random.Random(3)
    for _ in range(50):
        (ledger.folder / "log.jsonl").write_bytes(chance.randbytes(chance.randrange(2000)))
        with pytest.raises(DataError):
            again(ledger).events()
