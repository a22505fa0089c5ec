"""The API: nothing without the token, nothing for other sites, no 500 whatever comes."""

import json
import subprocess
import sys

import pytest

from ledger.serving import TOKEN, serving

PATHS = (
    "/api/overview",
    "/api/requests/R-0001",
    "/api/requests/R-0001/receipt",
    "/api/requests/R-0001/certificate",
    "/api/key.pub",
    "/api/log.jsonl",
)


@pytest.fixture(scope="module")
def server(finished, tmp_path_factory):
    with serving(finished.copy(tmp_path_factory.mktemp("serving") / "place").folder) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_with_the_token_it_answers_and_without_it_does_not(server, path):
    status, _, headers = server.ask(path)
    assert status == 200
    assert headers["cache-control"] == "no-store"
    for wrong in ("", "Bearer ", "Bearer wrong", f"bearer {TOKEN}", "Basic eDp5", f"Bearer {TOKEN}x", TOKEN):
        status, said, _ = server.ask(path, headers={"Authorization": wrong})
        assert status == 401
        assert list(json.loads(said)) == ["sentence"]
    assert server.ask(f"{path}?token={TOKEN}", headers={"Authorization": ""})[0] == 401


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css"])
def test_the_page_itself_says_nothing_of_anybody_and_loads_nothing_from_elsewhere(server, path):
    status, content, headers = server.ask(path, headers={"Authorization": ""})
    assert status == 200
    assert b"bob" not in content
    assert b"https://" not in content
    assert content.count(b"http://") == content.count(b"http://www.w3.org/2000/svg")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "127.0.0.1.evil.example:80"},
    {"Host": ""},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_another_sites_page_gets_nothing_even_with_the_token(server, headers):
    for path, body in (("/api/overview", None), ("/api/requests", {"clients": ["eve"]})):
        status, content, _ = server.ask(path, body, headers)
        assert status in (400, 403, 421)
        assert b"bob" not in content
    assert len(server.json("/api/overview")["requests"]) == 1


TRICKS = (
    "/api/../ledger/key",
    "/api/key",
    "/api/names.json",
    "/api/%2e%2e/key",
    "/api/..%2fkey",
    "/api/requests/..%2f..%2fkey/receipt",
    "/api/requests/../../key",
    "/api/requests/R-0001%00/receipt",
    "/api/requests/R-0001/../../key.pub/receipt",
    "/api/requests/r-0001",
    "/api/requests/R-9999",
    "/api/requests/R-0001%0a",
    "/api/requests/%F0%9F%90%B6",
    "/api/requests/" + "9" * 5000,
    "/api/requests/R-%D9%A0%D9%A0%D9%A0%D9%A1",
    "//etc/passwd",
    "/page.js/../../ledger.py",
    "/serving.py",
    "/api",
    "/api/",
    "/docs",
    "/openapi.json",
    "/..%2f..%2fetc/passwd",
)


@pytest.mark.parametrize("path", TRICKS)
def test_tricks_with_paths_find_nothing(server, path):
    status, content, _ = server.ask(path)
    assert status in (400, 404, 409, 422)
    assert b"PRIVATE" not in content
    assert b"salt" not in content
    assert b"bob" not in content


