"""Receipts: what they say, what they refuse, and that nothing but the key is needed."""

import base64
import json
import subprocess
import sys

import pytest

from expunge.errors import DataError
from expunge.ledger import desk
from expunge.ledger.canonical import canonical
from expunge.ledger.keys import Signer
from expunge.ledger.receipt import LARGEST, RECEIPT, SVR, verified, verify
from ledger.flips import flipped


def receipt(place):
    folder = place.folder / "ledger"
    return folder / "receipts" / "R-0001.intoto.jsonl", folder / "key.pub", folder / "log.jsonl"


def payload(line):
    return json.loads(base64.b64decode(json.loads(line)["payload"]))


def test_it_says_what_was_done(finished):
    file, key, log = receipt(finished)
    found = verify(file, key, log)
    case, said = finished.ledger.case("R-0001"), found.content
    assert said["request"]["received"] == "2026-11-16"
    assert said["request"]["due"] == "2026-12-16"
    assert said["models"] == case.facts["forgotten"]["models"]
    assert said["work"]["method"] == "fine-tuning"
    assert said["work"]["answered"]["count"] == 3
    assert said["work"]["cost"]["rounds"] > 0
    assert said["override"] == {"reason": "a test needs no audit"}
    assert said["audit"] is None
    assert said["recipients"] == {**said["recipients"], "count": 3, "told": 3, "last": "2026-11-16"}
    assert said["scope"]["clients"] == case.facts["received"]["scope"]["clients"]
    assert said["erasure"]["deleted"][0]["what"] == "the old model"
    assert said["erasure"]["deleted"][0]["sha256"] == case.facts["running"]["models"]["before"]
    assert said["log"]["hash"] == finished.ledger.events()[said["log"]["events"] - 1].hash
    assert found.properties == ("EXPUNGE_OLD_MODEL_DELETED",)
    assert found.notes == ()
    assert file.stat().st_size <= LARGEST


def test_it_is_two_in_toto_statements_in_dsse_envelopes(finished):
    lines = receipt(finished)[0].read_text().splitlines()
    first, second = map(payload, lines)
    assert {first["_type"], second["_type"]} == {"https://in-toto.io/Statement/v1"}
    assert (first["predicateType"], second["predicateType"]) == (RECEIPT, SVR)
    assert set(second["predicate"]) == {"verifier", "timeCreated", "properties"}
    after = finished.ledger.case("R-0001").facts["forgotten"]["models"]["after"]
    assert second["subject"] == [{"name": "model", "digest": {"sha256": after}}]
    assert json.loads(lines[0])["payloadType"] == "application/vnd.in-toto+json"


def test_no_flipped_bit_verifies(finished):
    file, _, _ = receipt(finished)
    key = finished.ledger.key
    verified(file.read_bytes(), key, "it")
    for changed in flipped(file.read_bytes(), 6000, seed=4):
        with pytest.raises(DataError):
            verified(changed, key, "it")


def test_no_beginning_of_it_verifies(finished):
    file, _, _ = receipt(finished)
    whole = file.read_bytes()
    for size in range(0, len(whole), 7):
        with pytest.raises(DataError):
            verified(whole[:size], finished.ledger.key, "it")


def rewritten(text, change):
    """The first envelope changed as JSON, the second as it was."""
    first, second, _ = text.split(b"\n")
    return change(json.loads(first)) + b"\n" + second + b"\n"


