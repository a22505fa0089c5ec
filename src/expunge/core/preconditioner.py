"""A randomised Nystrom preconditioner for damped conjugate gradient (Frangella, Tropp, Udell 2023).

A sketch of a few products finds the operator's large eigenvalues; dividing them out leaves CG with the flat
rest. The sketch depends on the operator alone, so it serves every right side that comes later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.krylov import Product
from expunge.errors import NumericalError, RequestError


@dataclass(frozen=True)
class Nystrom:
    """``A ~ U diag(values) U'`` and the preconditioner that it gives at a damping.

    Example:
        >>> A = torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0]))
        >>> sketch = nystrom(lambda rows: rows @ A, torch.zeros(4), rank=2, generator=torch.Generator().manual_seed(0))
        >>> bool(90 < sketch.values[0] <= 100.001)
        True
    """

    basis: Tensor
    values: Tensor

    def preconditioner(self, damping: float) -> Product:
        """``P^-1 = (l_min + damping) U (diag(l) + damping)^-1 U' + (I - U U')``, l the sketched eigenvalues."""
        if not self.values[-1] + damping > 0:
            raise RequestError(
                f"A sketch that reaches the operator's null space needs a damping above 0, not {damping}."
            )
        factors = (self.values[-1] + damping) / (self.values + damping) - 1

        def apply(vector: Tensor) -> Tensor:
            return vector + self.basis @ (factors * (self.basis.T @ vector))

        return apply


def nystrom(product: Product, like: Tensor, *, rank: int, generator: torch.Generator) -> Nystrom:
    """Sketch a positive semi-definite operator with ``rank`` products.

    Args:
        product: rows times A: one call with all test vectors, so that it can be one message.
        like: any vector of the right length, dtype and device.
        rank: how many products to spend.
        generator: source of the random test vectors.
    """
    if not 1 <= rank <= like.numel():
        raise RequestError(f"The sketch's rank must lie between 1 and {like.numel()}, not {rank}.")
    random = torch.randn(like.numel(), rank, generator=generator, dtype=torch.float64).to(like)
    test = torch.linalg.qr(random).Q
    image = product(test.T).T
    # A shift of the size of rounding keeps the Cholesky factor real; it is taken off the values again.
    shift = torch.finfo(like.dtype).eps * float(torch.linalg.matrix_norm(image)) * like.numel() ** 0.5
    shifted = image + shift * test
    core = test.T @ shifted
    factor, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
    if failed:
        raise NumericalError("The sketch needs a finite, positive semi-definite operator: use the GGN.")
    half = torch.linalg.solve_triangular(factor, shifted.T, upper=False).T
    basis, singular, _ = torch.linalg.svd(half, full_matrices=False)
    return Nystrom(basis, (singular.square() - shift).clamp(min=0.0))


def sketched(product: Product, like: Tensor, damping: float, *, rank: int, seed: int) -> Product | None:
    """A preconditioner from a sketch of that rank; None where it is 0."""
    if not rank:
        return None
    sketch = nystrom(product, like, rank=rank, generator=torch.Generator().manual_seed(seed))
    return sketch.preconditioner(damping)
