import json
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expunge.bench.results import MEASURES, Results, Row, Series, Variant, environment, utc_now
from expunge.errors import DataError, ExpungeError, RequestError

ROWS = [
    Row("trained", 10, test_accuracy=0.98, asr=0.957, kl_forget=4.7),
    Row("retrain", 10, test_accuracy=0.971, asr=0.0),
    Row("retrain", 10, test_accuracy=0.967, asr=0.001),
    Row("retrace-krylov", 10, test_accuracy=0.965, asr=0.0, sample_gradients=123456789, verdict="equivalent"),
]
NOISE = {"asr": {"low": 0.0, "high": 0.001, "mean": 0.0005}}

FRAME = '{"version": 2, "experiment": "x", "date": null, "scenario": {}, "environment": {}, %s}'


@pytest.fixture
def results():
    return Results("digits", {"clients": 5, "trigger": {"patch": 3}}, {"python": "3.11"}, ROWS, NOISE)


def test_fields_are_the_documented_ones_in_order():
    expected = (
        "method seed test_accuracy test_loss forget_accuracy forget_loss secret_loss secret_rank"
        " secrets_likely secrets_first forget_probability forget_rouge"
        " forget_truth_ratio others_probability others_rouge others_truth_ratio asr trigger_pull trigger_rank"
        " trigger_moves nearby_pull mia_auc kl kl_forget distance trigger_distance unseen_distance kept_share logit_mse"
        " agreement parameter_gap causal_faithfulness accuracy_gap mia_success privacy_gap asr_reduction seconds"
        " speedup sample_gradients speedup_in_gradients rounds bytes stored_bytes training_overhead warned verdict"
        " variant digest evidence"
    )
    assert " ".join(field.name for field in fields(Row)) == expected


def test_round_trip_is_exact_and_stable(results, tmp_path):
    path = tmp_path / "new" / "results.json"
    results.save(path)
    assert Results.load(path) == results
    first = path.read_bytes()
    Results.load(path).save(path)
    assert path.read_bytes() == first
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_file_has_the_shape_of_the_architecture(results, tmp_path):
    results.save(tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    assert list(content) == ["version", "experiment", "date", "scenario", "environment", "rows", "noise"]
    assert (content["version"], content["date"]) == (2, None)
    names = [field.name for field in fields(Row)]
    for row, own in zip(content["rows"], results.rows, strict=True):
        assert list(row) == [name for name in names if getattr(own, name) is not None], "in order, and nothing empty"
    assert content["rows"][3]["sample_gradients"] == 123456789


def test_floats_keep_six_significant_digits_and_foreign_scalars_become_plain(results, tmp_path):
    row = Row("trained", 1, kl=1 / 3, seconds=numpy.float32(2.5), speedup=torch.tensor(4.0), rounds=numpy.int64(3))
    replace(results, rows=[row]).save(tmp_path / "results.json")
    found = Results.load(tmp_path / "results.json").rows[0]
    assert (found.kl, found.seconds, found.speedup, found.rounds) == (0.333333, 2.5, 4.0, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), numpy.float64("nan")])
@pytest.mark.parametrize("measure", ["asr", "kl", "seconds"])
def test_nonfinite_is_refused_by_name_and_leaves_the_old_file(results, tmp_path, measure, value):
    path = tmp_path / "results.json"
    results.save(path)
    before = path.read_bytes()
    bad = replace(results, rows=[*ROWS, Row("hf-kcu", 12, **{measure: value})])
    with pytest.raises(DataError, match=rf"{measure} of method 'hf-kcu', seed 12"):
        bad.save(path)
    assert path.read_bytes() == before


def test_nonfinite_elsewhere_is_refused(results, tmp_path):
    with pytest.raises(DataError, match="rate of scenario"):
        replace(results, scenario={"rate": float("nan")}).save(tmp_path / "r.json")
    with pytest.raises(DataError, match="low of asr of noise"):
        replace(results, noise={"asr": {"low": float("inf"), "high": 1.0, "mean": 1.0}}).save(tmp_path / "r.json")


def test_percentages_and_text_are_refused(results, tmp_path):
    with pytest.raises(DataError, match=r"asr .* \[0, 1\]"):
        replace(results, rows=[Row("trained", 0, asr=95.7)]).save(tmp_path / "r.json")
    with pytest.raises(DataError, match="must be a number"):
        replace(results, rows=[Row("trained", 0, kl="low")]).save(tmp_path / "r.json")
    with pytest.raises(DataError, match="is object"):
        replace(results, scenario={"thing": object()}).save(tmp_path / "r.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"experiment": "x"}',
        FRAME % '"rows": [{"method": "a"}], "noise": {}',
        FRAME % '"rows": [{"method": "a", "seed": 0, "other": 1}], "noise": {}',
        FRAME % '"rows": [{"method": "a", "seed": 0, "kl": NaN}], "noise": {}',
        FRAME % '"rows": [{"method": "a", "seed": 0, "kl": "b"}], "noise": {}',
        FRAME % '"rows": [], "noise": {"kl": 1}',
    ],
)
def test_foreign_files_are_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        Results.load(path)
    assert "foreign.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_good_frame_is_read(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(FRAME % '"rows": [{"method": "a", "seed": 0, "kl": 1}], "noise": {}')
    assert Results.load(path).rows == [Row("a", 0, kl=1)]


