"""Somebody's own models of any kind as they sit an audit's exam: any samples, any loss, read and tried beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from expunge.auditing.doubts import Doubt, loss_doubts
from expunge.auditing.evidence import Evidence
from expunge.auditing.given import FEW, TRIED, UNSURE, moved_towards
from expunge.auditing.loss_exam import Asked, Losses, LossExam, MeasuredLosses
from expunge.auditing.retained_evidence import batches, retained_evidence
from expunge.auditing.sample_doubts import require_apart
from expunge.core.batch import Forward, run
from expunge.core.losses import CrossEntropy, Loss
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ExpungeError, ModelError
from expunge.federation.engines.collating import Collate
from expunge.federation.engines.local_data import Data, LocalData


class Examined(LocalData):
    """Samples of an audit; what is wrong with them is told of them, not of a client."""

    @property
    def _who(self) -> str:
        return f"The {self.name} data"


def examined(source: Data, what: str, collate: Collate | None) -> Examined:
    """The samples of one kind.

    Example:
        >>> len(examined([(torch.zeros(2), torch.zeros(3))], "unseen", None))
        1
    """
    if hasattr(source, "__len__") and len(source) == 0:
        raise DataError(f"There are no {what} samples: give at least one.")
    return Examined(source, what, collate)


def tells_classes(loss: Loss, source: Data, collate: Collate | None, forward: Forward | None) -> bool:
    """Whether these are a classifier's samples: one tensor of inputs, one class label each. Else losses are asked for.

    What cannot be read at all counts as a classifier's, whose reading says what is wrong.

    Example:
        >>> classes, tokens = [(torch.zeros(2), 1)], [(torch.zeros(2), torch.zeros(2, dtype=torch.int64))]
        >>> [tells_classes(CrossEntropy(), own, None, None) for own in (classes, tokens)]
        [True, False]
    """
    if forward is not None or not isinstance(loss, CrossEntropy):
        return False
    try:
        pair = LocalData(source, "own", collate).take([0]).pair
    except ExpungeError:
        return True
    return pair is not None and pair[1].dim() == 1


def as_pair(source: Data, what: str, collate: Collate | None) -> Data:
    """A classifier's samples that only a collate function, or numpy, makes tensors of; others as they are.

    Example:
        >>> inputs, labels = as_pair(([[0.0], [1.0]], [0, 1]), "unseen", None)
        >>> labels
        [0, 1]
    """
    if isinstance(source, tuple) and all(isinstance(part, Tensor) for part in source):
        return source
    try:
        data = Examined(source, what, collate)
        pair = data.take(range(len(data))).pair
    except ExpungeError:
        return source
    return pair if pair is not None else source


def losses_of(loss: Loss, forward: Forward | None, module: nn.Module, data: LocalData, numbers: Tensor) -> Losses:
    """A module's losses on some samples, without gradients; its own mode is kept.

    Example:
        >>> flat, data = nn.Linear(1, 2), LocalData((torch.ones(3, 1), torch.tensor([0, 1, 1])), "own")
        >>> nn.init.zeros_(flat.weight), nn.init.zeros_(flat.bias)[0]
        (Parameter containing:
        tensor([[0.],
                [0.]], requires_grad=True), tensor(0., grad_fn=<SelectBackward0>))
        >>> losses_of(CrossEntropy(), None, flat, data, torch.tensor([0, 2])).each
        tensor([0.6931, 0.6931], dtype=torch.float64)
    """
    found, masses = [], []
    with torch.no_grad(), _told(data):
        for batch in batches(module, data, numbers, forward):
            outputs = run(module, batch, forward)
            own, mass = loss.per_sample(outputs, batch.targets), loss.mass(batch.targets)
            counted = torch.ones(len(own), dtype=torch.float64) if mass is None else mass.double().cpu()
            found.append(own.double().cpu() / counted.clamp(min=1e-30))
            masses.append(counted)
    return Losses(torch.cat(found), torch.cat(masses))


@dataclass(frozen=True, eq=False)
class ByLosses:
    """Models of any kind, by name, and their exam.

    Attributes:
        models: all modules.
        exam: what they are asked.
        loss: of the training.
        forward: how outputs come from a module, where calling it is not enough.
        retained: samples that stay, where they are given.
    """

    models: Mapping[str, nn.Module]
    exam: LossExam
    loss: Loss
    forward: Forward | None
    retained: LocalData | None

    @classmethod
    def of(
        cls,
        models: Mapping[str, nn.Module],
        sources: Mapping[str, Data],
        loss: Loss,
        collate: Collate | None,
        forward: Forward | None,
    ) -> ByLosses:
        """The samples, read, and tried on every model."""
        sets = {what: examined(source, what, collate) for what, source in sources.items()}
        rows = {what: digests_of(own) for what, own in sets.items()}
        for what, own in rows.items():
            if what != "forgotten" and own == rows["forgotten"]:
                raise DataError(f"The {what} samples are the forgotten ones: give others.")
        require_apart(rows)
        for name, module in models.items():
            for data in sets.values():
                _try(module, name, data, loss, forward)
        different = {what: len(set(rows[what])) for what in ("forgotten", "unseen")}
        return cls(models, LossExam(sets["forgotten"], sets["unseen"], different), loss, forward, sets.get("retained"))

    @property
    def request(self) -> str:
        """What names the request in a record."""
        return data_digest(self.exam.forgotten)

    @property
    def setting(self) -> str:
        """What names that from which a nonce draws questions."""
        return data_digest(self.exam.unseen, in_order=True)

    def doubts(self, exam: LossExam, trained: MeasuredLosses, others: Sequence[MeasuredLosses]) -> list[Doubt]:
        """What looks wrong with what was given."""
        del exam
        return loss_doubts(self.models, trained, others)

    def judged(self, weights: Snapshot) -> str:
        """What names the judged model in a record."""
        data = self.exam.forgotten
        lost = losses_of(self.loss, self.forward, self.models["after"], data, torch.arange(len(data)))
        return losses_digest(weights.digest, lost.each)

    def measured(
        self, exam: LossExam, module: nn.Module, weights: Snapshot, *, back: bool = False, same_start: bool = False
    ) -> MeasuredLosses:
        """One module in an exam like this one; and on the way back to the trained one, where that is asked for."""
        moved = moved_towards(module, self.models["before"]) if back and self._is_alike(module) else None
        way = (lambda share: self._asked(moved(share))) if moved is not None else None
        return exam.measure(self._asked(module), weights, way, same_start=same_start)

    def evidence(self, loss: Loss) -> list[Evidence]:
        """What can be said without retrained models: of those who stay alone."""
        if self.retained is None:
            return []
        return retained_evidence(self.models, self.retained, loss, self.forward)

    def _is_alike(self, module: nn.Module) -> bool:
        """Whether it is of the trained model's architecture: with all of its weights it loses what that one loses."""
        before, copy = self.models["before"], deepcopy(module)
        try:
            copy.load_state_dict(before.state_dict())
        except RuntimeError:
            return False
        data = self.exam.forgotten
        numbers = torch.arange(min(TRIED, len(data)))
        own, known = (self._asked(each)(data, numbers).each for each in (copy, before))
        return bool((own - known).norm() <= UNSURE * known.norm())

    def _asked(self, module: nn.Module) -> Asked:
        return partial(losses_of, self.loss, self.forward, module)


