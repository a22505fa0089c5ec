"""A deletion request, and who is touched by it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import SupportsIndex

from expunge.errors import RequestError, listed
from expunge.federation.messages.tasks import Indices


@dataclass(frozen=True)
class Request:
    """What is to be forgotten: whole clients, or some samples inside clients.

    Example:
        >>> request = Request.of("ada", samples={"bob": [2, 0]})
        >>> request.clients, request.samples["bob"]
        (('ada',), (0, 2))
    """

    clients: tuple[str, ...] = ()
    samples: Mapping[str, Indices] = field(default_factory=dict)

    @classmethod
    def of(cls, clients: str | Sequence[str] = (), samples: Mapping[str, Sequence[int]] | None = None) -> Request:
        """A request from one name or several, and sample indices by client."""
        if not isinstance(clients, Iterable | None):
            raise RequestError(f"Who leaves is named by a text, or by several in a list, not by {clients!r}.")
        names = (clients,) if isinstance(clients, str) else tuple(dict.fromkeys(() if clients is None else clients))
        if not isinstance(samples, Mapping | None):
            raise RequestError(
                f"Samples to forget are given by client, as {{'ada': [0, 5]}}, not as {samples!r}: "
                "how many retained ones the curvature uses is curvature_samples."
            )
        chosen = {name: _indices(name, numbers) for name, numbers in (samples or {}).items()}
        if not names and not chosen:
            raise RequestError("The request names nothing to forget: give a client or some samples.")
        for name, indices in chosen.items():
            if not indices:
                raise RequestError(f"The request names no samples of client {name!r}: give at least one index.")
            if name in names:
                raise RequestError(f"The request names client {name!r} as a whole and some of its samples: choose one.")
        return cls(names, chosen)

    def parties(self, counts: Mapping[str, int], remembered: Sequence[str] = ()) -> Parties:
        """Who is touched, among the reachable clients and those of whom only a vector was kept.

        Args:
            counts: the reachable clients and their sample counts.
            remembered: clients whose vector the server keeps; they may have gone.
        """
        known = dict.fromkeys([*counts, *remembered])
        for name in [*self.clients, *self.samples]:
            if name not in known:
                raise RequestError(f"There is no client {name!r}; there are {listed(known)}.")
        for name, indices in self.samples.items():
            if name not in counts:
                raise RequestError(f"Client {name!r} cannot be reached, so only the whole of it can be forgotten.")
            count = counts[name]
            if indices[0] < 0 or indices[-1] >= count:
                raise RequestError(f"Client {name!r} has samples 0 to {count - 1} only: check the indices.")
        emptied = [name for name, indices in self.samples.items() if len(indices) == counts[name]]
        leaving = (*self.clients, *emptied)
        retained = {name: self.samples.get(name, ()) for name in counts if name not in leaving}
        if not retained:
            raise RequestError("The request would forget every client: nothing is left to keep, so start a new model.")
        partly = {name: indices for name, indices in self.samples.items() if name in retained}
        return Parties(leaving, partly, retained, dict(counts))


@dataclass(frozen=True)
class Parties:
    """The request as it falls on a federation.

    Attributes:
        leaving: clients that go as a whole.
        partly: clients that stay but lose these samples.
        retained: clients that stay, each with the samples that it no longer uses.
        counts: sample counts of all reachable clients before the deletion.
    """

    leaving: tuple[str, ...]
    partly: Mapping[str, Indices]
    retained: Mapping[str, Indices]
    counts: Mapping[str, int]

    @cached_property
    def owners(self) -> dict[str, Indices | None]:
        """Clients that hold data to forget, each with its samples (None: all of them)."""
        return {**dict.fromkeys(self.leaving, None), **self.partly}

    @cached_property
    def forgotten_counts(self) -> dict[str, int]:
        """|D_u in D_i| of each reachable owner."""
        return {
            name: self.counts[name] if indices is None else len(indices)
            for name, indices in self.owners.items()
            if name in self.counts
        }

    @property
    def mass(self) -> float:
        """w_u: the share of all samples that is to be forgotten."""
        return sum(self.forgotten_counts.values()) / sum(self.counts.values())


def _indices(name: str, numbers: Iterable[int]) -> Indices:
    """In order, each once."""
    if not isinstance(numbers, Iterable):
        raise RequestError(f"Samples of client {name!r} are given as a list of whole numbers, not as {numbers!r}.")
    return tuple(sorted({_index(number) for number in numbers}))


def _index(value: SupportsIndex) -> int:
    """A whole number; not a truth value, so that a mask is not taken for the samples 0 and 1."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise RequestError("Samples are named by their indices, not by a mask of truth values.")
    try:
        return operator.index(value)
    except TypeError as problem:
        raise RequestError(f"Samples are named by whole numbers, not by {value!r}.") from problem
