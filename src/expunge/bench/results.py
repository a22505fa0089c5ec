"""The one JSON shape of everything measured: tables, plots and checks are made from this file only."""

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy
import torch

from expunge.errors import DataError, RequestError
from expunge.federation.keeping.files import write_whole
from expunge.version import __version__

VERSION = 2
"""Of the file. Since 2 `hf-kcu` is the corrected influence step; in a file of 1 the same name is `retrace` of today."""

Noise = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Row:
    """What one method reached in one run; a value that was not measured is None.

    Accuracies and rates lie in [0, 1]. Several rows may share method and seed (retrained models do). Where an
    experiment compares several settings, ``variant`` names the row's. ``digest`` is the model's, ``evidence`` the word
    on it without retrained models.
    """

    method: str
    seed: int
    test_accuracy: float | None = None
    test_loss: float | None = None
    forget_accuracy: float | None = None
    forget_loss: float | None = None
    secret_loss: float | None = None
    secret_rank: float | None = None
    secrets_likely: float | None = None
    secrets_first: float | None = None
    forget_probability: float | None = None
    forget_rouge: float | None = None
    forget_truth_ratio: float | None = None
    others_probability: float | None = None
    others_rouge: float | None = None
    others_truth_ratio: float | None = None
    asr: float | None = None
    trigger_pull: float | None = None
    trigger_rank: float | None = None
    trigger_moves: float | None = None
    nearby_pull: float | None = None
    mia_auc: float | None = None
    kl: float | None = None
    kl_forget: float | None = None
    distance: float | None = None
    trigger_distance: float | None = None
    unseen_distance: float | None = None
    kept_share: float | None = None
    logit_mse: float | None = None
    agreement: float | None = None
    parameter_gap: float | None = None
    causal_faithfulness: float | None = None
    accuracy_gap: float | None = None
    mia_success: float | None = None
    privacy_gap: float | None = None
    asr_reduction: float | None = None
    seconds: float | None = None
    speedup: float | None = None
    sample_gradients: float | None = None
    speedup_in_gradients: float | None = None
    rounds: float | None = None
    bytes: float | None = None
    stored_bytes: float | None = None
    training_overhead: float | None = None
    warned: float | None = None
    verdict: str | None = None
    variant: str | None = None
    digest: str | None = None
    evidence: str | None = None


NAMES = ("method", "verdict", "variant", "digest", "evidence")
"""What a row says in words; of a seed there is a whole number."""
MEASURES = tuple(part.name for part in fields(Row) if part.name not in (*NAMES, "seed"))
RATES = frozenset(
    {
        *("test_accuracy", "forget_accuracy", "asr", "mia_auc", "agreement", "mia_success", "warned"),
        *("forget_probability", "forget_rouge", "others_probability", "others_rouge"),
    }
)


@dataclass(frozen=True)
class Summary:
    """A measure over the runs of a method; `spread` is the sample standard deviation, 0 for one run."""

    mean: float
    spread: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Variant:
    """One setting of an experiment: what was done, and how much retraining varies there.

    `noise` is over retrained models of fresh initialisations, `noise_same_init` over models retrained from the
    initialisation that the training began with, other shuffling only.
    """

    scenario: dict[str, Any]
    noise: Noise
    noise_same_init: Noise


@dataclass(frozen=True)
class Series:
    """A curve: what was measured (`y`, one value a seed or one in all) along `x`, under the method's name."""

    method: str
    variant: str
    x_name: str
    y_name: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Judged:
    """How verdicts were reached that are not from the models themselves.

    Attributes:
        rule: what EQUIVALENT means: "margins", as in ``auditing.verdict``.
        source: what was judged.
        without: measures of the verdict that the source does not have, by name.
    """

    rule: str
    source: str
    without: list[str]


