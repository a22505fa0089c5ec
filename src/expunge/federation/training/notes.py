"""How a client trained in one round, as it was seen; on Flower its training reply says so, and the server reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from expunge.errors import RequestError
from expunge.federation.training.recipe import SGD, Adam, Recipe

Rule = SGD | Adam
"""The optimisers that can be read from torch's, and kept in a store."""


SEVERAL = "trains with several rules, learning rates or numbers of steps in one round"
"""The problem where parts of a model train in different ways, or a client does at different times."""

UNLIKE = 0.1
"""The part of what an optimiser took from which on a factor is no description of what was done to gradients."""


@dataclass(frozen=True)
class Note:
    """What a client's torch optimisers did in one round.

    Attributes:
        rule: of all that the client sends; None where no one rule describes it, and ``problem`` says why.
        learning_rate: the mean over its steps.
        steps: how many it made.
        moments: root mean square gradients by the names of the arrays that it sends, where its optimiser has them; as
            they were before clipping.
        problem: what cannot be followed, to be read after the client's name.
        apart: the names of arrays that it sends, but had trained from values of its own.
        kept: the factor by which gradients came out between backward and step, on the mean: clipped ones below 1.
        unlike: the part of what the optimiser took that no such factor explains, as noise is.
        numbers: how many numbers were trained; it is known where they were, and not sent.
        batch: samples of a step on the mean, where they were seen; else 0.

    Example:
        >>> note = Note(SGD(momentum=0.9), 0.1, 12)
        >>> Note.read("ada", note.facts()) == note
        True
    """

    rule: Rule | None
    learning_rate: float
    steps: float
    moments: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    apart: tuple[str, ...] = ()
    kept: float = 1.0
    unlike: float = 0.0
    numbers: int = field(default=0, compare=False)
    batch: float = field(default=0.0, compare=False)

    def followed_by(self, later: Note) -> Note:
        """Both in one, where the later training went on in the same round.

        Example:
            >>> both = Note(SGD(), 0.1, 6).followed_by(Note(SGD(), 0.4, 3))
            >>> both.rule == SGD(), round(both.learning_rate, 9), both.steps
            (True, 0.2, 9)
        """
        steps = self.steps + later.steps

        def mean(one: float, other: float) -> float:
            return one if one == other else (self.steps * one + later.steps * other) / steps

        is_one = self.rule == later.rule and self.numbers == later.numbers
        problem = self.problem or later.problem or ("" if is_one else SEVERAL)
        kept = mean(self.kept, later.kept)
        return replace(
            later,
            rule=None if problem else later.rule,
            learning_rate=mean(self.learning_rate, later.learning_rate),
            steps=steps,
            moments={name: value * later.kept / kept for name, value in later.moments.items()},
            problem=problem,
            kept=kept,
            unlike=mean(self.unlike, later.unlike),
            batch=mean(self.batch, later.batch),
        )

    @property
    def rate(self) -> float:
        """The learning rate that counts: clipped gradients move a model less far; Adam divides by them."""
        return self.learning_rate * (1.0 if isinstance(self.rule, Adam) else self.kept)

    @property
    def altered(self) -> bool:
        """Whether gradients were changed by more than a factor before the optimiser took them."""
        return self.unlike > UNLIKE

    def facts(self) -> dict[str, Any]:
        """For the stamp; what there is not is left out."""
        found: dict[str, Any] = {"learning-rate": float(self.learning_rate), "steps": float(self.steps)}
        if self.rule is not None:
            found["optimiser"] = json.dumps(Recipe(self.rule).as_dict()["client"])
        if self.moments:
            found |= {"moments-of": list(self.moments), "moments": [float(each) for each in self.moments.values()]}
        found |= {"apart": list(self.apart)} if self.apart else {}
        found |= {"kept": self.kept, "unlike": self.unlike} if (self.kept, self.unlike) != (1.0, 0.0) else {}
        found |= {"batch": self.batch} if self.batch > 0 else {}
        return found | ({"problem": self.problem} if self.problem else {})

    @classmethod
    def read(cls, name: str, stamp: Mapping[str, Any]) -> Note | None:
        """What a site says; None where it says nothing, and refused where it is nonsense."""
        if "steps" not in stamp:
            return None
        try:
            written, moments = stamp.get("optimiser"), _numbers(stamp.get("moments", []))
            names = [str(each) for each in _list(stamp.get("moments-of", []))]
            rule = Recipe.from_dict({"client": json.loads(str(written)), "server": _PLAIN}).client if written else None
            if not isinstance(rule, Rule | None):
                raise ValueError("the optimiser is not one of ours")
            rate, steps = _numbers([stamp["learning-rate"], stamp["steps"]])
            own = dict(zip(names, moments, strict=True))
            apart = tuple(str(each) for each in _list(stamp.get("apart", [])))
            kept, unlike, batch = _numbers([stamp.get("kept", 1.0), stamp.get("unlike", 0.0), stamp.get("batch", 0.0)])
            problem = " ".join(str(stamp.get("problem", "")).split())[:500]
            return cls(rule, rate, steps, own, problem, apart, kept, unlike, batch=batch)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, RequestError) as unread:
            raise RequestError(
                f"What site {name!r} says of its training cannot be read: bring site and server to the same version."
            ) from unread


def written(rule: Rule) -> str:
    """The rule with its settings, for a sentence.

    Example:
        >>> written(SGD(momentum=0.9)), written(Adam(weight_decay=0.01, decoupled=True))
        ('SGD(momentum=0.9)', 'AdamW(weight_decay=0.01)')
    """
    plain = type(rule)()
    changed = {name: value for name, value in vars(rule).items() if value != getattr(plain, name)}
    settings = ", ".join(f"{name}={value}" for name, value in changed.items() if name != "decoupled")
    return f"{'AdamW' if isinstance(rule, Adam) and rule.decoupled else type(rule).__name__}({settings})"


_PLAIN = Recipe().as_dict()["server"]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("this is no list")
    return value


def _numbers(values: Any) -> list[float]:
    """Finite numbers of at least 0."""
    found = [float(value) for value in _list(values)]
    if not all(0 <= value < math.inf for value in found):
        raise ValueError("a number is negative or infinite")
    return found
