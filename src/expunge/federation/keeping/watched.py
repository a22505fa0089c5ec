"""What was seen of the clients' training in a round, instead of being stated, or beside it: then the two must agree.

A statement that is wrong takes a wrong step back without anybody noticing: momentum that is not told makes every answer
of those who stay ten times too slow. What torch's optimisers did cannot be told wrong.

Where it fails: what is added to the loss (FedProx) is not seen, and of what is done to gradients before a step only the
part that is a factor, as clipping by length is; the rest is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from expunge.core.vectors import Layout, length, named_as
from expunge.errors import RequestError
from expunge.federation.keeping.given import number
from expunge.federation.keeping.rounds import PerClient
from expunge.federation.training.notes import Note, Rule, written
from expunge.federation.training.recipe import SGD, ClientRule, Recipe
from expunge.federation.training.watching import Arrays, Optimisers, Watch

ALTERED = (
    "Gradients were changed between backward and step by more than a factor (noise, clipping value by value, signs) at "
    "{names}. Clients are taken to answer by as much as is left of their gradients, which is a guess: audit the model. "
    "Under control variates (SCAFFOLD) a client's pull comes with what the others send, and most of it stays: retrain."
)
"""What a forget says where clients train so."""

PIECES = 64
"""A parameter's weights are known again by the sums of so many pieces."""

SURE, SAME, LEAST = 3.0, 0.01, 0.01
"""A client is taken to have sent less than it trained where the difference is so many times what would be by chance,
and more than so much; and to have sent at least such a part."""

INSTEAD = "let it be measured, Memory(model, Recipe(Measured(train))), or describe its recursion"


@dataclass(frozen=True)
class Stated:
    """What is recorded of a round beside vectors; None and nothing where it is not said."""

    recipe: Recipe
    learning_rate: PerClient = None
    steps: PerClient = None
    moments: Mapping[str, Sequence[float]] | None = None
    altered: tuple[str, ...] = ()
    batches: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Block:
    """A client's training in a round, as far as it was watched: in one with block, or in several, one after another.

    Attributes:
        note: how it trained.
        begin: marks of the weights that it began with.
        end: of those that it ended with.
        optimisers: of the last with block.
        is_cut: whether it was left by an exception: what follows may go on from it, and nothing is recorded of it.
        others: what the client had trained before from the same weights, and may have sent instead.
    """

    note: Note
    begin: Tensor
    end: Tensor
    optimisers: Optimisers
    is_cut: bool = False
    others: tuple[Block, ...] = ()

    def sent_as(self, update: Tensor, layout: Layout) -> Block:
        """The one of these trainings that led most nearly where the update does, however long it is."""
        if not self.others:
            return self
        own = _marks(layout.unflatten(update).values())[:, 1:].flatten()
        led = [(block.end - block.begin)[:, 1:].flatten() for block in (self, *self.others)]
        alike = [
            float(torch.dot(own, way) / length(way).clamp_min(1e-300)) if way.shape == own.shape else 0.0 for way in led
        ]
        return (self, *self.others)[alike.index(max(alike))]

    def part_sent(self, update: Tensor, layout: Layout) -> float:
        """How much the client sent of what it trained, along that: below 1 where it was clipped or compressed.

        1 where the two do not differ by more than noise, which may have been added; and where it was boosted, since
        whoever stays could claim any rate by that.
        """
        own = _marks(layout.unflatten(update).values())[:, 1:].flatten()
        led = (self.end - self.begin)[:, 1:].flatten()
        far = float(length(led))
        if led.shape != own.shape or not far > 0:
            return 1.0
        factor = float(torch.dot(own, led)) / far**2
        chance = float(length(own - factor * led)) / (far * math.sqrt(int(led.count_nonzero())))
        return max(factor, LEAST) if factor < 1 - max(SURE * chance, SAME) else 1.0

    def explains(self, update: Tensor, layout: Layout) -> bool:
        """Whether the client sent what it was watched to train; also not where that was clipped or boosted."""
        own = _marks(layout.unflatten(update).values())
        led = self.end - self.begin
        return led.shape == own.shape and bool(((own - led)[:, 1:].abs() <= 1e-4 * own[:, :1]).all())


def marks(model: nn.Module, layout: Layout) -> Tensor:
    """Of each parameter that the federation trains its length and the sums of its halves: they tell weights apart."""
    given = dict(model.named_parameters())
    own = named_as((name for name, _ in layout.shapes), given).values() or given  # a wrapper may name all otherwise
    return _marks(given[name].detach() for name in own)


