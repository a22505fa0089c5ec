"""What the paper prints, as data: shown beside what we measure, never used to compute anything.

Rates lie in [0, 1]. The paper's HF-KCU is our `hf-kcu-paper`, its "MIA" the success rate of a membership attack. Where
its text and a table disagree the table's value stands here, and contradictions.py says so.
"""

from math import exp, sqrt

from expunge.bench.results import Results, Series
from expunge.report.layout import BFLOAT16, label_of

Values = dict[str, dict[str, float]]
"""A method's measures."""


def _pair(after: float, retrained: float, speedup: float, **more: float) -> Values:
    ours = {"test_accuracy": after, "speedup": speedup, **more}
    return {"hf-kcu-paper": ours, "retrain": {"test_accuracy": retrained, "speedup": 1.0}}


def _component(accuracy: float, gap: float, mia: float) -> dict[str, float]:
    return {"test_accuracy": accuracy, "parameter_gap": gap, "mia_success": mia}


def _damping(accuracy: float, faithfulness: float, speedup: float) -> Values:
    return {
        "hf-kcu-paper": {"test_accuracy": accuracy, "causal_faithfulness": faithfulness, "speedup": speedup},
    }


def _compared(accuracy: float, faithfulness: float, mia: float, speedup: float) -> dict[str, float]:
    return {
        "test_accuracy": accuracy,
        "causal_faithfulness": faithfulness,
        "mia_success": mia,
        "speedup": speedup,
    }


PRINTED: dict[str, dict[str, Values]] = {
    "main": {
        "": {
            "trained": {"test_accuracy": 0.7176, "mia_success": 0.850},
            "retrain": {"test_accuracy": 0.7079, "mia_success": 0.500, "speedup": 1.0, "seconds": 945.0},
            "gradient-ascent": _compared(0.1000, -1.53, 0.750, 8.5),
            "fed-eraser": _compared(0.6952, 0.27, 0.520, 5.0),
            "sisa": _compared(0.6780, 0.10, 0.540, 3.3),
            "hf-kcu-paper": {**_compared(0.7116, 0.38, 0.499, 47.75), "seconds": 19.5},
        }
    },
    "datasets": {
        "mnist": _pair(0.9924, 0.9913, 49.84, causal_faithfulness=-0.0053),
        "cifar10 vit-lite": _pair(0.4890, 0.4941, 40.55, causal_faithfulness=-0.0197),
        "cifar10 resnet18": _pair(0.6915, 0.6807, 82.04, causal_faithfulness=0.0001),
        "fashion-mnist": _pair(0.8908, 0.9051, 44.82, causal_faithfulness=-0.0027),
    },
    "backdoor": {
        "printed protocol": {
            "trained": {"test_accuracy": 0.7265, "asr": 0.8435},
            "hf-kcu-paper": {
                **{"test_accuracy": 0.7261, "asr": 0.7137, "asr_reduction": 0.154},
                **{"seconds": 4.34, "speedup": 430.0},
            },
            "retrain": {
                **{"test_accuracy": 0.7258, "asr": 0.0964, "asr_reduction": 0.886},
                **{"seconds": 1867.89, "speedup": 1.0},
            },
        }
    },
    "components": {
        "one client": {
            "as printed: full": _component(0.7118, 1.409, 0.500),
            "as printed: without causal weighting": _component(0.7151, 1.406, 0.492),
            "as printed: without adaptive scaling": _component(0.7099, 1.413, 0.496),
            "as printed: without influence decay": _component(0.7159, 1.406, 0.492),
            "as printed: uniform influence": _component(0.7160, 1.406, 0.490),
        }
    },
    "damping": {
        "lambda=0.1": _damping(0.7093, -0.0035, 41.53),
        "lambda=0.01": _damping(0.7029, -0.0034, 52.15),
        "lambda=0.001": _damping(0.7089, -0.0040, 209.74),
    },
    "heterogeneity": {
        "alpha=0.1": _pair(0.7084, 0.7025, 49.08),
        "alpha=0.5": _pair(0.6991, 0.7059, 58.97),
        "alpha=1.0": _pair(0.6885, 0.6916, 76.48),
    },
    "clients": {
        "10 clients": _pair(0.6885, 0.6916, 76.48),
        "100 clients": _pair(0.4313, 0.4489, 110.13),
        "200 clients": _pair(0.3412, 0.3793, 109.72),
    },
    "wallclock": {
        "cnn": {"hf-kcu-paper": {"seconds": 24.5}, "retrain": {"seconds": 1170.0}},
        "resnet18": {"hf-kcu-paper": {"seconds": 180.0}, "retrain": {"seconds": 6300.0}},
        "vit-lite": {"hf-kcu-paper": {"seconds": 85.0}, "retrain": {"seconds": 3450.0}},
    },
    "functional": {
        "": {"hf-kcu-paper": {"kl": 0.0023, "logit_mse": 0.087, "accuracy_gap": 0.0037, "mia_success": 0.499}}
    },
}
"""By experiment, variant, method and measure; the variant "" stands for any."""

