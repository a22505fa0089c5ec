import pytest

from expunge.bench.response import CLEAN, LEFT, LENGTH, MEASURED, PREDICTED, STRONG, X_NAME
from expunge.bench.results import Results, Series
from expunge.report.page import render_report
from expunge.report.plots import figures, whole_figures


def study():
    """Two trainings, two kinds of client, two seeds."""
    series = []
    for training in ("SGD", "Adam"):
        for kind, more in ((CLEAN, 0.0), (STRONG, 0.3)):
            variant = f"{training}, {kind}"
            for seed in (-1, 1):
                own = [0.9, 0.4 + more + 0.1 * seed]
                series.append(Series(MEASURED, variant, X_NAME, LEFT, [0.1, 10.0], own))
                series.append(Series(PREDICTED, variant, X_NAME, LEFT, [0.1, 10.0], [1.0, 0.4]))
                series.append(Series(MEASURED, variant, X_NAME, LENGTH, [0.1, 10.0], [0.75, 0.25]))
    return Results("response", {}, {}, [], {}, {}, series)


def test_a_panel_a_training_with_marks_as_large_as_their_share_of_the_pull():
    figure = whole_figures(study())["response"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["SGD", "Adam"]
    for axes in figure.axes:
        assert axes.get_xscale() == "log"
        clean, strong = (marks for marks in axes.collections if marks.get_offsets().shape == (2, 2))
        assert [list(marks.get_offsets()[:, 1]) for marks in (clean, strong)] == [
            pytest.approx([0.9, 0.4]),
            pytest.approx([0.9, 0.7]),
        ]
        large, small = clean.get_sizes()
        assert large > 2.5 * small
        assert tuple(clean.get_facecolor()[0]) != tuple(strong.get_facecolor()[0])
        assert clean.get_offsets()[0, 0] < 0.1 < strong.get_offsets()[0, 0]  # side by side


def test_bars_reach_from_the_lowest_to_the_highest_seed_and_lines_are_predicted():
    axes = whole_figures(study())["response"].axes[0]
    bars = [path.vertices[:, 1] for marks in axes.collections for path in marks.get_paths() if len(path.vertices) == 2]
    assert any(list(ends) == pytest.approx([0.6, 0.8]) for ends in bars)
    predicted = [
        list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 2 and 10.0 in line.get_xdata()
    ]
    assert predicted == [[1.0, 0.4], [1.0, 0.4]]


def test_the_page_shows_it_and_nothing_is_drawn_of_nothing():
    assert list(figures(study())) == ["response"]
    assert "How much of a client&#x27;s pull is left" in render_report(study())
    assert whole_figures(Results("response", {}, {}, [], {})) == {}
