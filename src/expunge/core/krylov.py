"""Krylov solvers that know nothing of models: damped conjugate gradient, and Lanczos for f(A)x.

Both see a symmetric operator only through its products. What they learn on the way (residuals, Ritz values,
the smallest curvature met) is part of the result, since k = 10 iterations are far from convergence and a
solution without its residual means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from expunge.errors import NumericalError, RequestError

Product = Callable[[Tensor], Tensor]
NegativeCurvature = Literal["stop", "ignore", "raise-damping"]
NEGATIVE_CURVATURE: tuple[NegativeCurvature, ...] = get_args(NegativeCurvature)
Status = Literal["converged", "iterations", "negative-curvature", "zero-right-side"]

_NO_CURVATURE = "Conjugate gradient met a direction without any curvature: give a damping above 0."


@dataclass(frozen=True)
class Solution:
    """The answer of a damped conjugate gradient solve, and what the solve learned.

    Attributes:
        vector: the last good iterate.
        iterations: how many were done.
        products: how many operator products were spent.
        residual_norms: ``||b - (A + damping) x_t||`` for t = 0, 1, ..., by CG's own recurrence.
        ritz_values: eigenvalues of the damped operator (preconditioned, where there is a preconditioner) seen
            through the Krylov space, ascending. They lie inside its spectrum.
        condition_estimate: largest over smallest Ritz value. An estimate from below, never a bound.
        error_bound: ``||r_k|| / (smallest_eigenvalue + damping)``, a true bound on ``||x_k - x*||_2``;
            None where no positive lower bound on the spectrum is known.
        smallest_curvature: the smallest ``p'Ap / p'p`` met (without damping), restarts included.
        damping: the damping that was used in the end (larger than asked for after ``raise-damping``).
        status: what stopped it.
    """

    vector: Tensor
    iterations: int
    products: int
    residual_norms: tuple[float, ...]
    ritz_values: tuple[float, ...]
    condition_estimate: float | None
    error_bound: float | None
    smallest_curvature: float | None
    damping: float
    status: Status

    def diagnosis(self) -> dict[str, Any]:
        """What the solve learned, without the vector, ready for JSON."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "vector"}


@dataclass
class _Trace:
    """Coefficients of one run of CG."""

    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    residual_norms: list[float] = field(default_factory=list)
    curvatures: list[float] = field(default_factory=list)
    products: int = 0


def conjugate_gradient(
    product: Product,
    right_side: Tensor,
    *,
    iterations: int,
    damping: float = 0.0,
    tolerance: float = 0.0,
    start: Tensor | None = None,
    preconditioner: Product | None = None,
    negative_curvature: NegativeCurvature = "stop",
    smallest_eigenvalue: float | None = 0.0,
) -> Solution:
    """Solve ``(A + damping I) x = b`` by conjugate gradient (Algorithm 1, lines 6 to 14).

    Args:
        product: ``v -> A v`` for a symmetric A, without damping.
        right_side: b.
        iterations: at most so many.
        damping: added to the diagonal.
        tolerance: stop at ``||r|| <= tolerance ||b||``; at rounding, relative to the first residual, it always stops.
        start: first iterate; costs one product. None starts at zero, for free.
        preconditioner: ``r -> P^-1 r``, symmetric positive definite.
        negative_curvature: what to do when ``p'(A + damping)p <= 0``. ``stop`` keeps the last good iterate (and
            raises at the first iteration, where there is none); ``ignore`` goes on as the paper does;
            ``raise-damping`` starts again with more damping.
        smallest_eigenvalue: a lower bound on A's spectrum that is known beforehand (0 for a GGN), for the
            error bound; None where nothing is known (a Hessian).

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 4.0]))
        >>> solution = conjugate_gradient(lambda v: A @ v, torch.tensor([1.0, 4.0]), iterations=2)
        >>> [round(x, 4) for x in solution.vector.tolist()]
        [1.0, 1.0]
        >>> [round(value, 4) for value in solution.ritz_values]
        [1.0, 4.0]
    """
    if iterations < 1:
        raise RequestError(f"Conjugate gradient needs at least 1 iteration, not {iterations}.")
    if not (damping >= 0 and math.isfinite(damping)):
        raise RequestError(f"The damping must be a number of at least 0, not {damping}.")
    if negative_curvature not in NEGATIVE_CURVATURE:
        raise RequestError(f"Negative curvature can be met with {', '.join(NEGATIVE_CURVATURE)} only.")
    spent, curvatures = 0, []
    while True:
        trace = _Trace()
        vector, status = _iterate(
            product,
            right_side,
            trace,
            iterations,
            damping,
            tolerance,
            start,
            preconditioner,
            negative_curvature,
        )
        spent += trace.products
        curvatures += trace.curvatures
        if status != "negative-curvature" or negative_curvature != "raise-damping":
            break
        # Twice the negative curvature met makes that direction as convex as it was concave.
        raised = max(2 * damping, damping - 2 * min(trace.curvatures))
        if raised <= damping:
            raise NumericalError(_NO_CURVATURE)
        damping = raised
    return _solution(vector, trace, damping, status, spent, min(curvatures, default=None), smallest_eigenvalue)


