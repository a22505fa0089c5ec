"""What the server remembers of each client while training: a vector or a few, and how every round was trained.

    A_u = sum over rounds of  w_u/(1 - w_u) (Delta_u - Delta)

the mean update minus the one that the others would have made without it (keeping/pulls.py), round by round; nothing in
a round that it missed, and the whole update in one that it made alone. To first order, training without u would have
ended at ``theta - A_u`` worn down by what the others trained afterwards (training/response.py). The vector is derived
from the client's data: it is deleted with it.

Where several leave together, or one after another, their weights in a round belong together, and vectors are sums over
rounds: what that leaves unknown is told, and said where it is much.

Where the server has a momentum it matters when a client pulled: the sum is then kept in a few stretches of rounds.

Vectors are held in memory, or, where a folder is given (memory_folder.py) or a state was read (vector_files.py), on
disk: a round then reads and writes those of its participants only, and a departure those of the clients that met the
leaver.

A memory that was made with its model knows where the rounds lead, so a model that they do not lead to is refused by
name: rounds missing or recorded twice, flipped signs, another server rule, a memory from before an earlier forget.
It does not exist under secure aggregation.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from expunge.core.vectors import Chosen, Layout, Snapshot, length, weighted_sum
from expunge.errors import DataError, RequestError, listed
from expunge.federation.keeping.filed import Filed, blocks_of
from expunge.federation.keeping.given import Update, by_client, flat, named, several, shares
from expunge.federation.keeping.memory_file import MemoryContent, read_memory, write_apart, write_memory
from expunge.federation.keeping.memory_folder import MemoryFolder
from expunge.federation.keeping.peaks import COMPRESSED, DOUBT, LOOKED_AT, Peak, looks_adaptive, looks_compressed
from expunge.federation.keeping.place import HALF, Place, leads_there
from expunge.federation.keeping.pulls import BLURRED, Departure, Together, pulls_of
from expunge.federation.keeping.rounds import Drift, KeptRound, PerClient, staying
from expunge.federation.keeping.stretches import Held, Stretch, Totals, Vectors, added
from expunge.federation.keeping.unmoved import moved, refitted
from expunge.federation.keeping.watched import (
    ALTERED,
    Block,
    Stated,
    agreed,
    as_sent,
    block_of,
    gone_on_from,
    marks,
    seen,
)
from expunge.federation.training.onlooker import Onlooker, misstated
from expunge.federation.training.plan import Schedule
from expunge.federation.training.recipe import (
    SGD,
    AdaptiveServer,
    ClientRule,
    FedAvg,
    FedAvgM,
    Recipe,
    as_recipe,
    refusal,
)
from expunge.federation.training.response import Response
from expunge.federation.training.watching import Watch
from expunge.federation.training.works import ROUNDING, Work, spread

STRETCHES = 4
"""At most so many stretches of rounds are kept apart where it matters when a client pulled."""

SMALL_MODEL = 1000
"""Up to so many parameters stretches cost nothing worth counting, so they are kept under every server rule."""

UNKNOWN = (
    "About {part:.0%} of the pull of {names} is not known: their weights beside others who leave, or who have left, "
    "differed from round to round, or they had rounds to themselves. Audit the model, or retrain."
)
"""What a forget says where a pull is known badly."""

MOST = 0.75
"""Who had more than this part of the weight in its rounds was forgotten badly: answers came a tenth to a third of the
way to retrained models', with nine tenths of all data, five clients of six leaving, or rounds to itself in turns."""

HEAVY = (
    "{names} had {part:.0%} of the weight in the rounds that they took part in, and a step of first order tells little "
    "of what the others alone would have made of the model: audit it, or retrain."
)
"""What a forget says where those who leave made most of the model."""

LOUD, ALONG = 1.5, 0.5
"""Who pulled so many times as loud as others, and with such a cosine along the way of the whole training, boosted what
the others did besides: two fifths to three quarters of it were left under SGD on small federations, without a sign of
it. In none in which nobody boosted its updates were both reached."""

