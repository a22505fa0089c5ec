"""Clients that lie: the real engine, whose replies from some clients are replaced by what they choose to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import Reply, Task

Lie = Callable[[Task, Reply], Reply]


class LyingEngine(LocalEngine):
    """Says what ``lies`` make of the honest replies, by client."""

    lies: Mapping[str, Lie]

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        replies = super().ask(tasks)
        return {name: self.lies[name](tasks[name], r) if name in self.lies else r for name, r in replies.items()}
