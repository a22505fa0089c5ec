import pytest
import torch
from torch import Tensor

from cases import SPECTRA, System, system
from expunge.core.krylov import conjugate_gradient
from expunge.core.preconditioner import Nystrom, nystrom
from expunge.errors import NumericalError, RequestError


def sketch(problem: System, rank: int, seed: int = 0) -> Nystrom:
    generator = torch.Generator().manual_seed(seed)
    return nystrom(lambda rows: rows @ problem.matrix, problem.right_side, rank=rank, generator=generator)


def low_rank() -> System:
    return system(torch.cat([torch.zeros(25), torch.tensor([1.0, 2.0, 5.0, 20.0, 100.0])]), seed=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kappa", "ratio_in_paper"),
    [(50, 28 / 35), (200, 42 / 71), (1000, 68 / 158), (5000, 112 / 354), (20_000, 189 / 707)],
)
def test_fewer_iterations_as_in_the_papers_figure(kappa: int, ratio_in_paper: float, seed: int) -> None:
    """Geometric spectrum, 300 unknowns, relative residual 1e-4, rank 130, whose 130 products are not counted.

    Without a preconditioner this family needs 34, 67, 139, 283 and 515 iterations, near the paper's 35 to 707.
    """
    problem = system(SPECTRA["geometric"](300, float(kappa), torch.Generator()), seed)
    preconditioner = sketch(problem, rank=130, seed=seed).preconditioner(damping=0.0)

    def iterations(**options: object) -> int:
        found = conjugate_gradient(
            problem.product, problem.right_side, iterations=1000, tolerance=1e-4, smallest_eigenvalue=1.0, **options
        )
        assert found.status == "converged"
        assert (found.vector - problem.solution()).norm() <= found.error_bound
        return found.iterations

    assert iterations(preconditioner=preconditioner) <= ratio_in_paper * iterations()


@pytest.mark.parametrize("damping", [0.0, 1e-3, 10.0])
def test_it_is_symmetric_positive_definite_and_the_formula(damping: float) -> None:
    problem = system(SPECTRA["geometric"](30, 1e4, torch.Generator()), seed=1)
    found = sketch(problem, rank=8)
    identity = torch.eye(30).double()
    dense = torch.stack([found.preconditioner(damping)(row) for row in identity])
    assert torch.allclose(dense, dense.T, atol=1e-14)
    assert torch.linalg.eigvalsh(dense)[0] > 0
    U, smallest = found.basis, found.values[-1] + damping
    expected = smallest * U @ torch.diag(1 / (found.values + damping)) @ U.T + identity - U @ U.T
    assert torch.allclose(dense, expected, atol=1e-12)


@pytest.mark.parametrize("rank", [5, 8, 30])
def test_a_rank_that_suffices_gives_the_operator_itself(rank: int) -> None:
    problem = low_rank()
    found = sketch(problem, rank)
    assert torch.allclose(found.basis * found.values @ found.basis.T, problem.matrix, atol=1e-10)
    assert found.values[:5].tolist() == pytest.approx([100.0, 20.0, 5.0, 2.0, 1.0], rel=1e-9)
    assert torch.allclose(found.basis.T @ found.basis, torch.eye(rank).double(), atol=1e-12)


def test_one_that_knows_the_operator_needs_two_steps_at_most() -> None:
    problem = low_rank()
    preconditioner = sketch(problem, rank=6).preconditioner(damping=0.1)
    found = conjugate_gradient(
        problem.product, problem.right_side, iterations=9, damping=0.1, tolerance=1e-9, preconditioner=preconditioner
    )
    assert found.status == "converged"
    assert found.iterations <= 2


def test_the_sketch_never_exceeds_the_operator_and_costs_one_call_of_rank_rows() -> None:
    problem = system(SPECTRA["uniform"](20, 100.0, torch.Generator().manual_seed(0)), seed=2)
    calls: list[int] = []

    def product(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return rows @ problem.matrix

    found = nystrom(product, problem.right_side, rank=7, generator=torch.Generator().manual_seed(0))
    assert calls == [7]
    remainder = problem.matrix - found.basis * found.values @ found.basis.T
    assert torch.linalg.eigvalsh(remainder)[0] >= -1e-10 * 100
    again = sketch(problem, rank=7)
    assert torch.equal(found.values, again.values)


@pytest.mark.parametrize("rank", [0, -1, 31])
def test_ranks_outside_the_dimension_are_refused(rank: int) -> None:
    with pytest.raises(RequestError, match="between 1 and 30"):
        sketch(low_rank(), rank)


def test_the_null_space_needs_damping() -> None:
    with pytest.raises(RequestError, match="damping above 0"):
        sketch(low_rank(), rank=10).preconditioner(damping=0.0)


@pytest.mark.parametrize("factor", [-1.0, 0.0, float("nan")])
def test_an_operator_that_is_not_positive_semi_definite_is_refused(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(NumericalError, match="semi-definite"):
        nystrom(lambda rows: factor * rows, torch.zeros(5), rank=2, generator=generator)
