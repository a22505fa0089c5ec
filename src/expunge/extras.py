"""What is installed on request only: one sentence that says what is missing and how to get it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from expunge.errors import ExpungeError

_SENTENCES = {
    "cryptography": "Receipts are signed by cryptography: pip install 'expunge[ledger]'.",
    "fastapi": "The page is served by FastAPI: pip install 'expunge[serve]'.",
    "uvicorn": "The page is served by uvicorn: pip install 'expunge[serve]'.",
    "flwr": "Flower is not installed: pip install 'expunge[flower]'.",
    "matplotlib": "Plots need matplotlib: pip install 'expunge[bench]'.",
    "peft": "Adapters are PEFT's: pip install 'expunge[text]'.",
    "sklearn": "The digits come with scikit-learn: pip install 'expunge[bench]'.",
    "tokenizers": "Text is cut into tokens by tokenizers: pip install 'expunge[text]'.",
}


class MissingExtraError(ExpungeError, ImportError):
    """A package of an extra is not installed."""


def missing(package: str) -> str | None:
    """The sentence to say where a package is not installed; None where it is.

    Example:
        >>> missing("matplotlib") in (None, "Plots need matplotlib: pip install 'expunge[bench]'.")
        True
    """
    try:
        import_module(package)
    except ImportError:
        return _SENTENCES[package]
    return None


def require(package: str) -> None:
    """Refuse to go on where a package is not installed."""
    if sentence := missing(package):
        raise MissingExtraError(sentence)


def folder_of(package: str) -> Path:
    """Where a package lies, which is not imported, since that may take long; refused where it is not installed."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise MissingExtraError(_SENTENCES[package])
    return Path(found.origin).parent
