import json
from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from expunge.bench.results import Results, Row, Series
from expunge.report.cost import cost_plot
from expunge.report.fingerprint import fingerprint, read_fingerprint
from expunge.report.forgetting import forgetting_plot
from expunge.report.layout import method_name
from expunge.report.lines import series_plot, variants_plot
from expunge.report.palette import NOISE, colours, marker
from expunge.report.pareto import PAPER, pareto_plot, seconds_plot
from expunge.report.plots import figures, save_plots
from report.bench_cases import METHODS, adversary, bench, conditioning, convergence, sequential

LAMBDAS = ("lambda=0.1", "lambda=0.01", "lambda=0.001")


def texts(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [Text.get_window_extent(text, canvas.get_renderer()) for text in figure.axes[0].texts]


def names(axes):
    return [line.get_label() for line in axes.lines if not str(line.get_label()).startswith("_")]


def hollow(axes):
    return [line for line in axes.lines if line.get_gid() == PAPER]


@pytest.mark.parametrize("plot", [cost_plot, pareto_plot])
@pytest.mark.parametrize("variant", ["clean client", "strong backdoor"])
def test_no_label_covers_another_with_seventeen_methods(plot, variant):
    boxes = texts(plot(bench().part(variant)))
    assert len(boxes) >= 16
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_no_two_methods_look_alike():
    looks = {(colours(list(METHODS))[method], marker(method)) for method in METHODS if method != "do-nothing"}
    assert len(looks) == len(METHODS) - 1


def test_a_ruined_model_does_not_press_the_others_together():
    axes = forgetting_plot(bench().part("clean client")).axes[-1]
    assert axes.get_xlim()[0] > 30
    assert "← 10.0" in {text.get_text() for text in axes.texts}


def test_the_papers_points_are_hollow_beside_ours():
    axes = pareto_plot(bench().part("clean client")).axes[0]
    assert axes.get_xscale() == "log"
    points = {(line.get_xdata()[0], round(float(line.get_ydata()[0]), 2)) for line in hollow(axes)}
    assert {(47.75, 71.16), (5.0, 69.52), (3.3, 67.8), (1.0, 70.79)} <= points
    assert {line.get_markerfacecolor() for line in hollow(axes)} == {"none"}
    labels = {text.get_text() for text in axes.texts if isinstance(text, Annotation)}
    assert "gradient ascent (10.0%)" in labels


def test_seconds_are_bars_on_a_logarithmic_scale_with_the_papers_around():
    axes = seconds_plot(bench().part("clean client")).axes[0]
    assert axes.get_xscale() == "log"
    theirs = sorted(float(bar.get_width()) for bar in axes.patches if bar.get_gid() == PAPER)
    assert theirs == [19.5, 945.0]
    assert len(axes.patches) == len(METHODS) - 2 + 2
    assert next(label.get_text() for label in axes.get_yticklabels()) == "retrain (gold standard)"


def test_variants_are_steps_with_a_line_for_every_method():
    figure = variants_plot(bench("damping", LAMBDAS))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "accuracy on new data",
        "accuracy on the forgotten data",
        "backdoor success",
        "times less work than retraining",
    ]
    first, *_, work = figure.axes
    assert [label.get_text() for label in first.get_xticklabels()] == ["0.1", "0.01", "0.001"]
    assert first.get_xlabel() == "lambda"
    assert {container.get_label() for container in first.containers} == {
        method_name(m) for m in METHODS if m != "do-nothing"
    }
    assert [float(y) for y in hollow(first)[0].get_ydata()] == pytest.approx([70.93, 70.29, 70.89])
    assert any(part.get_gid() == NOISE for part in first.collections)
    assert work.get_yscale() == "log"
    assert not hollow(work)


def test_a_line_has_the_means_of_its_variants():
    results = bench("clients", ("10 clients", "20 clients"))
    axes = variants_plot(results).axes[0]
    line = next(part for part in axes.containers if part.get_label() == "SISA")[0]
    expected = [100 * results.part(label).summary("sisa", "test_accuracy").mean for label in results.variants]
    assert [float(y) for y in line.get_ydata()] == pytest.approx(expected)
    assert ([tick.get_text() for tick in axes.get_xticklabels()], axes.get_xlabel()) == (["10", "20"], "clients")


