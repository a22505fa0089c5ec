"""`expunge bench` on the command line: what it leaves, and that every bad input is one line before any work."""

import json

import pytest

from expunge.bench.results import Results
from expunge.report import read_csv


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXPUNGE_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.slow
def test_bench_leaves_numbers_tables_pictures_and_a_report(tmp_path, expunge):
    smoke = ("--scale", "smoke", "--workers", "1", "--device", "cpu")
    code, out, err = expunge("bench", "functional", "conditioning", *smoke)
    assert code == 0, err
    assert "do nothing (trained)" in out
    assert "report.html" in err
    folder = tmp_path / "runs" / "bench" / "smoke" / "functional"
    results = Results.load(folder / "results.json")
    assert results.experiment == "functional"
    assert results.scenario["seeds"] == [10]
    assert read_csv(folder / "rows.csv") == results.rows
    assert "do nothing" in (folder / "table.md").read_text()
    assert "retrain noise" in (folder / "table.md").read_text()
    assert (folder.parent / "conditioning" / "series.png").exists()
    made = {file: file.stat().st_mtime_ns for file in folder.parent.glob("cells/*/*")}
    code, out, err = expunge("bench", "functional", *smoke, "--json")
    assert code == 0, err
    again = json.loads(out)
    assert len(again["rows"]) == len(results.rows)
    assert {file: file.stat().st_mtime_ns for file in folder.parent.glob("cells/*/*")} == made


BAD = {
    "experiment": (["mian"], "There is no experiment 'mian'; there are main, datasets, backdoor"),
    "scale": (["main", "--scale", "huge"], "'huge'; there are smoke, small, paper"),
    "device": (["main", "--scale", "smoke", "--device", "cuda"], "no CUDA device"),
    "other device": (["main", "--scale", "smoke", "--device", "tpu"], "cpu, cuda or auto"),
    "seeds": (["main", "--scale", "smoke", "--seeds", "ten"], "whole numbers"),
    "negative seed": (["main", "--scale", "smoke", "--seeds=-1"], "at least 0, not -1"),
    "data": (["main", "--scale", "paper"], "data_batch_1.bin is not in data/cifar-10-batches-bin: set EXPUNGE_DATA"),
    "second": (["functional", "nothing"], "'nothing'"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD.values(), ids=BAD)
def test_a_bad_bench_is_one_line_and_leaves_nothing(tmp_path, expunge, monkeypatch, arguments, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = expunge("bench", *arguments)
    assert code == 1
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_results_of_another_version_are_not_mixed(tmp_path, expunge):
    mark = tmp_path / "old" / "smoke" / "bench.json"
    mark.parent.mkdir(parents=True)
    mark.write_text('{"format": 1, "expunge": "0.0.1"}')
    code, _, err = expunge("bench", "functional", "--scale", "smoke", "--device", "cpu", "--out", tmp_path / "old")
    assert code == 1
    assert "expunge 0.0.1" in err
    assert len(err.strip().splitlines()) == 1
    assert [file.name for file in mark.parent.iterdir()] == ["bench.json"]


def test_stored_updates_let_fed_eraser_forget(tmp_path, expunge):
    tiny = ("--rounds", "2", "--clients", "3", "--epochs", "1", "--model", "softmax")
    code, _, err = expunge("train", "--out", "run", *tiny, "--keep-updates", "1")
    assert code == 0, err
    code, _, err = expunge("forget", "run", "--client", "client-1", "--method", "fed-eraser")
    assert code == 0, err
    assert (tmp_path / "run" / "without-client-1" / "fed-eraser" / "model.safetensors").exists()
    code, _, err = expunge("train", "--out", "bare", *tiny)
    code, _, err = expunge("forget", "bare", "--client", "client-1", "--method", "fed-eraser")
    assert code == 1
    assert len(err.strip().splitlines()) == 1
