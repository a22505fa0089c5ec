import pytest

from expunge.report.measures import COLUMNS, judge, judge_value, measure, method_name, retrained_range


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