OTHER_FORMS = {
    "spaces": lambda text: rewritten(text, lambda own: json.dumps(own, sort_keys=True).encode()),
    "order": lambda text: rewritten(text, lambda own: canonical(own).replace(b'{"payload"', b'{ "payload"')),
    "another field": lambda text: rewritten(text, lambda own: canonical({**own, "more": 1})),
    "two signatures": lambda text: rewritten(text, lambda own: canonical({**own, "signatures": 2 * own["signatures"]})),
    "no signature": lambda text: rewritten(text, lambda own: canonical({**own, "signatures": []})),
    "no keyid": lambda text: rewritten(
        text, lambda own: canonical({**own, "signatures": [{"sig": own["signatures"][0]["sig"]}]})
    ),
    "unpadded base64": lambda text: rewritten(
        text, lambda own: canonical({**own, "payload": own["payload"].rstrip("=") + "\n"})
    ),
    "escaped letters": lambda text: text.replace(b"payloadType", b"payload\\u0054ype", 1),
    "one line more": lambda text: text + text.split(b"\n")[0] + b"\n",
    "a blank line": lambda text: text + b"\n",
    "no last newline": lambda text: text[:-1],
    "carriage returns": lambda text: text.replace(b"\n", b"\r\n"),
    "one line": lambda text: text.split(b"\n")[0] + b"\n",
    "lines exchanged": lambda text: b"\n".join([*text.split(b"\n")[1::-1], b""]),
    "twice the first": lambda text: b"\n".join([text.split(b"\n")[0]] * 2 + [b""]),
    "a duplicate key": lambda text: b'{"payload":"",' + text[1:],
    "nested": lambda _: b"[" * 5000 + b"\n\n",
    "too long": lambda text: text + b" " * LARGEST,
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("change", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_other_ways_to_write_it_are_refused(finished, change):
    text = receipt(finished)[0].read_bytes()
    assert change(text) != text
    with pytest.raises(DataError):
        verified(change(text), finished.ledger.key, "it")


def test_a_foreign_key_is_told(finished, tmp_path):
    file, _, _ = receipt(finished)
    Signer.make(tmp_path / "key", tmp_path / "key.pub")
    with pytest.raises(DataError, match="signed by another key"):
        verify(file, tmp_path / "key.pub")
    for text in ("", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "ssh-ed25519 AAAA"):
        (tmp_path / "key.pub").write_text(text)
        with pytest.raises(DataError, match="no public key in PEM"):
            verify(file, tmp_path / "key.pub")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    forms = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "key.pub").write_bytes(X25519PrivateKey.generate().public_key().public_bytes(*forms))
    with pytest.raises(DataError, match="of another kind"):
        verify(file, tmp_path / "key.pub")
    with pytest.raises(DataError, match="cannot be read"):
        verify(file, tmp_path / "nowhere")


def test_the_log_has_to_lead_to_it_and_to_know_it(finished, tmp_path):
    file, key, log = receipt(finished)
    lines, copy = log.read_bytes().splitlines(keepends=True), tmp_path / "log.jsonl"
    number = verify(file, key).content["log"]["events"]
    copy.write_bytes(b"".join(lines[:number]))
    assert "cannot be told from this copy" in verify(file, key, copy).notes[0]
    copy.write_bytes(b"".join(lines[: number - 1]))
    with pytest.raises(DataError, match="ends before the receipt"):
        verify(file, key, copy)
    copy.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(DataError, match="an event was removed, added or moved"):
        verify(file, key, copy)


def test_a_receipt_that_the_log_does_not_know_is_refused(done):
    """Signed by the right key, after the fact."""
    from expunge.ledger import receipt as receipts

    file, key, log = receipt(done)
    ledger = done.ledger
    case, head = ledger.case("R-0001"), ledger.events()[verify(file, key).content["log"]["events"] - 1]
    content = {**receipts.predicate(case, head), "limits": "none"}
    first = receipts.sealed(receipts.statement(verify(file, key).subjects, RECEIPT, content), ledger.signer)
    file.write_bytes(first + b"\n" + file.read_bytes().split(b"\n")[1] + b"\n")
    assert verify(file, key).content["limits"] == "none"
    with pytest.raises(DataError, match="does not know it"):
        verify(file, key, log)


def test_lines_of_two_receipts_are_told_apart(done):
    done.ask("cyd")
    done.work().run(["R-0002"])
    done.close("R-0002")
    first, second = (done.folder / "ledger" / "receipts" / f"R-000{n}.intoto.jsonl" for n in (1, 2))
    mixed = b"\n".join([first.read_bytes().split(b"\n")[0], second.read_bytes().split(b"\n")[1], b""])
    with pytest.raises(DataError, match="put together from two receipts"):
        verified(mixed, done.ledger.key, "it")


def test_many_leavers_fit_into_ten_kilobytes(place):
    names = [f"sample-owner-{number}" for number in range(200)]
    number = desk.add(place.ledger, desk.Filing(("bob",), {name: [1] for name in names}, checked_by="the clerk"))
    from expunge.ledger import receipt as receipts

    case = place.ledger.case(number)
    scope = case.facts["received"]["scope"]
    content = {
        "scope": scope,
        "work": {"details": {"x": 1}, "warnings": ["long"], "options": {"k": 1}},
        "audit": {"margins": [1]},
        "erasure": {"left": ["there"]},
    }
    steps = 0
    while "digest" not in content["scope"]:
        content, steps = receipts._smaller(content), steps + 1
    assert steps == 6
    assert content["scope"]["clients"] == 1
    assert content["scope"]["samples"] == 200
    assert len(canonical(content)) < 1000


PROGRAM = """
import sys
from pathlib import Path
from expunge.ledger.receipt import verify
verify(*map(Path, sys.argv[1:]))
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_checking_needs_neither_torch_nor_a_network(finished):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, receipt(finished))], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "scipy", "flwr", "fastapi", "typer"} & set(done.stdout.split())


def test_who_was_not_told_is_counted(place):
    number = place.ask("bob")
    place.work().run([number])
    with pytest.raises(Exception, match="3 of 3 recipients were not told yet"):
        desk.close(place.ledger, number)
    desk.tell(place.ledger, number, ["ada"], "2026-11-15")
    with pytest.raises(Exception, match="'eve' did not get the model"):
        desk.tell(place.ledger, number, ["eve"])
    desk.close(place.ledger, number, "their addresses are unknown")
    said = verify(*receipt(place)).content["recipients"]
    assert (said["count"], said["told"], said["last"]) == (3, 1, "2026-11-15")
