"""Curves that need no federation: how fast conjugate gradient converges, and what a perturbation can do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from expunge.bench.results import Series
from expunge.core.bounds import approximate_solver_bound, iterations_for, perturbation_bound
from expunge.core.krylov import conjugate_gradient
from expunge.core.preconditioner import nystrom

TOLERANCE = 1e-4
SPECTRUM = "geometric spectrum"
CONVEX = "quadratic with a known spectrum"


def conditioning(smoke: bool, seed: int) -> list[Series]:
    """Iterations to a relative residual of 1e-4 against the condition number, without and with a preconditioner.

    The matrix has a geometric spectrum; the sketch spends as many products as its rank, which are not counted here.
    """
    size, rank = (60, 26) if smoke else (300, 130)
    kappas = [50.0, 200.0] if smoke else [50.0, 200.0, 1000.0, 5000.0, 20000.0]
    curves: dict[str, list[float]] = {"cg": [], "cg+nystrom": [], "bound": []}
    for kappa in kappas:
        matrix, right_side = _system(torch.logspace(0, -1, size, base=kappa, dtype=torch.float64), seed)
        chance = torch.Generator().manual_seed(seed)
        sketch = nystrom(_rows_times(matrix), right_side, rank=rank, generator=chance)
        for name, preconditioner in (("cg", None), ("cg+nystrom", sketch.preconditioner(0.0))):
            solution = conjugate_gradient(
                _rows_times(matrix),
                right_side,
                iterations=20 * size,
                tolerance=TOLERANCE,
                preconditioner=preconditioner,
            )
            curves[name].append(float(solution.iterations))
        curves["bound"].append(float(iterations_for(kappa, TOLERANCE)))
    y_name = f"iterations to {TOLERANCE:g}"
    return [Series(name, SPECTRUM, "condition number", y_name, kappas, values) for name, values in curves.items()]


def perturbation(smoke: bool, seed: int) -> list[Series]:
    """Theorem 1 and its corollary: clients that reply a curvature off by epsilon and a gradient off by rho.

    The error of the exact step, and of ten CG iterations, beside their bounds; epsilon as a share of mu, rho a tenth
    of the gradient's length. Errors are the largest of several random perturbations.
    """
    size, mu, tries = (20, 0.1, 2) if smoke else (100, 0.1, 10)
    hessian, gradient = _system(torch.linspace(mu, 1.0, size, dtype=torch.float64), seed)
    exact = torch.linalg.solve(hessian, gradient)
    norm = float(torch.linalg.vector_norm(gradient))
    rho = 0.1 * norm
    shares = [0.1, 0.5] if smoke else [0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9]
    curves: dict[str, list[float]] = {name: [] for name in ("exact step", "bound", "ten iterations", "bound with CG")}
    chance = torch.Generator().manual_seed(seed)
    for share in shares:
        worst, worst_cg, worst_xi = 0.0, 0.0, 0.0
        for _ in range(tries):
            bent = hessian + _symmetric(size, share * mu, chance)
            pulled = gradient + _vector(size, rho, chance)
            perturbed = torch.linalg.solve(bent, pulled)
            short = conjugate_gradient(_rows_times(bent), pulled, iterations=10).vector
            worst = max(worst, _distance(perturbed, exact))
            worst_cg, worst_xi = max(worst_cg, _distance(short, exact)), max(worst_xi, _distance(short, perturbed))
        curves["exact step"].append(worst)
        curves["ten iterations"].append(worst_cg)
        curves["bound"].append(perturbation_bound(norm, mu, share * mu, rho))
        curves["bound with CG"].append(approximate_solver_bound(norm, mu, share * mu, rho, worst_xi))
    return [
        Series(name, CONVEX, "perturbation of the curvature, as a share of mu", "error of the step", shares, values)
        for name, values in curves.items()
    ]


def _system(eigenvalues: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with these eigenvalues in random directions, and a random right side."""
    chance = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    directions = torch.linalg.qr(torch.randn(size, size, generator=chance, dtype=torch.float64)).Q
    return (directions * eigenvalues) @ directions.T, torch.randn(size, generator=chance, dtype=torch.float64)


def _rows_times(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """``v -> A v``, or rows times A, for a symmetric A."""
    return lambda rows: rows @ matrix


def _symmetric(size: int, norm: float, chance: torch.Generator) -> Tensor:
    raw = torch.randn(size, size, generator=chance, dtype=torch.float64)
    both = raw + raw.T
    return both * (norm / float(torch.linalg.matrix_norm(both, ord=2)))


def _vector(size: int, norm: float, chance: torch.Generator) -> Tensor:
    raw = torch.randn(size, generator=chance, dtype=torch.float64)
    return raw * (norm / float(torch.linalg.vector_norm(raw)))


def _distance(first: Tensor, second: Tensor) -> float:
    return float(torch.linalg.vector_norm(first - second))