BODIES = {
    "empty": b"",
    "half": b'{"clients": ["eve"',
    "a list": b"[]",
    "a number": b"3",
    "nested": b'{"clients":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"clients": ["\xff\xfe"]}',
    "half a character": b'{"clients": ["\\ud800"]}',
    "too long": b'{"clients": ["' + b"x" * 2_000_000 + b'"]}',
    "nobody": b'{"clients": []}',
    "a blank name": b'{"clients": ["  "]}',
    "a NUL": b'{"clients": ["a\\u0000b"]}',
    "a name as a number": b'{"clients": [3]}',
    "a name as a text": b'{"clients": "eve"}',
    "an unknown field": b'{"clients": ["eve"], "state": "closed"}',
    "null": b'{"clients": null}',
    "samples that are none": b'{"samples": {"eve": ["0"]}}',
    "samples below zero": b'{"samples": {"eve": [-1]}}',
    "samples as truth": b'{"samples": {"eve": [true]}}',
    "samples twice": b'{"samples": {"eve": [1, 1]}}',
    "no date": b'{"clients": ["eve"], "received": "yesterday"}',
    "a date that is none": b'{"clients": ["eve"], "received": "2026-02-30"}',
    "the last year": b'{"clients": ["eve"], "received": "9999-12-31"}',
    "a due date in the past": b'{"clients": ["eve"], "due": "2020-01-01"}',
    "a due date too late": b'{"clients": ["eve"], "due": "2190-01-01"}',
    "no ground": b'{"clients": ["eve"], "ground": "z"}',
    "NaN": b'{"clients": ["eve"], "received": NaN}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_malformed_bodies_are_refused_in_a_sentence_and_nothing_is_filed(server, body):
    for path in ("/api/requests", "/api/requests/R-0001/accept", "/api/verify"):
        status, content, _ = server.ask(path, body)
        assert status in (400, 409, 422)
        assert json.loads(content)["sentence"]
    assert len(server.json("/api/overview")["requests"]) == 1


def test_a_form_of_another_kind_is_refused(server):
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""):
        assert server.ask("/api/requests", b'{"clients": ["eve"]}', {"Content-Type": kind})[0] == 409
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert server.ask("/api/requests", method=method)[0] in (401, 404, 405)
    assert len(server.json("/api/overview")["requests"]) == 1


def test_a_receipt_is_checked(server):
    text = server.ask("/api/requests/R-0001/receipt")[1].decode()
    assert server.json("/api/verify", {"receipt": text})["valid"] is True
    for wrong in (text[:-1], text.replace("payloadType", "payloadtype", 1), "", "\ud800", "x" * 20_000):
        found = server.json("/api/verify", {"receipt": wrong})
        assert found["valid"] is False
        assert found["lines"]


def test_a_certificate_has_the_name_that_the_receipt_has_not(server):
    assert b"bob" in server.ask("/api/requests/R-0001/certificate")[1]
    assert b"bob" not in server.ask("/api/requests/R-0001/receipt")[1]


def test_filing_and_accepting(done):
    with serving(done.folder) as server:
        filed = server.json("/api/requests", {"clients": ["<b>ada</b>"], "note": "by post"})
        assert (filed["number"], filed["state"], filed["notes"]) == ("R-0002", "received", [])
        assert server.json("/api/requests/R-0002/accept", {"checked_by": "the clerk"})["state"] == "accepted"
        assert server.ask("/api/requests/R-0002/accept", {"checked_by": "the clerk"})[0] == 409
        assert server.ask("/api/requests/R-0002/receipt")[0] == 409
        assert server.json("/api/requests", {"samples": {"ada": [0, 5]}, "checked_by": "x"})["state"] == "accepted"
        (done.folder / "ledger" / "head.json").write_text("{}")
        status, content, _ = server.ask("/api/overview")
        assert status == 503
        assert b"head.json" in content


def test_a_file_that_is_missing_or_damaged_is_named(done):
    files = ("log.jsonl", "head.json", "names.json", "key.pub", "receipts/R-0001.intoto.jsonl")
    with serving(done.folder) as server:
        for file in (done.folder / "ledger" / name for name in files):
            whole, named = file.read_bytes(), False
            for content in (None, b"", whole[: len(whole) // 2], b"[" * 100_000):
                file.unlink() if content is None else file.write_bytes(content)
                for path, body in (*((path, None) for path in PATHS), ("/api/requests", {"clients": [" "]})):
                    status, said, _ = server.ask(path, body)
                    assert status in (200, 409, 503), (file, path)
                    named |= status == 503 and file.name.encode() in said
                assert server.ask("/api/verify", {"receipt": "x"})[0] in (200, 503)
                file.write_bytes(whole)
            assert named, file
        assert server.ask("/api/overview")[0] == 200
    assert len(done.ledger.events()) == len(done.ledger.case("R-0001").events) + 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--token", "short"], "at least 16"),
        (["--token", "a b" * 10], "no spaces"),
        (["--federation", "x/y.py"], "init"),
    ],
)
def test_what_cannot_be_served_is_told(done, words, told):
    program = [sys.executable, "-c", "from expunge.cli import main; main()", "serve", *words]
    ended = subprocess.run(program, cwd=done.folder, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 1
    assert told in ended.stderr
