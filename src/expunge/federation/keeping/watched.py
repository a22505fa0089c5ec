"""What was seen of the clients' training in a round, instead of being stated, or beside it: then the two must agree.

A statement that is wrong takes a wrong step back without anybody noticing: momentum that is not told makes every answer
of those who stay ten times too slow. What torch's optimisers did cannot be told wrong.

Where it fails: what is added to the loss (FedProx) is not seen, and of what is done to gradients before a step only the
part that is a factor, as clipping by length is; the rest is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from expunge.core.vectors import Layout, named_as
from expunge.errors import RequestError
from expunge.federation.keeping.rounds import PerClient
from expunge.federation.training.notes import Note, Rule, written
from expunge.federation.training.recipe import SGD, ClientRule, Recipe
from expunge.federation.training.watching import Arrays, Watch

ALTERED = (
    "Gradients were changed between backward and step by more than a factor (noise, clipping value by value, signs) at "
    "{names}. Clients are taken to answer by as much as is left of their gradients, which is a guess: audit the model."
)
"""What a forget says where clients train so."""

INSTEAD = "let it be measured, Memory(model, Recipe(Measured(train))), or describe its recursion"


@dataclass(frozen=True)
class Stated:
    """What is recorded of a round beside vectors; None and nothing where it is not said."""

    recipe: Recipe
    learning_rate: PerClient = None
    steps: PerClient = None
    moments: Mapping[str, Sequence[float]] | None = None
    altered: tuple[str, ...] = ()


def seen(name: str, watch: Watch, model: nn.Module, layout: Layout, recipe: Recipe) -> Note:
    """What a client's optimiser did with the parameters that the federation trains; refused where it did nothing.

    Args:
        name: the client's.
        watch: it is over.
        model: as it was trained.
        layout: of what the federation trains.
        recipe: as it is stated; a rule of your own stands for whatever is seen.
    """
    note = watch.note(lambda: _arrays(model, layout))
    if note is None:
        raise RequestError(
            f"No optimiser of torch made a step while client {name!r} was watched: train inside the with block, in its "
            "thread; or state learning_rate and steps in record."
        )
    if not note.learning_rate > 0:
        raise RequestError(f"Client {name!r} trained with a learning rate of 0: leave it out of such rounds.")
    if note.rule is None and _is_read(recipe.client):
        raise RequestError(
            f"Client {name!r} {note.problem}: train with one SGD, Adam or AdamW of torch that is made anew in every "
            f"round, {INSTEAD}."
        )
    return note


def agreed(
    notes: Mapping[str, Note], stated: Stated, updates: Mapping[str, Tensor], layout: Layout, *, first: bool
) -> Stated:
    """The round as it was seen; what is stated beside it must be the same.

    Args:
        notes: of the clients that were watched.
        stated: what is said.
        updates: of everybody who took part.
        layout: of the updates.
        first: whether it is the first round: the rule that is seen is then the training's, where none is stated.
    """
    unseen = next((name for name in updates if name not in notes), None)
    if unseen is not None:
        raise RequestError(f"Client {unseen!r} was not watched in this round, and others were: watch everybody.")
    own, recipe = {name: notes[name] for name in updates}, stated.recipe
    if _is_read(recipe.client):
        if first and recipe.client == SGD():
            recipe = replace(recipe, client=_rule(next(iter(own.values()))))
        for name, note in own.items():
            _require_rule(name, _rule(note), recipe.client, first=first)
    rates = {name: note.learning_rate for name, note in own.items()}
    steps = {name: note.steps for name, note in own.items()}
    for what, given, found in (("learning_rate", stated.learning_rate, rates), ("steps", stated.steps, steps)):
        _require_same(what, given, found)
    rates = {name: note.rate for name, note in own.items()}
    altered = tuple(dict.fromkeys((*stated.altered, *(name for name, note in own.items() if note.altered))))
    moments = stated.moments
    if recipe.client.adaptive:
        moments = {name: _moments(name, own[name], updates[name], layout) for name in own}
    return Stated(recipe, rates, steps, moments, altered)


def _is_read(rule: ClientRule) -> bool:
    """Whether it is a rule that can be read from torch's optimisers."""
    return isinstance(rule, Rule)


def _rule(note: Note) -> Rule:
    assert note.rule is not None  # refused before
    return note.rule


def _arrays(model: nn.Module, layout: Layout) -> Arrays:
    """The parameters that the federation trains, under its names."""
    given = dict(model.named_parameters())
    names = named_as((name for name, _ in layout.shapes), given)
    return {name: _plain(given[own]) for name, own in names.items()}


def _plain(parameter: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    found: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = parameter.detach().float().cpu().numpy()
    return found


def _require_rule(name: str, rule: Rule, told: ClientRule, *, first: bool) -> None:
    assert isinstance(told, Rule)
    if replace(told, proximal_mu=0.0) != rule:
        whose = "the others" if first else "the training so far"
        raise RequestError(
            f"Client {name!r} trains with {written(rule)}, where {written(told)} is stated or seen of {whose}: "
            "train everybody alike, and leave the optimiser out of the recipe."
        )


def _require_same(what: str, given: PerClient, found: Mapping[str, float]) -> None:
    each = given if isinstance(given, Mapping) else dict.fromkeys(found, given)
    for name, value in found.items():
        told = each.get(name)
        if told is not None and not math.isclose(told, value, rel_tol=1e-4):
            raise RequestError(
                f"Client {name!r} trained with {what} {value:g}, where {told:g} is stated: leave it out."
            )


def _moments(name: str, note: Note, update: Tensor, layout: Layout) -> Sequence[float]:
    """In the order of the parameters; what did not move needs none."""
    moved: Iterable[tuple[str, Tensor]] = layout.unflatten(update).items()
    for parameter, part in moved:
        if parameter not in note.moments and bool(part.any()):
            raise RequestError(
                f"Second moments of {parameter!r} were not seen at client {name!r}: leave the with block before its "
                "weights are changed by anything but its optimiser."
            )
    return [note.moments.get(parameter, 0.0) for parameter, _ in layout.shapes]
