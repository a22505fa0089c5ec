from dataclasses import replace

import pytest

from expunge.bench.results import Results, Row, Variant
from expunge.errors import RequestError
from expunge.report import nearness_markdown
from expunge.report.nearness import WORK, nearness

RETRAINED = (0.59, 0.60, 0.61)
"""Of every rate; the mean is 0.6."""


def results(own, trained, method="retrace", seeds=(10,), retrained=RETRAINED, distances=(0.1, 0.2, 0.3)):
    """Each seed has the same retrained models; `own` and `trained` are measures, or one set of measures a seed."""
    rows = []
    for number, seed in enumerate(seeds):
        for value, distance in zip(retrained, distances, strict=False):
            rates = dict.fromkeys(("test_accuracy", "forget_accuracy", "asr", "mia_auc"), value)
            rows.append(Row("retrain", seed, **rates, kl_forget=distance, speedup_in_gradients=1.0))
        for name, given in (("trained", trained), (method, own)):
            rows.append(Row(name, seed, **(given[number] if isinstance(given, list) else given)))
    return Results("backdoor", {}, {}, rows, {})


def test_differences_are_averaged_and_their_scatter_is_told():
    own = [{"forget_accuracy": value} for value in (0.66, 0.55, 0.62)]
    (found,) = nearness(results(own, {"forget_accuracy": 0.9}, seeds=(10, 11, 12)))
    gap = found.gaps["forget_accuracy"]
    assert (round(gap.own.mean, 6), round(gap.own.spread, 6)) == (0.01, 0.055678)
    assert (round(gap.trained.mean, 6), round(gap.trained.spread, 6)) == (0.3, 0.0)
    assert found.seeds == 3


def test_each_seed_has_its_own_retrained_models():
    rows = []
    for seed, level in ((10, 0.3), (11, 0.8)):
        rows += [Row("retrain", seed, forget_accuracy=level + shift) for shift in (-0.01, 0.0, 0.01)]
        rows += [Row("trained", seed, forget_accuracy=level + 0.1), Row("retrace", seed, forget_accuracy=level - 0.02)]
    (found,) = nearness(Results("main", {}, {}, rows, {}))
    gap = found.gaps["forget_accuracy"]
    assert (round(gap.own.mean, 6), round(gap.own.spread, 6)) == (-0.02, 0.0)
    assert round(gap.trained.mean, 6) == 0.1


def test_a_distance_stands_beside_the_mean_range_of_each_seed():
    rows = []
    for seed, largest in ((10, 0.2), (11, 0.4)):
        rows += [Row("retrain", seed, kl_forget=distance) for distance in (0.1, 0.15, largest)]
        rows += [Row("trained", seed, kl_forget=5.0), Row("retrace", seed, kl_forget=0.3)]
    (found,) = nearness(Results("main", {}, {}, rows, {}))
    assert found.gaps["kl_forget"].retrained == pytest.approx((0.1, 0.3))
    assert found.gaps["kl_forget"].own.mean == pytest.approx(0.3)
    (few,) = nearness(Results("main", {}, {}, [row for row in rows if row.kl_forget != 0.2], {}))
    assert few.gaps["kl_forget"].retrained is None


def test_what_was_not_measured_has_no_gap():
    (found,) = nearness(results({"asr": 0.1}, {"test_accuracy": 0.9}))
    assert found.gaps == {}
    assert found.work is None


def both(*verdicts):
    own = {"test_accuracy": 0.6, "forget_accuracy": 0.64, "asr": 0.6, "kl_forget": 0.2, WORK: 80.0}
    trained = {"test_accuracy": 0.62, "forget_accuracy": 0.95, "asr": 0.9, "kl_forget": 4.0}
    strong = results(own, trained, seeds=(10, 11, 12))
    clean = results({"forget_accuracy": 0.6, WORK: 120.0}, {"forget_accuracy": 0.6}, "retrace+recovery")
    parts = {"cifar10, strong": strong, "cifar10, clean": clean}
    rows = [replace(row, variant=label) for label, part in parts.items() for row in part.rows]
    given = iter(verdicts)
    rows = [replace(row, verdict=next(given, None)) if row.method.startswith("retrace") else row for row in rows]
    variants = {label: Variant(part.scenario, {}, {}) for label, part in parts.items()}
    return Results("backdoor", {}, {}, rows, {}, variants)


def test_the_table_has_verdicts_before_numbers_and_no_judgement_of_its_own():
    text = nearness_markdown(both("EQUIVALENT", "UNDER-FORGOTTEN", "EQUIVALENT", "EQUIVALENT"))
    assert text.startswith("**UNDER-FORGOTTEN in 1 of 4 runs, EQUIVALENT in 3.**\n")
    strong, clean = (line for line in text.splitlines() if line.startswith("| cifar10"))
    assert "| retrace | equivalent 2, under-forgotten 1 ! | +0.0 ± 0.0 (trained +2.0) |" in strong
    assert "| 0.200 (retrained 0.100–0.300; 5.0% of trained 4.00) |" in strong
    assert strong.endswith("| 80× |")
    assert "| retrace + recovery | **equivalent** | – | +0.0 (trained +0.0) |" in clean
    assert strong.count("!") == 1
    assert clean.count("**") == 2
    assert "A line's mark is the worst verdict of its runs" in text


def test_without_verdicts_nothing_is_marked():
    text = nearness_markdown(both())
    assert text.startswith("There are no verdicts.\n")
    assert "| retrace | – |" in text


def test_an_experiment_without_the_default_is_refused():
    with pytest.raises(RequestError, match="no rows of retrace"):
        nearness_markdown(Results("samples", {}, {}, [Row("trained", 10)], {}))
