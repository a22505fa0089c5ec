from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from expunge.bench.results import Results, Row
from expunge.errors import RequestError
from expunge.report.cost import cost_plot
from expunge.report.forgetting import forgetting_plot
from expunge.report.palette import NOISE, colours
from expunge.report.plots import save_plots


def band(axes):
    return next(patch for patch in axes.patches if patch.get_gid() == NOISE)


def test_three_panels_with_bands_where_the_noise_is(results):
    figure = forgetting_plot(results)
    assert len(figure.axes) == 3
    for axes, key in zip(figure.axes, ("asr", "forget_accuracy", "test_accuracy"), strict=True):
        shape = band(axes)
        assert shape.get_x() == pytest.approx(100 * results.noise[key]["low"])
        assert shape.get_x() + shape.get_width() == pytest.approx(100 * results.noise[key]["high"])


def test_every_run_and_every_mean_is_drawn(results):
    axes = forgetting_plot(results).axes[0]
    assert sum(len(line.get_xdata()) for line in axes.lines) == len(results.rows) + len(results.methods())
    mean = sum(results.values("hf-kcu", "asr")) / 3
    assert any(line.get_xdata()[0] == pytest.approx(100 * mean) for line in axes.lines if len(line.get_xdata()) == 1)


def test_no_backdoor_no_panel(clean):
    titles = [axes.get_title(loc="left") for axes in forgetting_plot(clean).axes]
    assert titles == ["accuracy on forgotten data", "accuracy on new data"]


def test_cost_plot_marks_noise_and_doing_nothing(results):
    axes = cost_plot(results).axes[0]
    shape = band(axes)
    assert (shape.get_y(), shape.get_y() + shape.get_height()) == pytest.approx((0.11, 0.27))
    nothing = next(line for line in axes.lines if line.get_gid() == "do-nothing")
    assert nothing.get_ydata()[0] == pytest.approx(4.7)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    names = {text.get_text() for text in axes.texts if isinstance(text, Annotation)}
    assert names == {"retrain (gold standard)", "HF-KCU as printed", "HF-KCU corrected", "retrace, Krylov"}


@pytest.mark.parametrize("mark", [0.125, 0.1])
def test_the_note_on_the_band_covers_no_mark(results, mark):
    far = {"kl_forget": mark, "speedup_in_gradients": 20.0}
    rows = [replace(row, **far) if row.method == "retrace-krylov" else row for row in results.rows]
    thin = {**results.noise, "kl_forget": {**results.noise["kl_forget"], "low": 0.11, "high": 0.12}}
    axes = cost_plot(replace(results, rows=rows, noise=thin)).axes[0]
    note = next(text for text in axes.texts if not isinstance(text, Annotation) and "apart" in text.get_text())
    box, (point,) = note.get_window_extent(), axes.transData.transform([(20.0, mark)])
    assert box.x0 < point[0] < box.x1  # it would be covered were the note as high
    assert not box.y0 < point[1] < box.y1


def test_a_band_is_spoken_of_where_there_is_one(results):
    assert "blue band" in forgetting_plot(results).get_supxlabel()
    few = [row for row in results.rows if row.method != "retrain"]
    assert "band" not in forgetting_plot(replace(results, rows=few, noise={})).get_supxlabel()


def test_a_method_dearer_than_retraining_is_not_cut_off(results):
    rows = [replace(row, speedup_in_gradients=0.2) if row.method == "hf-kcu-paper" else row for row in results.rows]
    assert cost_plot(replace(results, rows=rows)).axes[0].get_xlim()[0] < 0.15


def test_cost_labels_do_not_overlap_even_when_points_do(results):
    twins = [
        replace(row, method=f"twin-{index}")
        for index in range(5)
        for row in results.rows
        if row.method == "retrace-krylov"
    ]
    figure = cost_plot(replace(results, rows=results.rows + twins))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in figure.axes[0].texts]
    assert len(boxes) == 4 + 5 + 2
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    "rows", [[], [Row("trained", 0)], [Row("hf-kcu-paper", 0, kl_forget=0.0, speedup_in_gradients=0.0)]]
)
def test_nothing_measured_is_said_and_not_an_error(rows, tmp_path):
    bare = Results("bare", {}, {}, rows, {})
    assert "measured" in forgetting_plot(bare).axes[0].texts[0].get_text()
    assert "measured" in cost_plot(bare).axes[0].texts[0].get_text()
    assert save_plots(bare, tmp_path) == []


def test_files_are_written_and_reproducible_without_pyplot_state(results, tmp_path):
    first, second = save_plots(results, tmp_path / "a"), save_plots(results, tmp_path / "b")
    assert [path.name for path in first] == ["forgetting.png", "forgetting.svg", "cost.png", "cost.svg"]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(first, second, strict=True))
    assert not pyplot.get_fignums()


def test_unwritable_folder_is_an_error_of_ours(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Cannot write plots"):
        save_plots(results, tmp_path / "file")


def test_other_methods_get_colours_of_their_own():
    chosen = colours(["trained", "retrain", "retrace-krylov", "fine-tuning", "federaser", "federaser+recovery"])
    assert len(set(chosen.values())) == 5
    assert chosen["federaser"] == chosen["federaser+recovery"]
