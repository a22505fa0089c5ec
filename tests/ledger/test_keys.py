"""The private key: readable by its owner only, and under a passphrase where somebody wants one."""

import os
import pty
import subprocess
import sys

import pytest

from expunge.errors import DataError, RequestError
from expunge.ledger import desk
from expunge.ledger.keys import PASSPHRASE, Signer
from expunge.ledger.ledger import Ledger

SECRET = "größer als \N{DOG FACE}"
EXPUNGE = [sys.executable, "-c", "from expunge.cli import main; main()"]


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv(PASSPHRASE, SECRET)
    return Ledger.create(tmp_path / "ledger", "the desk", protected=True)


def test_the_key_is_encrypted_and_signs_with_its_passphrase(ledger):
    assert "ENCRYPTED" in (ledger.folder / "key").read_text()
    assert desk.add(Ledger(ledger.folder), desk.Filing(("ada",))) == "R-0001"
    assert Ledger(ledger.folder).case("R-0001").state == "received"


@pytest.mark.parametrize(
    ("given", "told"), [("wrong", "is not the passphrase"), ("", "needs a passphrase: put it into")]
)
def test_without_its_passphrase_nothing_is_written_and_all_can_be_read(ledger, monkeypatch, given, told):
    monkeypatch.setenv(PASSPHRASE, given)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(RequestError, match=told):
            desk.add(Ledger(ledger.folder), desk.Filing(("ada",)))
    assert [event.kind for event in Ledger(ledger.folder).events()] == ["opened"]


def test_a_key_that_is_there_gets_no_passphrase_from_here(ledger):
    with pytest.raises(RequestError, match="openssl pkey -aes256"):
        Ledger.create(ledger.folder, protected=True)


def test_a_key_that_openssl_has_encrypted_is_read(tmp_path, monkeypatch):
    Signer.make(tmp_path / "plain", tmp_path / "key.pub")
    program = [
        "openssl",
        "pkey",
        "-aes256",
        "-in",
        tmp_path / "plain",
        "-out",
        tmp_path / "key",
        "-passout",
        "pass:abc",
    ]
    subprocess.run(program, check=True)
    monkeypatch.setenv(PASSPHRASE, "abc")
    plain, own = Signer.load(tmp_path / "plain"), Signer.load(tmp_path / "key")
    assert own.public.fingerprint == plain.public.fingerprint


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(ledger, mode):
    (ledger.folder / "key").chmod(mode)
    with pytest.raises(DataError, match="chmod 600"):
        desk.add(Ledger(ledger.folder), desk.Filing(("ada",)))
    (ledger.folder / "key").chmod(0o400)
    assert desk.add(Ledger(ledger.folder), desk.Filing(("ada",))) == "R-0001"


def typed(folder, words, *lines):
    """Run the program at a terminal of its own, and type; what it said, and how it ended."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.pop(PASSPHRASE, None)
        os.execv(sys.executable, [*EXPUNGE, *words])
    said = [b""]
    for line in lines:
        while b": " not in said[-1]:
            said[-1] += os.read(terminal, 1000)
        os.write(terminal, line.encode() + b"\n")
        said.append(b"")
    try:
        while more := os.read(terminal, 1000):
            said.append(more)
    except OSError:  # it has ended
        pass
    os.close(terminal)
    return b"".join(said).decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_at_a_terminal_it_is_asked_for(tmp_path):
    said, code = typed(tmp_path, ["init", "--passphrase"], SECRET, "something else")
    assert code == 1
    assert "not the same passphrase twice" in said
    assert not (tmp_path / "ledger" / "key").exists()
    said, code = typed(tmp_path, ["init", "--passphrase"], SECRET, SECRET)
    assert code == 0, said
    assert SECRET not in said
    said, code = typed(tmp_path, ["request", "add", "--client", "ada", "--checked-by", "x"], SECRET)
    assert code == 0, said
    assert said.count("Passphrase of") == 1
    assert Ledger(tmp_path / "ledger").case("R-0001").state == "accepted"
