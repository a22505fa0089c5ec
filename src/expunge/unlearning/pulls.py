"""Pulls: what the data to forget has done to the model, round by round, and how the training answered it.

    recorded   vectors that were added up while training (federation/keeping/memory.py)
    replay     from a few checkpoints the owners train one round with and without the data

A replay serves samples whose client stays, which no vector can tell apart, and clients of whom none was kept. Let D be
the mean update, D_u and D'_u the owner's with and without what is to be forgotten, a part m of its samples, and w its
weight in the round, as it was recorded, or else by its samples:

    a = D - (mean update without the data) = w (D_u - (1 - m) D'_u - m D) / (1 - w m)

where D is how far the model went per round from this checkpoint to the next. It is exact for one round, and stands for
all rounds of its stretch in which the owner took part. It needs the owners and their data once; cost: two local rounds
of theirs a checkpoint, of fewer epochs where an owner has so much data that they would cost more than forgetting may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from expunge.core.kronecker import Filter
from expunge.core.seeds import derived_seed
from expunge.core.vectors import weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Trained
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, FedAvg, Recipe
from expunge.federation.training.response import Response
from expunge.federation.training.works import ROUNDING, Round, Work
from expunge.unlearning.estimate import recorded_steps, replayed_epochs, round_epochs
from expunge.unlearning.filters import Answered, Held
from expunge.unlearning.request import Parties

Source = Literal["recorded", "replay"]
Apply = Callable[[Filter, Tensor], Tensor]
"""Applies a function of the curvature, which has a row for each of them, to the rows of a matrix."""


@dataclass(frozen=True, eq=False)
class Pull:
    """What is to be taken back.

    Attributes:
        source: where it was learnt.
        vectors: the sum of pulls, a row for each stretch of rounds.
        spreads: for each row how it came over all rounds; None where rates and steps are not known.
        response: how those who stay answered; None where that is not known.
        notes: sentences for the person who asked.
    """

    source: Source
    vectors: Tensor
    spreads: Tensor | None = None
    response: Response | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def total(self) -> Tensor:
        """All of it, as it came to lie in the model where nobody corrects it: with the server's rate and momentum."""
        if self.response is None:
            return self.vectors.sum(dim=0)

        def flat(left: Filter, vectors: Tensor) -> Tensor:
            return left(torch.zeros(1, dtype=torch.float64), ()).to(vectors) * vectors

        return self.left(flat)

    @property
    def together(self) -> Pull:
        """All of it in one row, which came over the rounds as the lengths of its stretches say."""
        if self.spreads is None or len(self.vectors) == 1:
            return self
        lengths = self.vectors.double().norm(dim=1)
        spread = (lengths / lengths.sum()) @ self.spreads.double()
        return replace(self, vectors=self.vectors.sum(dim=0)[None], spreads=spread.to(self.spreads)[None])

    def left(self, apply: Apply, stiffer: float = 1.0, spread: float = 0.0) -> Tensor:
        """What is left of it in the model at the end, where curvature is so many times larger, spread like this."""
        return apply(Answered(*self._known, stiffer, spread), self.vectors).sum(dim=0)

    def held(self, apply: Apply) -> Tensor:
        """What is left of it in the server's momentum."""
        return apply(Held(*self._known), self.vectors).sum(dim=0)

    @property
    def _known(self) -> tuple[Response, Tensor]:
        if self.response is None or self.spreads is None:
            raise RequestError("How the clients trained is not known: record learning rate and steps with every round.")
        return self.response, self.spreads


def recorded(state: ServerState, leaving: Sequence[str]) -> Pull:
    """The pull of whole clients as it was recorded while training."""
    memory = state.memory
    if memory is None:
        reason = "There are no vectors here" if state.lost else "No vectors were kept while training"
        told = (f"{reason}, so retrace has nothing to take back: use hf-kcu.", *state.lost)
        raise RequestError(" ".join(told))
    response = memory.response(leaving, state.schedule, state.model.layout)
    if response is None:
        if memory.recipe.server != FedAvg():
            raise RequestError(
                f"What {memory.recipe.server.name} made of a pull cannot be told without the training's learning rate "
                "and steps: record them with every round, or give learning_rate and local_steps."
            )
        return Pull("recorded", memory.influence(leaving).to(state.model.parameters)[None])
    vectors, spreads = memory.pulls(leaving, state.schedule)
    response.travel()  # what it needs and does not have is told now
    return Pull("recorded", vectors.to(state.model.parameters), spreads, response)


