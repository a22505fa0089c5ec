"""The demo as a newcomer runs it, and the claims that it makes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-c", "from expunge.cli import main; main()", "demo", "--out", str(out)]
    wide = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=wide)
    return out, done.stdout


def mean(results, method, measure):
    return fmean(row[measure] for row in results["rows"] if row["method"] == method)


@pytest.mark.slow
def test_forgetting_by_trajectory_is_at_the_retrained_model_at_a_fraction_of_its_cost(demo):
    results = json.loads((demo[0] / "results.json").read_text())
    assert len({row["seed"] for row in results["rows"]}) >= 3
    assert sum(row["method"] == "retrain" for row in results["rows"]) == 5 * len({r["seed"] for r in results["rows"]})
    assert mean(results, "trained", "asr") >= 0.8
    for method in ("retrace-krylov", "retrace-krylov+recovery"):
        accuracy = mean(results, method, "test_accuracy") - mean(results, "retrain", "test_accuracy")
        assert accuracy >= -0.015, method
        assert mean(results, method, "asr") - mean(results, "retrain", "asr") <= 0.02, method
        assert mean(results, method, "speedup_in_gradients") >= 20, method
        assert mean(results, method, "kl_forget") < 0.1 * mean(results, "trained", "kl_forget"), method
    # What is printed in the paper leaves the backdoor where it was.
    assert mean(results, "hf-kcu-paper", "asr") > 0.9 * mean(results, "trained", "asr")


@pytest.mark.slow
def test_the_demo_leaves_what_a_person_looks_at(demo):
    out, terminal = demo
    assert {path.name for path in out.iterdir()} >= {"results.json", "report.html", "forgetting.png", "cost.png"}
    assert "do nothing" in terminal
    assert "retrain noise" in terminal
    page = (out / "report.html").read_text()
    assert 'src="http' not in page
    assert all(name in page for name in ("HF-KCU as printed", "retrain", "seed"))
