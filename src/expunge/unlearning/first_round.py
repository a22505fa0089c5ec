"""Whether the training that is told is the one that was: those who stay train its first round again.

Who trained by another loss than a forget is told (ten times as large, a sum where a mean is told, with a proximal term)
gets a step by curvature that those who stay never had, and no vector tells. But the starting weights are kept, and the
shape of every update that began there. So one of those who stay trains that round again by what is told, and should go
as far as it went: the model is the same, the data are, and gradients are far from the noise of their batches. Under
Adam, which divides the scale of a loss out, second moments are compared, too.

Only where it went otherwise others are asked, and all must have gone too far, or all not far enough: one that boosted
what it sent then alarms nobody. Small batches lead further by their noise: where their size was not seen, as it is of
clients that are watched, the round is trained once more, and all that its noise could do is allowed.

Where it fails: what matters later only, as smoothed labels do, is hardly seen from the start, nor is what personal
layers or a function of the user's own did.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from torch import Tensor

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
"""At most so many are asked, one after another."""

USUAL = 1.5
"""Whoever went no more than so many times as far a step as the median, or so many times less far, is a usual one."""

APART = 1.7
"""Nobody honest was seen to go so many times as far as before, or so many times less far."""

SLIGHT = 0.01
"""A gradient of less than this part of the largest layer's may be rounding alone, as that of a bias without effect."""

UNSEEN = 3.0
"""The same where the size of their batches was not seen, beside the noise that is allowed for."""

OTHERWISE = (
    "Trained again by what is told here, {names} went {factor:.2g} times as far in the first round as they had gone. "
    "So the loss was another one (multiplied, summed over a batch, accumulated without dividing, with a proximal or "
    "another term), or else optimiser, rate, steps or data were, or what was sent was changed (altered=), and the step "
    "may leave something or take too much. Tell forget, or a Flower app's Site, the loss as it was trained: l2= beside "
    "it, SGD(proximal_mu=...) in the recipe, or a function that gives one number a sample."
)


@dataclass(frozen=True, eq=False)
class Begun:
    """A client's first round, as it was recorded and as it is asked for again.

    Attributes:
        task: the round, from the starting weights.
        work: what the client did then.
        peak: the shape of what it sent.
        count: how many samples it has.
        is_seen: whether the size of its batches is known.
    """

    task: Train
    work: Work
    peak: Peak
    count: int
    is_seen: bool

    @property
    def strength(self) -> float:
        """How far a weight went in a step of rate 1, as a root mean square."""
        return self.peak.height * self.peak.evenness / (self.work.learning_rate * self.work.steps)

    @property
    def samples(self) -> int:
        """Sample-gradients of training it again."""
        return samples_of(self.task, self.count)

    @property
    def apart(self) -> float:
        """From which factor on it is another training."""
        return APART if self.is_seen else UNSEEN

    def is_as_then(self, factor: float, noise: float = 0.0) -> bool:
        """Whether the training that is told may have gone so many times as far.

        Args:
            factor: between this time and then.
            noise: the part of the squared length that comes of batches, where theirs may have had any size.
        """
        fewer, all_of_them = 1 + noise * (self.task.batch_size - 1), self.task.batch_size / self.count
        return (
            1 / (self.apart * math.sqrt(fewer))
            <= factor
            <= self.apart / math.sqrt(max(1 - noise, min(all_of_them, 1.0)))
        )

    def noise(self, one: Tensor, other: Tensor) -> float:
        """The part of the squared length in which these updates differ; all that Adam divides by may be noise."""
        if self.task.optimiser.adaptive:
            return 1.0
        lengths = float(one.double().norm() * other.double().norm())
        return min(float((one - other).double().square().sum()) / (2 * lengths), 1.0) if lengths > 0 else 0.0

    def factor(self, reply: Trained) -> float:
        """How many times as far the client went this time; of Adam's several numbers the one that says most.

        Single layers of deep networks differ from one training to the next, so one counts where it is far off alone.
        """
        moved = int(reply.update.count_nonzero())
        recorded = self.peak.height * self.peak.evenness * math.sqrt(moved) * reply.steps / self.work.steps
        found = [float(reply.update.double().norm()) / recorded] if moved else [0.0]
        felt = SLIGHT * max(self.work.moments, default=0.0)
        pairs = zip(reply.moments, self.work.moments, strict=bool(self.work.moments))
        layers = [again / once for again, once in pairs if once > felt]
        found += [statistics.median(layers)] if layers else []
        found += [layer for layer in layers if not self.apart**-2 <= layer <= self.apart**2]
        return max(found, key=lambda factor: abs(math.log(factor)) if factor > 0 else math.inf)


