import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from expunge.bench.rejudging import judged_again, judgement_of, verdicts_of
from expunge.bench.results import Results, Row
from expunge.errors import RequestError

ROOT = Path(__file__).parent.parent.parent
SPREAD = (-0.004, -0.002, 0.0, 0.002, 0.004)


def model(method, asr, shift=0.0, **more):
    """A model with the values that older results have; the more of the trigger works, the lower is the loss."""
    known = {"asr": asr + shift, "forget_loss": 5 - 4 * asr + 10 * shift, "forget_accuracy": 0.4 + asr / 2 + shift}
    return Row(method, 10, **known, mia_auc=0.5 + asr / 5 + shift, test_accuracy=0.9 + shift, **more)


def results(retrains=5, **methods):
    """One federation whose retrained models obey the trigger at 5%, and methods by their own rates."""
    rows = [model("trained", 0.9, verdict="UNDER-FORGOTTEN")]
    rows += [model("retrain", 0.05, shift, verdict="EQUIVALENT") for shift in SPREAD[:retrains]]
    rows += [model(name, asr, verdict="EQUIVALENT") for name, asr in methods.items()]
    return Results("demo", {}, {}, rows, {})


def verdicts(found):
    return {row.method: row.verdict for row in found.rows}


def test_each_row_is_judged_by_its_own_values():
    found = verdicts(judged_again(results(retrace=0.052, sisa=0.5)))
    assert found == {"trained": "UNDER-FORGOTTEN", "retrain": None, "retrace": "EQUIVALENT", "sisa": "UNDER-FORGOTTEN"}


def test_with_trained_and_retrained_models_exchanged_the_verdicts_are_others():
    """A yardstick that is the trained models would call who did nothing EQUIVALENT."""
    swapped = []
    for row in results(retrace=0.052, sisa=0.89).rows:
        if row.method == "trained":
            swapped += [model("retrain", 0.9, shift) for shift in SPREAD]
        elif row.method != "retrain":
            swapped.append(row)
    swapped.append(model("trained", 0.05))
    found = verdicts(judged_again(replace(results(), rows=swapped)))
    assert (found["retrace"], found["sisa"]) == ("UNDER-FORGOTTEN", "EQUIVALENT")


def test_a_model_that_went_too_far_is_not_called_remembering():
    far = replace(model("ascent", 0.05, verdict="EQUIVALENT"), forget_loss=9.0, forget_accuracy=0.1)
    found = judged_again(replace(results(), rows=[*results().rows, far]))
    assert verdicts(found)["ascent"] == "OVER-FORGOTTEN"


def test_doing_it_twice_changes_nothing(tmp_path):
    once = judged_again(results(retrace=0.052, sisa=0.5, not_=0.2))
    assert judged_again(once) == once
    once.save(tmp_path / "results.json")
    assert judged_again(Results.load(tmp_path / "results.json")) == Results.load(tmp_path / "results.json")


def test_with_fewer_than_five_retrained_models_nothing_is_equivalent():
    found = verdicts(judged_again(results(retrains=4, retrace=0.05, sisa=0.5)))
    assert (found["retrace"], found["sisa"]) == ("UNDECIDED", "UNDER-FORGOTTEN")


def test_the_measures_that_need_models_are_named_and_values_stay():
    old = results(retrace=0.052)
    new = judged_again(old)
    plain = {"distance", "kl_forget", "unseen_distance", "kept_share", "test_loss"}
    of_a_trigger = {"trigger_distance", "trigger_pull", "trigger_rank", "trigger_moves", "nearby_pull"}
    assert (new.judged.rule, new.judged.source) == ("margins", "stored values")
    assert set(new.judged.without) == plain | of_a_trigger
    without = [replace(row, verdict=None) for row in old.rows]
    assert [replace(row, verdict=None) for row in new.rows] == without
    clean = replace(old, rows=[replace(row, asr=None) for row in old.rows])
    assert set(judged_again(clean).judged.without) == plain


