"""What is installed on request only: one sentence that says what is missing and how to get it."""

from __future__ import annotations

from importlib.util import find_spec

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
    return _SENTENCES[package] if find_spec(package) is None else None  # to import it may take long


def require(package: str) -> None:
    """Refuse to go on where a package is not installed."""
    if sentence := missing(package):
        raise MissingExtraError(sentence)
