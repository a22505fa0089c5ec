"""The switches of HF-KCU: every row of the component ablation is one of these objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from expunge.core.curvature import Kind
from expunge.core.krylov import NegativeCurvature
from expunge.errors import RequestError
from expunge.unlearning.recovery import Recovery

Source = Literal["auto", "gradient", "trajectory"]
GradientOf = Literal["forgotten", "retained"]
Update = Literal["removal", "printed"]
CurvatureOf = Literal["retained", "owners", "everyone"]
CausalWeights = Literal["share", "gradient-norm", "uniform", "none"]
Solver = Literal["auto", "krylov", "kronecker"]
Filter = Literal["auto", "damped", "rounds", "between"]
Scaling = Literal["trust-region", "norm", "none"]
Missing = Literal["refuse", "leave-out"]


@dataclass(frozen=True)
class HfKcuOptions:
    """Options of HF-KCU.

    Attributes:
        source: where the client's influence comes from; ``auto`` is trajectory where the vectors were kept.
        gradient_of: ``forgotten`` is the influence step; ``retained`` the Newton step on the retained objective, right
            for a convex model that was not trained to its end. At an optimum they are the same.
        update: ``removal`` is ``+w_u/(1-w_u) H^-1 g``; ``printed`` the paper's ``-H^-1 g`` with w_i in front.
        curvature_of: whose curvature: the clients that stay, each owner's own (printed), or everyone's.
        curvature: ``ggn`` (positive semi-definite) or ``hessian`` (printed).
        causal_weights: how several owners' gradients combine: by their ``share`` of the data to forget, by
            ``gradient-norm`` (printed), ``uniform`` over all clients, or ``none``: the step is applied to all clients.
        solver: ``krylov`` sees the curvature through k products, a message each; ``kronecker`` takes it apart layer by
            layer, from one message; ``auto`` is kronecker for the trajectory source, krylov for the gradient source.
        iterations: k of conjugate gradient or Lanczos; kronecker has none.
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        samples: how many retained samples the curvature uses, spread by client size, and how many others the trust
            region looks at (a short round has its own, batch-norm statistics take whole batches); ``auto`` is a tenth
            of them, but 100 to 1000 (kronecker: all, but at most 2000); None is all.
        filter: what is left of a pull along a direction of curvature e. ``damped`` is lambda/(e + lambda); ``rounds``
            the exact wearing-down of the rounds; ``between`` the mean of ``rounds`` and of ``damped`` with 5 lambda;
            ``auto`` is damped for krylov (by conjugate gradient, the others by Lanczos); for kronecker it is between,
            or damped where between costs those who stay too much.
        influence_decay: False leaves the influence unfiltered.
        scaling: ``trust-region`` takes the longest step that keeps the retained loss within tau, in the end where
            something follows that repairs it (repair.py); ``norm`` is the
            printed cap at beta ||theta||; ``none`` takes t = 1.
        beta: of ``norm``.
        tau: of ``trust-region``, in the loss's own unit: nats for cross-entropy.
        steps: re-linearised steps (gradient source); those after the first are Newton steps on the retained objective.
        tolerance: relative residual at which CG may stop early.
        negative_curvature: what CG does when it meets any.
        preconditioner_rank: products spent on a Nystrom sketch before CG; 0 is none.
        correction: whether a step of those who stay follows where the filtered step ended (correction.py), or a short
            round of theirs where that was a long one and the model has no batch norm (repair.py); it needs the
            trajectory source, kronecker factors and the trust region, and is left out elsewhere, also where a recovery
            round does the same with more.
        recovery: a round of the retained clients afterwards, or None.
        missing: what to do when a client that stays cannot be reached: ``refuse``, or ``leave-out``, which solves the
            problem of those who can be and says so.
        seed: of the samples drawn.
    """

    source: Source = "auto"
    gradient_of: GradientOf = "forgotten"
    update: Update = "removal"
    curvature_of: CurvatureOf = "retained"
    curvature: Kind = "ggn"
    causal_weights: CausalWeights = "share"
    solver: Solver = "auto"
    iterations: int = 10
    damping: float | None = None
    samples: int | Literal["auto"] | None = "auto"
    filter: Filter = "auto"
    influence_decay: bool = True
    scaling: Scaling = "trust-region"
    beta: float = 0.01
    tau: float = 0.05
    steps: int = 1
    tolerance: float = 0.0
    negative_curvature: NegativeCurvature = "stop"
    preconditioner_rank: int = 0
    correction: bool = True
    recovery: Recovery | None = None
    missing: Missing = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "source": Source,
            "gradient_of": GradientOf,
            "update": Update,
            "curvature_of": CurvatureOf,
            "curvature": Kind,
            "causal_weights": CausalWeights,
            "solver": Solver,
            "filter": Filter,
            "scaling": Scaling,
            "missing": Missing,
            "negative_curvature": NegativeCurvature,
        }
        for name, choice in choices.items():
            if getattr(self, name) not in get_args(choice):
                known = ", ".join(get_args(choice))
                raise RequestError(f"The option {name} can be {known}, not {getattr(self, name)!r}.")
        for name in ("iterations", "samples", "steps"):
            value = getattr(self, name)
            if name == "samples" and (value is None or value == "auto"):
                continue
            if not isinstance(value, int) or value < 1:
                raise RequestError(f"The option {name} must be at least 1, a whole number, not {value!r}.")
        for name in ("damping", "tau", "beta", "tolerance", "preconditioner_rank"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise RequestError(f"The option {name} must be a number of at least 0, not {value}.")
        if self.source == "trajectory" and (self.steps > 1 or self.curvature_of == "owners"):
            raise RequestError("The trajectory source takes one step with the curvature of the clients that stay.")
        if self.source == "trajectory" and (self.update == "printed" or self.negative_curvature == "raise-damping"):
            raise RequestError("The printed update and 'raise-damping' exist for the gradient source only.")
        if not isinstance(self.preconditioner_rank, int):
            raise RequestError(
                f"The option preconditioner_rank must be a whole number, not {self.preconditioner_rank}."
            )
        if self.filter in ("rounds", "between") and (self.curvature_of == "owners" or self.preconditioner_rank):
            raise RequestError("The filter of the rounds is applied on the server, without a preconditioner.")
        if self.solver == "kronecker" and not self.has_factors:
            raise RequestError("Kronecker factors exist for the Gauss-Newton matrix on the server, unpreconditioned.")

    @property
    def label(self) -> str:
        """The method's name in results."""
        kind = "paper" if self.update == "printed" else self.source
        return ("hf-kcu" if kind == "auto" else f"hf-kcu-{kind}") + ("+recovery" if self.recovery else "")

    @property
    def has_factors(self) -> bool:
        """Whether this curvature can be taken apart: the Gauss-Newton matrix, on the server, unpreconditioned."""
        return self.curvature == "ggn" and self.curvature_of != "owners" and not self.preconditioner_rank

    @property
    def expected_rounds(self) -> int:
        """Message rounds that this takes at most; where vectors decide, with vectors.

        With batch norm it may be more: each length that is tried has its statistics, and a message for its losses.
        """
        if self.curvature_of == "owners":
            each = 1
        elif self.solver == "kronecker" or (self.solver == "auto" and self.source != "gradient" and self.has_factors):
            each = 1 if self.source != "gradient" else 2
        else:
            each = 1 + (self.iterations + (1 if self.preconditioner_rank else 0) if self.influence_decay else 0)
        each += 3 if self.scaling == "trust-region" else 0
        follows = 2 if self.recovery else 4 if self.may_correct else 0  # a short round in vain, and then a correction
        if self.scaling == "trust-region":  # the sharper filter, or the whole step, may be tried in vain
            factored = self.solver == "kronecker" or (self.solver == "auto" and self.has_factors)
            twice = self.filter == "auto" and factored
            return self.steps * (each + twice) + 2 * follows + (1 if follows and not twice else 0)
        return self.steps * each + follows

    @property
    def may_correct(self) -> bool:
        """Whether these options allow for a correction or a short round, where the federation and its model do."""
        factored = self.solver == "kronecker" or (self.solver == "auto" and self.has_factors and self.influence_decay)
        searched = self.scaling == "trust-region" and self.recovery is None
        return self.correction and self.source != "gradient" and factored and searched

    def changed(self, **changes: Any) -> HfKcuOptions:
        """The same with some options changed; who asks for iterations, and for no solver, wants Krylov.

        Example:
            >>> HfKcuOptions().changed(iterations=20).solver
            'krylov'
        """
        if "iterations" in changes and self.solver == "auto":
            changes = {"solver": "krylov", **changes}
        return replace(self, **changes)

    def with_recovery(self, recovery: Recovery | None = None) -> HfKcuOptions:
        """The same with a recovery round afterwards."""
        return replace(self, recovery=recovery or Recovery())


