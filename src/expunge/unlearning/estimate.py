"""What a method will cost at most, told before anybody is asked: messages, bytes and sample-gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import FORWARD_COST
from expunge.unlearning.options import StepOptions
from expunge.unlearning.request import Parties


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


@dataclass(frozen=True)
class Size:
    """How large a federation is, as far as costs go by it.

    Attributes:
        vector: bytes of one vector as long as the model.
        factors: bytes of the Kronecker factors of its layers.
        clients: how many stay.
        owners: how many hold data to forget.
        samples: how many are retained.
        forgotten: how many are to be forgotten, of those who can be reached.
    """

    vector: int
    factors: int
    clients: int
    owners: int
    samples: int
    forgotten: int

    @classmethod
    def of(cls, state: ServerState, parties: Parties) -> Size:
        """Of this state and request."""
        each = state.model.parameters.element_size()
        shapes = [shape for _, shape in state.model.layout.shapes] if state.model.layout is not None else []
        values = sum(_triangle(shape[0]) + _triangle(math.prod(shape[1:])) for shape in shapes if len(shape) > 1)
        left = sum(parties.counts[name] - len(gone) for name, gone in parties.retained.items())
        forgotten = sum(parties.forgotten_counts.values())
        vector = each * state.model.parameters.numel()
        return cls(vector, each * values + vector, len(parties.retained), len(parties.owners), left, forgotten)


def small_change(messages: int) -> int:
    """Bytes of what is not a vector: losses, counts and seeds, for each client in all its messages."""
    return 256 * messages


def drawn(options: StepOptions, size: Size) -> int:
    """How many samples a draw has."""
    samples = options.samples(size.samples)
    return size.samples if samples is None else min(samples, size.samples)


def searched(options: StepOptions, size: Size) -> float:
    """Sample-gradients of the search for a length: every length once, the model as it is once a message."""
    return 0.0 if options.tau is None else (len(options.lengths) + 3) * FORWARD_COST * drawn(options, size)


def recovered(options: StepOptions, size: Size) -> float:
    """Sample-gradients of a recovery round and of the search for its length."""
    if options.recovery is None:
        return 0.0
    lengths = len(options.recovery.lengths) * FORWARD_COST * drawn(options, size)
    return options.recovery.epochs * size.samples + lengths


def _triangle(side: int) -> int:
    return side * (side + 1) // 2
