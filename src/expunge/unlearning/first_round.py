"""Whether the training that is told is the one that was: those who stay train its first round again.

Who trained by another loss than a forget is told (ten times as large, a sum where a mean is told, with a proximal term)
gets a step by curvature that those who stay never had, and no vector tells. But the starting weights are kept, and the
shape of every update that began there. So one of those who stay trains that round again by what is told, and should go
as far as it went: the model is the same, the data are, and gradients are far from the noise of their batches. Under
Adam, which divides the scale of a loss out, second moments are compared, too.

Only where it went otherwise others are asked, and all must have gone too far, or all not far enough: one that boosted
what it sent then alarms nobody.

Where it fails: what matters later only, as smoothed labels do, is hardly seen from the start, nor is what personal
layers or a function of the user's own did.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError, listed
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.keeping.peaks import Peak
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Draw, Train, Trained
from expunge.federation.training.recipe import SGD, Adam
from expunge.federation.training.works import Work
from expunge.unlearning.estimate import Estimate
from expunge.unlearning.request import Parties
from expunge.unlearning.retained import BATCH_SIZE

ASKED = 3
"""At most so many are asked, one after another, the most usual first."""

APART = 1.7
"""Nobody honest was seen to go so many times as far as before, or so many times less far."""

OTHERWISE = (
    "Trained again by what is told here, {names} went {factor:.2g} times as far in the first round as they had gone. "
    "So the loss was another one (multiplied, summed over a batch, accumulated without dividing, with a proximal or "
    "another term), or else optimiser, rate, steps or data were, or what was sent was changed (altered=), and the step "
    "may leave something or take too much. Tell forget the loss as it was trained: l2= beside it, SGD(proximal_mu=...) "
    "in the recipe, or a function that gives one number a sample."
)


@dataclass(frozen=True, eq=False)
class Begun:
    """A client's first round, as it was recorded and as it is asked for again.

    Attributes:
        task: the round, from the starting weights.
        work: what the client did then.
        peak: the shape of what it sent.
        count: how many samples it has.
    """

    task: Train
    work: Work
    peak: Peak
    count: int

    @property
    def strength(self) -> float:
        """How far a weight went in a step of rate 1, as a root mean square."""
        return self.peak.height * self.peak.evenness / (self.work.learning_rate * self.work.steps)

    @property
    def samples(self) -> int:
        """Sample-gradients of training it again."""
        return self.task.epochs * (self.count if self.task.draw is None else self.task.draw.size)

    @property
    def apart(self) -> float:
        """From which factor on it is another training; how steep Adam finds a loss goes by its batches, too."""
        passes = self.task.batch_size * self.work.steps / self.count
        return APART * max(1.0, math.sqrt(passes)) if self.task.optimiser.adaptive else APART

    def factor(self, reply: Trained) -> float:
        """How many times as far the client went this time; of Adam's two numbers the one that says more."""
        moved = int(reply.update.count_nonzero())
        recorded = self.peak.height * self.peak.evenness * math.sqrt(moved) * reply.steps / self.work.steps
        found = [float(reply.update.double().norm()) / recorded] if moved else [0.0]
        pairs = zip(reply.moments, self.work.moments, strict=bool(self.work.moments))
        found += [statistics.median(again / once for again, once in pairs if once > 0)] if self.work.moments else []
        return max(found, key=lambda factor: abs(math.log(factor)) if factor > 0 else math.inf)


@dataclass(frozen=True, eq=False)
class FirstRound:
    """Who is asked to train the first round again, the most usual first."""

    clients: dict[str, Begun]

    @classmethod
    def of(cls, state: ServerState, parties: Parties) -> FirstRound | None:
        """Where the start, rates and steps were recorded, and clients train by a rule that they can be asked for."""
        rule = state.trained_by.client
        beginning = state.memory.beginning() if state.memory is not None else None
        if beginning is None or not isinstance(rule, SGD | Adam):
            return None
        start, recorded = beginning
        model = state.model.moved(start.to(state.model.parameters))
        size = state.schedule.batch_size if state.schedule is not None else BATCH_SIZE
        here = {
            name: Begun(_task(model, rule, work, parties.counts[name], size, name), work, peak, parties.counts[name])
            for name, (work, peak) in recorded.items()
            if parties.retained.get(name) == ()
        }
        if not here:
            return None
        usual = statistics.median(each.strength for each in here.values())
        names = sorted(here, key=lambda name: abs(math.log(here[name].strength / usual)))
        return cls({name: here[name] for name in names[:ASKED]})

    @property
    def estimate(self) -> Estimate:
        """What it costs at most."""
        asked = self.clients.values()
        sent = sum(each.task.model.stored_bytes for each in asked)
        return Estimate(len(asked), sent, sent, float(sum(each.samples for each in asked)))

    def doubts(self, engine: Engine) -> tuple[str, ...]:
        """Ask them, one after another as long as they went otherwise; a sentence where all of them did."""
        factors = dict[str, float]()
        for name, each in self.clients.items():
            try:
                factor = each.factor(ask_each(engine, {name: each.task}, Trained)[name])
            except NumericalError:  # it diverged
                factor = math.inf
            if 1 / each.apart <= factor <= each.apart:
                return ()
            factors[name] = factor
        if len({factor > 1 for factor in factors.values()}) > 1:
            return ()
        return (OTHERWISE.format(names=listed(factors), factor=statistics.median(factors.values())),)


def _task(model: Snapshot, rule: SGD | Adam, work: Work, count: int, batch_size: int, name: str) -> Train:
    """As many steps as the client made, of about this size: on part of its samples, or in whole epochs on all."""
    steps, seed = max(1, round(work.steps)), derived_seed("first round", name)
    size = min(batch_size, count)
    if steps * size < count:
        return Train(model, 1, size, work.learning_rate, seed, draw=Draw(steps * size, seed), optimiser=rule)
    epochs = round(steps * size / count)
    return Train(model, epochs, math.ceil(count * epochs / steps), work.learning_rate, seed, optimiser=rule)