def test_a_variant_where_everything_is_low_is_still_in_the_picture():
    results = bench("clients", ("10 clients", "200 clients"))
    low = [replace(row, test_accuracy=row.test_accuracy - 0.35 * (row.variant[0] == "2")) for row in results.rows]
    results = replace(results, rows=low)
    axes = variants_plot(results).axes[0]
    line = next(part for part in axes.containers if part.get_label() == "retrain (gold standard)")[0]
    assert axes.get_ylim()[0] < min(float(y) for y in line.get_ydata())
    assert axes.get_ylim()[0] > 0  # and one that is ruined still does not press the others together


def test_residuals_fall_on_a_logarithmic_scale_beside_bound_and_paper():
    figure = series_plot(convergence())
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("linear", "log", "iteration")
        assert names(axes)[:3] == ["HF-KCU corrected", "retrace, Krylov", "bound"]
        assert [line.get_label() for line in hollow(axes)] == ["paper: HF-KCU (client 1)", "paper: HF-KCU (client 2)"]
        assert next(line for line in axes.lines if line.get_label() == "bound").get_linestyle() == "--"


def test_iterations_against_kappa_on_two_logarithmic_scales():
    (axes,) = series_plot(conditioning()).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert next(list(map(float, line.get_ydata())) for line in hollow(axes)) == [35, 71, 158, 354, 707]


def test_departures_are_panels_in_percent_with_retrained_marks():
    figure = series_plot(sequential())
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "test accuracy",
        "worst asr of the departed",
        "mean forget accuracy of the departed",
    ]
    for axes in figure.axes:
        retrained = next(line for line in axes.lines if line.get_label() == "retrain (gold standard)")
        assert retrained.get_linestyle() == "None"
        assert 30 < max(axes.get_ylim()) < 100
        assert any(part.get_gid() == NOISE for part in axes.collections)


def test_several_bounds_can_be_told_apart():
    (axes,) = series_plot(adversary()).axes
    styles = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert styles["bound"] != styles["bound with CG"]
    assert axes.get_yscale() == "log"


def test_runs_of_unequal_length_are_drawn_together():
    runs = [Series("sisa", "", "step", "error", [1, 2], [1.0, 2.0]), Series("sisa", "", "step", "error", [1], [3.0])]
    (axes,) = series_plot(Results("x", {}, {}, [], {}, {}, runs)).axes
    assert [float(y) for y in axes.lines[0].get_ydata()] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (bench(variants=("cifar10",)), ["forgetting", "cost", "pareto", "seconds"]),
        (bench("backdoor"), [f"{n}-{v}" for v in ("clean-client", "strong-backdoor") for n in ("forgetting", "cost")]),
        (
            bench("damping", LAMBDAS[:2]),
            [f"{n}-lambda-{v}" for v in ("0.1", "0.01") for n in ("forgetting", "cost")] + ["variants"],
        ),
        (sequential(), ["series"]),
    ],
)
def test_the_pictures_of_an_experiment(results, expected):
    assert list(figures(results)) == expected


def test_variants_of_which_nothing_is_wanted_are_not_drawn():
    of_one = ["forgetting-clean-client", "cost-clean-client"]
    assert list(figures(bench("backdoor"), of_one[1:])) == of_one


def test_a_picture_names_the_results_file_it_was_made_from(tmp_path):
    results = sequential()
    results.save(tmp_path / "results.json")
    png, svg = save_plots(results, tmp_path / "pictures")
    assert (png.name, svg.name) == ("series.png", "series.svg")
    assert read_fingerprint(png) == fingerprint(Results.load(tmp_path / "results.json"))
    changed = replace(results, series=results.series[1:])
    assert read_fingerprint(png) != fingerprint(changed)


def test_a_measure_that_nobody_took_does_not_make_a_picture_stale(tmp_path):
    """A new field of a row is None in every older file, or is not there."""
    rows = [Row("trained", 0, asr=0.9), Row("sisa", 0, asr=0.1)]
    results = Results("demo", {}, {}, rows, {})
    results.save(tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    for row in content["rows"]:
        row["test_loss"] = None
    (tmp_path / "older.json").write_text(json.dumps(content))
    assert fingerprint(Results.load(tmp_path / "older.json")) == fingerprint(results)
    assert fingerprint(replace(results, rows=[replace(rows[0], test_loss=0.1), rows[1]])) != fingerprint(results)


def test_no_picture_no_fingerprint(tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    assert read_fingerprint(tmp_path / "text.png") is None
    assert read_fingerprint(tmp_path / "none.png") is None
