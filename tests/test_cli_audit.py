"""`expunge audit` on a real run: retrains what is missing, judges, and leaves what an auditor looks at."""

import json

import pytest

from expunge.bench.results import Results


@pytest.fixture
def run(tmp_path, monkeypatch, expunge):
    """A federation with a poisoned client that two methods tried to forget."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    tiny = ("--rounds", "6", "--clients", "5", "--epochs", "3", "--learning-rate", "0.1", "--model", "softmax")
    assert expunge("train", "--out", "run", *tiny, "--attacker", "client-3", "--boost", "4")[0] == 0
    for method in ("retrace-krylov", "fine-tuning"):
        assert expunge("forget", "run", "--client", "client-3", "--method", method)[0] == 0
    return tmp_path / "run"


def require_doing_nothing_to_be_told(methods):
    """It is UNDER-FORGOTTEN, with the trained model's own scores, and the others have theirs."""
    own = methods["do-nothing"]
    assert own["verdict"] == "UNDER-FORGOTTEN"
    assert own["models"]["after"] == own["models"]["before"]
    assert len(set(own["models"]["retrained"]) - {own["models"]["before"]}) == 5
    for attack, found in own["attacks"].items():
        assert found["unlearned"] == found["trained"], attack
        assert found["gap"] == found["do_nothing"], attack
        assert methods["fine-tuning"]["attacks"][attack]["trained"] == found["trained"], attack
        assert methods["fine-tuning"]["attacks"][attack]["unlearned"] != found["unlearned"], attack
    assert all(found["value"] == found["doing_nothing"] for found in own["findings"])
    for found in own["evidence"]:
        if found["what"] in ("retained loss", "retained gradient"):
            assert found["values"]["before"] == found["values"]["after"]
    told = {name: {found["measure"]: found["value"] for found in each["findings"]} for name, each in methods.items()}
    assert told["do-nothing"]["asr"] > 0.5 > told["retrace-krylov"]["asr"]


@pytest.mark.slow
def test_an_audit_retrains_judges_and_shows(run, expunge):
    code, out, err = expunge("audit", "run")
    assert code == 0, err
    folder = run / "without-client-3"
    assert len(list(folder.glob("retrain-*"))) == 5
    content = json.loads((folder / "audit.json").read_text())
    assert set(content["methods"]) == {"retrace-krylov", "fine-tuning"}
    for name, own in content["methods"].items():
        assert own["verdict"] in ("EQUIVALENT", "UNDER-FORGOTTEN", "OVER-FORGOTTEN", "DAMAGED", "UNDECIDED"), name
        assert own["verdict"] in out
        assert own["number"] in " ".join(out.split())
        assert own["limits"] in " ".join(out.split())
        assert {found["measure"] for found in own["findings"]} >= {
            "test_accuracy",
            "forget_loss",
            "trigger_rank",
            "nearby_pull",
            "distance",
        }
        assert list(own["attacks"]) == ["loss", "modified entropy", "shadow models", "RMIA", "LiRA"]
        assert len(own["attacks"]["LiRA"]["retrained"]) == 5
        assert {found["what"] for found in own["evidence"]} >= {"held-out data", "retained loss", "retained gradient"}
    assert "l2" in content["certificate"].lower() or "L2" in content["certificate"]
    attempts = {name: own["attempt"] for name, own in content["methods"].items()}
    assert sorted(attempts.values()) == [1, 2]
    assert {own["level"] for own in content["methods"].values()} == {0.05, 0.025}
    assert "2nd model audited for this request: judged at a level of 2.5%." in out
    assert {"audit.html", "audit-scores.png", "audit-roc.png"} <= {file.name for file in folder.iterdir()}
    made = {file: file.stat().st_mtime_ns for file in folder.glob("retrain-*/model.safetensors")}
    assert expunge("forget", "run", "--client", "client-3", "--method", "do-nothing")[0] == 0
    code, out, err = expunge("audit", "run", "--json")
    assert code == 0, err
    methods = json.loads(out)["without-client-3"]["methods"]
    assert methods.keys() == content["methods"].keys() | {"do-nothing"}
    require_doing_nothing_to_be_told(methods)
    assert {name: own["attempt"] for name, own in methods.items()} == {**attempts, "do-nothing": 3}
    assert all(methods[name]["nonce"] == own["nonce"] for name, own in content["methods"].items())
    assert {file: file.stat().st_mtime_ns for file in folder.glob("retrain-*/model.safetensors")} == made