@dataclass(frozen=True, eq=False)
class FirstRound:
    """Who is asked to train the first round again: the usual ones, those with the least to do first."""

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
            name: _begun(name, model, rule, parties.counts[name], size, own)
            for name, own in recorded.items()
            if parties.retained.get(name) == ()
        }
        if not here:
            return None
        usual = statistics.median(each.strength for each in here.values())
        unusual = {name: abs(math.log(each.strength / usual)) for name, each in here.items()}
        names = sorted(here, key=lambda name: (max(unusual[name], math.log(USUAL)), here[name].samples))
        return cls({name: here[name] for name in names[:ASKED]})

    @property
    def estimate(self) -> Estimate:
        """What it costs at most."""
        asked = [each for each in self.clients.values() for _ in range(1 if each.is_seen else 2)]
        sent = sum(each.task.model.stored_bytes for each in asked)
        return Estimate(len(asked), sent, sent, float(sum(each.samples for each in asked)))

    def doubts(self, engine: Engine) -> tuple[str, ...]:
        """Ask them, one after another as long as they went otherwise; a sentence where all of them did."""
        if engine.sums_only:  # a client's own update is not to be seen
            return ()
        factors, here = dict[str, float](), engine.clients()
        for name, each in ((name, each) for name, each in self.clients.items() if name in here):
            try:
                factor, is_as_then = _asked(engine, name, each)
            except NumericalError:  # it diverged
                factor, is_as_then = math.inf, False
            if is_as_then:
                return ()
            factors[name] = factor
        if len({factor > 1 for factor in factors.values()}) != 1:
            return ()
        return (OTHERWISE.format(names=listed(factors), factor=statistics.median(factors.values())),)


def _asked(engine: Engine, name: str, each: Begun) -> tuple[float, bool]:
    """How many times as far a client goes now, and whether it may have gone so; asked again where that is not sure."""
    reply = ask_each(engine, {name: each.task}, Trained)[name]
    factor = each.factor(reply)
    if each.is_as_then(factor) or each.is_seen:
        return factor, each.is_as_then(factor)
    again = ask_each(engine, {name: other_batches(each.task)}, Trained)[name]
    return factor, each.is_as_then(factor, each.noise(reply.update, again.update))


def _begun(
    name: str,
    model: Snapshot,
    rule: SGD | Adam,
    count: int,
    told: int,
    recorded: tuple[Work, Peak, float | None],
) -> Begun:
    """As many steps as the client made, in batches of its own or of those told: on part of its samples, or all."""
    work, peak, seen = recorded
    task = trained_again(model, rule, count, work, told if seen is None else seen, derived_seed("first round", name))
    return Begun(task, work, peak, count, seen is not None)


def trained_again(model: Snapshot, rule: SGD | Adam, count: int, work: Work, batch: float, seed: int) -> Train:
    """A round of as many steps as a client made, on part of its samples, or all.

    Args:
        model: where it begins.
        rule: of the client's optimiser.
        count: of its samples.
        work: what it did then.
        batch: how large its batches were.
        seed: of the samples and their order.
    """
    steps = max(1, round(work.steps))
    size = min(max(1, round(batch)), count)
    if steps * size < count:
        return Train(model, 1, size, work.learning_rate, seed, draw=Draw(steps * size, seed), optimiser=rule)
    epochs = round(steps * size / count)
    return Train(model, epochs, math.ceil(count * epochs / steps), work.learning_rate, seed, optimiser=rule)


def other_batches(task: Train) -> Train:
    """The same round, in batches of other samples."""
    seed, draw = derived_seed("again", task.seed), task.draw
    return replace(task, seed=seed, draw=None if draw is None else replace(draw, seed=seed))


def samples_of(task: Train, count: int) -> int:
    """Sample-gradients of a round, of a client with so many samples."""
    return task.epochs * (count if task.draw is None else task.draw.size)
