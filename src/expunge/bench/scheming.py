"""Attackers who know the method: an engine whose leaver sends what misleads the vector that is kept of it.

    pulls early         a boosted backdoor in the first quarter of the rounds, then honest updates from clean data
    pulls that cancel   a boosted backdoor, and in the first quarter the reverse of all that it would pull, too
    takes the credit    in the first round the whole way that the others would have gone without it

The second wants its vector to be small, the third wants the others' work to be undone where it is taken back. Both know
everything: they rehearse the training with everybody's data before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from expunge.bench.adversary import Between
from expunge.bench.scenario import CANCELLING, CREDIT, EARLY, Scenario, SwitchableEngine
from expunge.core.vectors import Snapshot
from expunge.federation.messages.tasks import Reply, Task, Train, Trained
from expunge.federation.training.fedavg import Keep, train


class Scheming(Between):
    """An engine that reaches the same clients, some of whom scheme while they train.

    Args:
        engine: of the federation as it is, backdoors and all.
        honest: of the same federation where the schemers did nothing to their data.
        scenario: says who schemes, and how everybody trains.
    """

    def __init__(self, engine: SwitchableEngine, honest: SwitchableEngine, scenario: Scenario) -> None:
        super().__init__(engine)
        self._engine, self._honest, self._scenario = engine, honest, scenario
        self._plan, self._extra = scenario.plan, dict[str, Tensor]()

    def without(self, names: tuple[str, ...]) -> Scheming:
        """The same on all clients but these, with its own cost account."""
        return Scheming(self._engine.without(names), self._honest, self._scenario)

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        """As the engine behind it, but for what schemers send while they train."""
        early = max(1, self._plan.rounds // 4)
        scheming = {
            name: (scheme, number)
            for name, scheme in self._scenario.schemes.items()
            if name in tasks and (number := self._round(name, tasks[name])) is not None
        }
        quiet = [name for name, (scheme, number) in scheming.items() if scheme == EARLY and number >= early]
        replies = self._engine.ask({name: task for name, task in tasks.items() if name not in quiet})
        replies |= self._honest.ask({name: tasks[name] for name in quiet}) if quiet else {}
        for name, (scheme, number) in scheming.items():
            reply, lasts = replies[name], {CANCELLING: early, CREDIT: 1}.get(scheme, 0)
            if number < lasts and isinstance(reply, Trained):
                if number == 0:
                    self._extra[name] = self._rehearsed(name, scheme, tasks[name].model) / lasts
                replies[name] = replace(reply, update=reply.update + self._extra[name])
        return {name: replies[name] for name in tasks}

    def _round(self, name: str, task: Task) -> int | None:
        """Which round of the training this is; None where it is something else."""
        if not isinstance(task, Train):
            return None
        seeds = (self._plan.task(task.model, number, name).seed for number in range(self._plan.rounds))
        return next((number for number, seed in enumerate(seeds) if seed == task.seed), None)

    def _rehearsed(self, name: str, scheme: str, start: Snapshot) -> Tensor:
        """What the schemer adds to its updates in all, by a training that nobody else sees.

        A pull counts ``w (Delta_u - mean of the others)`` in its vector, and the mean moves by w times its update.
        """
        counts = self._engine.clients()
        share, others = counts[name] / sum(counts.values()), {other: () for other in counts if other != name}
        rehearsal = self._engine.without(())
        if scheme == CREDIT:
            end = train(rehearsal, start, self._plan, clients=others, keep=Keep(vectors=False, checkpoints=0))
            return (end.model.parameters - start.parameters) / share
        memory = train(rehearsal, start, self._plan, keep=Keep(checkpoints=0)).memory
        assert memory is not None
        return -memory.vectors[name].to(start.parameters) / share
