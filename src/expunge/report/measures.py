"""What the measures and methods are called, how their values are written, and when one is close to retraining."""

from dataclasses import dataclass
from typing import Literal

from expunge.bench.results import Results, Summary

Judgement = Literal["near", "between", "far"]
MISSING = "–"
FEWEST_RETRAINS = 3
"""Fewer retrained models than these have no range worth the name, so nothing is judged by them."""
RECOVERY = "+recovery"
_NAMES = {
    "trained": "do nothing (trained)",
    "retrain": "retrain (gold standard)",
    "hf-kcu": "HF-KCU",
    "hf-kcu-paper": "HF-KCU as printed",
    "hf-kcu-gradient": "HF-KCU gradient",
    "hf-kcu-trajectory": "HF-KCU trajectory",
}


@dataclass(frozen=True)
class Measure:
    """A column: its name for a newcomer, how it is written, and which distance from retraining is still near.

    `side` says where a value is worse than retraining; `near` and `far` are distances outside the retrained range on
    that side, in the measure's own unit, or as a share of the range's upper end where `relative`.
    """

    key: str
    header: str
    meaning: str
    form: Literal["percent", "number", "times"] = "percent"
    side: Literal["both", "below", "above", "none"] = "none"
    near: float = 0.0
    far: float = 0.0
    relative: bool = False


COLUMNS = (
    Measure(
        "test_accuracy",
        "accuracy on new data (%)",
        "How often the model is right on test images nobody trained on. Forgetting should not cost any of it.",
        side="below",
        near=0.015,
        far=0.05,
    ),
    Measure(
        "forget_accuracy",
        "accuracy on forgotten data (%)",
        "How often it still gives the leaving client's labels on the leaving client's data. It should be what a model"
        " that never saw them reaches: higher means remembered, lower means damaged.",
        side="both",
        near=0.02,
        far=0.10,
    ),
    Measure(
        "asr",
        "backdoor success (%)",
        "How many images carrying the leaving client's hidden trigger go to the attacker's class (attack success rate,"
        " ASR; images of that class left out). The plainest sign that the client is still in the model.",
        side="above",
        near=0.02,
        far=0.10,
    ),
    Measure(
        "kl_forget",
        "distance to retrained (KL)",
        "How differently the model and a retrained one answer on the forgotten data (Kullback–Leibler divergence, in"
        " nats): 0 is the same answers. Two retrained models differ too; below their difference is as good as it gets.",
        form="number",
        side="above",
        far=2.0,
        relative=True,
    ),
    Measure(
        "mia_auc",
        "privacy leak (AUC)",
        "How well an attacker tells training images from unseen ones by the model's loss (membership inference): 0.5 is"
        " a coin toss, 1 is certainty.",
        form="number",
        side="both",
        near=0.005,
        far=0.02,
    ),
    Measure(
        "speedup",
        "times faster",
        "The seconds that retraining takes, divided by the seconds that this takes, on the same machine.",
        form="times",
    ),
    Measure(
        "speedup_in_gradients",
        "times less work",
        "The same ratio counted in sample-gradients (one image through the model and back), so that it does not depend"
        " on the machine. A forward pass counts 1/3, a curvature product 2.",
        form="times",
    ),
)


def measure(key: str) -> Measure:
    """The column with this key.

    Example:
        >>> measure("asr").header
        'backdoor success (%)'
    """
    return next(column for column in COLUMNS if column.key == key)


def method_name(method: str) -> str:
    """A method's name for people; an unknown one stays as it is.

    Example:
        >>> method_name("hf-kcu-trajectory+recovery")
        'HF-KCU trajectory + recovery'
    """
    base = method.removesuffix(RECOVERY)
    return _NAMES.get(base, base) + (" + recovery" if base != method else "")


def write_value(value: float, form: str, scale: float | None = None) -> str:
    """A value as text, with decimals that fit `scale` (by default the value itself).

    Example:
        >>> write_value(0.957, "percent"), write_value(0.1312, "number"), write_value(28.4, "times")
        ('95.7', '0.131', '28')
    """
    if form == "percent":
        return f"{100 * value:.1f}"
    size = abs(value if scale is None else scale)
    if form == "times":
        return f"{value:.0f}" if size >= 10 else f"{value:.1f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def write_summary(summary: Summary | None, form: str) -> str:
    """Mean ± spread as text, the mean alone for a single run, a dash where nothing was measured.

    Example:
        >>> write_summary(Summary(0.957, 0.012, 0.94, 0.97, 3), "percent")
        '95.7 ± 1.2'
    """
    if summary is None:
        return MISSING
    text = write_value(summary.mean, form) + ("×" if form == "times" else "")
    if summary.count > 1 and (summary.spread > 0 or form != "times"):
        text += f" ± {write_value(summary.spread, form, scale=summary.mean)}"
    return text


def retrained_range(results: Results, key: str) -> tuple[float, float] | None:
    """How much retraining itself varies: the recorded noise, else, for rates, the range of the retrained rows.

    None with fewer than three retrained models.

    Example:
        >>> retrained_range(Results("demo", {}, {}, [], {"asr": {"low": 0.0, "high": 0.01, "mean": 0.0}}), "asr")
        (0.0, 0.01)
    """
    if 0 < len(results.values("retrain", "test_accuracy")) < FEWEST_RETRAINS:
        return None
    if key in results.noise:
        return results.noise[key]["low"], results.noise[key]["high"]
    retrained = results.summary("retrain", key)
    if retrained is None or measure(key).form != "percent":
        return None
    return retrained.low, retrained.high


def judge_value(value: float, column: Measure, limits: tuple[float, float] | None) -> Judgement | None:
    """Whether a value is near the retrained range, far from it or between; None where there is nothing to compare.

    Example:
        >>> judge_value(0.96, measure("asr"), (0.0, 0.01)), judge_value(0.02, measure("asr"), (0.0, 0.01))
        ('far', 'near')
    """
    if column.side == "none" or limits is None:
        return None
    low, high = limits
    outside = 0.0
    if column.side in ("both", "below"):
        outside = max(outside, low - value)
    if column.side in ("both", "above"):
        outside = max(outside, value - high)
    unit = high if column.relative else 1.0
    if outside <= column.near * unit + 1e-9:
        return "near"
    return "far" if outside > column.far * unit else "between"


def judge(results: Results, method: str, key: str) -> Judgement | None:
    """The judgement of a method's mean.

    Example:
        >>> from expunge.bench.results import Row
        >>> noise = {"asr": {"low": 0.0, "high": 0.01, "mean": 0.0}}
        >>> judge(Results("demo", {}, {}, [Row("trained", 0, asr=0.9)], noise), "trained", "asr")
        'far'
    """
    summary = results.summary(method, key)
    return None if summary is None else judge_value(summary.mean, measure(key), retrained_range(results, key))
