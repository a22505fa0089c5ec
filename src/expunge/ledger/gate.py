"""What has to be before anything is destroyed: an audit that passed, or a person's word with a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expunge.errors import RequestError
from expunge.federation.keeping.files import read_json
from expunge.unlearning.registry import Method, Outcome

_OPENS = {"EQUIVALENT": True, "SUPPORTED": True, "UNDECIDED": None, "NO EVIDENCE": None}


def opens(word: str) -> bool | None:
    """Whether an audit's word opens the gate; None where it leaves that to a person.

    Example:
        >>> opens("EQUIVALENT"), opens("UNDECIDED"), opens("UNDER-FORGOTTEN")
        (True, None, False)
    """
    return _OPENS.get(word, False)


@dataclass(frozen=True)
class Gate:
    """The gate of ``expunge forget --erase``: the audit that ``expunge audit`` has left beside the tries.

    Attributes:
        tries: the folder of the request in a run.
        override: why to go on without an audit that passed; empty where there is one.
    """

    tries: Path
    override: str = ""

    def require(self, method: Method) -> None:
        """Refuse before the work what would be refused after it."""
        if self.override:
            return
        if not method.forgets:
            raise RequestError(
                f"The model that {method.name} leaves remembers: --erase by a method that forgets, or say why not with"
                " --override."
            )
        if not self._audited():
            raise RequestError(
                f"Nothing in {self.tries} has passed an audit: audit it first, or say why not (--override)."
            )

    def passed(self, outcome: Outcome) -> Outcome:
        """The outcome, with what opened the gate written down; refused where this very model was not audited."""
        if self.override:
            return _noted(outcome, {"override": self.override})
        found = self._audited().get(outcome.state.model.digest)
        if found is None:
            raise RequestError(
                f"The model that {outcome.method} made is not the one that passed: audit it, or --override."
            )
        return _noted(outcome, {"audit": found})

    def _audited(self) -> dict[str, str]:
        """The models that passed, by digest, each with its verdict."""
        file = self.tries / "audit.json"
        if not file.exists():
            return {}
        methods = read_json(file).get("methods")
        found = methods.values() if isinstance(methods, dict) else []
        return {own["models"]["after"]: own["verdict"] for own in found if opens(str(own.get("verdict")))}


def _noted(outcome: Outcome, gate: dict[str, Any]) -> Outcome:
    return replace(outcome, details={**outcome.details, "gate": gate})
