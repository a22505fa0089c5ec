"""The command line on real folders: what works end to end, and that every bad input is one line and changes nothing."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.idx_files import idx
from expunge import cli
from expunge.bench.results import Results
from expunge.federation.keeping.memory import Memory
from expunge.unlearning.registry import methods

TINY = ("--rounds", "1", "--clients", "3", "--epochs", "1", "--model", "softmax")


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Away from any data folder, with a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXPUNGE_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """One trained run, made once by the command itself."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["expunge", "train", "--out", str(path), *TINY])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert not left.value.code
    return path


@pytest.fixture
def run(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def tree(path):
    """Every file and folder below, with its bytes."""
    if not path.exists():
        return None
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "folder"
        for file in sorted([path, *path.rglob("*")])
    }


def refused(answer, said=""):
    """Exit code 1, nothing on standard output, one line on standard error."""
    code, out, err = answer
    assert code == 1
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert "Traceback" not in err


class TestEndToEnd:
    def test_train_makes_a_whole_folder(self, pristine):
        assert set(tree(pristine)) == {
            ".",
            ".lock",
            "federation.py",
            "run.json",
            "state-1",
            "state-1/checkpoints.safetensors",
            "state-1/memory.safetensors",
            "state-1/model.safetensors",
            "state-1/vectors",
            *(f"state-1/vectors/{file.name}" for file in (pristine / "state-1" / "vectors").iterdir()),
        }
        vectors = Memory.load(pristine / "state-1" / "memory.safetensors")
        assert set(vectors.clients) == {f"client-{i}" for i in range(3)}

    @pytest.mark.slow
    def test_forget_show_erase_and_forget_another(self, run, expunge):
        vector = Memory.load(run / "state-1" / "memory.safetensors").vectors["client-0"].numpy().tobytes()
        trained = tree(run / "state-1")
        code, out, err = expunge("forget", run, "--client", "client-0")
        assert (code, out) == (0, "")
        assert "sample-gradients" in err
        assert (run / "without-client-0" / "retrace" / "model.safetensors").exists()
        assert tree(run / "state-1") == trained
        for seed in (0, 1):
            assert expunge("forget", run, "--client", "client-0", "--method", "retrain", "--seed", seed)[0] == 0
        assert {path.name for path in (run / "without-client-0").iterdir()} == {"retrace", "retrain-1", "retrain-2"}

        code, out, err = expunge("show", run)
        assert code == 0
        assert "retrain" in out.lower()
        results = Results.load(run / "without-client-0" / "results.json")
        assert [row.method for row in results.rows] == ["trained", "retrain", "retrain", "retrace"]
        assert results.rows[-1].kl is not None
        assert (run / "without-client-0" / "report.html").stat().st_size > 1000
        code, out, _ = expunge("show", run, "--json")
        assert code == 0
        assert json.loads(out) == [json.loads((run / "without-client-0" / "results.json").read_text())]

        assert [file for file in run.rglob("*.safetensors") if vector in file.read_bytes()]
        code, out, err = expunge("forget", run, "--client", "client-0", "--erase", "--override", "a test", "--json")
        assert code == 0
        told = json.loads(out)
        assert told["method"] == "retrace"
        assert torch.isfinite(load_file(f"{told['folder']}/model.safetensors")["layer.weight"]).all()
        assert {path.name for path in run.iterdir()} == {
            ".lock",
            "federation.py",
            "run.json",
            "state-2",
            "without-client-0",
        }
        evidence = {path.name for path in (run / "without-client-0").iterdir()}
        assert {"results.json", "report.html"} <= evidence  # numbers and plots stay, weights and vectors do not
        places = {path.parent for path in run.rglob("*.safetensors")}
        assert places == {run / "state-2", run / "state-2" / "vectors"}
        assert not [file for file in run.rglob("*") if file.is_file() and vector in file.read_bytes()]
        memory = Memory.load(run / "state-2" / "memory.safetensors")
        assert set(memory.vectors) == {"client-1", "client-2"}
        weights = memory.shares[0]
        one, other = (memory.vectors[name] / weights[name] for name in ("client-1", "client-2"))
        torch.testing.assert_close(one, -other, atol=1e-5, rtol=1e-3)

        before = tree(run)
        refused(expunge("forget", run, "--client", "client-0"), "there are client-1, client-2")
        assert tree(run) == before
        assert expunge("forget", run, "--client", "client-1", "--erase", "--override", "a test")[0] == 0
        assert json.loads((run / "run.json").read_text())["departed"] == ["client-0", "client-1"]
        refused(expunge("forget", run, "--client", "client-2"), "every client")

    def test_a_dry_run_says_what_would_be_done_and_changes_nothing(self, run, expunge):
        before = tree(run)
        code, out, _ = expunge("forget", run, "--client", "client-1", "--dry-run")
        assert code == 0
        assert out.startswith("retrace would forget client-1; it asks ")
        told = json.loads(expunge("forget", run, "--client", "client-1", "--dry-run", "--json")[1])
        assert (told["method"], told["leaving"]) == ("retrace", ["client-1"])
        assert told["estimate"]["messages"] > 0
        assert told["seconds"] > 0
        assert tree(run) == before

    def test_json_output_parses_and_tells_the_cost(self, run, expunge):
        krylov = ("--method", "retrace-krylov", "-k", "3", "--damping", "0.5")
        code, out, _ = expunge("forget", run, "--client", "client-1", "--json", *krylov)
        assert code == 0
        told = json.loads(out)
        assert told["cost"]["sample_gradients"] > 0
        assert told["details"]["damping"] == 0.5
        assert told["details"]["steps"][0]["solves"]["server"]["iterations"] == 3
        saved = json.loads((run / "without-client-1" / "retrace-krylov" / "outcome.json").read_text())
        assert saved["cost"] == told["cost"]

    def test_samples(self, run, expunge):
        code, out, _ = expunge("forget", run, "--samples", "client-1:0,2", "--samples", "client-1:5,0", "--json")
        assert code == 0
        told = json.loads(out)
        assert told["details"]["source"] == "replay"
        saved = next(run.glob("without-client-1-samples-*/retrace/outcome.json"))
        assert json.loads(saved.read_text())["request"]["samples"] == {"client-1": [0, 2, 5]}

    def test_a_seed_gives_the_same_model_again(self, run, expunge):
        found = []
        for seed in (3, 3, 4):
            arguments = ("--client", "client-1", "--method", "hf-kcu", "--curvature-samples", "50")
            assert expunge("forget", run, *arguments, "--seed", seed)[0] == 0
            found.append((run / "without-client-1" / "hf-kcu" / "model.safetensors").read_bytes())
        assert found[0] == found[1] != found[2]

    def test_the_safety_belt_is_a_failure_that_changes_nothing(self, run, expunge):
        """Far from an optimum a step away from the client is a step away from all: with tau 0 none is safe."""
        before = tree(run)
        arguments = ("--client", "client-1", "--method", "hf-kcu", "--tau", "0", "--erase", "--override", "x")
        code, out, err = expunge("forget", run, *arguments)
        assert (code, out) == (1, "")
        assert [line.split(":")[0] for line in err.splitlines()] == ["note", "error"]
        assert "safety belt" in err
        assert tree(run) == before

    def test_vectors_that_are_missing_are_told_by_name_when_forgetting_and_when_looking(self, run, expunge):
        (run / "state-1" / "memory.safetensors").unlink()
        code, _, err = expunge("forget", run, "--client", "client-0", "--method", "fine-tuning")
        assert code == 0
        said = f"note: {run / 'state-1' / 'memory.safetensors'} is missing, though vectors were kept"
        assert said in err
        assert said in expunge("show", run)[2]

    def test_a_weaker_method_is_told_in_json_and_retrace_names_the_missing_file(self, run, expunge):
        file = run / "state-1" / "memory.safetensors"
        file.unlink()
        (run / "state-1" / "checkpoints.safetensors").unlink()
        code, out, err = expunge("forget", run, "--client", "client-1", "--json")
        told = json.loads(out)
        assert (code, told["method"]) == (0, "hf-kcu")
        assert [warning for warning in told["warnings"] if str(file) in warning]
        assert (
            "There are no vectors here, and no checkpoints are there to replay from, so hf-kcu runs"
            in told["warnings"][0]
        )
        assert all(f"note: {warning}" in err for warning in told["warnings"])
        refused(expunge("forget", run, "--client", "client-1", "--method", "retrace"), f"{file} is missing")

    def test_what_was_tried_is_for_its_owner_only(self, run, expunge):
        assert expunge("forget", run, "--client", "client-1", "--method", "do-nothing")[0] == 0
        places = [run, *run.rglob("*")]
        assert {"run.json", "memory.safetensors", "outcome.json"} <= {place.name for place in places}
        for place in places:
            assert place.stat().st_mode & 0o777 == (0o700 if place.is_dir() else 0o600), place

    def test_an_audit_of_this_very_model_opens_the_gate(self, run, expunge):
        words = ("forget", run, "--client", "client-0", "--method", "fine-tuning")
        assert expunge(*words)[0] == 0
        tries = run / "without-client-0"
        after = json.loads((tries / "fine-tuning" / "outcome.json").read_text())["after"]
        for digest, verdict in ((after, "UNDECIDED"), (after, "UNDER-FORGOTTEN"), ("another", "EQUIVALENT")):
            found = {"methods": {"fine-tuning": {"verdict": verdict, "models": {"after": digest}}}}
            (tries / "audit.json").write_text(json.dumps(found))
            before = tree(run)
            refused(expunge(*words, "--erase"), "audit it")
            assert tree(run) == before
        found["methods"]["fine-tuning"]["models"]["after"] = after
        (tries / "audit.json").write_text(json.dumps(found))
        assert expunge(*words, "--erase")[0] == 0
        told = json.loads((run / "run.json").read_text())["forgotten"][0]
        assert told["details"]["gate"] == {"audit": "EQUIVALENT"}

    def test_a_control_may_be_forced(self, run, expunge):
        words = ("--client", "client-0", "--method", "do-nothing", "--erase", "--override", "it never had data")
        assert expunge("forget", run, *words)[0] == 0
        told = json.loads((run / "run.json").read_text())
        assert told["forgotten"][0]["details"]["gate"] == {"override": "it never had data"}
        assert told["departed"] == ["client-0"]
        assert told["forgotten"][0]["before"] == told["forgotten"][0]["after"]

    def test_methods_and_version(self, expunge):
        code, out, _ = expunge("methods")
        assert code == 0
        assert all(name in out for name in methods())
        assert expunge("--version")[1].startswith("expunge ")


