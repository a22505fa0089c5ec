"""HF-KCU corrected: a Hessian-free influence step by Krylov iterations (Algorithm 1 with its faults mended).

With D_u the data to forget, w_u its share of all samples, G_r the Gauss-Newton matrix of the clients that stay and
lambda the damping, removing D_u moves the optimum, to first order, by

    theta' = theta + t w_u/(1-w_u) (G_r + lambda)^-1 grad L_u(theta)

(Koh & Liang 2017 with the sign of down-weighting). The linear system is solved by k iterations of conjugate gradient,
each a product that the clients compute and the server sums. Several owners combine by their share of D_u. Further
steps are Newton steps on the retained objective, linearised anew.

Where it fails: it sees nothing where the forgotten data is fitted perfectly (its gradient vanishes), and is wrong where
several local steps keep FedAvg from a stationary point. retrace.py needs neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expunge.core.krylov import conjugate_gradient
from expunge.core.preconditioner import sketched
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.recipe import FedAvgM
from expunge.unlearning.hf_kcu_options import HfKcuOptions, estimate
from expunge.unlearning.owners import causal_weights, owners_gradients
from expunge.unlearning.preparation import (
    away_warnings,
    forgotten_memory,
    memory_warnings,
    prepared,
    require_reachable,
    require_single_replies,
)
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.repair import RecoveryRound
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained
from expunge.unlearning.trust_region import Bounds, Following, shortened, take, unsafe

MOMENTUM = (
    "The server had a momentum, and hf-kcu's step knows of none: half or more of the data was left where that was "
    "measured, and those who stay lost by it. Use retrace, where vectors or checkpoints were kept, or retrain."
)


def hf_kcu(engine: Engine, state: ServerState, request: Request, options: HfKcuOptions) -> Outcome:
    """Forget clients or samples by the corrected influence step.

    Args:
        engine: reaches the clients, those who leave once.
        state: the trained model with its schedule; it is left untouched.
        request: what is to be forgotten.
        options: the solver, the trust region, what follows.
    """
    parties = prepared(engine, state, request, leave_out=options.missing == "leave-out")
    require_reachable(parties)
    require_single_replies(engine, state, asks_for_them=options.recovery is not None)
    repairs = {}
    if options.recovery is not None:
        repairs["recovery"] = RecoveryRound(options.recovery.plan(state), options.recovery.lengths)
    damping, stay = options.damping_of(state), Retained.of(engine, state, parties)
    stay = replace(stay, samples=options.samples(sum(stay.left.values())), seed=options.seed)
    following = Following(
        state.model,
        lambda: forgotten_memory(state, parties),
        lambda _: repairs,
        bool(repairs) and options.influence_decay,
    )
    details: dict[str, Any] = {"source": "gradient", "solver": "krylov", "curvature_samples": stay.samples}
    details |= {"damping": damping, "steps": []}
    model, warnings = state.model, list(away_warnings(state, parties))
    with measured(engine) as cost:
        for number in range(options.steps):
            # Lines 2 to 16: the influence of the data to forget, solved by k Krylov iterations.
            gradient, contributions = _gradient(stay, model, parties, options, number)
            step, record = _solved(stay, model, gradient, damping, options)
            # Lines 17 to 25: adaptive scaling, and the update.
            last = number == options.steps - 1
            name = "damped" if options.influence_decay else "none"
            taken = take(stay, model, {name: step}, Bounds(options.tau, options.lengths), following if last else None)
            details["steps"].append({"contributions": contributions, **record, **taken.record})
            if taken.length is None:
                break
            warnings.extend(shortened(taken, options.tau))
            model = taken.model
    details |= taken.repairs
    if taken.length is None:
        return unsafe("hf-kcu", state, cost, details)
    warnings.extend(memory_warnings(parties, taken.memory))
    server = state.trained_by.server
    warnings.extend((MOMENTUM,) if isinstance(server, FedAvgM) and server.momentum > 0 else ())
    return Outcome("hf-kcu", state.moved(model, taken.memory), cost, details=details, warnings=tuple(warnings))


def _gradient(
    stay: Retained, model: Snapshot, parties: Parties, options: HfKcuOptions, number: int
) -> tuple[Tensor, dict[str, float]]:
    """What the system's right side is, and how much each client contributed to it."""
    if options.gradient_of == "retained" or number > 0:
        gradient = stay.gradient(model)
        return gradient, dict.fromkeys(stay.clients, float(torch.linalg.vector_norm(gradient)))
    gradients, norms = owners_gradients(stay.engine, model, parties)
    alphas = causal_weights(options.causal_weights, parties, norms)
    factors = {name: -parties.mass / (1 - parties.mass) * alpha for name, alpha in alphas.items()}
    total = weighted_sum(gradients.values(), (factors[name] for name in gradients))
    return total, {name: abs(factors[name]) * norms[name] if name in norms else 0.0 for name in parties.counts}


def _solved(
    stay: Retained, model: Snapshot, gradient: Tensor, damping: float, options: HfKcuOptions
) -> tuple[Tensor, dict[str, Any]]:
    """``(G + lambda)^-1 g`` by conjugate gradient, and its diagnosis."""
    if not options.influence_decay:
        if damping == 0:
            raise RequestError("Without damping there is no unfiltered influence: give a damping above 0.")
        return gradient / damping, {}
    whose = stay if options.curvature_of == "retained" else stay.with_everyone()
    product = whose.product(model, options.curvature)
    solution = conjugate_gradient(
        product,
        gradient,
        iterations=options.iterations,
        damping=damping,
        tolerance=options.tolerance,
        preconditioner=sketched(product, gradient, damping, rank=options.preconditioner_rank, seed=options.seed),
        negative_curvature=options.negative_curvature,
        smallest_eigenvalue=0.0 if options.curvature == "ggn" else None,
    )
    return solution.vector, {"solves": {"server": solution.diagnosis()}}


register(
    Method(
        "hf-kcu",
        hf_kcu,
        HfKcuOptions(),
        "the paper's step corrected: one gradient of the data to forget, solved by Krylov iterations",
        asks_owners=True,
        estimate=estimate,
    ),
    recovery=True,
)
