import re
from dataclasses import replace

import pytest

from expunge.bench.results import Results, Row, Variant
from expunge.errors import RequestError
from expunge.report import nearness_markdown
from expunge.report.goals import GOALS, WORK, Goal
from expunge.report.nearness import attack_of, nearness

WEAK, STRONG = ({"backdoors": {"client-3": {"size": 4, "boost": boost}}} for boost in (1.0, 4.0))
CLEAN: dict = {"backdoors": {}}
RETRAINED = (0.59, 0.60, 0.61)
"""Of every rate; the mean is 0.6."""


def results(
    own, trained, scenario=STRONG, method="retrace", seeds=(10,), retrained=RETRAINED, distances=(0.1, 0.2, 0.3)
):
    """Each seed has the same retrained models; `own` and `trained` are measures, or one set of measures a seed."""
    rows = []
    for number, seed in enumerate(seeds):
        for value, distance in zip(retrained, distances, strict=False):
            rates = dict.fromkeys(("test_accuracy", "forget_accuracy", "asr", "mia_auc"), value)
            rows.append(Row("retrain", seed, **rates, kl_forget=distance, speedup_in_gradients=1.0))
        for name, given in (("trained", trained), (method, own)):
            rows.append(Row(name, seed, **(given[number] if isinstance(given, list) else given)))
    return Results("backdoor", scenario, {}, rows, {})


def status(measure, own, trained, scenario=STRONG, **more):
    (found,) = nearness(results({measure: own}, {measure: trained}, scenario, **more))
    return found.statuses[measure]


def test_the_goals_are_those_that_were_agreed_on():
    said = {attack: {goal.measure: goal.words() for goal in goals} for attack, goals in GOALS.items()}
    poisoned = {
        "test_accuracy": "within 1 point",
        "forget_accuracy": "within 3 points",
        "asr": "within 1 point",
        "kl_forget": "inside the range of retrained models or at most 3% of the trained model's",
    }
    assert said["weak"] == {**poisoned, WORK: "at least 150×"}
    assert said["strong"] == {**poisoned, WORK: "at least 60×"}
    assert said["clean"] == {
        "forget_accuracy": "at most 50% of the trained model's",
        "kl_forget": "below the trained model's",
        "mia_auc": "below the trained model's",
        WORK: "at least 100×",
    }


@pytest.mark.parametrize(
    ("scenario", "expected"), [(CLEAN, "clean"), ({}, "clean"), (WEAK, "weak"), (STRONG, "strong")]
)
def test_what_the_leaver_had_done_is_read_from_the_scenario(scenario, expected):
    assert attack_of(Results("backdoor", scenario, {}, [], {})) == expected


@pytest.mark.parametrize(
    ("measure", "just_met", "just_missed", "trained"),
    [
        ("test_accuracy", 0.61, 0.6101, 0.63),
        ("test_accuracy", 0.59, 0.5899, 0.63),
        ("forget_accuracy", 0.63, 0.6301, 0.95),
        ("forget_accuracy", 0.57, 0.5699, 0.95),
        ("asr", 0.61, 0.6101, 0.95),
        ("kl_forget", 0.3, 0.3001, 5.0),  # the largest distance of a retrained model
        ("kl_forget", 0.36, 0.3601, 12.0),  # 3 of 100 of the trained model's
    ],
)
@pytest.mark.parametrize("scenario", [WEAK, STRONG])
def test_goals_of_a_poisoned_client(measure, just_met, just_missed, trained, scenario):
    assert status(measure, just_met, trained, scenario) == "met"
    assert status(measure, just_missed, trained, scenario) == "missed"


@pytest.mark.parametrize(
    ("measure", "just_met", "just_missed", "trained"),
    [
        ("forget_accuracy", 0.65, 0.6501, 0.70),
        ("forget_accuracy", 0.55, 0.5499, 0.70),
        ("kl_forget", 0.3999, 0.4, 0.4),
        ("mia_auc", 0.6199, 0.62, 0.62),
        ("mia_auc", 0.5801, 0.58, 0.62),
    ],
)
def test_goals_of_a_clean_client(measure, just_met, just_missed, trained):
    assert status(measure, just_met, trained, CLEAN) == "met"
    assert status(measure, just_missed, trained, CLEAN) == "missed"


@pytest.mark.parametrize(("scenario", "least"), [(WEAK, 150), (STRONG, 60), (CLEAN, 100)])
def test_work_is_at_least_what_was_set(scenario, least):
    assert status(WORK, float(least), None, scenario) == "met"
    assert status(WORK, least - 0.1, None, scenario) == "missed"
    assert status(WORK, None, None, scenario) == "missed"


@pytest.mark.parametrize(
    ("measure", "own", "trained", "expected"),
    [
        ("forget_accuracy", 0.60, 0.61, "cannot tell"),  # met, but doing nothing lies on the edge of the range
        ("forget_accuracy", 0.60, 0.6101, "met"),
        ("forget_accuracy", 0.61, 0.605, "cannot tell"),  # further than half the way, inside the range
        ("forget_accuracy", 0.62, 0.605, "missed"),  # out of the range that the trained model lies in
        ("kl_forget", 0.01, 0.3, "cannot tell"),
        ("kl_forget", 0.31, 0.3, "missed"),
        ("mia_auc", 0.601, 0.602, "cannot tell"),
    ],
)
def test_where_doing_nothing_looks_retrained_a_goal_cannot_be_met(measure, own, trained, expected):
    assert status(measure, own, trained, CLEAN) == expected


