"""Whether the training has taught the model anything of the data of those who stay, as they are given.

Labels in another order, or inputs without the training's normalisation, give curvature and losses that belong to no
training, and a step that is wrong without a word. But a training lowers the loss of those who train. So their data are
doubted where they are predicted no better than by the starting weights, or, where these are not known, than by the one
answer that is best for all of them, as labels drawn by how often each comes.

Somebody who stays may be predicted badly in honesty: one that was poisoned, or one with rare labels that was not drawn
of late. So nobody is doubted as long as anybody's loss has fallen. Where it fails: data that fit some clients only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.core.cross_entropy import CrossEntropy
from expunge.core.elementwise import BinaryCrossEntropy, MeanSquaredError, SquaredError
from expunge.core.losses import Loss, mean_loss
from expunge.federation.engines.engine import Engine
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import FORWARD_COST
from expunge.unlearning.estimate import Estimate, small_change
from expunge.unlearning.request import Parties
from expunge.unlearning.retained import Retained, has_statistics

LOOKED_AT = 300
"""So many of their samples are looked at."""

FALLEN = 0.1
"""Whoever's loss is lower by this part has learnt something."""

UNLEARNT = (
    "The model predicts the data of those who stay no better than {what} (a mean loss of {now:.3g}, {then:.3g} there): "
    "look whether labels have the order that they had in the training, and inputs its scale and normalisation, unless "
    "the training itself has failed, or those who leave outweigh the others and taught it otherwise."
)


@dataclass(frozen=True, eq=False)
class Learned:
    """Those who stay, whose loss is looked at.

    Attributes:
        state: the model, and where its training began.
        parties: who stays.
        loss: as it is told.
    """

    state: ServerState
    parties: Parties
    loss: Loss

    @property
    def estimate(self) -> Estimate:
        """What it costs at most."""
        model, clients = self.state.model, len(self.parties.retained)
        drawn = min(LOOKED_AT, sum(self.parties.counts.values())) + clients
        sent = clients * (model.stored_bytes + model.parameters.nbytes)
        return Estimate(1, sent, small_change(1) * clients, 2 * FORWARD_COST * drawn)

    def doubts(self, engine: Engine) -> tuple[str, ...]:
        """Ask for their losses, by the starting weights too where these are known; a sentence where none has fallen."""
        model, start = self.state.model, self.start
        guessed = self._guessed(engine) if start is None else None
        if start is None and guessed is None:
            return ()
        way = torch.zeros_like(model.parameters) if start is None else model.parameters - start
        here = engine.clients()
        parties = replace(self.parties, retained={n: own for n, own in self.parties.retained.items() if n in here})
        replies = Retained.of(engine, self.state, parties, LOOKED_AT).told(model, way, (0.0, 1.0))
        counts = torch.tensor([reply.count for reply in replies], dtype=torch.float64)
        losses = torch.stack([reply.total for reply in replies]).double().cpu() / counts[:, None]
        squares = [float(own.double().square().sum()) for own in (model.parameters, model.parameters - way)]
        now, then = (losses - 0.5 * self.loss.l2 * torch.tensor(squares, dtype=torch.float64)).T
        then = then if guessed is None else torch.full_like(then, guessed)
        means = [float(counts @ each / counts.sum()) for each in (now, then)]
        if means[0] < means[1] or bool((now < then - FALLEN * then.abs()).any()):
            return ()
        what = "the weights that the training began with" if guessed is None else "one answer for all of them does"
        return (UNLEARNT.format(what=what, now=means[0], then=means[1]),)

    @property
    def start(self) -> Tensor | None:
        """The starting weights; with batch norm, whose statistics were others then, they tell nothing."""
        place = self.state.memory.place if self.state.memory is not None else None
        if place is None or place.beginning is None or has_statistics(self.state.model):
            return None
        return place.beginning.to(self.state.model.parameters)

    def _guessed(self, engine: Engine) -> float | None:
        """The loss of the best constant answer, where all targets are at hand."""
        if not isinstance(engine, LocalEngine):
            return None
        whole = [data.whole for data in engine.local_data() if data.name in self.parties.retained]
        targets = [batch.targets for batch in whole if batch is not None and isinstance(batch.targets, Tensor)]
        alike = len(targets) == len(whole) and len({each.shape[1:] for each in targets}) == 1
        return guessed(self.loss, torch.cat([each.cpu() for each in targets])) if alike else None


def guessed(loss: Loss, targets: Tensor) -> float | None:
    """The mean loss of the best answer that is the same for all; None of a loss of which it is not known.

    Example:
        >>> round(guessed(CrossEntropy(), torch.tensor([0, 0, 0, 1])), 4), guessed(SquaredError(), torch.eye(2))
        (0.5623, 0.25)
    """
    if isinstance(loss, CrossEntropy) and not targets.is_floating_point():
        targets = targets[targets != loss.ignore_index].flatten().long()
        counts = torch.bincount(targets, minlength=len(loss.weight or ())).double()
        counts = counts if loss.weight is None else counts * torch.tensor(loss.weight, dtype=torch.float64)
        answer = (counts / counts.sum()).clamp(min=1e-9).log()
    elif isinstance(loss, BinaryCrossEntropy):
        targets = targets.double()
        answer = targets.mean(dim=0).logit(1e-9)
    elif isinstance(loss, SquaredError | MeanSquaredError):
        targets = targets.double()
        answer = targets.mean(dim=0)
    else:
        return None
    return float(mean_loss(loss, answer.expand(len(targets), *answer.shape), targets))
