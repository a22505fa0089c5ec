import pytest

from expunge.auditing.intervals import clopper_pearson
from expunge.bench.results import Results, Row, Variant
from expunge.report.page import render_report
from expunge.report.plots import whole_figures
from expunge.report.verdict_plots import verdict_figures


def study():
    """Two variants of twenty runs: mixtures in the first only."""
    rows = []
    for seed in range(20):
        called = {"retrain-beside-5": seed < 14, "retrain": seed < 18, "weights-20": seed < 1, "weights-50": False}
        called |= {f"{name}-same-start": seed < 5 for name in ("weights-20",)} | {"retrain-same-start": seed < 17}
        for name, equivalent in called.items():
            verdict = "EQUIVALENT" if equivalent else "UNDECIDED"
            rows.append(Row(name, seed, test_accuracy=0.9, verdict=verdict, variant="digits"))
        rows += [Row(name, seed, verdict="UNDECIDED", variant="clean") for name in ("retrain-beside-5", "retrain")]
    rows.append(Row("retrain", 20, verdict="DAMAGED", variant="digits"))  # a seed without mixtures
    variants = {name: Variant({"retrains_per_seed": 10}, {}, {}) for name in ("digits", "clean")}
    return Results("verdict", {}, {}, rows, {}, variants)


def drawn(axes):
    """Each line by its label: the places, the shares, and the ends of the bars."""
    found = {}
    for bars in axes.containers:
        (line, _, (segments,)) = bars.lines
        ends = [tuple(segment[:, 1]) for segment in segments.get_segments()]
        found[bars.get_label()] = (list(line.get_xdata()), list(line.get_ydata()), ends)
    return found


def test_power_is_drawn_with_exact_intervals():
    lines = drawn(verdict_figures(study())["power"].axes[0])
    assert set(lines) == {"digits", "clean"}
    places, shares, ends = lines["digits"]
    assert places == [5.0, 10.0]
    assert shares == pytest.approx([100 * 14 / 20, 100 * 18 / 21])
    for (low, high), counts in zip(ends, ((14, 20), (18, 21)), strict=True):
        limits = clopper_pearson(*counts)
        assert (low, high) == pytest.approx((100 * limits.low, 100 * limits.high))
    assert lines["clean"][1] == [0.0, 0.0]


def test_mixtures_begin_with_an_honest_retrain_of_the_same_start():
    lines = drawn(verdict_figures(study())["mixing"].axes[0])
    assert set(lines) == {"digits, fresh start", "digits, same start"}, "there are no mixtures of a clean client"
    assert lines["digits, fresh start"][0] == [0.0, 20.0, 50.0]
    assert lines["digits, fresh start"][1] == pytest.approx([90.0, 5.0, 0.0])
    assert lines["digits, same start"][1] == pytest.approx([85.0, 25.0])


def test_these_are_the_pictures_of_the_study():
    assert list(whole_figures(study())) == ["power", "mixing"]
    assert render_report(study()).count("Clopper-Pearson") >= 4
    assert whole_figures(Results("verdict", {}, {}, [Row("no-op", 10, verdict="UNDECIDED")], {})) == {}
