"""README's commands from `expunge init` to `receipt verify`, word for word, on a model that is not in the package."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expunge.ledger.ledger import Ledger
from expunge.ledger.receipt import verify

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README.split("## From a request to a receipt")[1].split("## ")[0]
COMMANDS = re.findall(r"^\$ (expunge .*?)(?:\s{2,}#.*)?$", SECTION, re.M)


@pytest.mark.slow
def test_the_commands_run_word_for_word(tmp_path):
    assert COMMANDS[0] == "expunge init"
    assert COMMANDS[-1].startswith("expunge receipt verify")
    began, said = time.monotonic(), ""
    for command in COMMANDS:
        program = [sys.executable, "-c", "from expunge.cli import main; main()", *shlex.split(command)[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        said = done.stdout
    assert said.startswith("VALID: request R-0001")
    assert time.monotonic() - began < 600
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.case("R-0001").state == "closed"
    found = verify(*(tmp_path / "ledger" / name for name in ("receipts/R-0001.intoto.jsonl", "key.pub", "log.jsonl")))
    assert "EXPUNGE_EVIDENCE_SUPPORTED" in found.properties
    assert found.content["work"]["method"] == "retrace"
    assert found.content["override"] is None


@pytest.mark.slow
def test_a_verdict_asks_more_as_readme_says(tmp_path, monkeypatch, expunge):
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS[:3]:
        assert expunge(*shlex.split(command)[1:])[0] == 0
    words = re.findall(r"`expunge (request run.*?--retrains 10)`", SECTION)[0]
    assert expunge(*shlex.split(words))[0] == 0
    case = Ledger(tmp_path / "ledger").case("R-0001")
    assert case.facts["audited"]["word"] in ("UNDER-FORGOTTEN", "UNDECIDED")  # by which questions were drawn
    assert case.facts["forgotten"]["method"] == "retrace"
    assert not case.adopted
