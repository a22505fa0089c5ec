"""A client's pull in one round, that of several together, and what a departure does to the pulls of those who stay.

    a_u = D - D_without_u = w_u/(1 - w_u) (D_u - D)         D where u was alone: without it there is no update
    a_U = sum over u in U of  (1 - w_u)/(1 - w_U) a_u        of several who leave together
    a_v <- ((1 - w_v) a_v + w_v a_u) / (1 - w_u - w_v)       of v, once u has left

These hold in each round. Kept are sums over rounds, so the factors are means over them, by the lengths of the pulls
that they stand before: exact where weights are the same in every round, or one client leaves. What a mean misses is the
blur of a pull. Where a round had nobody but U, its update itself would be needed, and no vector holds it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from expunge.core.vectors import weighted_sum
from expunge.federation.keeping.rounds import KeptRound
from expunge.federation.training.works import ROUNDING, lengthened

BLURRED = 0.3
"""A pull of which more is not known, beside what is known, is warned of."""

Factor = tuple[float, float]
"""What stands before a pull in a round, and how long that pull is."""


def pulls_of(updates: Mapping[str, Tensor], shares: Mapping[str, float], mean: Tensor) -> dict[str, Tensor]:
    """Everybody's pull in a round.

    Args:
        updates: what each participant sent minus what it got.
        shares: their weights, which add up to 1.
        mean: of the updates.

    Example:
        >>> import torch
        >>> sent = {"ada": torch.tensor([1.0]), "bob": torch.tensor([5.0])}
        >>> pulls_of(sent, {"ada": 0.75, "bob": 0.25}, torch.tensor([2.0]))
        {'ada': tensor([-3.]), 'bob': tensor([1.])}
        >>> pulls_of({"ada": torch.tensor([7.0])}, {"ada": 1.0}, torch.tensor([7.0]))
        {'ada': tensor([7.])}
    """
    found = {}
    for name, update in updates.items():
        share = shares[name]
        if share <= 0.5:
            found[name] = share / (1 - share) * (update - mean)
            continue
        others = {other: own for other, own in shares.items() if other != name}  # 1 - share would lose digits
        rest = sum(others.values())
        if rest <= ROUNDING:
            found[name] = mean.clone()
            continue
        without = weighted_sum((updates[other] for other in others), (own / rest for own in others.values()))
        found[name] = share * (update - without)
    return found


def weighted_mean(factors: Sequence[Factor]) -> float:
    """By the lengths of the pulls; all alike where these are not known, 1 where there are none."""
    total = sum(length for _, length in factors)
    if total > 0:
        return sum(factor * length for factor, length in factors) / total
    return sum(factor for factor, _ in factors) / len(factors) if factors else 1.0


@dataclass(frozen=True)
class Together:
    """How the vectors of clients add up to their pull together.

    Attributes:
        factors: of each vector.
        blur: how long the part of the pull is, about, that is not known.
        is_lost: whether they had every round to themselves, so that nothing is known.

    Example:
        >>> even = KeptRound({"ada": 0.25, "bob": 0.25, "cyd": 0.5}, pulls={"ada": 1.0, "bob": 1.0})
        >>> Together.of([even, even], ["ada", "bob"])
        Together(factors={'ada': 1.5, 'bob': 1.5}, blur=0.0, is_lost=False)
    """

    factors: Mapping[str, float]
    blur: float
    is_lost: bool

    @classmethod
    def of(cls, kept: Iterable[KeptRound], names: Collection[str]) -> Together:
        """Of these clients, in these rounds."""
        known: dict[str, list[Factor]] = {name: [] for name in names}
        lost, blurs = list[KeptRound](), list[tuple[str, float]]()
        for each in kept:
            own = lengthened(each.shares, names)
            if own is None:
                lost.append(each)
            for name, factor in (own or {}).items():
                known[name].append((factor, each.pulls.get(name, 0.0)))
            blurs += [(name, each.blurs[name]) for name in names if name in each.blurs]
        factors = {name: weighted_mean(own) for name, own in known.items()}
        missed = [_missed(own, factors[name]) for name, own in known.items()]
        missed += [factors[name] * blur for name, blur in blurs]
        missed += [math.hypot(*(factors[name] * each.pulls.get(name, 0.0) for name in names)) for each in lost]
        missed += [each.far for each in lost]
        return cls(factors, math.hypot(*missed), bool(lost) and not any(known.values()))


@dataclass(frozen=True)
class Departure:
    """What is left of some rounds once a client has left.

    Attributes:
        left: the rounds; one that it made alone is gone.
        corrections: of each client that met it how much of its vector is added, and what the sum is divided by.

    Example:
        >>> even = KeptRound({"ada": 0.5, "bob": 0.25, "cyd": 0.25}, pulls={"ada": 1.0, "bob": 1.0, "cyd": 1.0})
        >>> left = Departure.of([even], "ada")
        >>> left.left[0].shares, left.corrections["bob"]
        ({'bob': 0.5, 'cyd': 0.5}, (0.3333333333333333, 0.3333333333333333))
    """

    left: list[KeptRound]
    corrections: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, kept: Sequence[KeptRound], gone: str) -> Departure:
        """Of this client, from these rounds."""
        corrections, blurs = dict[str, tuple[float, float]](), dict[str, float]()
        met = [each for each in kept if each.shares.get(gone, 0.0) > 0]
        names = {name for each in met for name, share in each.shares.items() if share > 0} - {gone}
        taken: dict[str, list[KeptRound]] = {}
        for each in kept:
            for name, share in each.shares.items():
                if share > 0 and name in names:
                    taken.setdefault(name, []).append(each)
        for name, rounds in taken.items():
            own, added, blurs[name] = _changed(rounds, met, gone, name)
            # Whoever had the leaver alone beside it in every round has its vector turned round, and knows no pull now.
            alone = all(_is_left_alone(each.shares, gone, name) for each in rounds)
            corrections[name] = (0.0, math.inf) if alone else (added / own, 1 / own)
        left = [(each, each.without(gone)) for each in kept]
        return cls(
            [own if own is each else _renewed(each, own, gone, blurs) for each, own in left if own is not None],
            corrections,
        )


def _changed(taken: Sequence[KeptRound], met: Sequence[KeptRound], gone: str, name: str) -> tuple[float, float, float]:
    """Of one who met the leaver: what stands before its own vector, and before the leaver's; its blur in each round.

    Args:
        taken: the rounds that it took part in.
        met: those of the leaver.
        gone: the leaver.
        name: who stays.
    """
    own = [(_factors(each.shares, gone, name)[0], each.pulls.get(name, 0.0)) for each in taken]
    others = [(_factors(each.shares, gone, name)[1], each.pulls.get(gone, 0.0)) for each in met]
    factor, added = weighted_mean(own), weighted_mean(others)
    missed = [_missed(own, factor), _missed(others, added)]
    missed += [added * each.blurs.get(gone, 0.0) for each in met]
    count = 0
    for each in taken:
        before = each.blurs.get(name, 0.0)
        if each.shares.get(gone, 0.0) > 0:
            count += 1
            missed += [factor * before, each.far if _is_left_alone(each.shares, gone, name) else 0.0]
        else:  # a round that is not written anew keeps its blur as it is
            missed.append(before * math.sqrt(max(factor**2 - 1, 0.0)))
    return factor, added, math.hypot(*missed) / math.sqrt(count)


def _renewed(each: KeptRound, left: KeptRound, gone: str, blurs: Mapping[str, float]) -> KeptRound:
    """A round that the leaver took part in, with lengths of the others' pulls as they are without it, about."""
    if not each.shares[gone] > 0:
        return left
    lengths = {}
    for name, length in left.pulls.items():
        own, added = _factors(each.shares, gone, name)
        more = each.far if _is_left_alone(each.shares, gone, name) else added * each.pulls.get(gone, 0.0)
        lengths[name] = math.hypot(own * length, more)
    # A leaver of no weight in any round met nobody, and what is not known of the others stays as it is.
    known = {name: blurs.get(name, left.blurs.get(name, 0.0)) for name, share in left.shares.items() if share > 0}
    return replace(left, pulls=lengths, blurs={name: blur for name, blur in known.items() if blur > 0})


def _factors(shares: Mapping[str, float], gone: str, name: str) -> tuple[float, float]:
    """What stands before a client's pull, and before the leaver's, in a round as it is without the leaver."""
    leaving, own = shares.get(gone, 0.0), shares.get(name, 0.0)
    rest = 1 - leaving - own
    if _is_left_alone(shares, gone, name):
        return (1 - own) / own, 0.0
    return ((1 - own) / rest, own / rest) if min(leaving, own) > 0 and rest > ROUNDING else (1.0, 0.0)


def _is_left_alone(shares: Mapping[str, float], gone: str, name: str) -> bool:
    """Whether the leaver was the only one beside it: its pull is its whole update from then on."""
    leaving, own = shares.get(gone, 0.0), shares.get(name, 0.0)
    return min(leaving, own) > ROUNDING and 1 - leaving - own <= ROUNDING


def _missed(factors: Sequence[Factor], mean: float) -> float:
    """How long what the mean misses is, where it points any way."""
    return math.hypot(*((factor - mean) * length for factor, length in factors))
