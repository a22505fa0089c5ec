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

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from expunge.core.curvature import Kind
from expunge.core.krylov import NegativeCurvature, conjugate_gradient
from expunge.core.preconditioner import sketched
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import PRODUCT_COST
from expunge.unlearning.checks import refuse_idle, require_choice, require_flag, require_number, require_whole
from expunge.unlearning.estimate import Estimate, Size, drawn, recovered, renewing, searched, small_change
from expunge.unlearning.options import StepOptions
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
from expunge.unlearning.trust_region import Following, shortened, take, unsafe

GradientOf = Literal["forgotten", "retained"]
CurvatureOf = Literal["retained", "everyone"]
CausalWeights = Literal["share", "gradient-norm", "uniform"]


@dataclass(frozen=True)
class HfKcuOptions(StepOptions):
    """Options of the corrected step.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: how many retained samples the curvature uses, spread by client size, and how many others the
            trust region looks at; ``auto`` is a tenth of them, but 100 to 1000; None is all.
        tau: how much the retained loss may rise, in the loss's own unit; None takes the whole step.
        lengths: step lengths that are tried, longest first.
        recovery: a round of the clients that stay afterwards, or None.
        missing: what to do when a client that stays cannot be reached: ``refuse`` or ``leave-out``.
        seed: of the samples drawn.
        gradient_of: ``forgotten`` is the influence step; ``retained`` the Newton step on the retained objective, right
            for a convex model that was not trained to its end. At an optimum they are the same.
        causal_weights: how several owners' gradients combine: by their ``share`` of the data to forget, by
            ``gradient-norm`` (as printed), or ``uniform`` over all clients.
        curvature_of: whose curvature: that of the clients that stay, or ``everyone``'s.
        curvature: ``ggn`` (positive semi-definite) or ``hessian`` (as printed).
        negative_curvature: what conjugate gradient does when it meets any, with the Hessian.
        iterations: k of conjugate gradient.
        tolerance: relative residual at which it may stop early.
        preconditioner_rank: products spent on a Nystrom sketch before; 0 is none.
        influence_decay: False leaves the solve out: the step is the gradient over lambda.
        steps: how many steps, linearised anew; those after the first are Newton steps on the retained objective.
    """

    gradient_of: GradientOf = "forgotten"
    causal_weights: CausalWeights = "share"
    curvature_of: CurvatureOf = "retained"
    curvature: Kind = "ggn"
    negative_curvature: NegativeCurvature = "stop"
    iterations: int = 10
    tolerance: float = 0.0
    preconditioner_rank: int = 0
    influence_decay: bool = True
    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "gradient_of", GradientOf)
        require_choice(self, "causal_weights", CausalWeights)
        require_choice(self, "curvature_of", CurvatureOf)
        require_choice(self, "curvature", Kind)
        require_choice(self, "negative_curvature", NegativeCurvature)
        require_whole(self, "iterations", "steps")
        require_whole(self, "preconditioner_rank", least=0)
        require_number(self, "tolerance")
        require_flag(self, "influence_decay")
        if self.gradient_of == "retained":
            refuse_idle(self, ("causal_weights",), "the gradient of those who stay has no owners to weigh")
        if self.curvature == "ggn":
            refuse_idle(self, ("negative_curvature",), "the Gauss-Newton matrix has no negative curvature")
        if not self.influence_decay:
            solver = ("curvature_of", "curvature", "iterations", "tolerance", "preconditioner_rank")
            refuse_idle(self, solver, "without influence decay nothing is solved")

    @property
    def expected_rounds(self) -> int:
        """Message rounds that this takes at most; with batch norm it may be more."""
        solved = self.iterations + bool(self.preconditioner_rank) if self.influence_decay else 0
        searched = 3 if self.tau is not None else 0
        follows = 2 if self.recovery else 0
        again = follows + bool(follows) if searched else 0  # the whole step may be tried and repaired in vain
        return self.steps * (1 + solved + searched) + follows + again


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
            taken = take(stay, model, {name: step}, options.tau, options.lengths, following if last else None)
            details["steps"].append({"contributions": contributions, **record, **taken.record})
            if taken.length is None:
                break
            warnings.extend(shortened(taken, options.tau))
            model = taken.model
    details |= taken.repairs
    if taken.length is None:
        return unsafe("hf-kcu", state, cost, details)
    warnings.extend(memory_warnings(parties, taken.memory))
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


def component_ablation() -> dict[str, HfKcuOptions]:
    """The component ablation of the corrected step: each row takes one component away.

    Influence decay is the wearing-down of the influence by the curvature; uniform influence weighs all clients alike.

    Example:
        >>> list(component_ablation())[1:3]
        ['without causal weighting', 'without adaptive scaling']
    """
    return {
        "full": HfKcuOptions(),
        "without causal weighting": HfKcuOptions(curvature_of="everyone"),
        "without adaptive scaling": HfKcuOptions(tau=None),
        "without influence decay": HfKcuOptions(influence_decay=False),
        "uniform influence": HfKcuOptions(causal_weights="uniform"),
    }


def _estimate(options: HfKcuOptions, size: Size) -> Estimate:
    """What it costs at most: gradients once, products and losses on draws."""
    products = options.iterations + options.preconditioner_rank if options.influence_decay else 0
    gone = size.forgotten if options.curvature_of == "everyone" else 0
    each = products * PRODUCT_COST * (drawn(options, size) + gone) + 2 * searched(options, size)
    first = size.samples if options.gradient_of == "retained" else size.forgotten
    work = first + options.steps * each + (options.steps - 1) * size.samples + 2 * recovered(options, size)
    vectors = 1 + options.steps * (2 + products) + (4 if options.recovery else 0)
    replies = options.steps * (1 + products) + (2 if options.recovery else 0)
    renewed = options.steps * renewing(options, size)
    everyone, messages = size.clients + size.owners, options.expected_rounds + renewed
    down = (vectors + 2 * renewed) * size.vector + small_change(messages)
    up = (replies + renewed) * size.vector + small_change(messages)
    return Estimate(messages, down * everyone, up * everyone, work)


register(
    Method(
        "hf-kcu",
        hf_kcu,
        HfKcuOptions(),
        "the paper's step corrected: one gradient of the data to forget, solved by Krylov iterations",
        asks_owners=True,
        estimate=_estimate,
    ),
    recovery=True,
)
