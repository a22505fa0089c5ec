from dataclasses import replace

from expunge.bench.results import Judged, Results, Row
from expunge.report import bench_markdown, nearness_markdown
from expunge.report.dropped import dropped_markdown, runs

BEFORE = {
    "main": {
        "": {
            "trained": {"10": "UNDER-FORGOTTEN"},
            "retrace": {"10": "EQUIVALENT", "11": "EQUIVALENT"},
            "sisa": {"10": "DAMAGED", "11": "EQUIVALENT"},
        }
    },
    "fresh": {"strong": {"retrace": {"10": "EQUIVALENT"}}},
}
NOTE = Judged("margins", "stored values", ["distance", "test_loss"])


def group(seed, variant=None, retrains=5, **verdicts):
    """The models of one seed; the default has a lower loss on the forgotten data than it should."""
    known = {"seed": seed, "variant": variant}
    rows = [Row("trained", forget_loss=1.0, verdict="UNDER-FORGOTTEN", **known)]
    rows += [Row("retrain", forget_loss=5 + number / 50, **known) for number in range(retrains)]
    return rows + [Row(method, forget_loss=4.0, verdict=verdict, **known) for method, verdict in verdicts.items()]


NOW = {
    "main": Results(
        "main",
        {},
        {},
        [*group(10, retrace="UNDER-FORGOTTEN", sisa="EQUIVALENT"), *group(11, retrace="EQUIVALENT", sisa="UNDECIDED")],
        {},
        judged=NOTE,
    ),
    "fresh": Results("fresh", {}, {}, group(10, "strong", retrains=3, retrace="UNDECIDED"), {}, judged=NOTE),
}


def test_every_run_has_its_two_verdicts_and_doing_nothing_is_no_method():
    found = {(run.experiment, run.method, run.seed): (run.before, run.now) for run in runs(BEFORE, NOW)}
    assert found == {
        ("main", "retrace", 10): ("EQUIVALENT", "UNDER-FORGOTTEN"),
        ("main", "sisa", 10): ("DAMAGED", "EQUIVALENT"),
        ("main", "retrace", 11): ("EQUIVALENT", "EQUIVALENT"),
        ("main", "sisa", 11): ("EQUIVALENT", "UNDECIDED"),
        ("fresh", "retrace", 10): ("EQUIVALENT", "UNDECIDED"),
    }


def test_the_table_counts_what_was_equivalent_and_what_it_is_now():
    lines = dropped_markdown(BEFORE, NOW).splitlines()
    assert lines[2] == "| main | 2 of 2 | under-forgotten 1, equivalent 1 | 1 of 2 | undecided |"
    assert lines[3] == "| fresh | 1 of 1 | undecided | – | – |"
    assert lines[4] == "| **all** | 3 of 3 | under-forgotten 1, equivalent 1, undecided 1 | 1 of 2 | undecided |"


def test_what_dropped_what_is_wrong_and_what_rose_is_said():
    text = dropped_markdown(BEFORE, NOW)
    assert "3 of 4 dropped. 1 of these have fewer than 5 retrained models" in text
    assert "Of the 2 of retrace that dropped, 2 lie outside a margin that can tell" in text
    assert "the farthest is: loss on the forgotten data (2)." in text
    assert "**UNDER-FORGOTTEN** (main, seed 10)." in text
    assert "EQUIVALENT now and not before: **SISA, DAMAGED before** (main, seed 10)." in text
    assert "Measured again" not in text


def test_an_experiment_that_was_measured_again_is_named():
    now = {**NOW, "main": replace(NOW["main"], judged=None)}
    assert "Measured again with all measures, not judged by stored values: main." in dropped_markdown(BEFORE, now)


def test_a_verdict_from_stored_values_has_a_sign_in_its_cell_and_the_caption_says_what_it_did_not_see():
    for write in (bench_markdown, nearness_markdown):
        text = write(NOW["main"])
        assert "| under-forgotten 1, equivalent 1 † ! |" in text
        assert "† Judged from stored values. Not looked at, for that needs models that are not stored: distance" in text
        assert "†" not in write(replace(NOW["main"], judged=None))


def test_a_method_that_gave_up_was_not_judged():
    rows = [replace(row, verdict="FAILED") if row.method == "sisa" else row for row in NOW["main"].rows]
    line = next(line for line in bench_markdown(replace(NOW["main"], rows=rows)).splitlines() if "| SISA" in line)
    assert "failed !" in line
    assert "†" not in line
