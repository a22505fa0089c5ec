"""A client: the only code that ever sees raw data. It does the tasks that it is asked to do."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from functools import partial, singledispatchmethod
from typing import Any

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, aligned, run
from expunge.core.curvature import Curvature, Kind
from expunge.core.factored import samples_at_once
from expunge.core.factors import Share, summed_factors
from expunge.core.kronecker import Factors
from expunge.core.krylov import conjugate_gradient
from expunge.core.losses import Loss, PerSample, amount
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import DataError, ModelError, NumericalError, RequestError
from expunge.federation.engines.local_data import LocalData
from expunge.federation.engines.looking import CHUNK, losses_of
from expunge.federation.engines.workbench import WeightMean, Workbench, side_by_side
from expunge.federation.messages.tasks import (
    FORWARD_COST,
    PRODUCT_COST,
    Ascend,
    Buffers,
    CurvatureFactors,
    CurvatureProduct,
    Draw,
    Gradient,
    Indices,
    LocalSolve,
    Losses,
    NormStatistics,
    OwnRound,
    Reply,
    Solved,
    Sum,
    Task,
    Train,
    Trained,
)

CURVED = 128
"""Samples of a curvature operator that are differentiated together on a CPU."""

BATCHES_AT_ONCE = 16
"""Training batches that are looked up together."""


class Client:
    """Does tasks on local data.

    Args:
        data: the client's own samples.
        model: any module, to work with: its weights are overwritten by those that come with a task.
        loss: the training loss.
        boost: factor by which a malicious client multiplies its updates; 1 for an honest one.
        budget_bytes: how much may be kept between curvature products.
        forward: how the model is run on a batch, where calling it with the inputs is not enough.

    Example:
        >>> from expunge.core.losses import CrossEntropy
        >>> model = nn.Linear(2, 2)
        >>> data = LocalData((torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)), "ada")
        >>> client = Client(data, model, CrossEntropy())
        >>> client.perform(Gradient(Snapshot.of(model))).count
        4
    """

    def __init__(
        self,
        data: LocalData,
        model: nn.Module,
        loss: Loss,
        *,
        boost: float = 1.0,
        budget_bytes: int = 2 << 30,
        forward: Forward | None = None,
    ) -> None:
        self.data = data
        self._model = model
        self._loss = loss
        self._boost = boost
        self._budget_bytes = budget_bytes
        self._forward = forward
        self._layout = Layout.of(model)
        self._curvature: tuple[object, Curvature] | None = None
        for layer in model.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False  # of how a gradient is kept alone; they are added up as vectors

    @property
    def model(self) -> nn.Module:
        """What it works with."""
        return self._model

    def perform(self, task: Task) -> Reply:
        """Do one task."""
        if task.model.parameters.numel() != self._layout.size:
            sent = task.model.parameters.numel()
            raise ModelError(f"The task's model has {sent} parameters where this client's has {self._layout.size}.")
        try:
            return self._perform(task)
        except NotImplementedError as problem:
            reason = str(problem).splitlines()[0].rstrip(".")
            raise ModelError(
                f"The model cannot be differentiated as often as this takes ({reason}): take other layers, or "
                "method='retrace' with coupled=False, which differentiates once."
            ) from problem

    @singledispatchmethod
    def _perform(self, task: Task) -> Reply:
        raise TypeError(f"No client knows the task {type(task).__name__}.")

    @_perform.register
    def _(self, task: Train) -> Trained:
        bench = Workbench(self._model, self._loss, record=False, forward=self._forward)
        with torch.random.fork_rng(devices=_devices(task.model.parameters)):
            torch.manual_seed(task.seed)  # of what is random in the model
            return side_by_side([bench], {self.data.name: partial(self.training, task)})[self.data.name]

    @_perform.register
    def _(self, task: OwnRound) -> Trained:
        task.model.write_to(self._model)
        self._model.train()
        seen: list[int] = []  # samples, as they go through the model

        def count(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append(next((len(own) for own in (*given, *named.values()) if isinstance(own, Tensor)), 1))

        hook = self._model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            with torch.random.fork_rng(devices=_devices(task.model.parameters)):
                torch.manual_seed(task.seed)
                task.rule.train(self._model, self.data.name)
        finally:
            hook.remove()
        after = Snapshot.of(self._model)
        buffers = {name: after.buffers[name] for name in task.model.buffers}
        return Trained(after.parameters - task.model.parameters, buffers, len(self.data), len(seen), float(sum(seen)))

    def training(self, task: Train, bench: Workbench) -> Generator[None, None, Trained]:
        """Local training on a bench, a step at a time, so that clients can take turns."""
        chosen = self._drawn(task.draw, task.exclude)
        task.model.write_to(bench.model)
        bench.model.train()
        together = self._norms(bench.model, task.model)
        for norm in self._norms(bench.model):  # one sample has no batch statistics, and what stays here stays as it is
            if len(chosen) == 1 or norm not in together:
                norm.eval()
        bench.begin(task.optimiser)
        steps, chance = 0, torch.Generator().manual_seed(task.seed)
        half = task.epochs * len(self._batches(chosen, task.batch_size)) // 2
        trained = (weight for weight in bench.model.parameters() if task.averaged and weight.requires_grad)
        later = WeightMean(trained)
        for _ in range(task.epochs):
            order = torch.randperm(len(chosen), generator=chance).to(chosen.device)
            for batch in self._taken(self._batches(chosen[order], task.batch_size)):
                try:
                    bench.step(batch, task.batch_size, task.learning_rate)
                except IndexError as problem:
                    raise DataError(
                        f"The loss cannot take the labels of client {self.data.name!r}: {problem}"
                    ) from problem
                steps += 1
                if steps > half:
                    later.add()
                yield
        later.take()
        count, cost = len(self.data) - len(set(task.exclude)), float(len(chosen) * task.epochs)
        try:
            after = Snapshot.of(bench.model)
        except ModelError as problem:
            if task.averaged:
                return Trained(torch.zeros_like(task.model.parameters), task.model.buffers, count, steps, cost)
            raise NumericalError(
                f"Training diverged at client {self.data.name!r}: lower the learning rate or the boost."
            ) from problem
        update = self._boost * (after.parameters - task.model.parameters)
        buffers = {name: after.buffers[name] for name in task.model.buffers}
        return Trained(update, buffers, count, steps, cost, bench.moments)

    @_perform.register
    def _(self, task: Ascend) -> Trained:
        chosen = self.data.available() if task.only is None else self.data.checked(task.only)
        self._model.eval()  # its batches must not enter the batch-norm statistics, and one sample has none
        start = now = task.model.parameters
        steps, cost, chance = 0, 0.0, torch.Generator().manual_seed(task.seed)
        orders = (torch.randperm(len(chosen), generator=chance).to(chosen.device) for _ in range(task.epochs))
        for batch in (batch for order in orders for batch in torch.split(chosen[order], task.batch_size)):
            gradient = self._ascent_gradient(task, now, batch)
            if gradient is None:
                cost += FORWARD_COST * len(batch)
                break
            norm = float(torch.linalg.vector_norm(gradient))
            if task.max_norm is not None and norm > task.max_norm:
                gradient = gradient * (task.max_norm / norm)
            way = now + task.learning_rate * gradient - start
            length = float(torch.linalg.vector_norm(way))
            if task.radius is not None and length > task.radius:
                way = way * (task.radius / length)
            now, steps, cost = start + way, steps + 1, cost + len(batch)
        if not bool(torch.isfinite(now).all()):
            raise NumericalError(f"The ascent overflowed at client {self.data.name!r}: lower the learning rate.")
        return Trained(now - start, dict(task.model.buffers), len(chosen), steps, cost)

    def _ascent_gradient(self, task: Ascend, at: Tensor, indices: Tensor) -> Tensor | None:
        """Where the batch's loss rises, or None where the accuracy has fallen far enough."""
        batch = self._take(indices)
        targets, leaf = batch.targets, at.detach().requires_grad_()
        outputs = self._outputs(task.model, leaf, batch)
        if task.stop_accuracy is not None:
            if outputs.dim() != 2 or not isinstance(targets, Tensor) or targets.is_floating_point():
                raise RequestError("Only classes have an accuracy to stop at: choose stop_accuracy=None.")
            if float((outputs.argmax(dim=1) == targets).double().mean()) < task.stop_accuracy:
                return None
        losses, mass = self._loss.per_sample(outputs, targets), self._loss.mass(targets)
        losses = losses if mass is None else losses / mass.clamp(min=1e-30).to(losses)
        raised = torch.log1p(-torch.exp(-losses) / 2) if task.bounded else losses
        return torch.autograd.grad(raised.mean(), leaf)[0]

    @_perform.register
    def _(self, task: Gradient) -> Sum:
        if task.only is not None:
            chosen = self.data.checked(task.only)
            count = len(chosen)
        else:
            chosen, count = self._drawn(task.draw, task.exclude), len(self.data.available(task.exclude))
        return Sum(self._gradient(task.model, chosen) * count, count, float(len(chosen)))

    @_perform.register
    def _(self, task: CurvatureProduct) -> Sum:
        count = len(self.data.available(task.exclude))
        curvature = self._curvature_at(task.model, task.kind, task.draw, task.exclude)
        total = torch.stack([curvature @ vector for vector in task.vectors]) * count
        return Sum(total, count, PRODUCT_COST * curvature.count * len(task.vectors))

    @_perform.register
    def _(self, task: CurvatureFactors) -> Sum:
        count = len(self.data.available(task.exclude))
        batch = self.shown(task.draw, task.exclude)
        factors = self.factors_of(task.model, [Share(batch, task.seed)])
        return Sum(factors.values * count, count, float(len(batch)), factors.blocks)

    @_perform.register
    def _(self, task: LocalSolve) -> Solved:
        chosen = self.data.available() if task.only is None else self.data.checked(task.only)
        gradient = self._gradient(task.model, chosen)
        curvature = self._curvature_at(task.model, task.kind)
        solution = conjugate_gradient(
            lambda vector: curvature @ vector,
            gradient,
            iterations=task.iterations,
            damping=task.damping,
            negative_curvature=task.negative_curvature,
            smallest_eigenvalue=0.0 if task.kind == "ggn" else None,
        )
        cost = len(chosen) + PRODUCT_COST * curvature.count * solution.products
        return Solved(solution, float(torch.linalg.vector_norm(gradient)), float(cost))

    @_perform.register
    def _(self, task: Losses) -> Sum:
        return losses_of({self.data.name: self}, {self.data.name: task})[self.data.name]

    @_perform.register
    def _(self, task: NormStatistics) -> Buffers:
        count, chosen = len(self.data.available(task.exclude)), self._drawn(task.draw, task.exclude)
        if len(chosen) == 1:  # one sample has no batch statistics: the model's own are used
            return Buffers(dict(task.model.buffers), count, 0.0)
        task.model.write_to(self._model)
        self._model.eval()  # dropout off: what is estimated is what evaluation will see, and nothing is random
        norms = self._norms(self._model, task.model)
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
        with torch.no_grad():
            for number, batch in enumerate(self._batches(chosen, task.batch_size), 1):
                for norm in norms:
                    norm.momentum = 1 / number  # a plain mean; told None, torch would count on the device and wait
                run(self._model, self._take(batch), self._forward)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        try:
            found = Snapshot.of(self._model).buffers
        except ModelError as problem:
            raise NumericalError(
                f"Batch-norm statistics overflow at client {self.data.name!r}: the model is left as it was."
            ) from problem
        return Buffers({name: found[name] for name in task.model.buffers}, count, FORWARD_COST * len(chosen))

    def _norms(self, model: nn.Module, sent: Snapshot | None = None) -> list[nn.modules.batchnorm._BatchNorm]:
        """Its batch-norm layers; of a model that was sent those alone whose statistics came with it."""
        return [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and (sent is None or f"{name}.running_mean".lstrip(".") in sent.buffers)
        ]

    def _batches(self, order: Tensor, size: int) -> list[Tensor]:
        """Batches in this order; under batch norm, a last sample on its own joins the batch before."""
        batches = list(torch.split(order, size))
        if len(batches) > 1 and len(batches[-1]) == 1 and self._norms(self._model):
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def _take(self, indices: Tensor) -> Batch:
        """Samples, on the model's device: a map-style dataset gives them on the CPU."""
        batch = aligned(self._model, self.data.take(indices), self._forward)
        if self.data.whole is None:  # tensors were looked at once, as a whole
            self._require_counting(batch.targets)
        return batch.to(next(self._model.parameters()).device)

    def _require_counting(self, targets: Any) -> None:
        """Refuse a sample whose only label does not count: it would be a sample all the same."""
        ignored = getattr(self._loss, "ignore_index", None)
        if ignored is not None and isinstance(targets, Tensor) and targets.dim() == 1 and ignored in targets:
            raise DataError(
                f"Client {self.data.name!r} has the label {ignored}, which does not count: leave those out."
            )

    def _taken(self, batches: list[Tensor]) -> Iterator[Batch]:
        """The samples of each batch, a few batches looked up at a time where none is padded by itself."""
        at_once = BATCHES_AT_ONCE if self.data.alike else 1
        for start in range(0, len(batches), at_once):
            together = batches[start : start + at_once]
            yield from self._take(torch.cat(together)).split([len(batch) for batch in together])

    def _outputs(self, model: Snapshot, parameters: Tensor, batch: Batch, *, twice: bool = False) -> Tensor:
        """The model's outputs with these parameters."""
        tensors = {**self._layout.unflatten(parameters), **model.buffers}
        outputs = run(self._model, batch, self._forward, tensors=tensors, twice=twice)
        if self.data.whole is None and not isinstance(self._loss, PerSample):  # of tensors all were looked at before
            problem = self._loss.problem(outputs, batch.targets)
            if problem is not None:
                raise DataError(f"Client {self.data.name!r} has {problem}")
        return outputs

    def _gradient(self, model: Snapshot, chosen: Tensor) -> Tensor:
        """Gradient of the mean loss, L2 included, over the chosen samples."""
        total, counted = torch.zeros_like(model.parameters), 0.0
        for part in torch.split(chosen, CHUNK):
            batch = self._take(part)
            total, counted = total + self.summed_gradient(model, batch), counted + self.amount(batch)
        total = total / self.required(counted) + self.l2 * model.parameters
        if not bool(torch.isfinite(total).all()):
            raise NumericalError("A gradient is NaN or infinite: check the model and the data.")
        return total

    def summed_gradient(self, model: Snapshot, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """The sum of the samples' gradients, each times its weight, without the L2 term."""
        self._model.eval()
        leaf = model.parameters.detach().requires_grad_()
        losses = self._loss.per_sample(self._outputs(model, leaf, batch, twice=True), batch.targets)
        total = losses.sum() if weights is None else torch.dot(losses, weights.to(losses))
        return torch.autograd.grad(total, leaf)[0]

    def factors_of(self, model: Snapshot, shares: Sequence[Share]) -> Factors:
        """The sum of the Kronecker factors of these samples."""
        self._model.eval()
        return summed_factors(self._model, model, shares, self._loss, forward=self._forward)

    def curvature_of(
        self, model: Snapshot, kind: Kind, batch: Batch, budget_bytes: int, weights: Tensor | None = None
    ) -> Curvature:
        """The curvature operator of these samples: of their mean loss, or of one with these weights."""
        self._model.eval()
        return Curvature(
            self._model,
            model,
            batch,
            self._loss,
            kind=kind,
            weights=weights,
            chunk_size=samples_at_once(self._model, budget_bytes) if model.parameters.is_cuda else CURVED,
            budget_bytes=budget_bytes,
            forward=self._forward,
        )

    @property
    def l2(self) -> float:
        """Of its loss."""
        return self._loss.l2

    def count(self, exclude: Indices) -> int:
        """How many samples it has but these."""
        return len(self.data.available(exclude))

    def looks_at(self, task: Gradient | CurvatureProduct | CurvatureFactors) -> int:
        """How many samples a task takes."""
        left = self.count(task.exclude)
        return left if task.draw is None else min(left, task.draw.size)

    def shown(self, draw: Draw | None, exclude: Indices) -> Batch:
        """The samples that are drawn."""
        return self._take(self._drawn(draw, exclude))

    def looked_at(self, task: Losses, size: int) -> Iterator[Batch]:
        """The samples whose losses are asked for, so many at a time."""
        return (self._take(part) for part in torch.split(self._drawn(task.draw, task.exclude), size))

    def sample_losses(self, model: Snapshot, batch: Batch) -> Tensor:
        """One loss for each sample, without the L2 term."""
        self._model.eval()
        with torch.no_grad():
            outputs = self._outputs(model, model.parameters, batch)
            return self._loss.per_sample(outputs, batch.targets).to(model.parameters)

    def amount(self, batch: Batch) -> float:
        """What the samples count together."""
        return amount(self._loss, batch.targets, len(batch))

    def required(self, counted: float) -> float:
        """What the samples count; refused where none does."""
        if not counted > 0:
            raise DataError(f"No label of client {self.data.name!r} counts (ignore_index): leave the client out.")
        return counted

    def _drawn(self, draw: Draw | None, exclude: Indices) -> Tensor:
        available = self.data.available(exclude)
        if draw is None:
            return available
        order = torch.randperm(len(available), generator=torch.Generator().manual_seed(draw.seed))
        size = min(draw.size, len(available))
        return available[order[len(order) - size :] if draw.from_back else order[:size]]

    def _curvature_at(self, model: Snapshot, kind: Kind, draw: Draw | None = None, exclude: Indices = ()) -> Curvature:
        """The curvature operator, built once and reused as long as model, samples and kind stay the same."""
        key = (model.digest, kind, draw, exclude)
        self._model.eval()  # also for a kept operator: chunks beyond its budget are rebuilt from the model
        if self._curvature is None or self._curvature[0] != key:
            self._curvature = None  # free the old graphs before building new ones
            self._curvature = (key, self.curvature_of(model, kind, self.shown(draw, exclude), self._budget_bytes))
        return self._curvature[1]


def _devices(like: Tensor) -> list[int]:
    """The CUDA device whose random state must be put back, if any."""
    return [like.device.index or 0] if like.device.type == "cuda" else []


def local_steps(count: int, epochs: int, batch_size: int) -> int:
    """SGD steps that a client with so many samples makes in one round.

    Example:
        >>> local_steps(count=100, epochs=5, batch_size=32)
        20
    """
    return epochs * math.ceil(count / batch_size)
