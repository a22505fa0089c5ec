"""Where a client trains on a GPU: steps recorded once as a CUDA graph, so that several clients run side by side.

A small network on a large GPU spends its time on launching kernels, not on computing. A recorded step is launched as
one; benches have a stream each, so their steps overlap. The arithmetic is that of the plain step: the same samples in
the same order, the last batch of an epoch filled up with samples of weight zero (computed plainly under batch norm).
Who trains for long has the step compiled, too: its small kernels are fused, and images lie channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn

from expunge.core.batch import Batch, Forward, run
from expunge.core.losses import Loss, mean_loss
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError
from expunge.federation.messages.tasks import Trained
from expunge.federation.training.recipe import SGD, Adam, second_moments

SIDE_BY_SIDE = 16
"""How many clients train at once; more would only fill the memory."""

WARM_UP = 1
"""Steps before recording, after a first one in which libraries choose their kernels."""

RECORDING = 80
"""A recording takes about as long as so many recorded steps: few steps are worth few benches."""


def weighted_loss(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The samples' losses, each times its weight, summed."""
    return torch.dot(loss.per_sample(run(model, Batch.of(inputs, targets)), targets), weights)


@cache
def compiled_loss() -> Callable[[nn.Module, Loss, Tensor, Tensor, Tensor], Tensor]:
    """The same, compiled: once for an architecture, whichever bench or engine asks."""
    return torch.compile(weighted_loss, dynamic=False)


def can_record(model: nn.Module) -> bool:
    """Whether the model's steps may be recorded: on a GPU, and nothing random in its forward pass.

    Dropout draws from a stream of chance that clients side by side would share; such models train plainly, one client
    after another.

    Example:
        >>> can_record(nn.Linear(2, 2))
        False
    """
    random = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    return next(model.parameters()).is_cuda and not random


class Workbench:
    """A model to train, and the optimiser's step that trains it: SGD's, until ``begin`` names another.

    Args:
        model: trained in place.
        loss: the training loss.
        record: record the step as a CUDA graph; False computes it plainly, on any device.
        compiled: compile the step before it is recorded.
        forward: how the model is run on a batch; such steps, and those on other batches than two tensors, are plain.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        record: bool = True,
        compiled: bool = False,
        forward: Forward | None = None,
    ) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise ModelError("A module of torch.jit cannot be copied and trained: give the one that it was made of.")
        self.model = model.to(memory_format=torch.channels_last) if compiled else model  # type: ignore[call-overload]
        self._compiled = compiled
        self._loss, self._forward = loss, forward
        self._stream = torch.cuda.Stream() if record else None  # type: ignore[no-untyped-call]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rule: SGD | Adam = SGD()
        self._optimiser = self._optimiser_of(self._rule)
        self._anchors: list[Tensor] = []
        self._batch_norm = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
        self._step: tuple[object, Callable[[], None]] | None = None
        self._inputs = self._targets = self._weights = torch.empty(0)
        self._filled = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, everything is computed on the bench's own stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Begin only after what was asked of the GPU so far is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def begin(self, rule: SGD | Adam) -> None:
        """Begin a round from the model as it is now, with an optimiser that remembers nothing."""
        if rule != self._rule:
            self._rule, self._optimiser, self._step = rule, self._optimiser_of(rule), None
            self._anchors = [torch.empty_like(weight) for weight in self._parameters] if rule.proximal_mu else []
        for anchor, weight in zip(self._anchors, self._parameters, strict=bool(self._anchors)):
            anchor.copy_(weight.detach())
        if self._step is None:
            self._optimiser.state.clear()
        else:
            self._forget_steps()

    @property
    def moments(self) -> tuple[float, ...]:
        """The optimiser's second moments by parameter, where it has some."""
        return tuple(second_moments(self._optimiser)) if self._rule.adaptive else ()

    def _optimiser_of(self, rule: SGD | Adam) -> torch.optim.Optimizer:
        """Torch's own; the loss's L2 is added to the gradient, whatever the rule does with its weight decay."""
        if isinstance(rule, SGD):
            return torch.optim.SGD(
                self._parameters,
                momentum=rule.momentum,
                dampening=rule.dampening,
                weight_decay=self._loss.l2 + rule.weight_decay,
                nesterov=rule.nesterov,
            )
        kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
        decay = rule.weight_decay + (0.0 if rule.decoupled else self._loss.l2)
        # On a GPU the rate is a tensor, so that a recorded step can be given another one.
        rate = torch.tensor(1e-3, device=self._parameters[0].device) if self._stream is not None else 1e-3
        return kind(
            self._parameters,
            lr=rate,
            betas=rule.betas,
            eps=rule.eps,
            weight_decay=decay,
            capturable=self._stream is not None,
        )

    @property
    def _dampened(self) -> bool:
        return isinstance(self._rule, SGD) and self._rule.dampening > 0

    def _forget_steps(self) -> None:
        """The optimiser's state as before its first step, in the tensors that a recorded step works on.

        A momentum of zero is what torch begins with only without dampening: with it, steps are not recorded.
        """
        for state in self._optimiser.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def step(self, batch: Batch, batch_size: int, learning_rate: float) -> None:
        """One step on these samples, the mean of their losses."""
        pair, size = self._recordable(batch, batch_size), len(batch)
        if pair is None:
            self._descend(
                lambda: mean_loss(self._loss, run(self.model, batch, self._forward), batch.targets), learning_rate
            )
            return
        inputs, targets = pair
        adaptive = self._rule.adaptive
        key = (batch_size, adaptive or learning_rate, inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype)
        if self._step is None or self._step[0] != key:
            images = self._compiled and inputs.dim() == 4
            self._inputs = torch.zeros_like(
                inputs[:1].expand(batch_size, *inputs.shape[1:]),
                memory_format=torch.channels_last if images else torch.contiguous_format,
            )
            self._targets = targets.new_zeros((batch_size, *targets.shape[1:]))
            self._weights = torch.zeros(batch_size, dtype=next(self.model.parameters()).dtype, device=inputs.device)
            self._filled = 0
            self._step = (key, self._recorded(learning_rate))
        self._inputs[:size] = inputs
        self._targets[:size] = targets
        if adaptive:
            self._optimiser.param_groups[0]["lr"].fill_(learning_rate)
        mass = self._loss.mass(targets)
        if size != self._filled or mass is not None:  # of tokens, every batch has its own number
            self._weights[:size] = 1 / size if mass is None else 1 / mass.sum().clamp(min=1e-30)
            self._weights[size:] = 0
            self._filled = size
        self._step[1]()

    def _recorded(self, learning_rate: float) -> Callable[[], None]:
        """The step on what then lies in the bench's own tensors, short batches filled up with weight zero."""
        plain = partial(self._descend, self._weighted, learning_rate)
        before = Snapshot.of(self.model)
        try:
            plain()
        except RuntimeError:
            if not self._compiled:
                raise
            self._compiled = False  # not every model can be compiled, nor on every machine
        for _ in range(WARM_UP):
            plain()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not with torch.cuda.graph(), which first gives all cached memory back: that takes longer than all else.
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                plain()
            finally:
                graph.capture_end()
        before.write_to(self.model)  # warming up moved it: by weight decay, and batch norm's statistics
        self._forget_steps()
        return graph.replay

    def _recordable(self, batch: Batch, batch_size: int) -> tuple[Tensor, Tensor] | None:
        """The two tensors of a batch whose step can be recorded."""
        odd = self._stream is None or self._forward is not None or (self._batch_norm and len(batch) != batch_size)
        return None if odd or self._dampened else batch.pair

    def _mean(self, batch: Batch) -> Tensor:
        return mean_loss(self._loss, run(self.model, batch, self._forward), batch.targets)

    def _weighted(self) -> Tensor:
        """The loss of what lies in the bench's own tensors."""
        of = compiled_loss() if self._compiled else weighted_loss
        return of(self.model, self._loss, self._inputs, self._targets, self._weights)

    def _descend(self, loss: Callable[[], Tensor], learning_rate: float) -> None:
        group = self._optimiser.param_groups[0]
        if not isinstance(group["lr"], Tensor):
            group["lr"] = learning_rate
        elif not torch.cuda.is_current_stream_capturing():
            group["lr"].fill_(learning_rate)
        self._optimiser.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        self._pull_back()
        self._optimiser.step()

    def _pull_back(self) -> None:
        """Added to gradients: FedProx's pull to the round's beginning, and the loss's L2 where decay is decoupled."""
        for weight, anchor in zip(self._parameters, self._anchors, strict=False):
            if weight.grad is not None:
                weight.grad.add_(weight.detach() - anchor, alpha=self._rule.proximal_mu)
        if isinstance(self._rule, Adam) and self._rule.decoupled and self._loss.l2:
            for weight in self._parameters:
                if weight.grad is not None:
                    weight.grad.add_(weight.detach(), alpha=self._loss.l2)