def _iterate(
    product: Product,
    right_side: Tensor,
    trace: _Trace,
    iterations: int,
    damping: float,
    tolerance: float,
    start: Tensor | None,
    preconditioner: Product | None,
    negative_curvature: NegativeCurvature,
) -> tuple[Tensor, Status]:
    """The loop itself; the names follow Algorithm 1."""

    def damped(vector: Tensor) -> Tensor:
        trace.products += 1
        image = product(vector)
        if not bool(torch.isfinite(image).all()):
            raise NumericalError("A curvature product is NaN or infinite: check the model and the data.")
        return image + damping * vector

    if start is None:
        v, r = torch.zeros_like(right_side), right_side.clone()
    else:
        v, r = start.clone(), right_side - damped(start)
    z = r if preconditioner is None else preconditioner(r)
    p = z.clone()
    rho = _dot(r, z)
    trace.residual_norms.append(_norm(r))
    # Beyond rounding the recurrence goes on towards 0, but the solution does not, and the Ritz values drift off.
    rounding = torch.finfo(r.dtype).eps * trace.residual_norms[0]
    goal = max(tolerance * _norm(right_side), rounding)
    if rho == 0:
        return v, "zero-right-side" if start is None else "converged"
    for step in range(iterations):
        if trace.residual_norms[-1] <= goal:
            return v, "converged"
        q = damped(p)
        curvature, squared = _dot(p, q), _dot(p, p)
        trace.curvatures.append(curvature / squared - damping)
        if curvature <= 0 and negative_curvature != "ignore":
            if step == 0 and negative_curvature == "stop":
                raise NumericalError(
                    f"The first direction has curvature {curvature / squared:.3g}, so there is no step to take: "
                    "use the GGN, raise the damping, or choose negative_curvature='raise-damping'."
                )
            return v, "negative-curvature"
        if curvature == 0:
            raise NumericalError(_NO_CURVATURE)
        alpha = rho / curvature
        v.add_(p, alpha=alpha)
        r.sub_(q, alpha=alpha)
        trace.residual_norms.append(_norm(r))
        z = r if preconditioner is None else preconditioner(r)
        rho, previous = _dot(r, z), rho
        beta = rho / previous
        trace.alphas.append(alpha)
        trace.betas.append(beta)
        if rho == 0:
            return v, "converged"
        p.mul_(beta).add_(z)
    return v, "converged" if trace.residual_norms[-1] <= goal else "iterations"


def _solution(
    vector: Tensor,
    trace: _Trace,
    damping: float,
    status: Status,
    products: int,
    smallest_curvature: float | None,
    smallest_eigenvalue: float | None,
) -> Solution:
    ritz = _ritz_values(trace.alphas, trace.betas)
    floor = None if smallest_eigenvalue is None else smallest_eigenvalue + damping
    return Solution(
        vector=vector,
        iterations=len(trace.alphas),
        products=products,
        residual_norms=tuple(trace.residual_norms),
        ritz_values=ritz,
        condition_estimate=ritz[-1] / ritz[0] if ritz and ritz[0] > 0 else None,
        error_bound=trace.residual_norms[-1] / floor if floor is not None and floor > 0 else None,
        smallest_curvature=smallest_curvature,
        damping=damping,
        status=status,
    )


def _ritz_values(alphas: list[float], betas: list[float]) -> tuple[float, ...]:
    """Eigenvalues of the tridiagonal matrix that CG's coefficients define (Golub & Van Loan, 11.3)."""
    k = len(alphas)
    if k == 0 or any(beta < 0 for beta in betas[: k - 1]):
        return ()
    matrix = torch.zeros(k, k, dtype=torch.float64)
    for i in range(k):
        matrix[i, i] = 1 / alphas[i] + (betas[i - 1] / alphas[i - 1] if i else 0.0)
        if i + 1 < k:
            matrix[i, i + 1] = matrix[i + 1, i] = math.sqrt(betas[i]) / alphas[i]
    return tuple(torch.linalg.eigvalsh(matrix).tolist())