def nan_weights(run):
    path = run / "state-1" / "model.safetensors"
    tensors = load_file(path)
    tensors["layer.weight"][0, 0] = float("nan")
    save_file(tensors, path)


def other_architecture(run):
    save_file({"conv.weight": torch.zeros(2, 2)}, run / "state-1" / "model.safetensors")


def damaged_weights(run):
    (run / "state-1" / "model.safetensors").write_bytes(b"no safetensors")


def missing_weights(run):
    (run / "state-1" / "model.safetensors").unlink()


def damaged_memory(run):
    (run / "state-1" / "memory.safetensors").write_bytes(b"no safetensors")


def nan_memory(run):
    path = run / "state-1" / "memory.safetensors"
    weights = {"client-0": 0.3, "client-1": 0.3, "client-2": 0.4}
    vectors = {name: torch.full((650,), float("nan")) for name in weights}
    save_file(vectors, path, metadata={"rounds": json.dumps([weights])})


def described(**changes):
    def change(run):
        content = json.loads((run / "run.json").read_text())
        content["scenario"] |= changes
        del content["digest"]
        (run / "run.json").write_text(json.dumps(content))

    return change


def written(text):
    return lambda run: (run / "run.json").write_text(text)


def as_it_was(run):
    pass


BAD_REQUESTS = {
    "unknown client": (as_it_was, ["--client", "zoe"], "there are client-0, client-1, client-2"),
    "nothing": (as_it_was, [], "nothing to forget"),
    "no indices": (as_it_was, ["--samples", "client-0:"], "CLIENT:INDEX"),
    "no colon": (as_it_was, ["--samples", "client-0"], "CLIENT:INDEX"),
    "letters": (as_it_was, ["--samples", "client-0:a"], "whole numbers"),
    "an empty index": (as_it_was, ["--samples", "client-0:1,,2"], "whole numbers"),
    "foreign index": (as_it_was, ["--samples", "client-0:0,99999"], "client-0' has samples 0 to"),
    "negative index": (as_it_was, ["--samples", "client-0:-1"], "client-0' has samples 0 to"),
    "samples of nobody": (as_it_was, ["--samples", "zoe:1"], "no client 'zoe'"),
    "a client and its samples": (as_it_was, ["--client", "client-0", "--samples", "client-0:1"], "choose one"),
    "everybody": (as_it_was, ["--client", "client-0", "--client", "client-1", "--client", "client-2"], "every client"),
    "erase samples": (as_it_was, ["--samples", "client-0:1", "--erase"], "whole clients"),
    "override without erase": (as_it_was, ["--client", "client-0", "--override", "x"], "--override goes with --erase"),
    "erase without an audit": (as_it_was, ["--client", "client-0", "--erase"], "audit it first, or say why not"),
    "erase by a control": (
        as_it_was,
        ["--client", "client-0", "--method", "do-nothing", "--erase"],
        "do-nothing leaves remembers",
    ),
    "erase by the printed update": (
        as_it_was,
        ["--client", "client-0", "--method", "hf-kcu-paper+recovery", "--erase"],
        "--erase by a method that forgets, or say why not",
    ),
    "no iterations": (as_it_was, ["--client", "client-0", "--method", "hf-kcu", "-k", "0"], "iterations"),
    "negative iterations": (as_it_was, ["--client", "client-0", "--method", "hf-kcu", "-k", "-3"], "iterations"),
    "negative damping": (as_it_was, ["--client", "client-0", "--damping", "-1"], "damping"),
    "damping nan": (as_it_was, ["--client", "client-0", "--damping", "nan"], "damping"),
    "negative tau": (as_it_was, ["--client", "client-0", "--tau", "-0.1"], "tau"),
    "no samples": (as_it_was, ["--client", "client-0", "--curvature-samples", "0"], "samples"),
    "unknown method": (as_it_was, ["--client", "client-0", "--method", "amnesia"], "retrace-krylov"),
    "iterations of no method": (as_it_was, ["--client", "client-0", "-k", "3"], "methods that have it: hf-kcu"),
    "an option of another method": (
        as_it_was,
        ["--client", "client-0", "--method", "retrain", "-k", "0"],
        "iterations",
    ),
    "nan weights": (nan_weights, ["--client", "client-0"], "NaN"),
    "other architecture": (other_architecture, ["--client", "client-0"], "another architecture"),
    "another model in the description": (
        described(model="digits-net"),
        ["--client", "client-0"],
        "another architecture",
    ),
    "damaged weights": (damaged_weights, ["--client", "client-0"], "damaged"),
    "missing weights": (missing_weights, ["--client", "client-0"], "missing"),
    "damaged memory": (damaged_memory, ["--client", "client-0"], "memory"),
    "nan memory": (nan_memory, ["--client", "client-0"], ""),
    "broken run.json": (written("{"), ["--client", "client-0"], "run.json"),
    "foreign run.json": (written("[1, 2]"), ["--client", "client-0"], "run.json"),
    "unknown dataset": (described(dataset="imagenet"), ["--client", "client-0"], "digits, mnist"),
    "unknown model": (described(model="gpt"), ["--client", "client-0"], "digits-net"),
    "missing dataset": (described(dataset="mnist", model="cnn"), ["--client", "client-0"], "EXPUNGE_DATA"),
}


