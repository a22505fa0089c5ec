"""What is written down of each round beside vectors: who took part, how much it counted, how it trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from expunge.errors import RequestError
from expunge.federation.keeping.given import by_client, number
from expunge.federation.keeping.peaks import Peak
from expunge.federation.training.onlooker import Glimpse
from expunge.federation.training.recipe import ClientRule
from expunge.federation.training.works import ROUNDING, Round, Work

PerClient = float | Mapping[str, float] | None
"""One number for everybody, or each client's own."""


@dataclass(frozen=True)
class Drift:
    """How far a client led from the mean in a round (client drift).

    Attributes:
        number: of the round.
        work: what it did.
        far: how far it led, as it would beside the mean of very many.
        batch: samples of its steps, where they were seen.
    """

    number: int
    work: Work
    far: float
    batch: float | None = None

    @property
    def travel(self) -> float:
        """Rate x steps."""
        return self.work.learning_rate * self.work.steps

    @property
    def strength(self) -> float:
        """How far it led in a step of rate 1."""
        return self.far / self.travel


@dataclass(frozen=True)
class KeptRound:
    """One round.

    Attributes:
        shares: each participant's weight in the mean; they add up to 1.
        rates: learning rates, where they were recorded.
        steps: local steps, where they were recorded.
        moments: second moments by parameter (recipe.second_moments), where they were recorded.
        pulls: the length of each participant's pull (pulls.py), where it was recorded.
        blurs: the length of what is not known of it, since somebody left who took part.
        peaks: the shape of each participant's update, of the first rounds.
        plain: whether the mean was added as it is, whatever the server's rule.
        mark: length and sum of the mean update, by which the same round is known again; None once a participant left.
        altered: participants whose gradients were changed by more than a factor before their optimiser took them.
        misstated: what torch's optimisers were seen to do, and what is stated instead, where they differ.
        glimpse: what they were seen to do, where nothing was stated with the round.
        batches: samples of each participant's steps, where they were seen.
    """

    shares: Mapping[str, float]
    rates: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    moments: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    pulls: Mapping[str, float] = field(default_factory=dict)
    blurs: Mapping[str, float] = field(default_factory=dict)
    peaks: Mapping[str, Peak] = field(default_factory=dict)
    plain: bool = False
    mark: tuple[float, float] | None = None
    altered: tuple[str, ...] = ()
    misstated: tuple[str, str] | None = None
    glimpse: Glimpse | None = None
    batches: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shares: Mapping[str, float],
        rates: PerClient,
        steps: PerClient,
        moments: Mapping[str, Sequence[float]] | None,
        *,
        plain: bool = False,
    ) -> KeptRound:
        """Checked: numbers above 0, of participants only."""
        read = {"learning rate": _each(rates, shares, "learning rate"), "steps": _each(steps, shares, "steps")}
        told = by_client({} if moments is None else moments, "Second moments")
        own = {name: _moments(name, values) for name, values in told.items()}
        strange = [name for name in own if name not in shares]
        if strange:
            raise RequestError(f"Moments of {strange[0]!r} are given, who sent no update in this round.")
        if any(not 0 <= value < math.inf for values in own.values() for value in values):
            raise RequestError("Second moments are roots of mean squares: numbers of at least 0.")
        if len({len(values) for values in own.values()}) > 1:
            raise RequestError("Clients sent different numbers of second moments: are they all of the same model?")
        return cls(dict(shares), read["learning rate"], read["steps"], own, plain=plain)

    def works(self, rate: float | None, steps: float | None) -> dict[str, Work] | None:
        """What each client did, with these where nothing was recorded; None where something is not known at all."""
        found = {}
        for name, share in self.shares.items():
            own = self.rates.get(name, rate), self.steps.get(name, steps)
            if own[0] is None or own[1] is None:
                return None
            found[name] = Work(share, own[0], own[1], self.moments.get(name, ()), self.pulls.get(name, 0.0))
        return found

    def led(self, number: int) -> dict[str, Drift]:
        """How far each client led from the mean, by the length of its pull; none where gradients were changed.

        Of n clients that lead apart by chance, ``D_u - D`` has ``1 - 2 w_u + sum of w^2`` of the variance of one.
        """
        even, found = sum(share**2 for share in self.shares.values()), dict[str, Drift]()
        for name, work in (self.works(None, None) or {}).items():
            rest, known = 1 - work.share, work.pull > 0 and work.learning_rate * work.steps > 0
            if known and rest > ROUNDING and name not in self.altered:
                far = work.pull * rest / work.share / math.sqrt(rest - work.share + even)
                found[name] = Drift(number, work, far, self.batches.get(name))
        return found

    def without(self, gone: str) -> KeptRound | None:
        """The round had this client not taken part; itself where it did not, None where nobody else did."""
        if gone not in self.shares:
            return self
        rest = 1 - self.shares.get(gone, 0.0)
        if rest <= ROUNDING:
            return None
        left = {name: share / rest for name, share in self.shares.items() if name != gone}
        rates, steps = ({n: value for n, value in known.items() if n != gone} for known in (self.rates, self.steps))
        moments = {name: values for name, values in self.moments.items() if name != gone}
        pulls, blurs = ({n: length for n, length in known.items() if n != gone} for known in (self.pulls, self.blurs))
        peaks = {name: peak for name, peak in self.peaks.items() if name != gone}
        return replace(
            self,
            shares=left,
            rates=rates,
            steps=steps,
            moments=moments,
            pulls=pulls,
            blurs=blurs,
            peaks=peaks,
            mark=None,
            altered=tuple(name for name in self.altered if name != gone),
            glimpse=None,
            batches={name: size for name, size in self.batches.items() if name != gone},
        )

    @property
    def far(self) -> float:
        """How long its mean update was; as the longest pull where a participant has left."""
        return self.mark[0] if self.mark is not None else max(self.pulls.values(), default=0.0)

    def unlike(self, rule: ClientRule, rate: float | None, steps: float | None) -> tuple[str, str] | None:
        """What was seen of this round and what is stated, with these where nothing was recorded, if they differ."""
        if self.misstated is not None or self.glimpse is None:
            return self.misstated
        return self.glimpse.unlike(rule, self.works(rate, steps))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not recorded is left out."""
        peaks = {name: [peak.height, peak.evenness] for name, peak in self.peaks.items()}
        known: dict[str, Any] = {"rates": self.rates, "steps": self.steps, "moments": self.moments}
        known |= {"pulls": self.pulls, "blurs": self.blurs, "peaks": peaks}
        known |= {"altered": self.altered, "misstated": self.misstated}
        known |= {"batches": self.batches}
        known |= {"glimpse": asdict(self.glimpse) if self.glimpse is not None else None}
        mark = ({"plain": True} if self.plain else {}) | ({"mark": list(self.mark)} if self.mark is not None else {})
        return {"shares": dict(self.shares), **{name: value for name, value in known.items() if value}, **mark}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> KeptRound:
        """Read it back, checked."""
        shares = {name: float(share) for name, share in written["shares"].items()}
        if not all(0 <= share <= 1 + ROUNDING for share in shares.values()):
            raise ValueError("a client's share in a round is not between 0 and 1")
        read = cls.of(
            shares,
            written.get("rates"),
            written.get("steps"),
            written.get("moments"),
            plain=bool(written.get("plain", False)),
        )
        mark = written.get("mark")
        pulls, blurs = ({n: float(own) for n, own in written.get(key, {}).items()} for key in ("pulls", "blurs"))
        if not all(name in shares and 0 <= length < math.inf for own in (pulls, blurs) for name, length in own.items()):
            raise ValueError("the length of a pull is not a number of at least 0")
        peaks = {name: Peak(float(own[0]), float(own[1])) for name, own in written.get("peaks", {}).items()}
        mark = (float(mark[0]), float(mark[1])) if mark is not None else None
        altered = tuple(name for name in written.get("altered", ()) if name in shares)
        batches = {name: float(size) for name, size in written.get("batches", {}).items()}
        if not all(name in shares and 0 < size < math.inf for name, size in batches.items()):
            raise ValueError("the size of a client's batches is not a number above 0")
        read = replace(read, pulls=pulls, blurs=blurs, peaks=peaks, mark=mark, altered=altered, batches=batches)
        if written.get("misstated") is not None:
            seen, stated = (str(each) for each in written["misstated"])
            read = replace(read, misstated=(seen, stated))
        glimpse = written.get("glimpse")
        return read if glimpse is None else replace(read, glimpse=Glimpse.read(glimpse))


def staying(
    works: Iterable[Mapping[str, Work]], kept: Sequence[KeptRound], leaving: Sequence[str]
) -> tuple[Round, ...]:
    """The rounds as those saw them who stay."""
    return tuple(
        Round(tuple(work for name, work in own.items() if name not in leaving), each.plain)
        for own, each in zip(works, kept, strict=True)
    )


def _each(given: PerClient, shares: Mapping[str, float], what: str) -> dict[str, float]:
    """A number for each participant, or none for anybody."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        given = dict.fromkeys(shares, given)
    if not given:
        return {}
    if set(given) != set(shares):
        odd = sorted(set(given) ^ set(shares), key=str)[0]
        raise RequestError(f"The {what} must be given of everybody who sent an update, and of nobody else: {odd!r}.")
    read = {name: number(value, f"{what} of client {name!r}") for name, value in given.items()}
    for name, value in read.items():
        if not 0 < value < math.inf:
            raise RequestError(f"The {what} of client {name!r} must be above 0, not {value}.")
    return read


def _moments(name: str, given: object) -> tuple[float, ...]:
    """One number for each parameter."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(
            f"Second moments of client {name!r} are a number for each parameter: second_moments(optimiser)."
        )
    return tuple(number(value, f"second moment of client {name!r}") for value in given)
