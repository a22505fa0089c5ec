"""expunge: take a client's contribution out of a federated model, and show how well it is gone."""

__version__ = "0.1.0"

from expunge.errors import DataError, ExpungeError, ModelError, NumericalError, RequestError, SiteError
from expunge.federation.keeping.memory import Memory
from expunge.forgetting import forget
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import Outcome, methods

__all__ = [
    "DataError",
    "ExpungeError",
    "HfKcuOptions",
    "Memory",
    "ModelError",
    "NumericalError",
    "Outcome",
    "Recovery",
    "RequestError",
    "SiteError",
    "forget",
    "methods",
]
