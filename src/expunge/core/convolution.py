"""Convolutions whose second derivative costs no more than it must.

Convolution is bilinear, so everything that a double backward pass needs is again one of three kernels: the
convolution, its transpose in the inputs and its transpose in the weights. torch's own double backward computes all
terms whether or not they are asked for, the last two by roundabout convolutions of transposed tensors, and that was
half of a curvature product's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DIMENSIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class _Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    at_fixed_point: bool

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        none = (0,) * len(self.stride)
        return torch.convolution(
            inputs, weight, None, self.stride, self.padding, self.dilation, False, none, self.groups
        )

    def transposed(
        self, outputs: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients in inputs and weight, where wanted, for a gradient in the outputs."""
        none = (0,) * len(self.stride)
        parts: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
            outputs, inputs, weight, None, self.stride, self.padding, self.dilation, False, none, self.groups,
            [*wanted, False],
        )  # fmt: skip
        return list(parts[:2])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = geometry
        return geometry.convolve(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        if ctx.geometry.at_fixed_point:
            inputs, weight = inputs.detach(), weight.detach()
        wanted = ctx.needs_input_grad[:2]
        parts = _Transposed.apply(*gradients, inputs, weight, ctx.geometry, wanted)  # type: ignore[no-untyped-call]
        return *parts, None


class _Transposed(torch.autograd.Function):
    """The first derivative of a convolution, as a function of the outputs' gradient, the inputs and the weight."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, inputs: Tensor, weight: Tensor, geometry: _Geometry, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outputs, inputs, weight)
        ctx.geometry = geometry
        return tuple(geometry.transposed(outputs, inputs, weight, wanted))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        outputs, inputs, weight = ctx.saved_tensors
        of_inputs, of_weight = gradients
        by_outputs: Tensor | None = None
        by_inputs: Tensor | None = None
        by_weight: Tensor | None = None
        if of_inputs is not None:
            by_outputs = ctx.geometry.convolve(of_inputs, weight)
            if ctx.needs_input_grad[2]:
                by_weight = ctx.geometry.transposed(outputs, of_inputs, weight, (False, True))[1]
        if of_weight is not None:
            pushed = ctx.geometry.convolve(inputs, of_weight)
            by_outputs = pushed if by_outputs is None else by_outputs + pushed
            if ctx.needs_input_grad[1]:
                by_inputs = ctx.geometry.transposed(outputs, inputs, of_weight, (True, False))[0]
        return by_outputs, by_inputs, by_weight, None, None


class lean_convolutions(TorchFunctionMode):  # noqa: N801 (a context manager)
    """Inside it, ``conv1d`` to ``conv3d`` are these; what torch knows beyond them (padding by name) stays torch's.

    Args:
        at_fixed_point: the first derivative will be differentiated in the outputs' gradient alone, as the GGN does,
            and not in inputs and weights; half of the second derivative is then never computed.

    Example:
        >>> inputs, weight = torch.ones(1, 1, 3), torch.ones(1, 1, 2, requires_grad=True)
        >>> with lean_convolutions(at_fixed_point=False):
        ...     torch.conv1d(inputs, weight)
        tensor([[[2., 2.]]], grad_fn=<_ConvolutionBackward>)
    """

    def __init__(self, *, at_fixed_point: bool) -> None:
        super().__init__()
        self._at_fixed_point = at_fixed_point

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace convolutions, leave the rest."""
        if function not in _DIMENSIONS:
            return function(*args, **(kwargs or {}))
        return self._convolution(function, *args, **(kwargs or {}))

    def _convolution(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        dimensions = _DIMENSIONS[function]
        if isinstance(padding, str) or input.dim() != dimensions + 2:
            return function(input, weight, bias, stride, padding, dilation, groups)
        geometry = _Geometry(
            _as_tuple(stride, dimensions),
            _as_tuple(padding, dimensions),
            _as_tuple(dilation, dimensions),
            groups,
            self._at_fixed_point,
        )
        outputs: Tensor = _Convolution.apply(input, weight, geometry)  # type: ignore[no-untyped-call]
        return outputs if bias is None else outputs + bias.view(-1, *(1,) * dimensions)


def _as_tuple(side: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    return (side,) * dimensions if isinstance(side, int) else tuple(side) * (dimensions // len(side))
