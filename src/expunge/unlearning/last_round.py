"""Whether clients went as far apart to the end as their data would have them: some train the last round again.

Control variates (SCAFFOLD, FedDyn's linear term) correct each client by what the others did. They are zero in the first
round, so training that again (first_round.py) shows nothing of them. Later all send nearly the same, a client's pull
comes with everybody's updates, and its vector holds little of it. So some of those who stay train the last round again,
from the final model, by what is told. Two numbers tell how they differ from each other then, beside what was recorded,

    factor = (how far apart they go now) / (how far apart they went),
    part   = < difference of their vectors, of now > / (rounds |difference of now|^2),

the part of so many rounds like this one that their vectors hold. Noise of batches would make the first larger and the
second smaller, so whoever is doubted by them trains once more on other batches: of both together it drops out.

It was measured with SGD in some 750 small federations that had neither (momentum, decay, FedProx, falling rates, few
clients a round, batches from 1 to all, poisoned, boosted and sign-flipped leavers): factors up to 1.3, with a momentum
of 0.97 up to 1.5, no part below 0.5 where they were above 1.2, and none below 0.4 where drifts had become shorter
(`SHORTER`; elsewhere nobody is asked). Under SCAFFOLD more than nine in ten were within `BOUNDS`, under FedDyn eight.

Where it fails: where clients are nearly alike, or where their batches' noise is most of what tells them apart; in
trainings of few rounds, since the first one is honest. A weak linear term (FedDyn's of 0.01) does little, and is not
seen. Adam's steps depend on the size of the batches too much, and control variates are for SGD.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from expunge.core.seeds import derived_seed
from expunge.errors import NumericalError, listed
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.keeping.rounds import Drift
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Train, Trained
from expunge.federation.training.recipe import SGD
from expunge.unlearning.estimate import Estimate
from expunge.unlearning.first_round import other_batches, samples_of, trained_again
from expunge.unlearning.request import Parties
from expunge.unlearning.retained import BATCH_SIZE

ASKED = 3
"""So many are asked, those of the latest rounds."""

FEWEST = 4
"""Whoever took part in fewer rounds is not asked: the first one is honest, and too large a part of so few."""

SHORTER = 0.9
"""Nobody is asked unless drifts have come down to this part of the first one, by rate and steps."""

BOUNDS = ((0.5, 0.3), (1.3, 0.5), (1.6, 0.9))
"""They are doubted from this factor on if their vectors hold no more than this part."""

TOGETHER = (
    "Trained again from the model by what is told here, {names} went {factor:.2g} times as far apart from each other "
    "as in their last rounds, and their vectors hold {part:.0%} of what such rounds would have brought. So something "
    "held the clients together that was not there in the first round: control variates (SCAFFOLD, FedDyn's linear "
    "term), clipped gradients, or a term of the loss that is not told. Where a client's pull came with what the others "
    "sent, most of it stays: retrain, or tell forget the training as it was."
)


@dataclass(frozen=True, eq=False)
class LastRound:
    """Who is asked to train the last round again.

    Attributes:
        tasks: by client, the round.
        ended: by client, what it did in the last round that it took part in, and how far it led from the mean.
        drifts: by client, how far it led from the mean in a round like that, on average over all.
        counts: samples of each.
    """

    tasks: Mapping[str, Train]
    ended: Mapping[str, Drift]
    drifts: Mapping[str, Tensor]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, state: ServerState, parties: Parties) -> LastRound | None:
        """Where rates, steps and lengths were recorded under SGD, and drifts have become shorter."""
        rule, memory = state.trained_by.client, state.memory
        if memory is None or not isinstance(rule, SGD) or memory.parameters is not None:
            return None
        if memory.place is not None and memory.place.beginning is None:  # an earlier forget has moved the model
            return None
        own = {n: led for n, led in memory.led().items() if parties.retained.get(n) == () and len(led) >= FEWEST}
        shorter = [statistics.median(each.strength for each in led[1:]) / led[0].strength for led in own.values()]
        if len(own) < 2 or statistics.median(shorter) > SHORTER:
            return None
        size = state.schedule.batch_size if state.schedule is not None else BATCH_SIZE
        tasks, counts = dict[str, Train](), {name: parties.counts[name] for name in own}
        for name, led in own.items():
            last, seed = led[-1], derived_seed("last round", name)
            batch = size if last.batch is None else last.batch
            tasks[name] = trained_again(state.model, rule, counts[name], last.work, batch, seed)
        names = sorted(tasks, key=lambda name: (-own[name][-1].number, samples_of(tasks[name], counts[name])))[:ASKED]
        drifts = dict[str, Tensor]()
        for name in names:
            drift, usual = memory.drift(name), statistics.fmean(each.travel for each in own[name])
            if drift is None:
                return None
            drifts[name] = drift * (own[name][-1].travel / usual)
        return cls({name: tasks[name] for name in names}, {name: own[name][-1] for name in names}, drifts, counts)

    @property
    def estimate(self) -> Estimate:
        """What it costs at most."""
        sent = 2 * sum(task.model.stored_bytes for task in self.tasks.values())
        work = 2 * sum(samples_of(task, self.counts[name]) for name, task in self.tasks.items())
        return Estimate(2, sent, sent, float(work))

    def doubts(self, engine: Engine) -> tuple[str, ...]:
        """Ask them, and again where they went further apart; a sentence where it was not the noise of batches."""
        here = engine.clients()
        tasks = {name: task for name, task in self.tasks.items() if name in here}
        if engine.sums_only or len(tasks) < 2:
            return ()
        try:
            once = self._trained(engine, tasks)
            if not _doubted(*self._apart(once, once)):
                return ()
            again = self._trained(engine, {name: other_batches(task) for name, task in tasks.items()})
        except NumericalError:  # it diverged, and tells nothing
            return ()
        factor, part = self._apart(once, again)
        if not _doubted(factor, part):
            return ()
        return (TOGETHER.format(names=listed(tasks), factor=factor, part=max(part, 0.0)),)

    def _trained(self, engine: Engine, tasks: Mapping[str, Train]) -> dict[str, Tensor]:
        """The updates, of as many steps as were made."""
        replies = ask_each(engine, tasks, Trained)
        return {
            name: reply.update.double() * (self.ended[name].work.steps / reply.steps)
            for name, reply in replies.items()
            if reply.steps > 0
        }

    def _apart(self, once: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> tuple[float, float]:
        """How many times as far apart they go, and the part of it that their vectors hold."""
        squares, parts = list[float](), list[float]()
        for one, other in combinations(once, 2):
            now, then = once[one] - once[other], again[one] - again[other]
            held = (self.drifts[one] - self.drifts[other]).to(now)
            square = float(now @ then)
            squares.append(square)
            parts.append(float(held @ (now + then)) / (2 * square) if square > 0 else 1.0)
        if not squares:
            return 0.0, 1.0
        went = statistics.fmean(self.ended[name].far ** 2 for name in once)
        return (max(statistics.fmean(squares), 0.0) / (2 * went)) ** 0.5, statistics.median(parts)


def _doubted(factor: float, part: float) -> bool:
    return any(factor >= least and part <= most for least, most in BOUNDS)
