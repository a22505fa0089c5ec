"""The paper's theorems as functions; each states what it assumes, and each is tested by trying to break it.

Notation: H is the curvature with ``lambda_min(H) >= mu > 0``, g the contribution gradient, ``delta* = -H^-1 g`` the
exact update. None of this holds for a network far from a strongly convex region; there the numbers are estimates.
"""

from __future__ import annotations

import math

from expunge.errors import RequestError


def perturbation_bound(gradient_norm: float, mu: float, epsilon: float, rho: float) -> float:
    """Theorem 1: how far bounded perturbations can move the exact update.

    With ``||E||_2 <= epsilon < mu`` added to H and ``||e||_2 <= rho`` added to g,
    ``||delta~ - delta*|| <= epsilon / (mu (mu - epsilon)) ||g|| + rho / (mu - epsilon)``.

    Assumes: H symmetric with ``lambda_min >= mu > epsilon``; both systems solved exactly.

    Example:
        >>> perturbation_bound(gradient_norm=1.0, mu=2.0, epsilon=1.0, rho=0.5)
        1.0
    """
    if not (0 <= epsilon < mu and rho >= 0 and gradient_norm >= 0):
        raise RequestError("Theorem 1 needs 0 <= epsilon < mu, rho >= 0 and a norm of at least 0.")
    return epsilon / (mu * (mu - epsilon)) * gradient_norm + rho / (mu - epsilon)


def approximate_solver_bound(gradient_norm: float, mu: float, epsilon: float, rho: float, xi: float) -> float:
    """Corollary of Theorem 1: the same, for an update that is within xi of the perturbed system's solution.

    Assumes: what Theorem 1 assumes, and ``||delta_hat - delta~*|| <= xi`` (for CG, its a-posteriori bound).

    Example:
        >>> approximate_solver_bound(gradient_norm=1.0, mu=2.0, epsilon=1.0, rho=0.5, xi=0.25)
        1.25
    """
    if not xi >= 0:
        raise RequestError("The solver's error xi must be at least 0.")
    return perturbation_bound(gradient_norm, mu, epsilon, rho) + xi


def cg_rate(condition: float, iterations: int) -> float:
    """CG's convergence theorem: ``||v_k - v*||_H <= 2 ((sqrt(k) - 1) / (sqrt(k) + 1))^iterations ||v*||_H``.

    Returns the factor in front of ``||v*||_H``; it never exceeds 2, though CG itself never exceeds 1.

    Assumes: H symmetric positive definite with condition number ``condition``, start at zero, exact arithmetic.

    Example:
        >>> round(cg_rate(condition=100.0, iterations=10), 3)
        0.269
    """
    if not 1 <= condition < math.inf or iterations < 0:
        raise RequestError("The rate needs a finite condition number of at least 1 and at least 0 iterations.")
    return 2.0 * math.exp(-iterations * _decay(condition)) if iterations else 2.0


def iterations_for(condition: float, epsilon: float) -> int:
    """The fewest iterations for which the rate above promises ``||v_k - v*||_H <= epsilon ||v*||_H``.

    The paper says that kappa = 100 and epsilon = 0.01 need about 10; its own theorem says 27.

    Assumes: what ``cg_rate`` assumes.

    Example:
        >>> iterations_for(condition=100.0, epsilon=0.01)
        27
    """
    if not epsilon > 0:
        raise RequestError("The accuracy epsilon must be above 0.")
    if cg_rate(condition, 0) <= epsilon:
        return 0
    count = max(1, math.ceil(math.log(2 / epsilon) / _decay(condition)))
    # Rounding of the logarithms can be off by one in either direction.
    while cg_rate(condition, count) > epsilon:
        count += 1
    while count > 0 and cg_rate(condition, count - 1) <= epsilon:
        count -= 1
    return count


def _decay(condition: float) -> float:
    """``log((sqrt(k) + 1) / (sqrt(k) - 1))``, in a form that keeps its digits where the condition is large."""
    root = math.sqrt(condition)
    return 2 * math.atanh(1 / root) if root > 1 else math.inf
