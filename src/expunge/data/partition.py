"""How the training samples are dealt out to the clients."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expunge.errors import RequestError

_TRIES = 100
_LARGEST_ALPHA = 1e9  # beyond about 1e300 the gamma draws behind a Dirichlet overflow

Indices = NDArray[np.int64]


def dirichlet(labels: Tensor, clients: int, alpha: float, seed: int, minimum: int = 10) -> list[Tensor]:
    """Split samples over clients with label skew (Hsu et al. 2019; Yurochkin et al. 2019).

    For each class c, proportions p_c ~ Dirichlet(alpha, ..., alpha) over the clients are drawn, and the
    shuffled samples of that class are cut accordingly. A small alpha gives each client few classes, a
    large one nearly equal shares of all. The whole draw is repeated until every client has `minimum`
    samples; when a hundred draws do not give that (tiny alpha, many clients), the last one is repaired by
    moving random samples from the largest client, so such splits are a little less skewed than asked.

    Args:
        labels: Class of every sample, (n,), integers.
        clients: How many clients.
        alpha: Concentration, above 0.
        seed: Equal seeds give equal splits.
        minimum: The fewest samples a client may have.

    Returns:
        One sorted int64 tensor of indices a client; every index is in exactly one of them.

    Raises:
        RequestError: When an argument is out of range, or there are fewer than `clients * minimum` samples.

    Example:
        >>> labels = torch.arange(100) % 10
        >>> parts = dirichlet(labels, clients=4, alpha=0.5, seed=0, minimum=5)
        >>> torch.cat(parts).sort().values.equal(torch.arange(100))
        True
        >>> min(len(part) for part in parts) >= 5
        True
    """
    _check(labels, clients, alpha, minimum)
    array = labels.detach().cpu().numpy()
    generator = np.random.default_rng(seed)
    by_class = [np.flatnonzero(array == label) for label in np.unique(array)]
    for _ in range(_TRIES):
        parts = _draw(by_class, clients, alpha, generator)
        if min(len(part) for part in parts) >= minimum:
            break
    else:
        parts = _repair(parts, minimum, generator)
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _draw(by_class: list[Indices], clients: int, alpha: float, generator: np.random.Generator) -> list[Indices]:
    shares: list[list[Indices]] = [[] for _ in range(clients)]
    for members in by_class:
        proportions = generator.dirichlet(np.full(clients, alpha))
        cuts = np.round(np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
        for share, piece in zip(shares, np.split(generator.permutation(members), cuts), strict=True):
            share.append(piece)
    # The empty array is for the split of no samples at all, which concatenate would refuse.
    return [np.concatenate([np.empty(0, np.int64), *share]) for share in shares]


def _repair(parts: list[Indices], minimum: int, generator: np.random.Generator) -> list[Indices]:
    """Fill up poor clients from the largest; ends because there are `clients * minimum` samples in all."""
    parts = list(parts)
    for poor in range(len(parts)):
        while (lacking := minimum - len(parts[poor])) > 0:
            rich = max(range(len(parts)), key=lambda client: len(parts[client]))
            given = min(lacking, len(parts[rich]) - minimum)
            shuffled = generator.permutation(parts[rich])
            parts[poor] = np.concatenate([parts[poor], shuffled[:given]])
            parts[rich] = shuffled[given:]
    return parts


def _check(labels: Tensor, clients: int, alpha: float, minimum: int) -> None:
    if labels.dim() != 1 or labels.is_floating_point():
        raise RequestError(f"Labels must be one integer a sample, not {labels.dtype} {tuple(labels.shape)}.")
    if clients < 1 or minimum < 0:
        raise RequestError(f"Ask for at least one client and no negative minimum, not {clients} and {minimum}.")
    if not 0 < alpha <= _LARGEST_ALPHA:
        raise RequestError(f"Choose a Dirichlet alpha above 0 and at most {_LARGEST_ALPHA:g}, not {alpha:g}.")
    if clients * minimum > len(labels):
        raise RequestError(
            f"{len(labels)} samples do not give {clients} clients {minimum} each: "
            "take fewer clients or a smaller minimum."
        )