@dataclass(frozen=True)
class Results:
    """One experiment: what was done, where, what came out, and how much retraining itself varies.

    `noise` maps a measure to its low, high and mean: for kl, kl_forget, logit_mse, agreement and parameter_gap
    over pairs of retrained models, for accuracies, asr and membership over the retrained models. An experiment on
    several settings keeps scenario and noise by variant, and `noise` is empty unless there is one variant only.
    `date` is when the last of it was measured, as `utc_now` writes it. `judged` is None where the models were judged.

    Example:
        >>> results = Results("demo", {}, {}, [Row("trained", 0, asr=0.9), Row("trained", 1, asr=1.0)], {})
        >>> round(results.summary("trained", "asr").mean, 2)
        0.95
    """

    experiment: str
    scenario: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    noise: Noise
    variants: dict[str, Variant] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    date: str | None = None
    judged: Judged | None = None

    def part(self, variant: str) -> Self:
        """The results of one variant alone, in the shape of an experiment that has no others."""
        if variant not in self.variants:
            raise RequestError(f"There is no variant {variant!r}; there are {', '.join(self.variants)}.")
        own = self.variants[variant]
        rows = [row for row in self.rows if row.variant == variant]
        series = [curve for curve in self.series if curve.variant == variant]
        return replace(self, scenario=own.scenario, rows=rows, noise=own.noise, variants={variant: own}, series=series)

    def methods(self) -> list[str]:
        """The methods in order of first appearance."""
        return list(dict.fromkeys(row.method for row in self.rows))

    def values(self, method: str, measure: str) -> list[float]:
        """The measured values of a method, in row order, without the missing ones."""
        if measure not in MEASURES:
            raise RequestError(f"There is no measure {measure!r}; choose one of {', '.join(MEASURES)}.")
        found = (getattr(row, measure) for row in self.rows if row.method == method)
        return [float(value) for value in found if value is not None]

    def summary(self, method: str, measure: str) -> Summary | None:
        """Mean, spread and range of a measure over a method's runs, or None where it was never measured."""
        values = self.values(method, measure)
        if not values:
            return None
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return Summary(statistics.fmean(values), spread, min(values), max(values), len(values))

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all: floats to 6 significant digits, keys in a fixed order, a row a line.

        Raises:
            DataError: a value is NaN, infinite, no number, or a rate outside [0, 1], or the date is none.
            RequestError: the path cannot be written.
        """
        content = {
            "version": VERSION,
            "experiment": self.experiment,
            "date": _date(self.date),
            "scenario": plain(self.scenario, "scenario"),
            "environment": plain(self.environment, "environment"),
            "rows": [{k: v for k, v in _plain_row(row).items() if v is not None} for row in self.rows],
            "noise": plain(self.noise, "noise"),
        }
        if self.variants:
            content["variants"] = {name: plain(asdict(part), name) for name, part in self.variants.items()}
        if self.series:
            content["series"] = [plain(asdict(curve), f"series {curve.method!r}") for curve in self.series]
        if self.judged is not None:
            content["judged"] = plain(asdict(self.judged), "judged")
        write_whole(Path(path), _text(content))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; DataError says in a sentence what is wrong with any other."""
        content = _content(Path(path))
        try:
            rows = [Row(**_plain_row(Row(**row))) for row in content["rows"]]
            variants = {
                name: Variant(dict(part["scenario"]), _noise(part["noise"]), _noise(part["noise_same_init"]))
                for name, part in content.get("variants", {}).items()
            }
            series = [Series(**curve) for curve in content.get("series", [])]
            return cls(
                content["experiment"],
                dict(content["scenario"]),
                dict(content["environment"]),
                rows,
                _noise(content["noise"]),
                variants,
                series,
                _date(content["date"]),
                Judged(**content["judged"]) if "judged" in content else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError, DataError) as error:
            raise DataError(f"{path} is not a results file of expunge ({type(error).__name__}: {error}).") from error


def utc_now() -> str:
    """The time of day everywhere, to the second, as results and audits carry it.

    Example:
        >>> utc_now().endswith("+00:00")
        True
    """
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(device: str = "cpu") -> dict[str, Any]:
    """The versions and the kind of machine behind the numbers; no host, user or path.

    Example:
        >>> sorted(environment())[:3]
        ['cpu_count', 'device', 'expunge']
    """
    return {
        "expunge": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
    }


def _content(path: Path) -> dict[str, Any]:
    """What a file of our version holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise DataError(f"Cannot read results from {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a results file, its JSON is broken: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a results file: its JSON is no object.")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        said = "no version" if version is None else f"the version {str(version)[:20]!r}"
        raise DataError(
            f"{path} has {said}, and only results of version {VERSION} can be read: methods were called otherwise"
            " in others, so measure again."
        )
    return content


def _date(date: Any) -> str | None:
    """A date as `utc_now` writes it, or None."""
    if date is None:
        return None
    try:
        in_utc = datetime.fromisoformat(date).utcoffset() == timedelta(0)
    except (TypeError, ValueError):
        in_utc = False
    if not in_utc:
        raise DataError(f"The date of results is a time in UTC or None, but is {date!r}.")
    return str(date)


def _noise(content: Mapping[str, Mapping[str, float]]) -> Noise:
    return {key: {end: float(of[end]) for end in ("low", "high", "mean")} for key, of in content.items()}


def _plain_row(row: Row) -> dict[str, Any]:
    where = f"method {row.method!r}, seed {row.seed}"
    content = plain(asdict(row), where)
    for name in NAMES:
        if not isinstance(content[name], str if name == "method" else str | None):
            raise DataError(f"A row has its {name} in words, but in that of {where} it is {content[name]!r}.")
    if type(content["seed"]) is not int:
        raise DataError(f"A row needs a method's name and a whole seed, but has {where}.")
    for name in MEASURES:
        value = content[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{name} of {where} must be a number or None, but is {value!r}.")
        if value is not None and name in RATES and not -1e-6 <= value <= 1 + 1e-6:
            raise DataError(f"{name} of {where} must lie in [0, 1], but is {value}.")
    return {part.name: content[part.name] for part in fields(Row)}


def plain(value: Any, where: str) -> Any:
    """JSON's own types only, floats rounded, NaN and infinity refused with the place where they are."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{key} of {where}") for key, item in value.items()}
    if isinstance(value, Iterable) and not hasattr(value, "item"):
        return [plain(item, where) for item in value]
    if isinstance(value, Integral):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"Results hold numbers and text only, but {where} is {type(value).__name__}.") from error
    if not math.isfinite(number):
        raise DataError(f"Results hold finite numbers only, but {where} is {number}.")
    return float(f"{number:.6g}")


def _text(content: Mapping[str, Any]) -> str:
    """JSON with a line for every row, which says only what was measured: there are thousands of them."""
    parts = {name: json.dumps(value, indent=2, allow_nan=False) for name, value in content.items() if name != "rows"}
    rows = ",\n    ".join(json.dumps(row, allow_nan=False) for row in content["rows"])
    whole = {name: parts[name].replace("\n", "\n  ") if name in parts else f"[\n    {rows}\n  ]" for name in content}
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {part}" for name, part in whole.items()) + "\n}\n"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a finite number")