BOOSTED = (
    "{names} pulled {loud:.1f} times as loud as others, along the way that the whole training went (a cosine of "
    "{cosine:.2f}), as who boosts its updates does. How far the others would have gone there without it is told badly "
    "by a step of first order, and most of it may be left: audit the model, or retrain."
)
"""What a forget says where those who leave may have boosted what everybody did."""

LOST = (
    "The model lies {part:.0%} of the recorded way from where the rounds end: in {type} small updates were lost in "
    "rounding, and what is taken back may never have been there. Average in float32, and audit the model."
)
"""What a forget says where rounding was as large as the training."""


class Memory:
    """One vector per client, added to once a round, in single precision at least: rounds are many, half is too coarse.

    Args:
        model: the model with its starting weights; without it nothing can be checked, and updates are flat vectors.
        recipe: how clients and server train; plain SGD and plain averaging where nothing is said.
        parameters: those that the federation trains together, where they are not all that are trainable: names of
            parameters or of layers, or a function of a name. The others are neither sent nor changed.
        folder: where the vectors are, for many clients: a new one, in which every recorded round is on disk once
            ``record`` returns. What ``copy``, ``without`` and a forget give changes nothing there until ``save()``.

    Example:
        >>> memory = Memory()
        >>> memory.record({"ada": torch.tensor([1.0]), "bob": torch.tensor([3.0])}, weights={"ada": 1, "bob": 1})
        >>> memory.influence(["ada"])
        tensor([-1.])
        >>> memory.without(["ada"]).clients
        ('bob',)
    """

    def __init__(
        self,
        model: nn.Module | Snapshot | None = None,
        recipe: Recipe | None = None,
        parameters: Chosen | None = None,
        *,
        folder: str | Path | None = None,
    ) -> None:
        if parameters is not None and not isinstance(model, nn.Module):
            raise RequestError("To choose parameters, make the memory with its model: Memory(model, parameters=...).")
        if not isinstance(model, nn.Module | Snapshot | None):
            raise RequestError(f"A memory is made with the model itself, Memory(model), not with {_kind(model)}.")
        snapshot = Snapshot.of(model, parameters) if isinstance(model, nn.Module) else model
        self.parameters: tuple[str, ...] | None = None
        if parameters is not None and snapshot is not None:
            self.parameters = tuple(name for name, _ in snapshot.layers().shapes)
        self.recipe = as_recipe(recipe)
        self._layout = snapshot.layout if snapshot is not None else None
        self._stretches: list[Stretch] = []
        self._kept: list[KeptRound] = []
        self._place: Place | None = None
        self._seen: dict[str, Block] = {}  # of this round
        self._onlooker: Onlooker | None = None
        if snapshot is not None:
            self._place = Place.at(snapshot.parameters)
        if not isinstance(folder, str | PathLike | None):
            raise RequestError(f"A memory's folder is a path, not {folder!r}.")
        self._folder = MemoryFolder.new(Path(folder)) if folder is not None else None
        self._is_draft = False
        self._look_on()
        if self._folder is not None:
            self._go_on(self._content)  # recipe and starting weights are on disk before the first round

    @property
    def folder(self) -> Path | None:
        """Where its vectors are, where they are on disk."""
        return self._folder.rows.folder if self._folder is not None else None

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients that it remembers."""
        if self._folder is not None:  # the rounds know them, too, and no row is looked at
            return tuple(dict.fromkeys(name for each in self._kept for name in each.shares))
        return tuple(dict.fromkeys(name for stretch in self._stretches for name in stretch.vectors))

    @property
    def size(self) -> int | None:
        """Length of its vectors; None before the first round."""
        return next((own.vectors.length for own in self._stretches if own.vectors.length is not None), None)

    @property
    def rounds(self) -> int:
        """How many rounds were recorded."""
        return len(self._kept)

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """A_u of each client, over all rounds; each is read when it is asked for."""
        return Totals(self._stretches)

    @property
    def shares(self) -> list[dict[str, float]]:
        """Each participant's weight, round by round."""
        return [dict(each.shares) for each in self._kept]

    @property
    def is_bound(self) -> bool:
        """Whether it knows which model its rounds lead to."""
        return self._place is not None

    @property
    def place(self) -> Place | None:
        """Where its rounds lead, and where they began, where that is known."""
        return self._place

    @property
    def server_momentum(self) -> Tensor | None:
        """The momentum that the server's rule has now, without those who were forgotten; None where it has none."""
        return self._place.momentum if self._place is not None else None

    @property
    def stored_bytes(self) -> int:
        """What keeping the clients' vectors costs."""
        return sum(stretch.vectors.stored_bytes for stretch in self._stretches)

    @contextmanager
    def watching(self, name: str, model: nn.Module) -> Iterator[None]:
        """Look at a client's local training, so that its optimiser, rate, steps and moments need not be stated.

        What is seen goes into the next ``record``; what was stated otherwise, or cannot be followed, is refused there.
        A client may be watched in several blocks, an epoch each: what goes on from the weights that the last one ended
        with is added to it; of several trainings that begin where the round began the one counts that is sent.

        Args:
            name: the client's.
            model: what it trains, with one ``SGD``, ``Adam`` or ``AdamW`` of torch; leave the block before its weights
                are changed by anything else.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> memory, before = Memory(model), model.weight.detach().clone()
            >>> with memory.watching("ada", model):
            ...     optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
            ...     model(torch.ones(4, 2)).sum().backward()
            ...     optimiser.step()
            >>> memory.record({"ada": {"weight": model.weight - before}}, {"ada": 1})
            >>> memory.recipe.client.name
            'AdamW'
        """
        name = named(name)
        if not isinstance(model, nn.Module):
            raise RequestError(f"Give memory.watching the model that is trained, not {_kind(model)}.")
        layout = self._layout if self._layout is not None else Layout.of(model, self.parameters)
        if self.size not in (None, layout.size):
            raise RequestError("The memory was recorded with another model: its vectors have another length.")
        begin = marks(model, layout)
        last = self._seen.pop(name, None)
        earlier = gone_on_from(name, last, begin)
        others = () if last is None else (*last.others, *(() if last.is_cut else (last,)))
        with Watch(model=model, begun=None if earlier is None else earlier.optimisers) as watch:
            try:
                yield
            except BaseException:  # training may go on from what was done
                cut = block_of(watch, model, layout, begin, earlier, others, is_cut=True) or earlier
                self._seen |= {} if cut is None else {name: cut}
                raise
        block = block_of(watch, model, layout, begin, earlier, others)
        self._layout, self._seen[name] = layout, seen(name, block, self.recipe)

    def record(
        self,
        updates: Mapping[str, Update],
        weights: Mapping[str, float],
        *,
        learning_rate: PerClient = None,
        steps: PerClient = None,
        moments: Mapping[str, Sequence[float]] | None = None,
        altered: Collection[str] = (),
        plain: bool = False,
    ) -> None:
        """Add one round: each participant's update (what it sent minus what it got) and its weight in the average.

        Args:
            updates: for each participant a flat vector, or named tensors (a difference of state dicts).
            weights: for each participant its weight, in any unit: sample counts will do.
            learning_rate: of this round, one for all or by client; where it is neither given nor was seen
                (``watching``), ``forget`` has to be told.
            steps: local steps of this round, one for all or by client.
            moments: by client, what ``second_moments(optimiser)`` gives: needed under Adam and AdamW.
            altered: clients that changed their gradients by more than a factor before their optimiser took them (noise,
                clipping value by value): a forget says so. Where they are watched it is seen.
            plain: the mean was added as it is, whatever the server's rule.
        """
        given = by_client(updates, "Updates")
        vectors = {name: flat(name, update, self._layout) for name, update in given.items()}
        stated = Stated(self.recipe, learning_rate, steps, moments, several(altered))
        watched = self._watched(vectors)
        if self._layout is not None and any(not block.is_cut for block in self._seen.values()):
            notes = {name: block.note for name, block in watched.items()}
            stated = agreed(notes, stated, vectors, self._layout, first=not self._kept)
            stated = as_sent(stated, watched, vectors, self._layout)
        share = shares(weights, vectors)
        known = {self.size, None if self._place is None else self._place.now.numel()} - {None}
        if len({vector.numel() for vector in vectors.values()} | known) > 1:
            raise RequestError("The updates differ in length: are they all of the same model?")
        finite = torch.stack([torch.isfinite(vector).all() for vector in vectors.values()]).tolist()
        for name, is_finite in zip(vectors, finite, strict=True):
            if not is_finite:
                raise DataError(f"The update of client {name!r} has a NaN or infinite value: it is not recorded.")
        kept = KeptRound.of(share, stated.learning_rate, stated.steps, stated.moments, plain=plain)
        mean = weighted_sum(vectors.values(), (share[name] for name in vectors))
        pulls = pulls_of(vectors, share, mean)
        stretches = added(self._stretches, pulls, len(self._kept), self._most, self._fresh)
        mark = (float(mean.double().norm()), float(mean.double().sum()))
        norms = torch.stack([length(own) for own in pulls.values()]).tolist()
        lengths = dict(zip(pulls, norms, strict=True))
        looked_at = vectors if len(self._kept) < LOOKED_AT and not plain else {}
        peaks = {name: Peak.of(vector) for name, vector in looked_at.items()}
        altered = tuple(name for name in stated.altered if name in vectors)
        kept = replace(kept, pulls=lengths, peaks=peaks, mark=mark, altered=altered, batches=dict(stated.batches))
        rounds = [*self._kept, self._looked_at(kept, stated.recipe, vectors, watched)]
        place = self._place.moved(self.recipe, mean, plain=plain) if self._place is not None else None
        self._go_on(replace(self._content, recipe=stated.recipe, rounds=rounds, stretches=stretches, place=place))
        self.recipe, self._seen = stated.recipe, {}

    def copy(self) -> Memory:
        """A memory of its own with the same content."""
        other = Memory(recipe=self.recipe)
        other._layout, other._stretches, other._kept = self._layout, list(self._stretches), list(self._kept)
        other._place, other.parameters = self._place, self.parameters
        other._folder, other._is_draft = self._folder, self._folder is not None
        return other

    def bound_to(self, model: Snapshot, momentum: Tensor | None = None, *, goes_on: bool = False) -> Memory:
        """The same for a model that a forget has made: from here on its rounds are checked, with this momentum.

        ``goes_on`` says that no forget, but only rounds have made it.
        """
        other, origin = self.copy(), self._place.beginning if goes_on and self._place is not None else None
        other._layout = model.layout if model.layout is not None else self._layout
        other._place = Place.at(model.parameters, len(self._kept), momentum, origin)
        other._look_on()
        return other

    def require_model(self, model: Snapshot) -> None:
        """Refuse a model that the recorded rounds do not lead to, or a server rule that cannot be followed."""
        if self.size not in (None, model.parameters.numel()):
            raise RequestError("The memory was recorded with another model: its vectors have another length.")
        place = self._place
        if place is None:
            return
        kept = self._kept[place.first :]
        updates = sum(len(each.shares) for each in kept)
        place.require(model.parameters, self.recipe, [each.mark for each in kept], updates, lambda: self.vectors)

    def moved(self, model: Snapshot) -> Layout:
        """Which of the model's parameters any round has changed; vectors on disk are not read for it."""
        content = self._content if self._folder is None else replace(self._content, stretches=[])
        return moved(content, model.parameters, model.layers())

    def refitted(self, old: Layout, new: Layout, rest: Tensor) -> Memory:
        """The same of some of its parameters, or of more, whose weights are in the rest; it looks at no training."""
        other = self.copy()
        content = refitted(self._content, old, new, rest)
        other._kept, other._stretches = list(content.rounds), list(content.stretches)
        other._place, other._layout = content.place, content.layout
        return other

    def require_way(self, model: Snapshot, way: Mapping[int, Snapshot]) -> None:
        """Refuse checkpoints from which the recorded rounds do not lead to the model, as far as lengths and sums tell.

        Args:
            model: that they lead to in the end.
            way: models by the number of rounds before them; without a server momentum.
        """
        rule = self.recipe.server
        if not self._kept or not isinstance(rule, FedAvg):
            return
        for number, each in way.items():
            steps = [(own.mark, 1.0 if own.plain else rule.learning_rate) for own in self._kept[number:]]
            marks = [(rate * mark[0], rate * mark[1]) for mark, rate in steps if mark is not None]
            updates = sum(len(own.shares) for own in self._kept[number:])
            if len(marks) == len(steps) and not leads_there(each.parameters, model.parameters, marks, updates):
                raise RequestError(
                    f"The recorded rounds do not lead from the checkpoint under {number} to the model: it is of "
                    "another training, or of another round of this one; give each under the number of rounds before it."
                )

    def mass(self, names: Iterable[str]) -> float:
        """w_U: the weight of these clients together, averaged over the rounds in which any of them took part."""
        names = several(names)
        together = [sum(each.shares.get(name, 0.0) for name in names) for each in self._kept]
        present = [weight for weight in together if weight > 0]
        return sum(present) / len(present) if present else 0.0

    def influence(self, names: Iterable[str]) -> Tensor:
        """A_U: the pull of these clients together, ``A_u (1 - w_u)/(1 - w_U)`` over them; over all stretches."""
        return torch.stack([vector for vector, _ in self._pulls(several(names))]).sum(dim=0)

    def pulls(self, names: Iterable[str], schedule: Schedule | None) -> tuple[Tensor, Tensor]:
        """A_U by stretches, a row each, and for each of them a row of how it is spread over all rounds."""
        names = several(names)
        works = self.works(schedule)
        if works is None:
            raise RequestError("How the clients trained is not known: give learning_rate and local_steps.")
        found = self._pulls(names)
        spreads = [spread(works, names, rounds) for _, rounds in found]
        return torch.stack([vector for vector, _ in found]), torch.stack(spreads)

    def response(self, leaving: Iterable[str], schedule: Schedule | None, layout: Layout | None) -> Response | None:
        """What those who stay leave of pulls, by what was recorded; None where rates and steps are not known."""
        if isinstance(self.recipe.server, AdaptiveServer):
            raise RequestError(refusal(self.recipe.server))
        works = self.works(schedule)
        return None if works is None else Response(self.recipe, staying(works, self._kept, several(leaving)), layout)

    def schedule(self, batch_size: int) -> Schedule | None:
        """The mean learning rate and the mean steps of a client in a round; None where they were not recorded."""
        works = [work for each in self.works(None) or () for work in each.values()]
        total = sum(work.share for work in works)
        if not total:
            return None
        steps = sum(work.share * work.steps for work in works) / total
        rate = sum(work.share * work.learning_rate * work.steps for work in works) / (total * steps)
        return Schedule(rate, steps, len(self._kept), batch_size)

    def doubts(self, schedule: Schedule | None, leaving: Collection[str] = ()) -> tuple[str, ...]:
        """A sentence where a pull is not known, gradients were changed, or who is stated as SGD looks like Adam."""
        altered = tuple(dict.fromkeys(name for each in self._kept for name in each.altered if name not in leaving))
        said = (*((ALTERED.format(names=listed(altered)),) if altered else ()), *self._blurred(leaving))
        mass = self.mass(leaving)
        said = (*said, *((HEAVY.format(names=listed(several(leaving)), part=mass),) if mass > MOST else ()))
        said = (*said, *self._boosted(leaving))
        told = (None, None) if schedule is None else (schedule.learning_rate, schedule.local_steps)
        seen = [(each.unlike(self.recipe.client, *told), number) for number, each in enumerate(self._kept, 1)]
        strange = [(unlike, number) for unlike, number in seen if unlike is not None]
        if 2 * len(strange) > len(self._kept):
            said = (*said, misstated(*strange[0]))
        works = self.works(schedule)
        if works is None or not isinstance(self.recipe.client, SGD):
            return said
        pairs = zip(self._kept, works, strict=True)
        peaks = [(peak, own[n].learning_rate * own[n].steps) for each, own in pairs for n, peak in each.peaks.items()]
        if looks_adaptive(peaks):
            return (*said, DOUBT.format(name=self.recipe.client.name))
        unseen = [peak for each in self._kept for name, peak in each.peaks.items() if name not in each.batches]
        return (*said, COMPRESSED) if looks_compressed(unseen, self.size or 0) else said

    def beginning(self) -> tuple[Tensor, dict[str, tuple[Work, Peak, float | None]]] | None:
        """The starting weights, and what each client did and sent in the first round; None where that is not known.

        With the size of its batches, where it was seen. Clients that changed their gradients are left out, and a memory
        of chosen parameters knows nothing of the rest.
        """
        first, place = self._kept[0] if self._kept else None, self._place
        if first is None or place is None or place.beginning is None or self.parameters is not None:
            return None
        works = first.works(None, None) or {}
        sent = {name: peak for name, peak in first.peaks.items() if peak.height > 0 and name not in first.altered}
        known = {name: (works[name], peak, first.batches.get(name)) for name, peak in sent.items() if name in works}
        return place.beginning, known

    def rounded(self, model: Snapshot) -> tuple[str, ...]:
        """A sentence where rounding has lost half of the way that was recorded, in a model that is not refused."""
        if self._place is None or self._place.now.shape != model.parameters.shape:
            return ()
        lost = self._place.lost(model.parameters)
        return (LOST.format(part=lost, type=str(model.parameters.dtype).removeprefix("torch.")),) if lost > HALF else ()

    def norms(self, names: Iterable[str]) -> list[float]:
        """``||A_u||`` of each of these clients."""
        return [float(length(self.vectors[name])) for name in several(names)]

    @property
    def stretches(self) -> int:
        """How many vectors are kept for each client, each of a stretch of rounds."""
        return len(self._stretches)

    def loudness(self, names: Iterable[str]) -> float:
        """How far these clients lead from the mean, in units of the median of those who stay; 1 is as theirs.

        Whoever boosts its updates pulls longer than others of its weight.
        """
        leaving = several(names)
        lengths, weights = dict[str, float](), dict[str, float]()  # over the rounds that recorded both
        for each in (each for each in self._kept if each.pulls):
            for name, share in each.shares.items():
                lengths[name] = lengths.get(name, 0.0) + (1 - share) * each.pulls.get(name, 0.0)
                weights[name] = weights.get(name, 0.0) + share
        strengths = {name: lengths[name] / weight for name, weight in weights.items() if weight > 0}
        others = [strengths[name] for name in strengths if name not in leaving]
        own = [strengths[name] for name in leaving if name in strengths]
        usual = statistics.median(others) if others else 0.0
        return max(own) / usual if own and usual > 0 else 1.0

    def drift(self, name: str) -> Tensor | None:
        """How far a client led from the mean in a round (client drift), on average; None if not kept.

        A round counts as much as in its pull.

        Example:
            >>> memory = Memory()
            >>> memory.record({"ada": torch.tensor([1.0]), "bob": torch.tensor([3.0])}, weights={"ada": 1, "bob": 1})
            >>> memory.drift("ada")
            tensor([-1.])
        """
        shares = [each.shares.get(name, 0.0) for each in self._kept]
        weight = sum(1.0 if share > 1 - ROUNDING else share / (1 - share) for share in shares)
        return self.vectors[name] / weight if weight > 0 and name in self.vectors else None

    def led(self) -> dict[str, list[Drift]]:
        """How far each client led from the mean, round by round, where that and what it did was recorded."""
        found = dict[str, list[Drift]]()
        for number, each in enumerate(self._kept, 1):
            for name, own in each.led(number).items():
                found.setdefault(name, []).append(own)
        return found

    def without(self, names: Iterable[str]) -> Memory:
        """The memory as it would be had these clients never taken part: their vectors gone, the others' corrected.

        One client after another (keeping/pulls.py): exact for constant weights, so that leaving one by one equals
        leaving together. Else it is near where few clients hold most of a round's weight to themselves, and poor in
        rounds of two; ``doubts`` tells. It belongs to no model until ``bound_to`` one.
        """
        left = self.copy()
        left._place = None
        for name in several(names):
            left = left._without_one(name)
        return left

    def _without_one(self, gone: str) -> Memory:
        other = self.copy()
        other._place, other._stretches, other._kept = None, [], []
        for stretch in self._stretches:
            departure, first = Departure.of(self._rounds_of(stretch), gone), len(other._kept)
            other._kept += departure.left
            vectors = stretch.vectors.without(gone, departure.corrections)
            if departure.left or next(iter(vectors), None) is not None:
                other._stretches.append(Stretch(range(first, len(other._kept)), vectors))
        return other

    def _rounds_of(self, stretch: Stretch) -> list[KeptRound]:
        return self._kept[stretch.rounds.start : stretch.rounds.stop]

    def _pulls(self, names: tuple[str, ...]) -> list[tuple[Tensor, range]]:
        """A_U of each stretch in which one of them pulled."""
        missing = [name for name in names if not any(name in stretch.vectors for stretch in self._stretches)]
        if missing:
            known = listed(self.clients) or "none"
            raise RequestError(f"No vector of client {missing[0]!r} was kept while training; there are: {known}.")
        if not names:
            raise RequestError("Name at least one client whose influence is wanted.")
        if not any(name not in names and share > 0 for each in self._kept for name, share in each.shares.items()):
            raise RequestError("These clients are the whole federation: nothing would be left; retrain instead.")
        if Together.of(self._kept, names).is_lost:
            raise RequestError(
                f"{listed(names)} were never in a round with others, and what they did there together was not kept: "
                "retrain instead, or let one of them stay."
            )
        found = []
        for stretch in self._stretches:
            own = {name: stretch.vectors[name] for name in names if name in stretch.vectors}
            if own:
                factors = Together.of(self._rounds_of(stretch), names).factors
                found.append((weighted_sum(own.values(), (factors[name] for name in own)), stretch.rounds))
        return found

    def _blurred(self, leaving: Collection[str]) -> tuple[str, ...]:
        """A sentence where what is not known of the leavers' pull is much beside what is known."""
        blur = math.hypot(*(Together.of(self._rounds_of(own), leaving).blur for own in self._stretches))
        try:
            known = float(length(self.influence(leaving))) if blur else 0.0
        except RequestError:  # whoever needs it is told by the method
            return ()
        if not blur > BLURRED * known:
            return ()
        return (UNKNOWN.format(names=listed(leaving), part=blur / math.hypot(blur, known)),)

    def _boosted(self, leaving: Collection[str]) -> tuple[str, ...]:
        """A sentence where those who leave pulled louder than others, along the way of the whole training."""
        start = self._place.beginning if self._place is not None else None
        loud = self.loudness(leaving) if leaving else 0.0
        if self._place is None or start is None or loud < LOUD:
            return ()
        try:
            pull = self.influence(leaving).double()
        except RequestError:  # whoever needs it is told by the method
            return ()
        way = (self._place.now - start).to(pull)
        both = float(length(pull) * length(way))
        cosine = float(pull @ way) / both if both > 0 else 0.0
        return (BOOSTED.format(names=listed(leaving), loud=loud, cosine=cosine),) if cosine > ALONG else ()

    def works(self, schedule: Schedule | None) -> list[dict[str, Work]] | None:
        """What each client did, round by round, by this schedule where it was not recorded; None where not known."""
        rate = schedule.learning_rate if schedule is not None else None
        steps = schedule.local_steps if schedule is not None else None
        found = []
        for each in self._kept:
            works = each.works(rate, steps)
            if works is None:
                return None
            found.append(works)
        return found

    def _look_on(self) -> None:
        """From now on see what torch's optimisers do with models like this one, whether clients are watched or not."""
        if self._layout is not None:
            weights = None if self._place is None else self._place.now
            self._onlooker = Onlooker([shape for _, shape in self._layout.shapes], weights)

    def _watched(self, vectors: Mapping[str, Tensor]) -> dict[str, Block]:
        """By participant how it trained what it sends, where it was watched to its end."""
        blocks = {name: block for name, block in self._seen.items() if name in vectors and not block.is_cut}
        if self._layout is None:
            return blocks
        return {name: block.sent_as(vectors[name], self._layout) for name, block in blocks.items()}

    def _looked_at(
        self, kept: KeptRound, recipe: Recipe, vectors: Mapping[str, Tensor], watched: Mapping[str, Block]
    ) -> KeptRound:
        """The round with what was seen of it by chance, where its clients were not watched, or not in all they sent."""
        glimpse = self._onlooker.glimpse(len(kept.shares)) if self._onlooker is not None else None
        if glimpse is None or self._layout is None or kept.plain:
            return kept
        works, told = kept.works(None, None), "is stated"
        if watched:
            if all(block.explains(vectors[name], self._layout) for name, block in watched.items()):
                return kept
            told = "is what was watched"  # with the rates of its optimisers: clipping is not theirs
            works = {n: Work(kept.shares[n], own.note.learning_rate, own.note.steps) for n, own in watched.items()}
        unlike = glimpse.unlike(recipe.client, works, told)
        strange = [each.misstated is not None for each in self._kept[-2:]]
        if unlike is not None and strange in ([True], [False, True]):  # said once, not in every round
            warnings.warn(misstated(unlike, len(self._kept)), stacklevel=3)
        return replace(kept, misstated=unlike, glimpse=glimpse if works is None else None)

    @property
    def _most(self) -> int:
        """How many stretches are kept apart: more than one only where it matters when a client pulled."""
        server, place = self.recipe.server, self._place
        has_momentum = isinstance(server, FedAvgM) and server.momentum > 0
        return STRETCHES if has_momentum or (place is not None and place.now.numel() <= SMALL_MODEL) else 1

    def _fresh(self, pulls: Mapping[str, Tensor]) -> Vectors:
        """The vectors of a new stretch."""
        if self._folder is not None:
            return self._folder.vectors(pulls, self._stretches)
        known = [own.vectors for own in self._stretches]
        filed = next((own for own in known if isinstance(own, Filed)), None)  # in the files of a state
        return Held(pulls) if filed is None else Filed.fresh(filed.source, pulls, blocks_of(known))

    @property
    def _content(self) -> MemoryContent:
        return MemoryContent(
            self.recipe, self._kept, self._stretches, self._place, self.parameters, layout=self._layout
        )

    def _go_on(self, content: MemoryContent, *, saving: bool = False) -> None:
        """Hold this from now on, once it is on disk where that is to be."""
        if self._folder is not None and (saving or not self._is_draft):
            self._folder, self._is_draft = self._folder.written(content), False
            assert self._folder.content is not None
            content = self._folder.content
        self._kept, self._stretches, self._place = list(content.rounds), list(content.stretches), content.place
        if self._onlooker is not None:
            self._onlooker.expect(None if self._place is None else self._place.now)

    def save(self, path: str | Path | None = None) -> None:
        """Write it to one safetensors file; or, without a path, into the folder that its vectors are in.

        The folder then holds this memory, in one move: vectors of those who left are overwritten and deleted, those of
        the clients that met them corrected. Other memories of the folder are refused from then on.
        """
        if path is not None:
            write_memory(Path(path), self._content)
            return
        if self._folder is None:
            raise RequestError("The memory has no folder of its own: say where, memory.save(path).")
        self._go_on(self._content, saving=True)

    def save_apart(self, path: Path) -> None:
        """Write it to one file of a state that is being written, and its vectors to files beside that one.

        Of vectors that are beside another such file, and have not changed, nothing is read or written.
        """
        write_apart(path, self._content)

    @classmethod
    def load(cls, path: str | Path, client: ClientRule | None = None) -> Memory:
        """Read a file, or go on with a folder; a client rule of your own, such as ``Measured``, is given again."""
        folder = MemoryFolder.opened(Path(path), client) if Path(path).is_dir() else None
        content = folder.content if folder is not None else read_memory(Path(path), client)
        assert content is not None
        memory = cls(recipe=content.recipe)
        memory._kept, memory._stretches, memory._place = list(content.rounds), content.stretches, content.place
        memory._folder, memory._layout, memory.parameters = folder, content.layout, content.parameters
        memory._look_on()
        return memory


def _kind(given: object) -> str:
    """For a sentence."""
    return given.__name__ if isinstance(given, type) else type(given).__name__
