import pytest

from expunge.bench.results import Results
from expunge.report.columns import COLUMNS, measure
from expunge.report.layout import method_name, scenario_line
from expunge.report.measures import judge, judge_value, retrained_range, write_value


def test_friendly_names():
    assert method_name("trained") == "do nothing (trained)"
    assert method_name("retrain") == "retrain (gold standard)"
    assert method_name("hf-kcu-paper+recovery") == "HF-KCU as printed + recovery"
    assert method_name("some-new-one") == "some-new-one"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("test_accuracy", 0.953, "near"),
        ("test_accuracy", 0.93, "between"),
        ("test_accuracy", 0.90, "far"),
        ("test_accuracy", 0.999, "near"),
        ("asr", 0.021, "near"),
        ("asr", 0.05, "between"),
        ("asr", 0.5, "far"),
        ("forget_accuracy", 0.2, "far"),
        ("kl_forget", 0.27, "near"),
        ("kl_forget", 0.28, "between"),
        ("kl_forget", 0.9, "far"),
        ("speedup", 9.0, None),
    ],
)
def test_judgement_margins(results, key, value, expected):
    assert judge_value(value, measure(key), retrained_range(results, key)) == expected


def test_every_column_is_explained():
    assert all(column.meaning.endswith(".") for column in COLUMNS)


def test_without_recorded_noise_rates_fall_back_on_the_retrained_rows(results):
    bare = type(results)(results.experiment, {}, {}, results.rows, {})
    assert retrained_range(bare, "asr") == (0.0, 0.002)
    assert retrained_range(bare, "kl_forget") is None
    assert judge(bare, "trained", "kl_forget") is None


def test_names_of_baselines_and_controls():
    assert method_name("unfiltered+recovery") == "unfiltered trajectory + recovery"
    assert method_name("fed-eraser") == "FedEraser"
    assert method_name("fine-tuning-same-budget") == "fine-tuning, same budget"
    assert method_name("without causal weighting") == "without causal weighting"


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1867.89, "seconds", "1,868"),
        (0.48, "seconds", "0.48"),
        (7.55e6, "megabytes", "7.55"),
        (12.0, "count", "12"),
        (0.0, "megabytes", "0"),
        (0.0023, "number", "0.0023"),
        (-0.31, "number", "-0.310"),
    ],
)
def test_every_form_has_the_digits_it_needs(value, form, text):
    assert write_value(value, form) == text


def scenario(**more):
    base = {"dataset": "mnist", "clients": 20, "model": "cnn", "forgotten": [], **more}
    return scenario_line(Results("x", base, {}, [], {}))


def step(clients=(), shares=(), triggered=()):
    return {"clients": list(clients), "shares": dict.fromkeys(shares, 0.2), "triggered": list(triggered)}


def test_who_leaves_is_said():
    poisoned = {"client-1": {}}
    assert scenario(forgotten=["client-1"], backdoors=poisoned).endswith("; client-1 is poisoned and leaves.")
    both = scenario(steps=[step(["client-1", "client-2"])], backdoors=poisoned)
    assert both.endswith("; client-1, client-2 leave; poisoned: client-1.")
    assert scenario(steps=[step(shares=["client-4"])]).endswith("; samples of client-4 leave.")
    assert "; 5 clients leave" in scenario(steps=[step([f"client-{n}"]) for n in range(5)])
    assert scenario_line(Results("x", {}, {}, [], {})) == ""
