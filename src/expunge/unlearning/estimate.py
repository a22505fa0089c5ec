"""What a method will cost at most, told before anybody is asked: messages, bytes and sample-gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from expunge.errors import RequestError
from expunge.federation.engines.client import local_steps
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import FORWARD_COST
from expunge.federation.training.plan import Schedule
from expunge.federation.training.recipe import Adam, FedAvg, Measured
from expunge.unlearning.options import StepOptions
from expunge.unlearning.request import Parties
from expunge.unlearning.retained import BATCH_SIZE, has_statistics

ASKED, STEPS, SMALLER = 3, 48, 2
"""Of those who stay so many are asked how they answer under Adam, those with most samples; for so many steps at most,
in batches so many times smaller than the training's."""

MANY = 0.5
"""Where more than this share of the weights has a diagonal for its curvature, a step is filtered by products, however
short it is and under every training: diagonals left up to a half of the way to retraining."""

STRETCHES = 14
"""Of what is followed by gradients (followed.py), one each: no training of more rounds is, and of fewer rounds each is
parted."""

LOUD, FURTHER = 3.0, 0.2
"""Where a client's pull is so many times as long by weight as others', a step by factors is taken so much further."""


REPLAYED, CHEAP = 40, 20_000
"""A replay takes no more than one in so many of the samples that the training went through, or than so many, as far as
rounds of fewer epochs spare them; they count for as many steps as there were."""


