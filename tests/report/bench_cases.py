"""Synthetic but realistic benchmark results: 17 methods, three seeds, several variants; and curves."""

import random
from dataclasses import replace

from expunge.bench.results import Results, Row, Series, Variant

# test accuracy, forget accuracy, backdoor success, KL on forgotten data, times less work, times faster, seconds
METHODS = {
    "trained": (0.625, 0.951, 0.961, 9.7, None, None, None),
    "do-nothing": (0.625, 0.951, 0.961, 9.7, None, None, None),
    "retrain": (0.624, 0.297, 0.026, 0.12, 1.0, 1.0, 95.0),
    "retrain-same-start": (0.624, 0.297, 0.026, 0.02, 1.0, 1.0, 95.0),
    "gradient-ascent": (0.10, 0.10, 0.0, 8.0, 81.0, 45.0, 2.1),
    "projected-gradient-ascent": (0.585, 0.70, 0.62, 3.1, 75.0, 44.0, 2.2),
    "fed-eraser": (0.432, 0.281, 0.021, 0.78, 5.5, 5.4, 17.6),
    "sisa": (0.51, 0.29, 0.02, 0.65, 4.2, 4.0, 23.8),
    "fine-tuning": (0.627, 0.833, 0.90, 5.2, 100.0, 98.0, 0.97),
    "fine-tuning-same-budget": (0.626, 0.86, 0.92, 5.5, 140.0, 138.0, 0.69),
    "not": (0.583, 0.379, 0.14, 0.37, 25.0, 25.0, 3.8),
    "fed-osd": (0.60, 0.45, 0.2, 0.9, 12.0, 11.5, 8.3),
    "unfiltered+recovery": (0.624, 0.503, 0.27, 0.52, 93.0, 92.0, 1.03),
    "hf-kcu-paper": (0.627, 0.956, 0.961, 9.7, 18.0, 17.0, 5.6),
    "hf-kcu": (0.625, 0.828, 0.736, 3.9, 151.0, 197.0, 0.48),
    "hf-kcu+recovery": (0.624, 0.80, 0.70, 3.7, 60.0, 65.0, 1.5),
    "retrace-krylov": (0.561, 0.265, 0.011, 0.30, 133.0, 168.0, 0.56),
    "retrace-krylov+recovery": (0.593, 0.273, 0.015, 0.18, 57.0, 62.0, 1.53),
}
VERDICTS = {
    "retrain": "EQUIVALENT",
    "retrain-same-start": "EQUIVALENT",
    "gradient-ascent": "DAMAGED",
    "fed-eraser": "DAMAGED",
    "sisa": "DAMAGED",
    "retrace-krylov": "DAMAGED",
    "retrace-krylov+recovery": "EQUIVALENT",
}
"""Where there is a backdoor; methods that are not here are under-forgotten."""
SEEDS = (10, 11, 12)
NOISE = {
    "test_accuracy": {"low": 0.617, "high": 0.631, "mean": 0.624},
    "forget_accuracy": {"low": 0.285, "high": 0.309, "mean": 0.297},
    "asr": {"low": 0.017, "high": 0.034, "mean": 0.026},
    "mia_auc": {"low": 0.498, "high": 0.506, "mean": 0.502},
    "mia_success": {"low": 0.495, "high": 0.507, "mean": 0.501},
    "kl_forget": {"low": 0.09, "high": 0.174, "mean": 0.13},
    "kl": {"low": 0.04, "high": 0.06, "mean": 0.05},
    "parameter_gap": {"low": 1.39, "high": 1.41, "mean": 1.40},
}
SAME = {name: {**of, "high": of["low"] + 0.3 * (of["high"] - of["low"])} for name, of in NOISE.items()}
SCENARIO = {
    "dataset": "cifar10",
    "model": "cnn",
    "clients": 10,
    "forgotten": ["client-3"],
    "plan": {"rounds": 20, "epochs": 5},
}


