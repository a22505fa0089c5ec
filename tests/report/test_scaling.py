import pytest

from expunge.bench.results import Results, Series
from expunge.report.page import render_report
from expunge.report.plots import figures, whole_figures
from expunge.report.scaling import MEMORY, SECONDS, X_NAME


def study():
    """Two models; of the second the memory is not known."""
    series = [
        Series("retrace", "small", X_NAME, SECONDS, [2e5], [0.1]),
        Series("retrain", "large", X_NAME, SECONDS, [3e8], [900.0]),
        Series("retrain", "small", X_NAME, SECONDS, [2e5], [10.0]),
        Series("retrace", "large", X_NAME, SECONDS, [3e8], [20.0]),
        Series("retrace", "small", X_NAME, MEMORY, [2e5], [0.5]),
    ]
    return Results("scaling", {}, {}, [], {}, {}, series)


def test_a_panel_for_seconds_and_one_for_memory_by_parameters():
    seconds, memory = whole_figures(study())["scaling"].axes
    assert {axes.get_xscale() + axes.get_yscale() for axes in (seconds, memory)} == {"loglog"}
    assert [axes.get_ylabel() for axes in (seconds, memory)] == [SECONDS, MEMORY]
    lines = {line.get_label(): line.get_xydata().tolist() for line in seconds.lines}
    assert lines == {
        "retrace": [pytest.approx([2e5, 0.1]), pytest.approx([3e8, 20.0])],
        "retrain": [pytest.approx([2e5, 10.0]), pytest.approx([3e8, 900.0])],
    }
    assert len(memory.lines) == 1


def test_the_page_shows_it_and_nothing_is_drawn_of_nothing():
    assert list(figures(study())) == ["scaling"]
    assert "by the number of parameters" in render_report(study())
    assert whole_figures(Results("scaling", {}, {}, [], {})) == {}
