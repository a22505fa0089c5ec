"""A synthetic but realistic experiment: the digits scenario, three seeds, five retrained models a seed."""

from dataclasses import replace

import pytest

from expunge.bench.results import Results, Row

VERDICTS = {
    "trained": "UNDER-FORGOTTEN",
    "hf-kcu-paper": "UNDER-FORGOTTEN",
    "hf-kcu": "UNDER-FORGOTTEN",
    "retrace-krylov": "EQUIVALENT",
}
METHODS = {
    "trained": {"test_accuracy": 0.980, "forget_accuracy": 1.0, "asr": 0.957, "mia_auc": 0.541, "kl_forget": 4.7},
    "hf-kcu-paper": {
        "test_accuracy": 0.980,
        "forget_accuracy": 0.999,
        "asr": 0.955,
        "mia_auc": 0.540,
        "kl_forget": 4.66,
        "speedup": 17.2,
        "speedup_in_gradients": 18.1,
    },
    "hf-kcu": {
        "test_accuracy": 0.977,
        "forget_accuracy": 0.758,
        "asr": 0.316,
        "mia_auc": 0.522,
        "kl_forget": 1.3,
        "speedup": 29.0,
        "speedup_in_gradients": 14.0,
    },
    "retrace-krylov": {
        "test_accuracy": 0.965,
        "forget_accuracy": 0.483,
        "asr": 0.003,
        "mia_auc": 0.505,
        "kl_forget": 0.13,
        "speedup": 52.0,
        "speedup_in_gradients": 28.0,
    },
}
SHIFTS = {10: -1, 11: 0, 12: 1}


def shifted(method: str, seed: int) -> Row:
    step = SHIFTS[seed]
    values = METHODS[method]
    scaled = {key: value * (1 + 0.1 * step) for key, value in values.items() if "kl" in key or "speedup" in key}
    moved = {key: min(1.0, max(0.0, value + 0.003 * step)) for key, value in values.items() if key not in scaled}
    return Row(method, seed, **moved, **scaled, verdict=VERDICTS[method])


def retrained(seed: int, index: int) -> Row:
    return Row(
        "retrain",
        seed,
        test_accuracy=0.967 + 0.0025 * index,
        forget_accuracy=0.479 + 0.001 * index,
        asr=0.0005 * index,
        mia_auc=0.501 + 0.001 * index,
        speedup=1.0,
        speedup_in_gradients=1.0,
        verdict="EQUIVALENT",
    )


def digits() -> Results:
    rows = []
    for seed in SHIFTS:
        rows.append(shifted("trained", seed))
        rows += [retrained(seed, index) for index in range(5)]
        rows += [shifted(method, seed) for method in METHODS if method != "trained"]
    noise = {
        "test_accuracy": {"low": 0.967, "high": 0.977, "mean": 0.972},
        "forget_accuracy": {"low": 0.479, "high": 0.483, "mean": 0.481},
        "asr": {"low": 0.0, "high": 0.002, "mean": 0.001},
        "mia_auc": {"low": 0.501, "high": 0.505, "mean": 0.503},
        "kl_forget": {"low": 0.11, "high": 0.27, "mean": 0.18},
    }
    scenario = {
        "dataset": "digits",
        "clients": 5,
        "dirichlet": 1.0,
        "leaving": [0],
        "trigger": {"patch": 3, "boost": 4},
    }
    environment = {"expunge": "0.1.0", "python": "3.11", "device": "cpu"}
    return Results("digits backdoor", scenario, environment, rows, noise)


@pytest.fixture
def results() -> Results:
    return digits()


@pytest.fixture
def clean(results: Results) -> Results:
    """The same without a backdoor: no success rate anywhere."""
    rows = [replace(row, asr=None) for row in results.rows]
    return replace(results, rows=rows, noise={key: value for key, value in results.noise.items() if key != "asr"})


@pytest.fixture
def failed(results: Results) -> Results:
    """The same, but retrace left the backdoor where it was."""
    bad = {"asr": 0.95, "forget_accuracy": 0.99, "kl_forget": 4.5, "verdict": "UNDER-FORGOTTEN"}
    rows = [replace(row, **bad) if row.method == "retrace-krylov" else row for row in results.rows]
    return replace(results, rows=rows)