def row(method, seed, variant, shift, backdoor, dice):
    test, forget, asr, distance, work, clock, seconds = METHODS[method]
    wobble = dice.uniform(-0.007, 0.007)

    def rate(value):
        return min(1.0, max(0.0, value + wobble + shift))

    return Row(
        method,
        seed,
        test_accuracy=rate(test),
        forget_accuracy=rate(forget),
        asr=min(1.0, max(0.0, asr + wobble)) if backdoor else None,
        mia_auc=0.5 + 0.05 * forget + wobble / 2,
        mia_success=0.5 + 0.03 * forget + wobble / 2,
        kl=distance / 10,
        kl_forget=distance * (1 + 10 * wobble),
        parameter_gap=1.4 + wobble,
        seconds=seconds,
        speedup=clock and clock * (1 + 5 * wobble),
        speedup_in_gradients=work,
        rounds=None if work is None else 1 + seed % 10 + 10,
        bytes=None if work is None else 3.4e8 / work * 10,
        stored_bytes=7.5e6 if "retrace" in method else None,
        training_overhead=0.01 if "retrace" in method else None,
        verdict=VERDICTS.get(method, "UNDER-FORGOTTEN") if backdoor else "UNDECIDED",
        variant=variant,
    )


def bench(experiment="main", variants=("clean client", "strong backdoor"), methods=tuple(METHODS)):
    """Two variants by default, the second with a backdoor."""
    dice = random.Random(0)
    rows = [
        row(method, seed, variant, -0.02 * number, number > 0, dice)
        for number, variant in enumerate(variants)
        for seed in SEEDS
        for method in methods
    ]
    shifted = [
        {
            name: {end: value - 0.02 * n * name.endswith("accuracy") for end, value in of.items()}
            for name, of in kind.items()
        }
        for n in range(len(variants))
        for kind in (NOISE, SAME)
    ]
    of = {
        variant: Variant(dict(SCENARIO), shifted[2 * number], shifted[2 * number + 1])
        for number, variant in enumerate(variants)
    }
    noise = shifted[0] if len(variants) == 1 else {}
    return Results(experiment, {}, {"expunge": "0.1.0", "device": "H200"}, rows, noise, of)


def sequential():
    """Ten clients leave one after another."""
    names = ("test accuracy", "worst asr of the departed", "mean forget accuracy of the departed")
    dice = random.Random(1)
    steps = list(range(1, 11))
    series = [
        Series(
            method,
            "",
            "clients that have left",
            name,
            steps,
            [start + slope * k + dice.uniform(0, 0.02) for k in steps],
        )
        for name in names
        for method, start, slope in (
            ("trained", 0.6, 0.001),
            ("retrain", 0.5, -0.01),
            ("retrace-krylov", 0.5, -0.02),
            ("fine-tuning", 0.55, -0.005),
        )
        for _ in SEEDS
    ]
    return Results("sequential", {}, {}, [], {}, {}, series)


def convergence():
    """Residuals of a solve for two clients that leave, with the bound."""
    steps = [float(k) for k in range(41)]
    series = [
        Series(method, f"{client} leaves", "iteration", "relative residual", steps, [start * rate**k for k in steps])
        for client in ("client-1", "client-2")
        for method, start, rate in (("hf-kcu", 1, 0.8), ("retrace-krylov", 1, 0.85), ("bound", 2, 0.9))
    ]
    return Results("convergence", {}, {}, [], {}, {}, series)


def conditioning():
    """Iterations against the condition number."""
    kappa = [50.0, 200.0, 1000.0, 5000.0]
    curves = {"cg": [29, 60, 130, 250], "cg+nystrom": [8, 15, 22, 30], "bound": [5 * k**0.5 for k in kappa]}
    series = [
        Series(name, "geometric spectrum", "condition number", "iterations to 0.0001", kappa, y)
        for name, y in curves.items()
    ]
    return Results("conditioning", {}, {}, [], {}, {}, series)


def adversary():
    """Variants with rows, and curves that belong to none of them."""
    shares = [0.01, 0.1, 0.5, 0.9]
    curves = {
        "exact step": [0.1, 0.2, 0.9, 3.0],
        "bound": [1.0, 2.0, 9.0, 90.0],
        "bound with CG": [1.1, 2.3, 9.9, 99.0],
    }
    series = [Series(name, "quadratic", "perturbation", "error of the step", shares, y) for name, y in curves.items()]
    return replace(bench("adversary", ("1 retained", "2 retained")), series=series)