PAPER = HfKcuOptions(
    source="gradient",
    update="printed",
    curvature_of="owners",
    curvature="hessian",
    causal_weights="gradient-norm",
    iterations=10,
    damping=0.01,
    samples=None,
    scaling="norm",
    beta=0.01,
    negative_curvature="ignore",
)
"""As printed: sign, scale and all."""

GRADIENT = HfKcuOptions(source="gradient", solver="krylov")
"""The corrected influence step: one gradient of the data to forget, filtered."""

TRAJECTORY = HfKcuOptions(source="trajectory", solver="krylov")
"""The vector kept while training, filtered: needs nothing of the client that leaves."""

UNFILTERED = HfKcuOptions(source="trajectory", solver="krylov", influence_decay=False, tau=0.5, recovery=Recovery())
"""A control: what the trajectory source does without its filter, in the longest step that tau allows."""


def component_ablation(full: HfKcuOptions) -> dict[str, HfKcuOptions]:
    """The rows of the component ablation: each takes one component away.

    Influence decay is the wearing-down of the influence by the filter; uniform influence weighs all clients alike.

    Example:
        >>> list(component_ablation(GRADIENT))[1:3]
        ['without causal weighting', 'without adaptive scaling']
    """
    return {
        "full": full,
        "without causal weighting": replace(full, causal_weights="none", curvature_of="everyone"),
        "without adaptive scaling": replace(full, scaling="none"),
        "without influence decay": replace(full, influence_decay=False),
        "uniform influence": replace(full, causal_weights="uniform"),
    }