def test_a_method_that_gave_up_and_a_row_that_was_never_judged_stay():
    rows = [*results().rows, model("sisa", 0.9, verdict="FAILED"), model("watched", 0.9)]
    found = verdicts(judged_again(replace(results(), rows=rows)))
    assert (found["sisa"], found["watched"]) == ("FAILED", None)


def test_outputs_that_were_not_finite_are_damage():
    broken = replace(model("ascent", 0.05, verdict="DAMAGED"), forget_loss=None, mia_auc=None)
    found = judged_again(replace(results(), rows=[*results().rows, broken]))
    assert found.rows[-1].verdict == "DAMAGED"


def test_each_seed_and_variant_has_its_own_yardstick():
    low = results(retrace=0.05)
    high = [replace(row, seed=11, asr=row.asr + 0.05, forget_loss=row.forget_loss - 1) for row in low.rows]
    found = judged_again(replace(low, rows=[*low.rows, *high]))
    assert [row.verdict for row in found.rows if row.method == "retrace"] == ["EQUIVALENT", "EQUIVALENT"]
    strangers = [replace(row, seed=11) if row.method == "retrace" else row for row in high]
    lone = replace(low, rows=[*low.rows, *(row for row in strangers if row.method == "retrace")])
    with pytest.raises(RequestError, match="seed 11 has no trained or no retrained models, so retrace cannot"):
        judged_again(lone)


def test_results_with_all_measures_or_without_verdicts_are_left_alone():
    whole = dict.fromkeys(judged_again(results(retrace=0.5)).judged.without, 0.1)
    new = replace(results(), rows=[replace(row, **whole) for row in results(retrace=0.5).rows])
    assert judged_again(new) is new
    unjudged = replace(new, rows=[replace(row, verdict=None) for row in results().rows])
    assert judged_again(unjudged) is unjudged


def test_the_note_is_read_back_and_none_is_written_without_one(tmp_path):
    new = judged_again(results(retrace=0.5))
    new.save(tmp_path / "new.json")
    assert Results.load(tmp_path / "new.json").judged == new.judged
    results().save(tmp_path / "old.json")
    assert "judged" not in json.loads((tmp_path / "old.json").read_text())


def test_a_judgement_says_why():
    found = results(sisa=0.5)
    assert "attack success" in judgement_of(found.rows[-1], found).reason


def script():
    spec = importlib.util.spec_from_file_location("rejudge", ROOT / "benchmarks/rejudge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_is_judged_again_and_keeps_the_verdicts_it_had(tmp_path):
    for name in ("demo", "verdict"):
        (tmp_path / name).mkdir()
    old = results(retrace=0.5)
    old.save(tmp_path / "demo/results.json")
    lone = replace(old, experiment="verdict", rows=[model("patched", 0.4, verdict="EQUIVALENT")])
    lone.save(tmp_path / "verdict/results.json")
    said = script().rejudge(tmp_path)
    assert said[0] == "demo: 6 of 7 rows have another verdict."
    assert said[1].startswith("verdict: left alone. ")
    kept = json.loads((tmp_path / "verdicts-0.2.0.json").read_text())
    assert kept == {"demo": verdicts_of(old)}
    assert kept["demo"][""]["retrace"] == {"10": "EQUIVALENT"}
    before = [path.read_bytes() for path in sorted(tmp_path.rglob("*.json"))]
    assert script().rejudge(tmp_path)[0] == "demo: 0 of 7 rows have another verdict."
    assert [path.read_bytes() for path in sorted(tmp_path.rglob("*.json"))] == before


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/results.json")), ids=lambda path: path.parent.name)
def test_committed_results_are_as_the_rule_of_today_judges_them(path):
    found = Results.load(path)
    if found.judged is not None:
        assert judged_again(found) == found
    else:  # measured with every measure, or nothing in it can be judged by values
        assert path.parent.name not in json.loads((ROOT / "results/verdicts-0.2.0.json").read_text()) or (
            judged_again(found) is found
        )