def gone_on_from(name: str, earlier: Block | None, begin: Tensor) -> Block | None:
    """The block of the same round that a new one goes on from; None where the client begins, or begins again.

    Args:
        name: the client's.
        earlier: what was seen of it in this round.
        begin: marks of the weights that the new block begins with.
    """
    if earlier is None:
        return None
    goes_on, again = _same(begin, earlier.end), _same(begin, earlier.begin)
    if goes_on and again:
        raise RequestError(
            f"Client {name!r} is watched twice in this round, and the weights of the model that was watched did not "
            "change: give memory.watching the model that is trained."
        )
    if not (goes_on or again):
        raise RequestError(
            f"Client {name!r} was watched in this round already, and begins with other weights than it began or ended "
            "with: change nothing between its with blocks, give every client a name of its own, and record each round."
        )
    return earlier if goes_on else None


def seen(name: str, block: Block | None, recipe: Recipe) -> Block:
    """What a client's optimiser did with the parameters that the federation trains; refused where it did nothing.

    Args:
        name: the client's.
        block: what was seen of it in this round.
        recipe: as it is stated; a rule of your own stands for whatever is seen.
    """
    if block is None:
        raise RequestError(
            f"No optimiser of torch made a step while client {name!r} was watched: train the watched model inside the "
            "with block; or state learning_rate and steps in record."
        )
    note = block.note
    if not note.learning_rate > 0:
        raise RequestError(f"Client {name!r} trained with a learning rate of 0: leave it out of such rounds.")
    if note.rule is None and _is_read(recipe.client):
        raise RequestError(
            f"Client {name!r} {note.problem}: train with one SGD, Adam or AdamW of torch that is made anew in every "
            f"round, {INSTEAD}."
        )
    return block


def block_of(
    watch: Watch,
    model: nn.Module,
    layout: Layout,
    begin: Tensor,
    earlier: Block | None,
    instead_of: tuple[Block, ...],
    *,
    is_cut: bool = False,
) -> Block | None:
    """What was seen in a with block, and before it in the same round where it went on; None where nothing was done.

    Args:
        watch: of the block.
        model: as it was trained.
        layout: of what the federation trains.
        begin: marks of the weights that the block began with.
        earlier: the block that it went on from, if there was one.
        instead_of: what was trained before from the same weights, if it did not go on from that.
        is_cut: whether it was left by an exception.
    """
    note = watch.note(lambda: _arrays(model, layout))
    if note is None:
        return None
    if earlier is not None:
        begin, note = earlier.begin, earlier.note.followed_by(note)
    others = earlier.others if earlier is not None else instead_of
    return Block(note, begin, marks(model, layout), watch.optimisers, is_cut, others)


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
        raise RequestError(
            f"Client {unseen!r} was not watched to its end in this round, and others were: watch everybody."
        )
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
    batches = {name: note.batch for name, note in own.items() if note.batch > 0}
    return Stated(recipe, rates, steps, moments, altered, batches)


def as_sent(stated: Stated, blocks: Mapping[str, Block], updates: Mapping[str, Tensor], layout: Layout) -> Stated:
    """The round with rates that count by as much as was sent of what was trained.

    Who clips what it sends answers a displaced model by as much less.
    """
    rates = dict(stated.learning_rate) if isinstance(stated.learning_rate, Mapping) else {}
    parts = {name: blocks[name].part_sent(updates[name], layout) for name in rates}
    return replace(stated, learning_rate={name: rate * parts[name] for name, rate in rates.items()})


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


def _marks(parts: Iterable[Tensor]) -> Tensor:
    found = []
    for part in parts:
        flat = part.reshape(-1)
        pieces = nn.functional.pad(flat, (0, -flat.numel() % PIECES)).view(PIECES, -1)
        found.append(torch.cat([length(part).double().reshape(1), pieces.sum(dim=1, dtype=torch.float64)]))
    return torch.stack([each.to(found[0].device) for each in found]).cpu()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are marks of the same weights, which may have come to another device between."""
    return one.shape == other.shape and bool(((one - other).abs() <= 1e-10 * one[:, :1]).all())


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
        told = None if each.get(name) is None else number(each[name], f"{what} of client {name!r}")
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