def worthwhile(steps: float, most: int) -> int:
    """How many benches are worth their recordings for so many steps: b of them, where ``b^2`` recordings take as long.

    Example:
        >>> [worthwhile(steps, 10) for steps in (10, 500, 100_000)]
        [1, 2, 10]
    """
    benches = 1
    while benches < min(most, SIDE_BY_SIDE) and (benches + 1) ** 2 * RECORDING <= steps:
        benches += 1
    return benches


class WeightMean:
    """The mean of weights over steps.

    It is the mean of how far they have come, summed in 32 bits or more: rounding does not add up.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> mean = WeightMean([weight])
        >>> for value in (2.0, 4.0):
        ...     _ = nn.init.constant_(weight, value)
        ...     mean.add()
        >>> mean.take()
        >>> weight.item()
        3.0
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._starts = [own.to(torch.promote_types(own.dtype, torch.float32), copy=True) for own in self._weights]
        self._totals = [torch.zeros_like(start) for start in self._starts]
        self._count = 0

    def add(self) -> None:
        """The weights are at one more place."""
        if self._weights:  # all in two launches, not two for each
            torch._foreach_add_(self._totals, torch._foreach_sub(self._weights, self._starts))
        self._count += 1

    def take(self) -> None:
        """Put the weights to their mean."""
        for weight, start, total in zip(self._weights, self._starts, self._totals, strict=True):
            weight.copy_(start + total / self._count)


def side_by_side(
    benches: list[Workbench], runs: Mapping[str, Callable[[Workbench], Generator[None, None, Trained]]]
) -> dict[str, Trained]:
    """Let clients take turns, one step each, as many at once as there are benches; replies in the order of the runs."""
    waiting = list(runs.items())
    active: dict[Workbench, tuple[str, Generator[None, None, Trained]]] = {}
    replies: dict[str, Trained] = {}
    for bench in benches:
        bench.wait()
    while waiting or active:
        for bench in benches:
            if bench not in active:
                if not waiting:
                    continue
                name, run = waiting.pop(0)
                active[bench] = (name, run(bench))
            name, steps = active[bench]
            with bench.at_work():
                try:
                    next(steps)
                except StopIteration as done:
                    replies[name] = done.value
                    del active[bench]
    if runs and torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: replies[name] for name in runs}