@dataclass(frozen=True)
class Estimate:
    """At most so much.

    Attributes:
        messages: message rounds.
        bytes_down: to all clients together.
        bytes_up: from all clients together.
        sample_gradients: the work of all clients together.
    """

    messages: int
    bytes_down: int
    bytes_up: int
    sample_gradients: float

    def __add__(self, other: Estimate) -> Estimate:
        """Of both together."""
        return Estimate(*(own + its for own, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Size:
    """How large a federation is, as far as costs go by it.

    Attributes:
        vector: bytes of the model, batch-norm statistics included; other vectors are no longer.
        factors: bytes of the Kronecker factors of its layers.
        clients: how many stay.
        owners: how many hold data to forget.
        samples: how many are retained.
        forgotten: how many are to be forgotten, of those who can be reached.
        validation: how many the server has of its own.
        statistics: whether the model has batch norm.
        replayed: sample-gradients of the owners' training from all checkpoints, where there are some.
        checkpoints: how many there are.
        vectors: whether vectors were kept of everything that is to be forgotten.
        measured: sample-gradients of measuring how an optimiser answers, where that may have to be done.
        asked: whether those who stay may be asked how stiff they are, after which one filter more is tried; of adapters
            an exact product tells it.
        rows: vectors of the pull, whose products are asked for apart.
        half_way: whether curvature may be looked at half way, where the step is long.
        always: whether it is looked at whatever the step: the model has one layer, or few that have factors, as far as
            names of parameters tell.
        one_layer: whether the model has one layer.
        short: whether the training had so few rounds that the response may be followed by gradients.
        pull: how long the recorded pull's vectors are together, beside the model itself; no step by them is longer.
    """

    vector: int
    factors: int
    clients: int
    owners: int
    samples: int
    forgotten: int
    validation: int
    statistics: bool
    replayed: float = 0.0
    checkpoints: int = 0
    vectors: bool = True
    measured: float = 0.0
    asked: bool = False
    rows: int = 1
    half_way: bool = False
    always: bool = False
    one_layer: bool = False
    short: bool = False
    pull: float = math.inf

    @classmethod
    def of(cls, state: ServerState, parties: Parties, validation: int = 0) -> Size:
        """Of this state and request, where the server has so many samples of its own."""
        each = state.model.parameters.element_size()
        shapes = [shape for _, shape in state.model.layout.shapes] if state.model.layout is not None else []
        values = sum(_triangle(shape[0]) + _triangle(math.prod(shape[1:])) for shape in shapes if len(shape) > 1)
        left = sum(parties.counts[name] - len(gone) for name, gone in parties.retained.items())
        forgotten = sum(parties.forgotten_counts.values())
        vector, clients, owners = state.model.stored_bytes, len(parties.retained), len(parties.owners)
        norm = has_statistics(state.model)
        remembered = state.memory.clients if state.memory is not None else ()
        kept = not parties.partly and set(parties.leaving) <= set(remembered)
        checkpoints = len(state.checkpoints.models) if state.checkpoints is not None else 0
        replayed = float(checkpoints * _replayed(state, parties)) if checkpoints else 0.0
        sizes = (vector, each * values + vector, clients, owners, left, forgotten, validation, norm)
        rule, batch = state.trained_by.client, state.schedule.batch_size if state.schedule is not None else BATCH_SIZE
        measured = 2.0 * epochs_of(state.schedule, parties.counts) * left if isinstance(rule, Measured) else 0.0
        answers = 2.0 * min(ASKED * STEPS * max(1, batch // SMALLER), left)
        adapted = state.model.layout is not None and state.model.layout.has_adapters
        asked = isinstance(rule, Adam) and not adapted
        stretches = state.memory.stretches if state.memory is not None else 1
        one_rate = not (getattr(rule, "adaptive", False) or isinstance(rule, Measured))
        halved = one_rate and isinstance(state.trained_by.server, FedAvg) and not norm
        asking, pull = answers if asked else measured, _pull(state, parties) if kept else math.inf
        rows = max(1, stretches, checkpoints)
        layout = state.model.layout
        alone = layout is not None and layout.is_one_layer and not norm
        always = alone or (layout is not None and layout.apart_from_layers > MANY and not norm)
        trained = state.memory.rounds if state.memory is not None and kept else None
        if trained is None:
            trained = state.schedule.rounds if state.schedule is not None else STRETCHES
        short = trained <= STRETCHES
        return cls(*sizes, replayed, checkpoints, kept, asking, asked, rows, halved, always, alone, short, pull)


def _pull(state: ServerState, parties: Parties) -> float:
    """How long the leavers' vectors are together beside the model, as FedAvg adds them up; infinite if not known."""
    memory, length = state.memory, float(state.model.parameters.norm())
    if memory is None or not length > 0:
        return math.inf
    try:
        vectors, _ = memory.pulls(parties.leaving, state.schedule)
    except RequestError:  # whoever needs them is told by the method
        return math.inf
    return float(vectors.norm(dim=1).sum()) / length


def epochs_of(schedule: Schedule | None, counts: Mapping[str, int]) -> int:
    """Local epochs of a round of the training: as stated, or as its mean steps come to.

    Example:
        >>> epochs_of(Schedule(0.1, local_steps=6, rounds=3, batch_size=4), {"ada": 12, "bob": 12})
        2
    """
    if schedule is None:
        return 1
    if schedule.epochs is not None:
        return schedule.epochs
    each = sum(own * local_steps(own, 1, schedule.batch_size) for own in counts.values()) / sum(counts.values())
    return max(1, round(schedule.local_steps / each))


def recorded_steps(state: ServerState, name: str) -> float | None:
    """How many steps this client made in a round that it took part in, on average; None where nobody recorded it."""
    works = state.memory.works(None) if state.memory is not None else None
    own = [each[name].steps for each in works or () if name in each]
    return sum(own) / len(own) if own else None


def round_epochs(state: ServerState, name: str, counts: Mapping[str, int]) -> int:
    """Local epochs of this client in a round: as stated, or those that come nearest to the steps that it made."""
    schedule, steps = state.schedule, recorded_steps(state, name)
    if schedule is None or schedule.epochs is not None or steps is None:
        return epochs_of(schedule, counts)
    return max(1, round(steps / local_steps(counts[name], 1, schedule.batch_size)))


def replayed_epochs(state: ServerState, parties: Parties) -> dict[str, int]:
    """Of each owner who is there: as many as it trained for in a round, or fewer where that would be too much work."""
    there = {name: gone for name, gone in parties.owners.items() if name in parties.counts}
    whole = {name: round_epochs(state, name, parties.counts) for name in there}
    each = {
        name: parties.counts[name] + (0 if gone is None else parties.counts[name] - len(gone))
        for name, gone in there.items()
    }
    checkpoints = len(state.checkpoints.models) if state.checkpoints is not None else 0
    work = checkpoints * sum(whole[name] * each[name] for name in there)
    part = min(1.0, max(_trained(state, parties) / REPLAYED, CHEAP) / work) if work else 1.0
    return {name: max(1, int(part * epochs)) for name, epochs in whole.items()}


def _trained(state: ServerState, parties: Parties) -> float:
    """How many samples the training went through: as recorded, else as if all had taken part in every round."""
    works = state.memory.works(None) if state.memory is not None else None
    if works and state.schedule is not None:
        return state.schedule.batch_size * sum(work.steps for each in works for work in each.values())
    rounds = state.schedule.rounds if state.schedule is not None else 1
    return float(rounds * epochs_of(state.schedule, parties.counts) * sum(parties.counts.values()))


def _replayed(state: ServerState, parties: Parties) -> int:
    """Sample-gradients of the owners' training from one checkpoint, with and without what is to be forgotten."""
    total = 0
    for name, epochs in replayed_epochs(state, parties).items():
        gone = parties.owners[name]
        total += epochs * (parties.counts[name] + (0 if gone is None else parties.counts[name] - len(gone)))
    return total


def small_change(messages: int) -> int:
    """Bytes of what is not a vector: losses, counts and seeds, for each client in all its messages."""
    return 256 * messages


def drawn(options: StepOptions, size: Size) -> int:
    """How many samples a draw has: shares are rounded up, so that every client has one."""
    samples = options.samples(size.samples)
    return size.samples if samples is None else min(samples + size.clients, size.samples)


def looked_at(options: StepOptions, size: Size) -> int:
    """How many samples one length of a step is judged by."""
    return max(drawn(options, size), size.validation)


def searched(options: StepOptions, size: Size) -> float:
    """Sample-gradients of the search for a length: every length once, the model as it is once a message."""
    lengths = 0 if options.tau is None else len(options.lengths) + 3
    renewed = max(lengths, 1) * size.samples if size.statistics else 0
    return FORWARD_COST * (lengths * looked_at(options, size) + renewed)


def renewing(options: StepOptions, size: Size) -> int:
    """How many messages more a search takes with batch norm, whose statistics belong to each length.

    Two a length, one for the model as it is, and two more where the whole step is tried before.
    """
    if not size.statistics:
        return 0
    return 1 if options.tau is None else 2 * len(options.lengths) + 3


def recovered(options: StepOptions, size: Size) -> float:
    """Sample-gradients of a recovery round and of the search for its length."""
    if options.recovery is None:
        return 0.0
    lengths = len(options.recovery.lengths) * FORWARD_COST * looked_at(options, size)
    return options.recovery.epochs * size.samples + lengths


def _triangle(side: int) -> int:
    return side * (side + 1) // 2