def data_digest(data: LocalData, *, in_order: bool = False) -> str:
    """What names samples with their targets in the record: a request in whatever order, unseen ones as they lie.

    Example:
        >>> pairs = [(torch.zeros(2), torch.zeros(3)), (torch.ones(2), torch.zeros(3))]
        >>> one, other = (LocalData(own, "own") for own in (pairs, pairs[::-1]))
        >>> data_digest(one) == data_digest(other), data_digest(one, in_order=True) == data_digest(other, in_order=True)
        (True, False)
    """
    found = digests_of(data)
    return hashlib.sha256(b"".join(found if in_order else sorted(found))).hexdigest()


def digests_of(data: LocalData) -> list[bytes]:
    """Each sample alone, with its target: no padding of a batch is in it."""
    found = []
    for number in range(len(data)):
        own = hashlib.sha256()
        for part in data.take([number]).tensors():
            own.update(f"{part.dtype} {tuple(part.shape)}".encode())
            own.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found.append(own.digest())
    return found


def losses_digest(weights: str, losses: Tensor) -> str:
    """What names a model in the record: the digest of its weights, and of what it loses, to a hundredth.

    Example:
        >>> losses_digest("weights", torch.zeros(2)) == losses_digest("weights", torch.full((2,), 1e-7))
        True
    """
    rounded = torch.nan_to_num(losses.double()).mul(100).round().add(0.0).cpu().numpy()
    return hashlib.sha256(weights.encode() + rounded.tobytes()).hexdigest()


def _try(module: nn.Module, name: str, data: LocalData, loss: Loss, forward: Forward | None) -> None:
    """A few samples twice, and what the loss has to say of them."""
    with torch.no_grad(), _told(data):
        (batch,) = batches(module, data, torch.arange(min(TRIED, len(data))), forward)
        once, again = (run(module, batch, forward) for _ in range(2))
        if once.dim() == 0 or len(once) != len(batch):
            shape = tuple(once.shape)
            raise ModelError(f"The model given as {name} gives outputs of shape {shape} for {len(batch)} samples.")
        if not torch.allclose(once, again, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ModelError(f"The model given as {name} answers the same question differently: call .eval() on it.")
        problem = loss.problem(once, batch.targets)
    if problem is not None:
        raise DataError(f"The {data.name} samples have {problem}")
    few = torch.arange(min(FEW, len(data)))
    together = losses_of(loss, forward, module, data, few).each
    with suppress(DataError):  # of one sample, which not every model takes
        alone = torch.cat([losses_of(loss, forward, module, data, own).each for own in torch.split(few, 1)])
        if bool(((alone - together).abs() > UNSURE * together.abs().mean()).any()):
            raise ModelError(
                f"The model given as {name} loses otherwise on a sample that comes alone, in evaluation mode: no "
                "statistics of the batch may be in what it gives for one sample."
            )


@contextmanager
def _told(data: LocalData) -> Iterator[None]:
    """Inside it, what a model or a loss cannot take is told in a sentence."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise DataError(f"The models or the loss cannot take the {data.name} samples: {reason}") from problem
