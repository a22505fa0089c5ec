import math
import re

import pytest

from expunge.auditing.functional import causal_faithfulness
from expunge.core.bounds import cg_rate, iterations_for
from expunge.models import build
from expunge.report.columns import measure
from expunge.report.contradictions import NOTES, contradictions_markdown
from expunge.report.printed import PRINTED, PRINTED_SERIES, SOURCES, beside, is_its_own, printed
from expunge.report.table import paper_notes
from report.bench_cases import bench


@pytest.mark.parametrize(
    ("experiment", "variant", "method", "key", "value"),
    [
        ("main", "", "trained", "test_accuracy", 0.7176),
        ("main", "", "trained", "mia_success", 0.85),
        ("main", "cifar10", "gradient-ascent", "test_accuracy", 0.10),
        ("main", "cifar10", "fed-eraser", "causal_faithfulness", 0.27),
        ("main", "cifar10", "sisa", "speedup", 3.3),
        ("datasets", "cifar10 vit-lite", "retrain", "test_accuracy", 0.4941),
        ("datasets", "cifar10 vit-lite-bf16", "retrain", "test_accuracy", 0.4941),
        ("backdoor", "printed protocol", "retrain", "asr", 0.0964),
        ("backdoor", "cifar10, printed protocol", "retrain", "asr", 0.0964),
        ("backdoor", "mnist, printed protocol", "retrain", "asr", None),
        ("backdoor", "strong", "retrain", "asr", None),
        ("components", "one client", "as printed: without adaptive scaling", "test_accuracy", 0.7099),
        ("damping", "lambda=0.001", "hf-kcu-paper", "speedup", 209.74),
        ("clients", "200 clients", "hf-kcu-paper", "test_accuracy", 0.3412),
        ("wallclock", "resnet18", "retrain", "seconds", 6300.0),
        ("wallclock", "resnet18-bf16", "retrain", "seconds", 6300.0),
        ("functional", "", "hf-kcu-paper", "kl", 0.0023),
        ("sequential", "", "hf-kcu-paper", "asr", None),
    ],
)
def test_values_of_the_paper(experiment, variant, method, key, value):
    assert printed(experiment, variant, method, key) == value


def test_every_value_has_a_source_a_column_and_is_a_rate_where_it_should_be():
    assert set(SOURCES) == {*PRINTED, *PRINTED_SERIES}
    assert set(NOTES) <= {*SOURCES, "method", "theory"}
    for variants in PRINTED.values():
        for values in (values for methods in variants.values() for values in methods.values()):
            for key, value in values.items():
                assert measure(key).key == key
                assert measure(key).form != "percent" or 0 <= value <= 1


def test_the_notes_on_the_figures_are_true():
    bound, first, _ = PRINTED_SERIES["convergence"]
    assert first.y[1] > bound.y[1]
    assert all(own < limit for own, limit in zip(first.y[2:], bound.y[2:], strict=True))
    theory, empirical, _ = PRINTED_SERIES["conditioning"]
    assert empirical.y == [round(y) for y in theory.y]
    assert theory.y[0] == pytest.approx(5 * math.sqrt(50))


def test_the_notes_on_times_are_true():
    seconds = {method: PRINTED["main"][""][method]["seconds"] for method in ("retrain", "hf-kcu-paper")}
    assert seconds["retrain"] / seconds["hf-kcu-paper"] == pytest.approx(48.5, abs=0.05)
    large = PRINTED["wallclock"]["resnet18"]
    assert large["retrain"]["seconds"] / large["hf-kcu-paper"]["seconds"] == 35
    speeds = [methods["hf-kcu-paper"]["speedup"] for methods in PRINTED["datasets"].values()]
    assert (min(speeds), max(speeds)) == (40.55, 82.04)
    assert PRINTED["clients"]["10 clients"] == PRINTED["heterogeneity"]["alpha=1.0"]


def test_the_notes_on_accuracy_are_true():
    main = {method: 100 * values["test_accuracy"] for method, values in PRINTED["main"][""].items()}
    assert main["trained"] - main["hf-kcu-paper"] == pytest.approx(0.60)
    assert main["hf-kcu-paper"] - main["retrain"] == pytest.approx(0.37)
    full, without = (
        PRINTED["components"]["one client"][name]
        for name in ("as printed: full", "as printed: without causal weighting")
    )
    assert without["test_accuracy"] > full["test_accuracy"]
    assert without["parameter_gap"] < full["parameter_gap"]


def test_the_notes_on_theory_and_the_model_are_true():
    assert iterations_for(100.0, 0.01) == 27
    assert cg_rate(100.0, 10) == pytest.approx(0.27, abs=0.005)
    counts = [sum(p.numel() for p in build("cnn", channels, 32, 10, 0).parameters()) for channels in (3, 1)]
    assert counts == [188_810, 188_234]


def test_every_note_is_in_the_list_once():
    text = contradictions_markdown().replace("\\", "")
    assert all(text.count(f"- {note}\n") == 1 for notes in NOTES.values() for note in notes)
    assert re.findall(r"^\*\*(.*)\*\*$", text, re.MULTILINE) == [*SOURCES.values(), "The method", "The theorems"]


def test_beside_other_data_in_the_same_experiment_nothing_is_said_of_smaller_runs():
    results = bench("backdoor", ("cifar10, printed protocol", "mnist, printed protocol"))
    results.variants["mnist, printed protocol"].scenario["dataset"] = "mnist"
    notes = paper_notes(results)
    assert notes[0] == "What the paper prints is from its Table 3."
    assert not any("full size" in note for note in notes)


def test_the_note_on_causal_faithfulness_is_true():
    accuracy = {method: values["test_accuracy"] for method, values in PRINTED["main"][""].items()}

    def own(method):
        return causal_faithfulness(accuracy["trained"], accuracy["retrain"], accuracy[method]).value

    assert own("hf-kcu-paper") == pytest.approx(0.62, abs=0.005)
    assert all(own(method) < 0 for method in ("gradient-ascent", "fed-eraser", "sisa"))


def test_beside_other_data_or_a_smaller_run_it_is_said_that_the_paper_speaks_of_something_else():
    results = bench("clients", ("10 clients",))
    assert beside(results.part("10 clients"), "retrain", "test_accuracy") == 0.6916
    assert is_its_own(results.part("10 clients"))
    assert not any("full size" in note for note in paper_notes(results))
    for change in ({"dataset": "digits"}, {"scale": "small"}):
        other = bench("clients", ("10 clients",))
        other.variants["10 clients"].scenario.update(change)
        assert not is_its_own(other.part("10 clients"))
        assert any("full size" in note for note in paper_notes(other))
