"""How far the work is, for those who watch; and sentences without names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from expunge.federation.engines.engine import Engine
from expunge.federation.keeping.files import write_whole
from expunge.ledger.ledger import Ledger
from expunge.ledger.log import stamp

HIDDEN = "(a sentence that names a client: it is not kept here)"


class Watch:
    """Writes down how far the work is, in the workplace, and tells it on.

    Args:
        ledger: whose workplace it is.
        tell: told the same: what, how much is done, of how much.
    """

    def __init__(self, ledger: Ledger, tell: Callable[[str, int, int], None] | None = None) -> None:
        self._ledger, self._tell = ledger, tell
        self._file = ledger.folder / "work" / "progress.json"

    def of(self, group: Sequence[str]) -> Callable[[str, int, int], None]:
        """A callback for work on these requests."""

        def told(what: str, done: int, total: int) -> None:
            now = stamp(self._ledger.clock())
            content = {"requests": list(group), "step": what, "done": done, "total": total, "time": now}
            write_whole(self._file, json.dumps(content), private=True)
            if self._tell is not None:
                self._tell(what, done, total)

        return told

    def rounds(self, engine: Engine, expected: int | None, group: Sequence[str]) -> None:
        """Let an engine tell of every message round, and how many to expect where that is known."""
        told, most = self.of(group), expected or 0
        told("forgetting", 0, most)
        if hasattr(engine, "on_round"):
            engine.on_round = lambda done: told("forgetting", done, max(done, most))

    def over(self) -> None:
        """Nothing is being done any more."""
        self._file.unlink(missing_ok=True)


def plainly(value: Any, known: Mapping[str, str]) -> Any:
    """A value for the log: names in quotes become digests, what still holds a name is left out, numbers are short.

    Example:
        >>> plainly({"loss": 0.12345678, "worst": "Site 'ada' is late", "of": {"ada": 1}}, {"ada": "client 00"})
        {'loss': 0.123457, 'worst': 'Site client 00 is late', 'of': {}}
    """
    if isinstance(value, str):
        for name, other in known.items():
            value = other if value == name else value.replace(repr(name), other)
        return HIDDEN if any(len(name) > 2 and name in value for name in known) else value
    if isinstance(value, Mapping):
        return {key: plainly(own, known) for key, own in value.items() if key not in known}
    if isinstance(value, list | tuple):
        return [plainly(own, known) for own in value[:20]]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, int | bool | None) else str(value)