@dataclass(frozen=True, eq=False)
class Replay:
    """Who trains again from which checkpoints.

    Attributes:
        state: the model, its checkpoints and schedule.
        parties: who holds what is to be forgotten.
        seed: of the owners' shuffling.
    """

    state: ServerState
    parties: Parties
    seed: int = 0

    def require_followed(self) -> None:
        """Refuse rules of clients and server that no replay follows, with checkpoints or without."""
        rule = self.state.trained_by
        if not isinstance(rule.client, SGD | Adam):
            raise RequestError(f"A replay trains by SGD, Adam or AdamW, not by {rule.client.name}: use hf-kcu.")
        if not isinstance(rule.server, FedAvg):
            raise RequestError(f"A replay follows FedAvg, not {rule.server.name}: use hf-kcu, or record vectors.")

    def require_possible(self) -> None:
        """Refuse what the replay could not do, before anybody is asked."""
        state = self.state
        self.require_followed()
        if state.checkpoints is None:
            raise RequestError(
                "There are no checkpoints to replay from: keep some while training (keep_checkpoints), or give them."
            )
        if state.schedule is None:
            raise RequestError("A replay trains as the training did: give its learning_rate, local_steps and rounds.")
        if any(number >= state.schedule.rounds for number in state.checkpoints.models):
            raise RequestError(
                f"A checkpoint stands under a round that a training of {state.schedule.rounds} did not have."
            )
        for model in state.checkpoints.models.values():
            if model.parameters.shape != state.model.parameters.shape:
                raise RequestError("The checkpoints are of another model: they have another number of parameters.")
        if state.memory is not None and state.memory.rounds == state.schedule.rounds:
            state.memory.require_way(state.model, state.checkpoints.models)

    def __call__(self, engine: Engine) -> Pull:
        """Ask the owners; two messages a checkpoint, one where whole clients leave."""
        state, response = self.state, self._response()
        assert state.checkpoints is not None
        numbers, worked = list(state.checkpoints.models), [_travel(each) for each in response.rounds]
        ends = [(one + other + 1) // 2 for one, other in pairwise(numbers)]
        vectors, spreads, moments = [], torch.zeros(len(numbers), len(worked), dtype=torch.float64), []
        weights = self._weights(len(worked))
        for row, (first, last) in enumerate(zip([0, *ends], [*ends, len(worked)], strict=True)):
            number = numbers[row]
            near = min((n for n, own in enumerate(worked) if own > 0), key=lambda n: abs(n - number))  # one was idle
            pulls, own = self._pulls(engine, number, _rate(response.rounds[near]))
            counts = torch.zeros(len(pulls), len(worked), dtype=torch.float64)
            for at in (at for at in range(first, last) if worked[at] > 0):
                counts[:, at] = counts.new_tensor([weights[at].get(name, 0.0) for name in pulls])
                counts[:, at] *= worked[at] / worked[near]
            vectors.append(weighted_sum(pulls.values(), counts.sum(dim=1).tolist()))
            spreads[row] = counts.sum(dim=0) / (float(counts.sum()) or 1.0)
            moments += [own] * (last - first)
        if state.memory is None:  # nobody else's moments are known
            rounds = [
                replace(each, works=tuple(replace(work, moments=own) for work in each.works))
                for each, own in zip(response.rounds, moments, strict=True)
            ]
            response = replace(response, rounds=tuple(rounds))
        notes = (*self._late(numbers, len(worked)), *_alone(weights))
        return Pull("replay", torch.stack(vectors), spreads, response, notes)

    def _late(self, numbers: Sequence[int], rounds: int) -> tuple[str, ...]:
        """The warning that checkpoints begin late: after an earlier request, or because none were kept before."""
        if numbers[0] * len(numbers) <= rounds:
            return ()
        return (
            f"The first checkpoint comes after {numbers[0]} of {rounds} rounds, and what the data did before is taken "
            "to be what it did there: audit it.",
        )

    def _weights(self, rounds: int) -> list[dict[str, float]]:
        """For each round what an owner's pull counts in it, w / (1 - w m): as recorded, else by its samples."""
        parties, memory, total = self.parties, self.state.memory, sum(self.parties.counts.values())
        part = {name: gone / parties.counts[name] for name, gone in parties.forgotten_counts.items()}
        known = {name for name in part if memory is not None and name in memory.clients}
        shares, found = memory.shares if memory is not None else [], []
        for number in range(rounds):
            own = {name: parties.counts[name] / total for name in part}
            own |= {name: shares[number].get(name, 0.0) for name in known}
            left = 1.0 - sum(own[name] * part[name] for name in own)
            found.append({name: weight / left for name, weight in own.items()} if left > ROUNDING else {})
        return found

    def _response(self) -> Response:
        """How those who stay trained, by what was recorded; else by the stated schedule, all rounds alike."""
        state, schedule = self.state, self.state.schedule
        known = state.memory.response(self.parties.leaving, schedule, state.model.layout) if state.memory else None
        if known is not None and known.rounds:
            return known
        assert schedule is not None
        alike = Round((Work(1.0, schedule.learning_rate, schedule.local_steps),))
        return Response(state.trained_by, (alike,) * schedule.rounds, state.model.layout)

    def _pulls(self, engine: Engine, number: int, rate: float) -> tuple[dict[str, Tensor], tuple[float, ...]]:
        """What each owner's data did in one round from this checkpoint, by weight, and an owner's second moments."""
        parties = self.parties
        assert self.state.checkpoints is not None
        model = self.state.checkpoints.models[number].on(self.state.model.parameters.device)
        plans = {name: self._plan(name, number, rate) for name in parties.owners}
        every = ask_each(engine, {name: own.task(model, number, name) for name, own in plans.items()}, Trained)
        partly = {name: plans[name].task(model, number, name, gone) for name, gone in parties.partly.items()}
        fewer = ask_each(engine, partly, Trained) if partly else {}
        mean, found = self._mean_update(number), {}
        for name, reply in every.items():
            gone = parties.forgotten_counts[name] / parties.counts[name]
            own = reply.update if name not in fewer else reply.update - (1 - gone) * fewer[name].update
            found[name] = self._rounds(name, reply.steps) * own - gone * mean
        return found, next(iter(every.values())).moments

    def _mean_update(self, number: int) -> Tensor:
        """The mean update of a round from this checkpoint on: how far the training went per round up to the next."""
        state, server = self.state, self.state.trained_by.server
        assert state.checkpoints is not None
        assert state.schedule is not None
        assert isinstance(server, FedAvg)
        later = {n: model for n, model in state.checkpoints.models.items() if n > number}
        after = min(later, default=state.schedule.rounds)
        end = later[after] if later else state.model
        here = state.checkpoints.models[number].parameters.to(state.model.parameters)
        return (end.parameters.to(here) - here) / (server.learning_rate * (after - number))

    def _rounds(self, name: str, steps: float) -> float:
        """How many rounds of its own a replay of so many steps counts for."""
        made = recorded_steps(self.state, name)
        if made is not None:
            return made / steps
        return round_epochs(self.state, name, self.parties.counts) / self._epochs[name]

    @cached_property
    def _epochs(self) -> dict[str, int]:
        return replayed_epochs(self.state, self.parties)

    def _plan(self, name: str, number: int, rate: float) -> TrainingPlan:
        schedule = self.state.schedule
        assert schedule is not None
        seed, recipe = derived_seed(self.seed, "replay", number), Recipe(self.state.trained_by.client)
        return TrainingPlan(1, self._epochs[name], schedule.batch_size, rate, seed=seed, recipe=recipe)


def _alone(weights: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """The warning that rounds had nobody but who is to be forgotten, whose pull there a replay does not tell."""
    count = sum(not each for each in weights)
    if not count:
        return ()
    return (
        f"In {count} of {len(weights)} rounds nobody took part but who is to be forgotten, and what these rounds did "
        "stays in the model: a replay does not tell it, so record vectors while training, or retrain.",
    )


def _travel(each: Round) -> float:
    """Rate x steps of a round, the mean of those who took part."""
    total = sum(work.share for work in each.works)
    return sum(work.share * work.learning_rate * work.steps for work in each.works) / total if total else 0.0


def _rate(each: Round) -> float:
    """The mean learning rate of a round."""
    total = sum(work.share for work in each.works)
    return sum(work.share * work.learning_rate for work in each.works) / total if total else 0.0