@pytest.mark.parametrize(("spoil", "arguments", "said"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_one_line_and_changes_nothing(run, expunge, spoil, arguments, said):
    spoil(run)
    before = tree(run)
    refused(expunge("forget", run, *arguments), said)
    assert tree(run) == before


BAD_TRAININGS = {
    "dataset": (["--dataset", "imagenet"], "digits, mnist"),
    "model": (["--model", "gpt"], "digits-net"),
    "model that does not fit": (["--dataset", "digits", "--model", "cnn", "--clients", "0"], "client"),
    "no clients": (["--clients", "0"], "client"),
    "too many clients": (["--clients", "1000"], "fewer clients"),
    "alpha": (["--alpha", "0"], "alpha"),
    "rounds": (["--rounds", "0"], "at least 1"),
    "epochs": (["--epochs", "0"], "at least 1"),
    "batch size": (["--batch-size", "0"], "at least 1"),
    "learning rate": (["--learning-rate", "-1"], "learning rate"),
    "learning rate nan": (["--learning-rate", "nan"], "learning rate"),
    "participation": (["--participation", "1.5"], "participation"),
    "seed": (["--seed", "-1"], "seed"),
    "device": (["--device", "abacus"], "abacus"),
    "attacker": (["--attacker", "zoe"], "'zoe' to attack"),
    "target": (["--attacker", "client-0", "--target", "10"], "below 10"),
    "patch": (["--attacker", "client-0", "--patch", "9"], "does not fit"),
    "poisoned": (["--attacker", "client-0", "--poisoned", "0"], "fraction"),
    "boost": (["--attacker", "client-0", "--boost", "0"], "boost"),
    "divergence": (["--learning-rate", "1e38"], "diverged"),
    "missing dataset": (["--dataset", "mnist", "--model", "cnn"], "train-images-idx3-ubyte.gz is not in"),
    "missing cifar": (["--dataset", "cifar10", "--model", "cnn"], "data_batch_1.bin is not in"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD_TRAININGS.values(), ids=BAD_TRAININGS)
def test_a_bad_training_is_one_line_and_makes_no_folder(tmp_path, expunge, arguments, said):
    refused(expunge("train", "--out", tmp_path / "new", *TINY, *arguments), said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [idx(torch.zeros(3, 28, 28, dtype=torch.uint8)), b"broken", b""],
    ids=["another file of the format", "no gzip", "empty"],
)
def test_a_broken_dataset_file_is_one_line(tmp_path, expunge, run, content):
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    arguments = ("--dataset", "mnist", "--model", "cnn", "--rounds", "1", "--clients", "3")
    refused(expunge("train", "--out", tmp_path / "new", *arguments), "damaged")
    refused(expunge("train", "--out", tmp_path / "new", *arguments, "--data-dir", tmp_path / "data"), "damaged")
    assert not (tmp_path / "new").exists()
    described(dataset="mnist", model="cnn")(run)
    before = tree(run)
    refused(expunge("forget", run, "--client", "client-0"), "damaged")
    refused(expunge("show", run), "damaged")
    assert tree(run) == before


class TestFolders:
    def test_below_a_regular_file(self, tmp_path, expunge):
        (tmp_path / "file").write_text("mine")
        below = tmp_path / "file" / "run"
        refused(expunge("train", "--out", below, *TINY), "cannot be written")
        refused(expunge("train", "--out", tmp_path / "file", *TINY), "exists already")
        refused(expunge("demo", "--out", below), "cannot be written")
        refused(expunge("forget", below, "--client", "client-0"))
        refused(expunge("show", below))
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "mine"}

    def test_nothing_is_written_over(self, run, expunge):
        before = tree(run)
        refused(expunge("train", "--out", run, *TINY), "not empty")
        assert tree(run) == before

    def test_no_run_there(self, tmp_path, expunge):
        refused(expunge("forget", tmp_path / "nowhere", "--client", "client-0"), "not a run folder")
        refused(expunge("show", tmp_path / "nowhere"), "not a run folder")
        assert not list(tmp_path.iterdir())

    def test_nothing_to_show(self, run, expunge):
        before = tree(run)
        refused(expunge("show", run), "Nothing was forgotten")
        assert tree(run) == before

    def test_a_file_in_the_place_of_the_result(self, run, expunge):
        (run / "without-client-0").write_text("mine")
        before = tree(run)
        refused(expunge("forget", run, "--client", "client-0"), "cannot be written")
        assert tree(run) == before

    def test_the_deployed_demo_without_flower(self, tmp_path, expunge, monkeypatch):
        monkeypatch.setitem(sys.modules, "flwr", None)
        refused(expunge("demo", "--engine", "flower", "--out", tmp_path / "new"), "pip install 'expunge[flower]'")

    def test_seeds_of_the_demo(self, tmp_path, expunge):
        refused(expunge("demo", "--out", tmp_path / "new", "--seeds", "1,x"), "whole numbers")
        assert not list(tmp_path.iterdir())


class TestHelp:
    @pytest.mark.parametrize("command", ["demo", "train", "forget", "show"])
    def test_has_an_example(self, expunge, command):
        code, out, _ = expunge(command, "--help")
        assert code == 0
        assert f"expunge {command} " in out.split("Example", 1)[1]

    def test_lists_every_command(self, expunge):
        code, out, _ = expunge("--help")
        assert code == 0
        assert all(command in out for command in ("demo", "train", "forget", "show", "methods"))


@pytest.mark.slow
class TestAsAProcess:
    """The installed entry point itself."""

    @staticmethod
    def start(*arguments):
        program = [sys.executable, "-c", "from expunge.cli import main; main()", *map(str, arguments)]
        return subprocess.run(program, capture_output=True, text=True, check=False)

    def test_one_line_or_with_debug_a_traceback(self, tmp_path):
        short = self.start("show", tmp_path / "nowhere")
        assert short.returncode == 1
        assert short.stdout == ""
        assert short.stderr.startswith("error: ")
        assert short.stderr.count("\n") == 1
        long = self.start("--debug", "show", tmp_path / "nowhere")
        assert long.returncode != 0
        assert "Traceback (most recent call last)" in long.stderr
        assert "DataError" in long.stderr
        assert "is not a run folder" in long.stderr