SOURCES = {
    "main": "Table 1; seconds from Figure 1b",
    "datasets": "Table 2",
    "backdoor": "Table 3",
    "components": "Table 4",
    "damping": "Table 5",
    "heterogeneity": "Table 6",
    "clients": "Table 7",
    "wallclock": "Table 8",
    "functional": "Table 9",
    "convergence": "Figure 2a",
    "conditioning": "Figure 2b",
}

_ITERATIONS = [float(k) for k in range(0, 51, 5)]
_KAPPA = [50.0, 200.0, 1000.0, 5000.0, 20000.0]
_CLIENT_1 = [1.0, 0.421, 0.089, 0.0182, 0.00385, 0.000812, 0.000171, 3.61e-5, 7.62e-6, 1.61e-6, 3.4e-7]
_CLIENT_2 = [1.0, 0.398, 0.0765, 0.0149, 0.00291, 0.000568, 0.000111, 2.17e-5, 4.24e-6, 8.28e-7, 1.62e-7]


def _residuals(name: str, y: list[float]) -> Series:
    return Series(name, "", "iteration", "relative residual", _ITERATIONS, y)


def _steps(name: str, y: list[float]) -> Series:
    return Series(name, "", "condition number", "iterations to 0.0001", _KAPPA, y)


PRINTED_SERIES: dict[str, tuple[Series, ...]] = {
    "convergence": (
        _residuals("theoretical bound", [exp(-0.18 * k) for k in _ITERATIONS]),
        _residuals("HF-KCU (client 1)", _CLIENT_1),
        _residuals("HF-KCU (client 2)", _CLIENT_2),
    ),
    "conditioning": (
        _steps("O(sqrt(kappa)) theory", [5 * sqrt(kappa) for kappa in _KAPPA]),
        _steps("HF-KCU", [35.0, 71.0, 158.0, 354.0, 707.0]),
        _steps("HF-KCU with preconditioner", [28.0, 42.0, 68.0, 112.0, 189.0]),
    ),
}
"""The curves of its Figure 2."""


def printed(experiment: str, variant: str, method: str, measure: str) -> float | None:
    """What the paper prints for this cell, or None.

    Example:
        >>> printed("main", "", "hf-kcu-paper", "speedup"), printed("main", "", "fed-osd", "speedup")
        (47.75, None)
    """
    of = PRINTED.get(experiment, {})
    theirs = variant.removesuffix(BFLOAT16).removeprefix("cifar10, ")  # of our bfloat16 and our other data it has none
    return of.get(theirs, of.get("", {})).get(method, {}).get(measure)


def beside(results: Results, method: str, measure: str) -> float | None:
    """What the paper prints beside a variant's value; `is_its_own` says whether that is about the same thing.

    Example:
        >>> beside(Results("main", {}, {}, [], {}), "retrain", "test_accuracy")
        0.7079
    """
    return printed(results.experiment, label_of(results), method, measure)


def is_its_own(results: Results) -> bool:
    """Whether a variant is on the paper's own data (CIFAR-10 mostly) and of its size.

    Example:
        >>> is_its_own(Results("main", {"dataset": "fashion-mnist", "scale": "small"}, {}, [], {}))
        False
    """
    data = results.scenario.get("dataset", "cifar10") == "cifar10" or results.experiment == "datasets"
    return data and results.scenario.get("scale", "paper") == "paper"
