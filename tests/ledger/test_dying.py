"""Killed at every event and at other moments, requests end as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import expunge
from ledger import dying


def deaths(place, *how):
    """Run the script that kills, and how often it did."""
    places = [str(Path(dying.__file__).parents[1]), str(Path(expunge.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, dying.__file__, str(place), *map(str, how)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["deaths"]


@pytest.mark.slow
def test_before_and_after_every_event(tmp_path):
    assert deaths(tmp_path, "events") == 34


@pytest.mark.slow
def test_before_some_file_operations(tmp_path):
    assert deaths(tmp_path, "operations", 47) > 10


@pytest.mark.slow
def test_a_few_at_random_moments_on_digits(tmp_path):
    assert deaths(tmp_path, "random", 8, "digits") > 2
