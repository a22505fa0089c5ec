"""The client's influence and its filter, asked for through an Engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.krylov import Product, Solution, conjugate_gradient, lanczos
from expunge.core.preconditioner import nystrom
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, ask_each, ask_factors, ask_mean
from expunge.federation.messages.tasks import CurvatureFactors, CurvatureProduct, Draw, Gradient, Indices, Sum
from expunge.federation.training.plan import Schedule
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.request import Parties

Function = Callable[[Tensor], Tensor]

ON_THE_WAY = 0.5
"""The least factor by which outputs are scaled where the curvature of the training's way is wanted.

A client's pull was worn down by the curvature of that way, not by that of its end, where a model that fits its samples
has nearly none. The value was chosen, not derived (docs/method.md).
"""


@dataclass(frozen=True, eq=False)
class Influence:
    """A right side of the filter's system ``(G + lambda) step = right_side``, and who contributed how much to it.

    ``known`` is the influence ``right_side / lambda`` itself where it is at hand (trajectory): CG then starts from it
    and has to find its curved part only, and it stays defined at lambda = 0.
    """

    right_side: Tensor
    contributions: dict[str, float]
    known: Tensor | None = None

    def unfiltered(self, damping: float) -> Tensor:
        """The influence itself."""
        if self.known is not None:
            return self.known
        if damping == 0:
            raise RequestError("Without damping there is no unfiltered influence: give a damping above 0.")
        return self.right_side / damping


def causal_weights(kind: str, parties: Parties, gradient_norms: Mapping[str, float]) -> dict[str, float]:
    """alpha_i of Eq. (causal weight) for every reachable client; exactly zero for those without data to forget.

    ``gradient-norm`` is the printed equation; ``share`` is ``|D_u in D_i| / |D_u|``, which makes the sum of weighted
    gradients the mean gradient over D_u; ``none`` weighs like ``share`` but its step is applied to all; ``uniform`` is
    1/N for everybody.
    """
    if kind == "uniform":
        return dict.fromkeys(parties.counts, 1.0 / len(parties.counts))
    parts: Mapping[str, float] = gradient_norms if kind == "gradient-norm" else parties.forgotten_counts
    total = sum(parts.values())
    return {name: parts[name] / total if total and name in parts else 0.0 for name in parties.counts}


def contribution_factors(
    options: HfKcuOptions, parties: Parties, gradient_norms: Mapping[str, float]
) -> dict[str, float]:
    """What stands before each owner's gradient: alpha_i times w_i as printed, or times ``-w_u/(1-w_u)``."""
    alphas = causal_weights(options.causal_weights, parties, gradient_norms)
    if options.update == "removal":
        return {name: -parties.mass / (1 - parties.mass) * alpha for name, alpha in alphas.items()}
    if options.causal_weights == "none":
        return alphas  # every client applies the step, and their weights add up to one
    everyone = sum(parties.counts.values())
    return {name: alpha * parties.counts[name] / everyone for name, alpha in alphas.items()}


def owners_gradients(engine: Engine, model: Snapshot, parties: Parties) -> dict[str, Tensor]:
    """Line 4 of Algorithm 1: each owner's mean gradient on its data to forget."""
    require_reachable(parties)
    tasks = {name: Gradient(model, only=indices) for name, indices in parties.owners.items()}
    return {name: reply.total / reply.count for name, reply in ask_each(engine, tasks, Sum).items()}


def forgotten_gradient(engine: Engine, model: Snapshot, parties: Parties, options: HfKcuOptions) -> Influence:
    """The owners' gradients, combined by the causal weights."""
    gradients = owners_gradients(engine, model, parties)
    norms = {name: float(torch.linalg.vector_norm(gradient)) for name, gradient in gradients.items()}
    factors = contribution_factors(options, parties, norms)
    total = weighted_sum(gradients.values(), (factors[name] for name in gradients))
    contributions = {name: abs(factors[name]) * norms[name] if name in norms else 0.0 for name in parties.counts}
    return Influence(total, contributions)


def retained_gradient(
    engine: Engine, model: Snapshot, parties: Parties, draws: Mapping[str, Draw | None] | None = None
) -> Influence:
    """The gradient of the retained objective (on draws): its Newton step is right away from an optimum, too."""
    tasks = {
        name: Gradient(model, exclude=left_out, draw=None if draws is None else draws[name])
        for name, left_out in parties.retained.items()
    }
    mean = ask_mean(engine, tasks)
    return Influence(mean, dict.fromkeys(parties.retained, float(torch.linalg.vector_norm(mean))))