def test_an_audit_writes_the_report_too_and_a_new_try_removes_both(run, expunge):
    folder = run / "without-client-3"
    assert expunge("show", "run")[0] == 0
    assert expunge("forget", "run", "--client", "client-3", "--method", "do-nothing")[0] == 0
    derived = {"report.html", "results.json", "audit.html", "audit.json"}
    assert not derived & {file.name for file in folder.iterdir()}
    assert expunge("audit", "run", "--retrains", "0")[0] == 0
    assert derived <= {file.name for file in folder.iterdir()}
    rows = Results.load(folder / "results.json").rows
    assert {row.method for row in rows} == {"trained", "retrace-krylov", "fine-tuning", "do-nothing"}
    assert "nothing" in (folder / "report.html").read_text().lower()
    assert expunge("forget", "run", "--client", "client-3", "--method", "fine-tuning")[0] == 0
    assert not derived & {file.name for file in folder.iterdir()}


def test_without_retrained_models_there_is_evidence_and_no_verdict(run, expunge):
    code, out, err = expunge("audit", "run", "--retrains", "0")
    assert code == 0, err
    content = json.loads((run / "without-client-3" / "audit.json").read_text())
    own = content["methods"]["retrace-krylov"]
    assert own["verdict"] == "UNDECIDED"
    assert own["number"] == "5 more retrained models might decide."
    assert "retrained models" in own["reason"]
    assert own["attacks"] == {}
    assert len(own["evidence"]) == 5
    assert own["evidence"][1]["what"].endswith("without retraining"), "the word that needs none"
    assert "UNDECIDED" in out


@pytest.mark.slow
def test_what_becomes_of_the_models_later_is_shown(run, expunge):
    code, out, err = expunge("audit", "run", "--retrains", "3", "--persistence", "1", "--relearning", "1")
    assert code == 0, err
    folder = run / "without-client-3"
    names = ["1 more round of those who stay", "1 epoch on the forgotten data"]
    for own in json.loads((folder / "audit.json").read_text())["methods"].values():
        assert list(own["later"]) == names
        assert own["as_it_is"]["verdict"] in (own["verdict"], "EQUIVALENT", "UNDECIDED")
    for name in names:
        assert f"After {name}: " in out
        assert f"After {name}: " in (folder / "audit.html").read_text()


def test_another_nonce_is_another_attempt_and_the_same_is_not(run, expunge):
    def asked(*options):
        code, out, err = expunge("audit", "run", "--retrains", "0", "--json", *options)
        assert code == 0, err
        own = json.loads(out)["without-client-3"]["methods"]["fine-tuning"]
        return own["attempt"], own["nonce"]

    first = asked("--nonce", "the auditor's")
    assert first[1] == "the auditor's"
    assert asked() == asked("--nonce", "the auditor's") == first
    again = asked("--nonce", "another")
    assert again == (first[0] + 2, "another"), "both models were asked again"


def test_nothing_to_audit_is_one_line(tmp_path, monkeypatch, expunge):
    monkeypatch.chdir(tmp_path)
    tiny = ("--rounds", "1", "--clients", "3", "--epochs", "1", "--model", "softmax")
    assert expunge("train", "--out", "run", *tiny)[0] == 0
    code, out, err = expunge("audit", "run")
    assert (code, out) == (1, "")
    assert "Nothing was forgotten in run yet" in err
    code, out, err = expunge("audit", "nowhere")
    assert (code, out) == (1, "")
    assert "not a run folder" in err