def test_accuracy_on_new_data_can_always_be_lost():
    assert status("test_accuracy", 0.60, 0.60) == "met"
    assert status("test_accuracy", 0.58, 0.60) == "missed"


def test_two_retrained_models_have_no_range():
    assert status("forget_accuracy", 0.60, 0.95, retrained=(0.6, 0.6)) == "cannot tell"
    assert status("test_accuracy", 0.60, 0.95, retrained=(0.6, 0.6)) == "met"


def test_differences_are_averaged_and_their_scatter_is_told():
    own = [{"forget_accuracy": value} for value in (0.66, 0.55, 0.62)]
    (found,) = nearness(results(own, {"forget_accuracy": 0.9}, seeds=(10, 11, 12)))
    gap = found.gaps["forget_accuracy"]
    assert (round(gap.own.mean, 6), round(gap.own.spread, 6)) == (0.01, 0.055678)
    assert (round(gap.trained.mean, 6), round(gap.trained.spread, 6)) == (0.3, 0.0)
    assert found.statuses["forget_accuracy"] == "met"


def test_each_seed_has_its_own_retrained_models():
    rows = []
    for seed, level in ((10, 0.3), (11, 0.8)):
        rows += [Row("retrain", seed, forget_accuracy=level + shift) for shift in (-0.01, 0.0, 0.01)]
        rows += [Row("trained", seed, forget_accuracy=level + 0.1), Row("retrace", seed, forget_accuracy=level - 0.02)]
    (found,) = nearness(Results("main", STRONG, {}, rows, {}))
    gap = found.gaps["forget_accuracy"]
    assert (round(gap.own.mean, 6), round(gap.own.spread, 6), gap.own.inside) == (-0.02, 0.0, False)
    assert (round(gap.trained.size, 6), gap.trained.inside) == (0.1, False)


@pytest.mark.parametrize(("inside", "expected"), [(2, "cannot tell"), (1, "met")])
def test_most_seeds_decide_whether_doing_nothing_looks_retrained(inside, expected):
    trained = [{"forget_accuracy": 0.605 if number < inside else 0.7} for number in range(3)]
    (found,) = nearness(results({"forget_accuracy": 0.6}, trained, CLEAN, seeds=(10, 11, 12)))
    assert found.statuses["forget_accuracy"] == expected


def test_a_distance_is_compared_with_the_mean_of_the_largest_of_each_seed():
    rows = []
    for seed, largest in ((10, 0.2), (11, 0.4)):
        rows += [Row("retrain", seed, kl_forget=distance) for distance in (0.1, 0.15, largest)]
        rows += [Row("trained", seed, kl_forget=5.0), Row("retrace", seed, kl_forget=0.3)]
    (found,) = nearness(Results("main", STRONG, {}, rows, {}))
    assert found.gaps["kl_forget"].retrained == pytest.approx((0.1, 0.3))
    assert found.statuses["kl_forget"] == "met"


def both():
    own = {"test_accuracy": 0.6, "forget_accuracy": 0.64, "asr": 0.6, "kl_forget": 0.2, WORK: 80.0}
    trained = {"test_accuracy": 0.62, "forget_accuracy": 0.95, "asr": 0.9, "kl_forget": 4.0}
    strong = results(own, trained)
    clean = results({"forget_accuracy": 0.6, WORK: 120.0}, {"forget_accuracy": 0.6}, CLEAN, "retrace+recovery")
    parts = {"cifar10, strong": strong, "cifar10, clean": clean}
    rows = [replace(row, variant=label) for label, part in parts.items() for row in part.rows]
    rows = [replace(row, verdict="UNDECIDED") if row.method.startswith("retrace") else row for row in rows]
    variants = {label: Variant(part.scenario, {}, {}) for label, part in parts.items()}
    return Results("backdoor", {}, {}, rows, {}, variants)


def test_the_table_names_what_is_missed_before_what_is_met():
    text = nearness_markdown(both())
    assert text.startswith("**1 of 7 goals is missed**, 1 cannot be told, 5 are met.\n")
    strong, clean = (line for line in text.splitlines() if line.startswith("| cifar10"))
    assert "| retrace | **1 missed** (forgotten data); 4 met |" in strong
    assert "| +4.00 ! (trained +35.0) |" in strong
    assert "| **0.200** (retrained 0.100–0.300; 5.0% of trained 4.00) |" in strong
    assert "| **80×** | undecided 1 |" in strong
    assert "| retrace + recovery | 1 cannot tell (forgotten data); 1 met |" in clean
    assert re.search(r"\+0\.0 \? \(trained \+0\.0\)", clean)
    assert "for a clean client: forgotten data at most 50% of the trained model's" in text


def test_an_experiment_without_the_default_is_refused():
    with pytest.raises(RequestError, match="no rows of retrace"):
        nearness_markdown(Results("samples", {}, {}, [Row("trained", 10)], {}))


def test_a_goal_with_two_ways_is_said_with_or():
    assert Goal("kl_forget", in_range=True, nearer=True).words() == (
        "inside the range of retrained models or below the trained model's"
    )
