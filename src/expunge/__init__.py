"""expunge: take a client's contribution out of a federated model, and show how well it is gone.

What stands here is imported on first use: torch takes seconds, and `expunge --help` does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from expunge.errors import DataError, ExpungeError, ModelError, NumericalError, RequestError, SiteError
from expunge.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors; `_HOMES` says the same to Python
    from expunge.auditing.audit import audit
    from expunge.auditing.statement import evidence
    from expunge.core.batch import Batch
    from expunge.core.losses import BinaryCrossEntropy, CrossEntropy, Loss, MeanSquaredError, PerSample, SquaredError
    from expunge.federation.keeping.memory import Memory
    from expunge.federation.training.plan import TrainingPlan
    from expunge.federation.training.recipe import (
        SGD,
        Adam,
        AdamW,
        AdaptiveServer,
        FedAvg,
        FedAvgM,
        Measured,
        Recipe,
        second_moments,
    )
    from expunge.forgetting import forget
    from expunge.ledger.federation import Federation
    from expunge.unlearning.hf_kcu_options import HfKcuOptions
    from expunge.unlearning.hf_kcu_paper_options import HfKcuPaperOptions
    from expunge.unlearning.recovery import Recovery
    from expunge.unlearning.registry import Outcome, methods
    from expunge.unlearning.retrace_options import RetraceKrylovOptions, RetraceOptions

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AdaptiveServer",
    "Batch",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "DataError",
    "ExpungeError",
    "FedAvg",
    "FedAvgM",
    "Federation",
    "HfKcuOptions",
    "HfKcuPaperOptions",
    "Loss",
    "MeanSquaredError",
    "Measured",
    "Memory",
    "ModelError",
    "NumericalError",
    "Outcome",
    "PerSample",
    "Recipe",
    "Recovery",
    "RequestError",
    "RetraceKrylovOptions",
    "RetraceOptions",
    "SiteError",
    "SquaredError",
    "TrainingPlan",
    "audit",
    "evidence",
    "forget",
    "methods",
    "second_moments",
]

_HOMES = {
    "Adam": "expunge.federation.training.recipe",
    "AdamW": "expunge.federation.training.recipe",
    "AdaptiveServer": "expunge.federation.training.recipe",
    "Batch": "expunge.core.batch",
    "BinaryCrossEntropy": "expunge.core.losses",
    "CrossEntropy": "expunge.core.losses",
    "FedAvg": "expunge.federation.training.recipe",
    "FedAvgM": "expunge.federation.training.recipe",
    "Measured": "expunge.federation.training.recipe",
    "Federation": "expunge.ledger.federation",
    "HfKcuOptions": "expunge.unlearning.hf_kcu_options",
    "HfKcuPaperOptions": "expunge.unlearning.hf_kcu_paper_options",
    "Loss": "expunge.core.losses",
    "MeanSquaredError": "expunge.core.losses",
    "Memory": "expunge.federation.keeping.memory",
    "Outcome": "expunge.unlearning.registry",
    "PerSample": "expunge.core.losses",
    "Recipe": "expunge.federation.training.recipe",
    "Recovery": "expunge.unlearning.recovery",
    "RetraceKrylovOptions": "expunge.unlearning.retrace_options",
    "RetraceOptions": "expunge.unlearning.retrace_options",
    "SGD": "expunge.federation.training.recipe",
    "SquaredError": "expunge.core.losses",
    "TrainingPlan": "expunge.federation.training.plan",
    "audit": "expunge.auditing.audit",
    "evidence": "expunge.auditing.statement",
    "forget": "expunge.forgetting",
    "methods": "expunge.unlearning.registry",
    "second_moments": "expunge.federation.training.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
