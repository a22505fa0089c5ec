"""The options of the corrected step, and what it costs at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expunge.core.curvature import Kind
from expunge.core.krylov import NegativeCurvature
from expunge.federation.messages.tasks import PRODUCT_COST
from expunge.unlearning.checks import refuse_idle, require_choice, require_flag, require_number, require_whole
from expunge.unlearning.estimate import Estimate, Size, drawn, recovered, renewing, searched, small_change
from expunge.unlearning.options import StepOptions

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


def estimate(options: HfKcuOptions, size: Size) -> Estimate:
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
