import math

import pytest

from expunge.audit.functional import causal_faithfulness
from expunge.report.columns import measure
from expunge.report.printed import NOTES, PRINTED, PRINTED_SERIES, SOURCES, beside, is_its_own, printed
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
        ("backdoor", "printed protocol", "retrain", "asr", 0.0964),
        ("backdoor", "strong", "retrain", "asr", None),
        ("components", "one client", "without adaptive scaling", "test_accuracy", 0.7099),
        ("damping", "lambda=0.001", "hf-kcu-paper", "speedup", 209.74),
        ("clients", "200 clients", "hf-kcu-paper", "test_accuracy", 0.3412),
        ("wallclock", "resnet18", "retrain", "seconds", 6300.0),
        ("functional", "", "hf-kcu-paper", "kl", 0.0023),
        ("sequential", "", "hf-kcu-paper", "asr", None),
    ],
)
def test_values_of_the_paper(experiment, variant, method, key, value):
    assert printed(experiment, variant, method, key) == value


def test_every_value_has_a_source_a_column_and_is_a_rate_where_it_should_be():
    assert set(SOURCES) == {*PRINTED, *PRINTED_SERIES}
    assert set(NOTES) <= set(SOURCES)
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
