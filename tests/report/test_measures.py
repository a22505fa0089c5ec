import pytest

from expunge.bench.results import Results
from expunge.report.columns import COLUMNS
from expunge.report.layout import method_name, scenario_line
from expunge.report.measures import retrained_range, write_value


def test_friendly_names():
    assert method_name("trained") == "do nothing (trained)"
    assert method_name("retrain") == "retrain (gold standard)"
    assert method_name("hf-kcu-paper+recovery") == "HF-KCU as printed + recovery"
    assert method_name("some-new-one") == "some-new-one"


def test_every_column_is_explained():
    assert all(column.meaning.endswith(".") for column in COLUMNS)


def test_without_recorded_noise_rates_fall_back_on_the_retrained_rows(results):
    bare = type(results)(results.experiment, {}, {}, results.rows, {})
    assert retrained_range(bare, "asr") == (0.0, 0.002)
    assert retrained_range(bare, "kl_forget") is None


def test_few_retrained_models_have_no_range(results):
    for count, expected in ((2, None), (3, (0.0, 0.001))):
        retrained = [row for row in results.rows if row.method == "retrain" and row.seed == 10][:count]
        assert retrained_range(Results("x", {}, {}, retrained, {}), "asr") == expected


def test_names_of_baselines_and_controls():
    assert method_name("unfiltered+recovery") == "unfiltered trajectory + recovery"
    assert method_name("fed-eraser") == "FedEraser"
    assert method_name("fine-tuning-same-budget") == "fine-tuning, same budget"
    assert method_name("without causal weighting") == "without causal weighting"


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1867.89, "seconds", "1,868"),
        (0.48, "seconds", "0.48"),
        (7.55e6, "megabytes", "7.55"),
        (12.0, "count", "12"),
        (0.0, "megabytes", "0"),
        (0.0023, "number", "0.0023"),
        (-0.31, "number", "-0.310"),
    ],
)
def test_every_form_has_the_digits_it_needs(value, form, text):
    assert write_value(value, form) == text


def scenario(**more):
    base = {"dataset": "mnist", "clients": 20, "model": "cnn", "forgotten": [], **more}
    return scenario_line(Results("x", base, {}, [], {}))


def step(clients=(), shares=(), triggered=()):
    return {"clients": list(clients), "shares": dict.fromkeys(shares, 0.2), "triggered": list(triggered)}


def test_who_leaves_is_said():
    poisoned = {"client-1": {}}
    assert scenario(forgotten=["client-1"], backdoors=poisoned).endswith("; client-1 is poisoned and leaves.")
    both = scenario(steps=[step(["client-1", "client-2"])], backdoors=poisoned)
    assert both.endswith("; client-1, client-2 leave; poisoned: client-1.")
    assert scenario(steps=[step(shares=["client-4"])]).endswith("; samples of client-4 leave.")
    assert "; 5 clients leave" in scenario(steps=[step([f"client-{n}"]) for n in range(5)])
    assert scenario_line(Results("x", {}, {}, [], {})) == ""


def test_another_attacker_among_the_same_leavers_is_said():
    everybody = [step(["client-1", "client-2", "client-3"])]
    said = scenario(steps=everybody, backdoors={"client-1": {}}, attackers=["client-1", "client-3"])
    assert said.endswith("; client-1, client-2, client-3 leave; poisoned: 1 of them, others for other seeds.")


def test_another_leaver_for_every_seed_is_said():
    names = [f"client-{number}" for number in (1, 3, 5, 7, 9)]
    everybody = ", ".join(names)
    one = scenario(steps=[step(["client-1"])], forgotten=names)
    assert one.endswith(f"; {everybody} leave, one per seed.")
    poisoned = scenario(steps=[step(["client-1"])], forgotten=names, backdoors={"client-1": {}})
    assert poisoned.endswith(f"; {everybody} leave, one per seed, poisoned.")
    friends = scenario(steps=[step(["client-1"])], forgotten=names, backdoors={"client-1": {}, "client-2": {}})
    assert friends.endswith(f"; {everybody} leave, one per seed; poisoned: the leaver and 1 more.")
    two = scenario(steps=[step(["client-1", "client-2"])], forgotten=[*names, "client-2"], backdoors={"client-1": {}})
    assert two.endswith(
        "; 2 clients leave, others for each seed"
        " (of client-1, client-2, client-3, client-5, client-7, client-9); poisoned: 1 of them."
    )
    some = scenario(steps=[step(shares=["client-1"])], forgotten=names)
    assert some.endswith(f"; samples of one client leave, another for each seed (of {everybody}).")


def test_how_many_seeds_and_retrains_is_said_and_what_was_trained_in_bfloat16():
    many = scenario(seeds=[10, 11], retrains_per_seed=5)
    assert many == "mnist, 20 clients, cnn; seeds 10, 11, 5 retrained models each."
    few = scenario(seeds=[10], retrains_per_seed=2, model="resnet18-bf16")
    assert few == (
        "mnist, 20 clients, resnet18-bf16 (trained in bfloat16); seed 10, 2 retrained models (too few for a verdict)."
    )
    assert "too few" not in scenario(seeds=[10], retrains_per_seed=3)
