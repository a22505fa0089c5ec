import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cases import system
from expunge.core.bounds import (
    approximate_solver_bound,
    cg_rate,
    iterations_for,
    perturbation_bound,
)
from expunge.core.krylov import conjugate_gradient
from expunge.errors import RequestError


def perturbed(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float, float]:
    """H with smallest eigenvalue mu, E of norm epsilon, g and e of norm rho."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> float:
        return float(torch.rand((), generator=generator, dtype=torch.float64))

    n = 2 + seed % 12
    mu = 10 ** (4 * uniform() - 2)
    problem = system(mu * torch.cat([torch.ones(1), 1 + 9 * torch.rand(n - 1, generator=generator)]).double(), seed)
    noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
    epsilon = mu * 0.99 * uniform()
    E = (noise + noise.T) * (epsilon / torch.linalg.matrix_norm(noise + noise.T, 2))
    e = torch.randn(n, generator=generator, dtype=torch.float64)
    rho = 10 ** (4 * uniform() - 3)
    return problem.matrix, E, problem.right_side, e * (rho / e.norm()), mu, epsilon, rho


def update(curvature: Tensor, gradient: Tensor) -> Tensor:
    return -torch.linalg.solve(curvature, gradient)


@pytest.mark.parametrize("part", range(10))
def test_theorem_1_holds_in_a_thousand_random_perturbations(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        H, E, g, e, mu, epsilon, rho = perturbed(seed)
        moved = float((update(H + E, g + e) - update(H, g)).norm())
        assert moved <= perturbation_bound(float(g.norm()), mu, epsilon, rho) * (1 + 1e-9), seed


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9, 1.9])
@pytest.mark.parametrize("rho", [0.0, 3.0])
def test_theorem_1_is_reached_along_the_smallest_eigenvector(epsilon: float, rho: float) -> None:
    mu, length = 2.0, 5.0
    values, vectors = torch.linalg.eigh(system(torch.tensor([mu, 3.0, 8.0]), seed=0).matrix)
    smallest = vectors[:, 0]
    H = vectors @ torch.diag(values) @ vectors.T
    E = -epsilon * torch.outer(smallest, smallest)
    moved = (update(H + E, (length + rho) * smallest) - update(H, length * smallest)).norm()
    assert float(moved) == pytest.approx(perturbation_bound(length, mu, epsilon, rho), rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_corollary_holds_with_conjugate_gradient_as_the_solver(k: int) -> None:
    for seed in range(100):
        H, E, g, e, mu, epsilon, rho = perturbed(seed)
        solved = conjugate_gradient((H + E).matmul, g + e, iterations=k, smallest_eigenvalue=mu - epsilon)
        moved = float((-solved.vector - update(H, g)).norm())
        xi = solved.error_bound
        assert moved <= approximate_solver_bound(float(g.norm()), mu, epsilon, rho, xi) * (1 + 1e-9), seed
        assert approximate_solver_bound(1.0, mu, epsilon, rho, 7.0) == perturbation_bound(1.0, mu, epsilon, rho) + 7.0


@given(
    condition=st.floats(1.0, 1e12),
    epsilon=st.floats(1e-12, 3.0),
)
@example(condition=1.0, epsilon=0.5)
@example(condition=1.0, epsilon=2.0)
@example(condition=1.0000000000000002, epsilon=1e-12)
@example(condition=9.0, epsilon=0.5)  # exactly the rate at 2
def test_iterations_for_is_the_least_that_the_rate_allows(condition: float, epsilon: float) -> None:
    count = iterations_for(condition, epsilon)
    assert cg_rate(condition, count) <= epsilon
    assert count == 0 or cg_rate(condition, count - 1) > epsilon


def test_the_papers_example_needs_27_iterations() -> None:
    assert iterations_for(condition=100.0, epsilon=0.01) == 27


def test_a_condition_beyond_all_digits_neither_hangs_nor_divides_by_zero() -> None:
    assert iterations_for(1e24, 0.01) == pytest.approx(0.5e12 * math.log(200), rel=1e-9)
    assert iterations_for(1e40, 0.01) > 1e20


@given(condition=st.floats(1.0, 1e8), iterations=st.integers(0, 1000))
def test_the_rate_is_the_formula(condition: float, iterations: int) -> None:
    root = math.sqrt(condition)
    expected = 2 * ((root - 1) / (root + 1)) ** iterations
    assert cg_rate(condition, iterations) == pytest.approx(expected, rel=1e-7, abs=1e-300)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (perturbation_bound, (1.0, 1.0, 1.0, 0.0)),
        (perturbation_bound, (1.0, 1.0, -0.1, 0.0)),
        (perturbation_bound, (1.0, 0.0, 0.0, 0.0)),
        (perturbation_bound, (1.0, 1.0, 0.5, -1.0)),
        (perturbation_bound, (-1.0, 1.0, 0.5, 0.0)),
        (perturbation_bound, (1.0, 1.0, 0.5, math.nan)),
        (perturbation_bound, (math.nan, 1.0, 0.5, 0.0)),
        (approximate_solver_bound, (1.0, 1.0, 0.5, 0.0, -1.0)),
        (approximate_solver_bound, (1.0, 1.0, 0.5, 0.0, math.nan)),
        (cg_rate, (0.99, 1)),
        (cg_rate, (2.0, -1)),
        (cg_rate, (math.nan, 1)),
        (cg_rate, (math.inf, 1)),
        (iterations_for, (2.0, 0.0)),
        (iterations_for, (2.0, math.nan)),
        (iterations_for, (0.5, 0.1)),
    ],
)
def test_outside_its_domain_each_refuses(function: object, arguments: tuple) -> None:
    with pytest.raises(RequestError):
        function(*arguments)