@pytest.mark.parametrize(("written", "said"), [("", "no version"), ('"version": 1,', "'1'"), ('"version": 3,', "'3'")])
def test_another_version_is_refused_for_what_it_is(tmp_path, written, said):
    """`hf-kcu` of an older file is another method: whatever else is in it, it is not read."""
    path = tmp_path / "old.json"
    path.write_text(
        (FRAME % '"rows": [{"method": "hf-kcu", "seed": 0}], "noise": {}').replace('"version": 2,', written)
    )
    with pytest.raises(DataError, match=rf"old\.json has .*{said}.* only results of version 2 .* measure again"):
        Results.load(path)


@pytest.mark.parametrize("version", ["true", "2.0", '"2"', "[2]"])
def test_a_version_is_a_whole_number(tmp_path, version):
    path = tmp_path / "odd.json"
    path.write_text((FRAME % '"rows": [], "noise": {}').replace('"version": 2', f'"version": {version}'))
    with pytest.raises(DataError, match="only results of version 2"):
        Results.load(path)


def test_deep_json_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"deep\.json is not a results file"):
        Results.load(tmp_path / "deep.json")


def test_date_and_digest_come_back_with_every_part(tmp_path):
    rows = [Row("trained", 0, variant="one", digest="ab12")]
    results = Results("x", {}, {}, rows, {}, {"one": Variant({}, {}, {})}, [], utc_now())
    results.save(tmp_path / "r.json")
    again = Results.load(tmp_path / "r.json")
    assert again == results
    assert datetime.now(UTC) - datetime.fromisoformat(again.date) < timedelta(minutes=1)
    assert again.part("one") == again


@pytest.mark.parametrize("date", ["yesterday", "2026-11-16T12:00:00", "2026-11-16T12:00:00+01:00", 5])
def test_a_date_is_a_time_in_utc(results, tmp_path, date):
    with pytest.raises(DataError, match="time in UTC"):
        replace(results, date=date).save(tmp_path / "r.json")


def test_names_are_words(results, tmp_path):
    for name in ("verdict", "variant", "digest"):
        with pytest.raises(DataError, match=f"its {name} in words"):
            replace(results, rows=[Row("trained", 0, **{name: 3})]).save(tmp_path / "r.json")


def test_missing_and_binary_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        Results.load(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match="not a results file"):
        Results.load(tmp_path / "binary.json")


def test_unwritable_path_is_an_error_of_ours(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExpungeError, match="Cannot write"):
        results.save(tmp_path / "file" / "results.json")


def test_methods_in_order_of_appearance(results):
    assert results.methods() == ["trained", "retrain", "retrace-krylov"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_summary_agrees_with_numpy(values):
    rows = [
        Row("other", 0, asr=0.5),
        *(Row("one", seed, asr=value) for seed, value in enumerate(values)),
        Row("one", 99),
    ]
    summary = Results("x", {}, {}, rows, {}).summary("one", "asr")
    spread = numpy.std(values, ddof=1) if len(values) > 1 else 0.0
    assert summary.mean == pytest.approx(numpy.mean(values))
    assert summary.spread == pytest.approx(spread, abs=1e-9)
    assert (summary.low, summary.high, summary.count) == (min(values), max(values), len(values))


def test_summary_of_nothing_is_none_and_unknown_measures_are_refused(results):
    assert results.summary("trained", "mia_auc") is None
    assert results.summary("absent", "asr") is None
    with pytest.raises(RequestError, match="no measure 'accuracy'"):
        results.summary("trained", "accuracy")
    assert "verdict" not in MEASURES


def test_environment_is_plain_and_tells_no_names(tmp_path):
    found = environment()
    Results("x", {}, found, [], {}).save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json").environment == found
    assert set(found) == {
        "expunge",
        "python",
        "torch",
        "numpy",
        "system",
        "machine",
        "cpu_count",
        "torch_threads",
        "device",
    }
    assert not any("/" in str(value) for value in found.values())


def test_variants_and_series_come_back_and_one_variant_stands_alone(tmp_path):
    rows = [Row("trained", 10, asr=0.9, variant="weak"), Row("trained", 10, asr=1.0, variant="strong")]
    variants = {name: Variant({"alpha": 0.5, "name": name}, NOISE, {}) for name in ("weak", "strong")}
    series = [Series("retrace", "weak", "iteration", "residual", [0.0, 1.0], [1.0, 0.5])]
    results = Results("backdoor", {}, {}, rows, {}, variants, series)
    results.save(tmp_path / "results.json")
    again = Results.load(tmp_path / "results.json")
    assert again == results
    strong = again.part("strong")
    assert strong.values("trained", "asr") == [1.0]
    assert strong.scenario["name"] == "strong"
    assert strong.noise == NOISE
    assert strong.series == []
    with pytest.raises(RequestError, match="weak, strong"):
        again.part("none")
