"""Those who stay, as one object: their gradient, curvature, losses, statistics and local training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from expunge.core.curvature import Kind
from expunge.core.kronecker import KroneckerCurvature
from expunge.core.krylov import Product
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.engines.engine import Engine, ask_each, ask_factors, ask_mean
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import (
    Buffers,
    CurvatureFactors,
    CurvatureProduct,
    Draw,
    Gradient,
    Indices,
    Losses,
    NormStatistics,
    Sum,
    Trained,
)
from expunge.federation.training.fedavg import average_buffers
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.lengths import RetainedLoss, Trial, combined, in_messages
from expunge.unlearning.request import Parties

BATCH_SIZE = 64
"""Of batch-norm statistics, where the training's is not known."""


@dataclass(frozen=True, eq=False)
class Retained:
    """The clients that stay, and how much of their data is looked at.

    Attributes:
        engine: reaches them.
        clients: who stays, each with the samples that it no longer uses.
        counts: sample counts of all reachable clients before the deletion.
        samples: how many of their samples are drawn where a draw is enough; None is all.
        seed: of the draws.
        batch_size: of batch-norm statistics: the training's.
        drifts: how far from the model each is where its curvature is looked at (at_work.py); else at the model itself.
    """

    engine: Engine
    clients: Mapping[str, Indices]
    counts: Mapping[str, int]
    samples: int | None = None
    seed: int = 0
    batch_size: int = BATCH_SIZE
    drifts: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, engine: Engine, state: ServerState, parties: Parties, samples: int | None = None, seed: int = 0
    ) -> Retained:
        """Those who stay after a request."""
        batch_size = state.schedule.batch_size if state.schedule is not None else BATCH_SIZE
        return cls(engine, parties.retained, parties.counts, samples, seed, batch_size)

    @property
    def left(self) -> dict[str, int]:
        """How many samples each keeps."""
        return {name: self.counts[name] - len(left_out) for name, left_out in self.clients.items()}

    def with_everyone(self) -> Retained:
        """The same with those who leave, and with what is to be forgotten."""
        return replace(self, clients=dict.fromkeys(self.counts, ()))

    def looking_at(self, samples: int | None) -> Retained:
        """The same with fewer samples or more."""
        return replace(self, samples=samples)

    def draws(self, *, from_back: bool = False) -> dict[str, Draw | None]:
        """Draws of about ``samples`` in all, by client size, at least one each; None is everything."""
        left = self.left
        total = sum(left.values())
        if self.samples is None or self.samples >= total:
            return dict.fromkeys(self.clients)
        return {
            name: Draw(math.ceil(self.samples * count / total), self.seed, from_back) for name, count in left.items()
        }

    def gradient(self, model: Snapshot, *, drawn: bool = False) -> Tensor:
        """The gradient of the retained objective, on everything or on the draws."""
        draws = self.draws() if drawn else dict.fromkeys(self.clients)
        tasks = {name: Gradient(model, exclude=gone, draw=draws[name]) for name, gone in self.clients.items()}
        return ask_mean(self.engine, tasks)

    def product(self, model: Snapshot, kind: Kind = "ggn") -> Product:
        """``v -> G v`` (or rows times G) over the draws, each client by its size: one message a call."""
        draws = self.draws()

        def product(vector: Tensor) -> Tensor:
            rows = vector if vector.dim() == 2 else vector[None]
            tasks = {
                name: CurvatureProduct(self._worked_on(name, model), rows, kind, draws[name], gone)
                for name, gone in self.clients.items()
            }
            return ask_mean(self.engine, tasks).view_as(vector)

        return product

    def factors(self, model: Snapshot) -> KroneckerCurvature:
        """The Gauss-Newton matrix over the draws as K-FAC has it, layer by layer: one message."""
        draws = self.draws()
        tasks = {
            name: CurvatureFactors(
                self._worked_on(name, model), derived_seed(self.seed, "targets", name), draws[name], gone
            )
            for name, gone in self.clients.items()
        }
        return KroneckerCurvature(ask_factors(self.engine, tasks), model.layers())

    def losses(self, model: Snapshot, step: Tensor, lengths: Sequence[float]) -> RetainedLoss:
        """Their loss at ``theta - t step`` for several t, the first 0.

        It comes from the server's own data where there is some, else from the clients in one message, on samples other
        than those of the curvature as far as there are others.
        """
        return combined(self.told(model, step, lengths))

    def told(self, model: Snapshot, step: Tensor, lengths: Sequence[float]) -> list[Sum]:
        """The same, each one's own sum of losses at each length."""
        return list(_checked(self._told(model, step, tuple(lengths))).values())

    def trials(self, model: Snapshot, step: Tensor, lengths: Sequence[float]) -> Iterator[Trial]:
        """Each length in turn with the model after it and the loss before and after; asked for when its turn comes.

        With batch norm every length is judged with the statistics that belong to it, one at a time; else those of a
        group go in one message.
        """

        def moved(length: float) -> Snapshot:
            return model.moved(model.parameters - length * step)

        groups = in_messages(lengths)
        if not has_statistics(model):
            for group in groups:
                loss = self.losses(model, step, (0.0, *group))
                for number, length in enumerate(group, 1):
                    yield Trial(length, moved(length), loss.at(number))
            return
        nowhere = torch.zeros_like(step)
        given = _checked(self._told(model, nowhere, (0.0,)))
        for length in chain.from_iterable(groups):
            judged = self.statistics(moved(length))
            after = self._told(judged, nowhere, (0.0,))
            both = [replace(told, total=torch.cat([told.total, after[name].total])) for name, told in given.items()]
            yield Trial(length, judged, combined(both).at(1))

    def statistics(self, model: Snapshot) -> Snapshot:
        """Batch-norm statistics remember, too: the model with those of the clients that stay, from the draws."""
        if not has_statistics(model):
            return model
        draws, tasks = self.draws(), {}
        for name, gone in self.clients.items():
            draw = draws[name]
            if draw is not None:  # batches count alike, so a few samples that are left over would count too much
                draw = replace(draw, size=self.batch_size * math.ceil(draw.size / self.batch_size))
            tasks[name] = NormStatistics(model, self.batch_size, gone, draw)
        replies = ask_each(self.engine, tasks, Buffers)
        buffers = average_buffers({name: (reply.buffers, reply.count) for name, reply in replies.items()})
        return replace(model, buffers=buffers)

    def train(
        self,
        model: Snapshot,
        plan: TrainingPlan,
        number: int = 0,
        *,
        draws: Mapping[str, Draw] | None = None,
        averaged: bool = False,
    ) -> dict[str, Trained]:
        """One round of local training from ``model``.

        Args:
            model: where they start.
            plan: epochs, batch size, learning rate and seed; its rounds and participation are not looked at.
            number: of the round, for its seeds.
            draws: the clients that train, each on so many of its samples only; None is everyone on everything.
            averaged: each sends where its later steps were on average (iterate averaging), not the last one.
        """
        tasks = {
            name: replace(plan.task(model, number, name, gone), averaged=averaged)
            for name, gone in self.clients.items()
        }
        if draws is not None:
            tasks = {name: replace(tasks[name], draw=draw) for name, draw in draws.items()}
        return ask_each(self.engine, tasks, Trained)

    def _worked_on(self, name: str, model: Snapshot) -> Snapshot:
        drift = self.drifts.get(name)
        return model if drift is None else model.moved(model.parameters + drift.to(model.parameters))

    def _told(self, model: Snapshot, step: Tensor, lengths: tuple[float, ...]) -> dict[str, Sum]:
        """Each one's sum of losses at each length."""
        if self.engine.validation is not None:
            reply = self.engine.validation.perform(Losses(model, step, lengths))
            assert isinstance(reply, Sum)
            self.engine.cost.sample_gradients += reply.sample_gradients
            return {"the server": reply}
        draws = self.draws(from_back=True)
        tasks = {name: Losses(model, step, lengths, draws[name], gone) for name, gone in self.clients.items()}
        return ask_each(self.engine, tasks, Sum)


def has_statistics(model: Snapshot) -> bool:
    """Whether the model has batch-norm statistics."""
    return any("running_" in name for name in model.buffers)


def _checked(replies: dict[str, Sum]) -> dict[str, Sum]:
    """The same: what is not a number before any step is refused where others have numbers."""
    before = torch.stack([reply.total[0] for reply in replies.values()]).tolist()  # one wait for all
    broken = [name for name, loss in zip(replies, before, strict=True) if not math.isfinite(loss)]
    if 0 < len(broken) < len(replies):
        raise NumericalError(
            f"Client {broken[0]!r} replied a loss that is NaN or infinite: the model is left as it was."
        )
    return replies