ASYMMETRIC = 0.05
"""The part of a product that may lie along earlier vectors of a Lanczos basis, where a symmetric matrix has none."""


@dataclass(frozen=True)
class Tridiagonal:
    """``A V ~ V T`` with orthonormal V: what k Lanczos steps from one start vector know of A."""

    basis: Tensor
    matrix: Tensor
    start_norm: float

    def apply(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``f(A) x ~ ||x|| V f(T) e_1`` for a function of the eigenvalues (given and returned as a tensor)."""
        values, vectors = torch.linalg.eigh(self.matrix)
        coordinates = vectors @ (function(values) * vectors[0])
        return torch.mv(self.basis.T, self.start_norm * coordinates.to(self.basis))


def lanczos(product: Product, start: Tensor, iterations: int) -> Tridiagonal:
    """Lanczos steps with full reorthogonalisation (twice, which is enough); one product each.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 4.0]))
        >>> lanczos(lambda v: A @ v, torch.tensor([1.0, 1.0]), 2).apply(torch.sqrt)
        tensor([1.0000, 2.0000])
    """
    return lanczos_of_rows(lambda rows: product(rows[0])[None], start[None], iterations)[0]


def lanczos_of_rows(
    product: Product, starts: Tensor, iterations: int, enough: Callable[[list[Tridiagonal]], bool] | None = None
) -> list[Tridiagonal]:
    """The same from each row of a matrix, side by side: each step is one product with as many rows as still go on.

    ``enough`` is shown what is known after each step, and says whether it will do.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 4.0]))
        >>> [own.apply(torch.sqrt) for own in lanczos_of_rows(lambda rows: rows @ A, torch.eye(2), 2)]
        [tensor([1., 0.]), tensor([0., 2.])]
    """
    if iterations < 1:
        raise RequestError(f"Lanczos needs at least 1 iteration, not {iterations}.")
    ways = [_Way(start, iterations) for start in starts]
    for step in range(iterations):
        going = [way for way in ways if not way.ended]
        if not going:
            break
        images = product(torch.stack([way.newest for way in going]))
        if not bool(torch.isfinite(images).all()):
            raise NumericalError("A curvature product is NaN or infinite: check the model and the data.")
        for way, image in zip(going, images, strict=True):
            way.step(image, last=step + 1 == iterations)
        if enough is not None and enough([way.found() for way in ways]):
            break
    return [way.found() for way in ways]


class _Way:
    """Lanczos from one vector."""

    def __init__(self, start: Tensor, iterations: int) -> None:
        self._norm = _norm(start)
        if self._norm == 0:
            raise RequestError("Lanczos cannot start from the zero vector.")
        self._basis = start.new_empty(iterations, len(start))
        self._basis[0] = start / self._norm
        self._count, self.ended = 1, False
        self._diagonal, self._off_diagonal, self._scale = list[float](), list[float](), 0.0

    @property
    def newest(self) -> Tensor:
        """The vector of the basis whose product is wanted."""
        return self._basis[self._count - 1]

    def step(self, image: Tensor, *, last: bool) -> None:
        """One more, given the product with the newest vector of the basis."""
        known = self._basis[: self._count]
        inside, rest = known @ image, image
        for _ in range(2):
            rest = rest - known.T @ (known @ rest)
        norms = [torch.linalg.vector_norm(own) for own in (image, inside[:-2], rest)]
        whole, earlier, length, own = torch.stack([*norms, inside[-1]]).tolist()  # one wait for all four
        self._scale = max(self._scale, whole)
        rounding = 100 * torch.finfo(image.dtype).eps * self._scale
        if earlier > max(ASYMMETRIC * whole, 10 * rounding):
            raise NumericalError(
                "Products do not belong to one symmetric matrix: somebody replied something else than was asked for."
            )
        self._diagonal.append(own)
        # Rounding leaves this much of an image that lies inside the space: then the space is invariant.
        self.ended = last or length <= rounding
        if not self.ended:
            self._off_diagonal.append(length)
            self._basis[self._count] = rest / length
            self._count += 1

    def found(self) -> Tridiagonal:
        """What is known in the end."""
        matrix = torch.diag(torch.tensor(self._diagonal, dtype=torch.float64))
        beside = torch.tensor(self._off_diagonal[: len(self._diagonal) - 1], dtype=torch.float64)
        matrix += torch.diag(beside, 1) + torch.diag(beside, -1)
        return Tridiagonal(self._basis[: len(matrix)], matrix, self._norm)


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


def _norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a))