def require_reachable(parties: Parties) -> None:
    """The gradient source needs the owners' data once."""
    gone = [name for name in parties.owners if name not in parties.counts]
    if gone:
        raise RequestError(
            f"Client {gone[0]!r} cannot be reached, and the gradient source needs its data once: "
            "use the trajectory source, which does not."
        )


def survives(kind: str, damping: float, schedule: Schedule | None) -> Function:
    """How much of a pull is left along directions of curvature e, by the chosen filter.

    Example:
        >>> survives("damped", 0.5, None)(torch.tensor([0.0, 0.5]))
        tensor([1.0000, 0.5000])
    """
    if damping == 0:
        raise RequestError("Without damping there is no filter: give a damping above 0.")

    def damped(curvature: Tensor, factor: float = 1.0) -> Tensor:
        return factor * damping / (curvature + factor * damping)

    if kind == "damped":
        return damped
    if schedule is None:
        raise RequestError("The filter of the rounds needs the training's learning rate, local steps and rounds.")
    if kind == "rounds":
        return schedule.survival
    return lambda curvature: (schedule.survival(curvature) + damped(curvature, 5.0)) / 2


def apply_filter(
    product: Product, influence: Influence, damping: float, schedule: Schedule | None, options: HfKcuOptions
) -> tuple[Tensor, Solution | None]:
    """``lambda (G + lambda)^-1`` of the influence by CG, any other filter by Lanczos."""
    if options.filter == "damped":
        solution = conjugate_gradient(
            product,
            influence.right_side,
            iterations=options.iterations,
            damping=damping,
            tolerance=options.tolerance,
            start=influence.known,
            preconditioner=_preconditioner(product, influence.right_side, damping, options),
            negative_curvature=options.negative_curvature,
            smallest_eigenvalue=0.0 if options.curvature == "ggn" else None,
        )
        return solution.vector, solution
    survived = survives(options.filter, damping, schedule)
    return lanczos(product, influence.unfiltered(damping), options.iterations).apply(survived), None


def kronecker_curvature(
    engine: Engine, model: Snapshot, clients: Mapping[str, Indices], counts: Mapping[str, int], options: HfKcuOptions
) -> KroneckerCurvature:
    """The curvature of these clients' samples layer by layer, each client by its size: one message.

    A stand-in for that of the way to the model for a pull from along it, the model's own for a gradient taken there.
    """
    assert options.source != "auto", "hf_kcu decides before it asks"
    draws, smallest = spread(options, clients, counts), ON_THE_WAY if options.source == "trajectory" else 1.0
    tasks = {
        name: CurvatureFactors(model, derived_seed(options.seed, "targets", name), draws[name], left_out, smallest)
        for name, left_out in clients.items()
    }
    return KroneckerCurvature(ask_factors(engine, tasks), model.layers())


def curvature_product(
    engine: Engine, model: Snapshot, clients: Mapping[str, Indices], counts: Mapping[str, int], options: HfKcuOptions
) -> Product:
    """``v -> G v`` (or rows times G) over these clients' samples, each client by its size: one message a call."""
    draws = spread(options, clients, counts)

    def product(vector: Tensor) -> Tensor:
        rows = vector if vector.dim() == 2 else vector[None]
        tasks = {
            name: CurvatureProduct(model, rows, options.curvature, draws[name], left_out)
            for name, left_out in clients.items()
        }
        return ask_mean(engine, tasks).view_as(vector)

    return product


def spread(
    options: HfKcuOptions, clients: Mapping[str, Indices], counts: Mapping[str, int], from_back: bool = False
) -> dict[str, Draw | None]:
    """Draws of about ``options.samples`` in all, by client size, at least one each; None is everything."""
    samples = options.samples
    assert samples != "auto", "hf_kcu decides before it draws"
    left = {name: counts[name] - len(left_out) for name, left_out in clients.items()}
    total = sum(left.values())
    if samples is None or samples >= total:
        return dict.fromkeys(clients)
    return {name: Draw(math.ceil(samples * count / total), options.seed, from_back) for name, count in left.items()}


def _preconditioner(product: Product, like: Tensor, damping: float, options: HfKcuOptions) -> Product | None:
    if not options.preconditioner_rank:
        return None
    generator = torch.Generator().manual_seed(options.seed)
    sketch = nystrom(product, like, rank=options.preconditioner_rank, generator=generator)
    return sketch.preconditioner(damping)
