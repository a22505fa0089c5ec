"""Where a client trains on a GPU: SGD steps recorded once as a CUDA graph, so that several clients run side by side.

A small network on a large GPU spends its time on launching kernels, not on computing. A recorded step is launched as
one; benches have a stream each, so their steps overlap. The arithmetic is that of the plain step: the same samples in
the same order, the last batch of an epoch filled up with samples of weight zero (computed plainly under batch norm).
Who trains for long has the step compiled, too: its small kernels are fused, and images lie channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn

from expunge.core.losses import Loss
from expunge.core.vectors import Snapshot
from expunge.federation.messages.tasks import Trained

SIDE_BY_SIDE = 16
"""How many clients train at once; more would only fill the memory."""

WARM_UP = 3
"""Steps before recording: libraries choose their kernels in the first ones."""


def weighted_loss(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The samples' losses, each times its weight, summed."""
    return torch.dot(loss.per_sample(model(inputs), targets), weights)


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
    """A model to train, and the SGD step that trains it.

    Args:
        model: trained in place.
        loss: the training loss.
        record: record the step as a CUDA graph; False computes it plainly, on any device.
        compiled: compile the step before it is recorded.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, record: bool = True, compiled: bool = False) -> None:
        self.model = model.to(memory_format=torch.channels_last) if compiled else model  # type: ignore[call-overload]
        self._compiled = compiled
        self._loss = loss
        self._stream = torch.cuda.Stream() if record else None  # type: ignore[no-untyped-call]
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimiser = torch.optim.SGD(parameters, weight_decay=loss.l2)
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

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int, learning_rate: float) -> None:
        """One SGD step on these samples, the mean of their losses."""
        size = len(inputs)
        if self._stream is None or (self._batch_norm and size != batch_size):
            self._descend(inputs, targets, learning_rate)
            return
        key = (batch_size, learning_rate, inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype)
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
        if size != self._filled:
            self._weights[:size] = 1 / size
            self._weights[size:] = 0
            self._filled = size
        self._step[1]()

    def _recorded(self, learning_rate: float) -> Callable[[], None]:
        """The step on what then lies in the bench's own tensors, short batches filled up with weight zero."""
        plain = partial(self._descend, self._inputs, self._targets, learning_rate, self._weights)
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
        with torch.cuda.graph(graph, stream=self._stream):
            plain()
        before.write_to(self.model)  # warming up moved it: by weight decay, and batch norm's statistics
        return graph.replay

    def _descend(self, inputs: Tensor, targets: Tensor, learning_rate: float, weights: Tensor | None = None) -> None:
        self._optimiser.param_groups[0]["lr"] = learning_rate
        self._optimiser.zero_grad(set_to_none=True)
        if weights is None:
            value = self._loss.per_sample(self.model(inputs), targets).mean()
        else:
            of = compiled_loss() if self._compiled else weighted_loss
            value = of(self.model, self._loss, inputs, targets, weights)
        value.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()


class WeightMean:
    """The mean of a weight over steps.

    It is the mean of how far the weight has come, summed in 32 bits or more: rounding does not add up.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> mean = WeightMean(weight)
        >>> for value in (2.0, 4.0):
        ...     _ = nn.init.constant_(weight, value)
        ...     mean.add()
        >>> mean.take()
        >>> weight.item()
        3.0
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._start = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        self._total = torch.zeros_like(self._start)
        self._count = 0

    def add(self) -> None:
        """The weight is at one more place."""
        self._total += self._weight.detach() - self._start
        self._count += 1

    def take(self) -> None:
        """Put the weight to its mean."""
        with torch.no_grad():
            self._weight.copy_(self._start + self._total / self._count)


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
