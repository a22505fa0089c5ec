import math

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from cases import SPECTRA, System, random_system, system
from expunge.core.bounds import cg_rate
from expunge.core.krylov import NEGATIVE_CURVATURE, Solution, conjugate_gradient, lanczos, lanczos_of_rows
from expunge.errors import NumericalError, RequestError

EPS = torch.finfo(torch.float64).eps
INDEFINITE = system(torch.tensor([-2.0, 1.0, 3.0, 4.0, 7.0, 11.0]), seed=0)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def solve(problem: System, iterations: int, **options: object) -> Solution:
    return conjugate_gradient(problem.product, problem.right_side, iterations=iterations, **options)


@pytest.mark.parametrize("part", range(10))
def test_the_theorems_hold_in_a_thousand_random_problems(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        problem = random_system(seed)
        smallest = float(problem.eigenvalues.min())
        # A third of the problems each: no damping, a little, and as much as the matrix is large.
        damping = float(problem.eigenvalues.max()) * (0.0, 1e-3, 1.0)[(seed // 3) % 3]
        spectrum = problem.eigenvalues + damping
        condition = float(spectrum.max() / spectrum.min())
        exact = problem.solution(damping)
        start = None if seed % 2 else torch.roll(problem.right_side, 1)
        first_error = exact if start is None else start - exact
        rounding = 100 * EPS * condition

        def energy(error: Tensor, problem: System = problem, damping: float = damping) -> float:
            return math.sqrt(error @ (problem.product(error) + damping * error))

        for k in (1, 2, 3, 5, 8, 13, 21):
            found = solve(problem, k, damping=damping, start=start, smallest_eigenvalue=smallest)
            error = found.vector - exact
            bound = cg_rate(condition, found.iterations) * energy(first_error)
            assert energy(error) <= bound * (1 + 1e-9) + rounding * (energy(exact) + energy(first_error)), (seed, k)
            size = exact.norm() + first_error.norm()
            assert error.norm() <= found.error_bound * (1 + 1e-9) + rounding * size, (seed, k)
            assert found.ritz_values[0] >= spectrum.min() * (1 - 1e-9), (seed, k)
            assert found.ritz_values[-1] <= spectrum.max() * (1 + 1e-9), (seed, k)
            assert found.condition_estimate <= condition * (1 + 1e-9), (seed, k)
            assert found.products == found.iterations + (start is not None), (seed, k)
            assert found.smallest_curvature >= smallest * (1 - 1e-9) - EPS * damping * 10, (seed, k)


@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_n_steps_solve_exactly_and_find_the_spectrum(spectrum: str, damping: float) -> None:
    problem = system(SPECTRA[spectrum](8, 30.0, torch.Generator().manual_seed(0)), seed=1)
    found = solve(problem, 8, damping=damping)
    exact = problem.solution(damping)
    assert (found.vector - exact).norm() < 1e-10 * exact.norm()
    if spectrum != "clustered":  # all eigenvalues are simple and well apart
        expected = (problem.eigenvalues + damping).sort().values
        assert vector(*found.ritz_values) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("with_start", [False, True])
def test_scipy_makes_the_same_iterates(damping: float, with_start: bool) -> None:
    problem = system(SPECTRA["geometric"](40, 200.0, torch.Generator()), seed=2)
    start = torch.roll(problem.right_side, 3) if with_start else None
    theirs: list[np.ndarray] = []
    scipy.sparse.linalg.cg(
        problem.matrix.numpy() + damping * np.eye(40),
        problem.right_side.numpy(),
        x0=None if start is None else start.numpy(),
        rtol=0.0,
        maxiter=15,
        callback=lambda iterate: theirs.append(iterate.copy()),
    )
    assert len(theirs) == 15
    for k, iterate in enumerate(theirs, start=1):
        ours = solve(problem, k, damping=damping, start=start).vector.numpy()
        assert np.linalg.norm(ours - iterate) < 1e-10 * np.linalg.norm(iterate), k


@pytest.mark.parametrize("with_start", [False, True])
def test_residual_norms_are_those_of_the_iterates(with_start: bool) -> None:
    problem = system(SPECTRA["uniform"](20, 50.0, torch.Generator().manual_seed(3)), seed=3)
    start = torch.ones(20).double() if with_start else None
    norms = solve(problem, 10, damping=0.3, start=start).residual_norms
    assert len(norms) == 11
    first = problem.right_side if start is None else problem.right_side - problem.product(start) - 0.3 * start
    assert norms[0] == pytest.approx(float(first.norm()), rel=1e-14)
    for k in range(1, 11):
        x = solve(problem, k, damping=0.3, start=start).vector
        assert norms[k] == pytest.approx(float((problem.right_side - problem.product(x) - 0.3 * x).norm()), rel=1e-9)


def test_tolerance_stops_at_the_first_residual_below_it() -> None:
    problem = system(SPECTRA["geometric"](50, 100.0, torch.Generator()), seed=4)
    found = solve(problem, 50, tolerance=1e-3)
    goal = 1e-3 * float(problem.right_side.norm())
    assert found.status == "converged"
    assert found.residual_norms[-1] <= goal < found.residual_norms[-2]
    assert solve(problem, found.iterations - 1, tolerance=1e-3).status == "iterations"
    assert found.products == found.iterations == len(found.residual_norms) - 1


def test_iterations_beyond_rounding_are_not_made_and_the_ritz_values_stay_inside() -> None:
    problem = system(torch.linspace(1, 10, 10), seed=5)
    found = solve(problem, 500)
    assert found.status == "converged"
    assert found.products <= 15
    assert 1 - 1e-10 <= found.ritz_values[0] <= found.ritz_values[-1] <= 10 + 1e-10


def test_a_start_at_the_solution_costs_one_product() -> None:
    found = conjugate_gradient(lambda v: 2 * v, vector(2, 4), iterations=5, start=vector(1, 2))
    assert (found.status, found.products, found.iterations) == ("converged", 1, 0)
    assert torch.equal(found.vector, vector(1, 2))


def test_arguments_are_left_alone() -> None:
    problem = system(torch.linspace(1, 9, 9), seed=6)
    right_side, start = problem.right_side.clone(), torch.ones(9).double()
    solve(problem, 4, start=start, preconditioner=lambda r: r)
    assert torch.equal(problem.right_side, right_side)
    assert torch.equal(start, torch.ones(9).double())


def test_an_operator_that_returns_its_argument_is_no_trap() -> None:
    right_side = vector(1, 2, 3)
    assert torch.equal(conjugate_gradient(lambda v: v, right_side, iterations=3).vector, vector(1, 2, 3))
    assert torch.equal(lanczos(lambda v: v, right_side, 3).basis, (right_side / right_side.norm())[None])


def test_zero_right_side_is_said_and_costs_nothing() -> None:
    found = conjugate_gradient(lambda v: v, torch.zeros(3), iterations=5)
    assert (found.status, found.products, found.iterations) == ("zero-right-side", 0, 0)
    assert not found.vector.any()


def test_error_bound_only_where_a_positive_floor_is_known() -> None:
    def bound(smallest: float | None, damping: float = 0.0) -> float | None:
        problem = system(torch.linspace(1, 9, 9), seed=7)
        return solve(problem, 2, smallest_eigenvalue=smallest, damping=damping).error_bound

    assert bound(None) is None
    assert bound(None, damping=1.0) is None
    assert bound(0.0) is None
    assert bound(-1.0, damping=0.5) is None
    assert bound(-1.0, damping=1.5) > 0
    assert bound(1.0, damping=0.0) > 0


def test_single_precision_is_kept() -> None:
    found = conjugate_gradient(lambda v: 2 * v, torch.ones(3), iterations=2)
    assert found.vector.dtype == torch.float32
    assert lanczos(lambda v: v * torch.arange(1.0, 4.0), torch.ones(3), 2).apply(torch.sqrt).dtype == torch.float32


@pytest.mark.parametrize("damping", [0.0, 0.4])
def test_a_preconditioner_changes_the_way_not_the_solution(damping: float) -> None:
    problem = system(SPECTRA["geometric"](20, 100.0, torch.Generator()), seed=8)
    other = system(torch.linspace(0.5, 2, 20), seed=9)  # any positive definite matrix will do
    exact = problem.solution(damping)
    plain = solve(problem, 60, damping=damping)
    with_one = solve(problem, 60, damping=damping, preconditioner=other.product, smallest_eigenvalue=1.0)
    assert (plain.vector - exact).norm() < 1e-10 * exact.norm()
    assert (with_one.vector - exact).norm() < 1e-10 * exact.norm()
    early = solve(problem, 5, damping=damping, preconditioner=other.product, smallest_eigenvalue=1.0)
    assert (early.vector - solve(problem, 5, damping=damping).vector).norm() > 1e-3 * exact.norm()
    assert (early.vector - exact).norm() <= early.error_bound
    damped = problem.matrix + damping * torch.eye(20).double()
    spectrum = torch.linalg.eigvals(other.matrix @ damped).real
    assert spectrum.min() * (1 - 1e-9) <= early.ritz_values[0]
    assert early.ritz_values[-1] <= spectrum.max() * (1 + 1e-9)


def test_the_exact_inverse_as_preconditioner_needs_one_step() -> None:
    problem = system(torch.linspace(1, 100, 12), seed=10)
    found = solve(problem, 5, preconditioner=torch.linalg.inv(problem.matrix).matmul, tolerance=1e-10)
    assert (found.status, found.iterations) == ("converged", 1)


def test_stop_keeps_the_last_good_iterate() -> None:
    found = solve(INDEFINITE, 6, smallest_eigenvalue=None)
    assert found.status == "negative-curvature"
    assert 1 <= found.iterations < 6
    assert found.products == found.iterations + 1
    assert found.smallest_curvature < 0
    before = solve(INDEFINITE, found.iterations)
    assert before.status == "iterations"
    assert torch.equal(found.vector, before.vector)
    assert len(found.residual_norms) == found.iterations + 1


@pytest.mark.parametrize("eigenvalue", [-1.0, 0.0])
def test_stop_at_the_first_direction_is_an_error_and_never_a_silent_zero(eigenvalue: float) -> None:
    with pytest.raises(NumericalError, match="first direction"):
        conjugate_gradient(lambda v: eigenvalue * v, torch.ones(3), iterations=3)


@pytest.mark.parametrize("damping", [0.0, 0.25])
@pytest.mark.parametrize("with_start", [False, True])
def test_raise_damping_ends_with_a_positive_definite_system_and_counts_everything(
    damping: float, with_start: bool
) -> None:
    spent: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        spent.append(v)
        return INDEFINITE.product(v)

    found = conjugate_gradient(
        product,
        INDEFINITE.right_side,
        iterations=10,
        damping=damping,
        start=torch.ones(6).double() if with_start else None,
        negative_curvature="raise-damping",
        smallest_eigenvalue=-2.0,
    )
    assert found.status == "converged"
    assert found.damping > 2.0  # minus the smallest eigenvalue
    exact = INDEFINITE.solution(found.damping)
    assert (found.vector - exact).norm() < 1e-10 * exact.norm()
    assert found.products == len(spent) > found.iterations + with_start
    assert -2.0 - 1e-12 <= found.smallest_curvature < 0
    assert found.error_bound >= 0


@pytest.mark.parametrize("policy", ["stop", "raise-damping", "ignore"])
def test_no_curvature_at_all_ends_with_an_error(policy: str) -> None:
    with pytest.raises(NumericalError, match="curvature"):
        conjugate_gradient(torch.zeros_like, torch.ones(3), iterations=3, negative_curvature=policy)


def test_ignore_goes_on_through_negative_curvature() -> None:
    found = solve(INDEFINITE, 6, negative_curvature="ignore")
    exact = INDEFINITE.solution()
    assert found.iterations == 6
    assert found.smallest_curvature < 0
    assert (found.vector - exact).norm() < 1e-8 * exact.norm()
    assert found.condition_estimate is None
    assert found.ritz_values[0] == pytest.approx(-2.0, rel=1e-6)


@pytest.mark.parametrize("policy", NEGATIVE_CURVATURE)
def test_policies_do_not_matter_where_the_curvature_is_positive(policy: str) -> None:
    problem = system(torch.linspace(1, 9, 9), seed=11)
    found = solve(problem, 4, damping=0.1, negative_curvature=policy)
    assert found.damping == 0.1
    assert torch.equal(found.vector, solve(problem, 4, damping=0.1).vector)


@pytest.mark.parametrize(
    "bad",
    [
        {"iterations": 0},
        {"iterations": -1},
        {"damping": -1e-9},
        {"damping": math.nan},
        {"damping": math.inf},
        {"negative_curvature": "hope"},
    ],
    ids=str,
)
def test_bad_requests_are_refused(bad: dict) -> None:
    with pytest.raises(RequestError):
        conjugate_gradient(lambda v: v, torch.ones(2), **({"iterations": 1} | bad))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_product_that_is_not_finite_is_an_error(value: float) -> None:
    for start in (None, torch.ones(2)):
        with pytest.raises(NumericalError, match="NaN"):
            conjugate_gradient(lambda v: v * value, torch.ones(2), iterations=3, start=start)
    with pytest.raises(NumericalError, match="NaN"):
        lanczos(lambda v: v * value, torch.ones(2), 2)


FUNCTIONS = {
    "exp(-A)": lambda values: torch.exp(-values),
    "sqrt": torch.sqrt,
    "filter": lambda values: 0.5 / (values + 0.5),
    "inverse": lambda values: 1 / values,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_n_lanczos_steps_give_the_dense_function(spectrum: str, function: object) -> None:
    problem = system(SPECTRA[spectrum](25, 50.0, torch.Generator().manual_seed(0)), seed=12)
    values, vectors = torch.linalg.eigh(problem.matrix)
    exact = vectors @ (function(values) * (vectors.T @ problem.right_side))
    found = lanczos(problem.product, problem.right_side, 25)
    assert (found.apply(function) - exact).norm() < 1e-10 * exact.norm()


@pytest.mark.parametrize("k", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_lanczos_of_the_inverse_is_conjugate_gradient(k: int, damping: float) -> None:
    problem = system(SPECTRA["geometric"](60, 1000.0, torch.Generator()), seed=13)
    found = lanczos(problem.product, problem.right_side, k)
    by_cg = solve(problem, k, damping=damping)
    by_lanczos = found.apply(lambda values: 1 / (values + damping))
    assert (by_lanczos - by_cg.vector).norm() < 1e-8 * by_cg.vector.norm()
    ritz = torch.linalg.eigvalsh(found.matrix) + damping
    assert vector(*by_cg.ritz_values) == pytest.approx(ritz, rel=1e-6)


@pytest.mark.parametrize("k", [1, 7, 40])
def test_the_basis_is_orthonormal_and_the_matrix_is_the_operator_in_it(k: int) -> None:
    problem = system(SPECTRA["geometric"](40, 1e4, torch.Generator()), seed=14)
    spent: list[Tensor] = []
    found = lanczos(lambda v: spent.append(v) or problem.product(v), problem.right_side, k)
    assert len(spent) == len(found.basis) == k
    assert torch.allclose(found.basis @ found.basis.T, torch.eye(k).double(), atol=1e-13)
    assert torch.allclose(found.basis @ problem.matrix @ found.basis.T, found.matrix, atol=1e-10 * 1e4)
    assert found.start_norm == pytest.approx(float(problem.right_side.norm()))


@pytest.mark.parametrize("iterations", [4, 10, 40])
def test_an_invariant_subspace_ends_lanczos_early_with_the_exact_answer(iterations: int) -> None:
    problem = system(torch.tensor([1.0, 2.0, 5.0, 9.0]).repeat(5), seed=15)
    found = lanczos(problem.product, problem.right_side, iterations)
    assert len(found.basis) == 4
    assert found.matrix.shape == (4, 4)
    values, vectors = torch.linalg.eigh(problem.matrix)
    exact = vectors @ (values.sqrt() * (vectors.T @ problem.right_side))
    assert (found.apply(torch.sqrt) - exact).norm() < 1e-10 * exact.norm()


def test_the_zero_operator_is_an_invariant_subspace_too() -> None:
    found = lanczos(torch.zeros_like, vector(3, 4), 5)
    assert len(found.basis) == 1
    assert torch.allclose(found.apply(lambda values: torch.exp(-values)), vector(3, 4))


@pytest.mark.parametrize(("start", "iterations"), [(torch.ones(2), 0), (torch.zeros(2), 3)])
def test_lanczos_refuses_no_iterations_and_no_start(start: Tensor, iterations: int) -> None:
    with pytest.raises(RequestError):
        lanczos(lambda v: v, start, iterations)


def test_rows_side_by_side_are_what_each_is_alone_and_one_that_ends_is_not_asked_for_again() -> None:
    problem = system(torch.tensor([1.0, 2.0, 5.0, 9.0, 20.0]), seed=16)
    _, vectors = torch.linalg.eigh(problem.matrix)
    starts = torch.stack([problem.right_side, vectors[:, 1], vectors[:, 0] + vectors[:, 3]])
    asked: list[int] = []
    found = lanczos_of_rows(lambda rows: asked.append(len(rows)) or rows @ problem.matrix, starts, 4)
    assert asked == [3, 2, 1, 1]
    for start, own in zip(starts, found, strict=True):
        alone = lanczos(problem.product, start, 4)
        assert own.matrix.shape == alone.matrix.shape
        assert torch.allclose(own.apply(torch.sqrt), alone.apply(torch.sqrt), atol=1e-12)
    with pytest.raises(RequestError):
        lanczos_of_rows(lambda rows: rows, torch.stack([torch.ones(2), torch.zeros(2)]), 2)


def test_what_is_no_symmetric_matrix_is_refused() -> None:
    turned = torch.roll(torch.eye(6), 1, dims=0).double() + torch.eye(6).double()
    with pytest.raises(NumericalError, match="one symmetric matrix"):
        lanczos(lambda v: turned @ v, vector(1, 2, 0, 4, 0, 1), 5)
