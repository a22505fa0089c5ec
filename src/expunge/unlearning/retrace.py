"""Retrace: a client's pull, kept while training, is retraced and taken back. Needs neither the client nor its data.

While training the server adds up one vector per client, ``A_u`` (federation/keeping/memory.py). To first order,
training without u would have ended at ``theta - f(G_r) A_u``: each round's pull is missing, worn down by what the
others trained afterwards, kept in directions that are flat for G_r, gone in curved ones (filters.py). So

    theta' = theta - t f(G_r) A_u,        then a repair by those who stay (repair.py)

with G_r the Gauss-Newton matrix of the clients that stay. `retrace` takes G_r apart layer by layer into Kronecker
factors (K-FAC): one message, and f is exact. `retrace-krylov` sees it through k products, a message each.

Where it fails: it assumes plain SGD at a constant rate on the clients and plain averaging on the server (FedAvg), whole
clients, and vectors recorded while training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.krylov import conjugate_gradient, lanczos
from expunge.core.preconditioner import sketched
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost, Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import FORWARD_COST, PRODUCT_COST
from expunge.federation.training.plan import Schedule
from expunge.unlearning.checks import (
    refuse_idle,
    require_choice,
    require_flag,
    require_number,
    require_rising,
    require_whole,
)
from expunge.unlearning.estimate import Estimate, Size, drawn, looked_at, recovered, renewing, searched, small_change
from expunge.unlearning.filters import filter_named
from expunge.unlearning.options import StepOptions
from expunge.unlearning.preparation import away_warnings, forgotten_memory, prepared, require_single_replies
from expunge.unlearning.recovery import RECOVERY_LENGTHS, Recovery
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.repair import CORRECTION_LENGTHS, PART, Correction, RecoveryRound, Repair, ShortRound
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained, has_statistics
from expunge.unlearning.trust_region import Following, Taken, shortened, take, unsafe

FactoredFilter = Literal["auto", "damped", "rounds", "blend"]
KrylovFilter = Literal["damped", "rounds", "blend", "none"]


@dataclass(frozen=True)
class RetraceOptions(StepOptions):
    """Options of retrace.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: how many retained samples the curvature uses, spread by client size, and how many others the
            trust region looks at (a short round has its own, batch-norm statistics take whole batches); ``auto`` is
            all of them, but at most 2000; None is all.
        tau: how much the retained loss may rise in the end, in the loss's own unit; None takes the whole step, and
            nothing is corrected.
        lengths: step lengths that are tried, longest first.
        recovery: a whole round of the clients that stay afterwards, in place of a correction; or None.
        missing: what to do when a client that stays cannot be reached: ``refuse`` or ``leave-out``.
        seed: of the samples drawn.
        filter: what is left of a pull along a direction of curvature e (filters.py): ``damped``, ``rounds`` or
            ``blend``; ``auto`` is blend, or damped where blend costs those who stay too much.
        min_logit_scale: a pull was worn down by the curvature of the training's way, not by that of its end, where a
            model that fits its samples has nearly none: outputs are scaled by factors from here to 1 as a stand-in.
            Chosen, not derived (docs/method.md).
        correction: whether a correction of those who stay follows, or a short round after a long step (repair.py).
        correction_lengths: how far a correction may be taken, from 0 on.
        long_step_ratio: a step longer than this share of the model's own length is a long one.
        round_lengths: how far a short round may be taken, from 0 on.
    """

    filter: FactoredFilter = "auto"
    min_logit_scale: float = 0.5
    correction: bool = True
    correction_lengths: tuple[float, ...] = CORRECTION_LENGTHS
    long_step_ratio: float = 0.1
    round_lengths: tuple[float, ...] = RECOVERY_LENGTHS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "filter", FactoredFilter)
        require_flag(self, "correction")
        require_rising(self, "correction_lengths", "round_lengths")
        if self.long_step_ratio != math.inf:  # nothing is a long step
            require_number(self, "long_step_ratio")
        require_number(self, "min_logit_scale")
        if not 0 < self.min_logit_scale <= 1:
            raise RequestError(f"The option min_logit_scale lies above 0 and is at most 1, not {self.min_logit_scale}.")
        if self.filter == "rounds":
            refuse_idle(self, ("damping",), "the filter of the rounds has none")
        if not self.may_correct:
            reason = "nothing is corrected without a correction, without tau, or beside a recovery"
            refuse_idle(self, ("correction_lengths", "long_step_ratio", "round_lengths"), reason)

    def auto_samples(self, left: int) -> int:
        """All retained samples, but at most 2000."""
        return min(max(left, 1), 2000)

    @property
    def may_correct(self) -> bool:
        """Whether a correction or a short round may follow, where the training's schedule is known."""
        return self.correction and self.tau is not None and self.recovery is None

    @property
    def expected_rounds(self) -> int:
        """Message rounds that this takes at most; with batch norm it may be more."""
        searched = 3 if self.tau is not None else 0
        follows = 2 if self.recovery else 4 if self.may_correct else 0  # a short round in vain, and then a correction
        twice = self.filter == "auto" and self.tau is not None  # the sharper filter may be tried in vain
        again = follows + (1 if follows and not twice else 0) if searched else 0
        return 1 + searched + twice + follows + again


@dataclass(frozen=True)
class RetraceKrylovOptions(StepOptions):
    """Options of retrace-krylov.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: as in retrace; ``auto`` is a tenth of the retained samples, but 100 to 1000.
        tau: how much the retained loss may rise, in the loss's own unit; None takes the whole step.
        lengths: step lengths that are tried, longest first.
        recovery: a round of the clients that stay afterwards, or None.
        missing: what to do when a client that stays cannot be reached: ``refuse`` or ``leave-out``.
        seed: of the samples drawn.
        filter: ``damped`` (by conjugate gradient), ``rounds`` or ``blend`` (by Lanczos), or ``none``: the bare pull.
        iterations: k of conjugate gradient or Lanczos.
        tolerance: relative residual at which conjugate gradient may stop early.
        preconditioner_rank: products spent on a Nystrom sketch before conjugate gradient; 0 is none.
    """

    filter: KrylovFilter = "damped"
    iterations: int = 10
    tolerance: float = 0.0
    preconditioner_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "filter", KrylovFilter)
        require_whole(self, "iterations")
        require_whole(self, "preconditioner_rank", least=0)
        require_number(self, "tolerance")
        if self.filter != "damped":
            refuse_idle(self, ("tolerance", "preconditioner_rank"), "only the damped filter is a linear system")
        if self.filter == "rounds":
            refuse_idle(self, ("damping",), "the filter of the rounds has none")
        if self.filter == "none":
            refuse_idle(self, ("iterations", "damping"), "the pull is not filtered")

    def auto_samples(self, left: int) -> int:
        """A tenth of the retained samples, but 100 to 1000."""
        return min(max(left // 10, 100), 1000)

    @property
    def expected_rounds(self) -> int:
        """Message rounds that this takes at most; with batch norm it may be more."""
        solved = 0 if self.filter == "none" else 1 + self.iterations + bool(self.preconditioner_rank)
        searched = 3 if self.tau is not None else 0
        follows = 2 if self.recovery else 0
        again = follows + bool(follows) if searched else 0
        return solved + searched + follows + again


@dataclass(frozen=True, eq=False)
class _Ready:
    """What is known once nothing can be refused any more."""

    state: ServerState
    parties: Parties
    stay: Retained
    pull: Tensor
    contributions: dict[str, float]
    recovery: Mapping[str, Repair]

    def following(self, repairs: Callable[[Snapshot], Mapping[str, Repair]], *, may_cost_more: bool) -> Following:
        """What follows the step: those who stay keep their vectors, without those who leave."""
        return Following(self.state.model, lambda: forgotten_memory(self.state, self.parties), repairs, may_cost_more)

    def outcome(self, taken: Taken, cost: Cost, tau: float | None, details: Mapping[str, Any]) -> Outcome:
        """What was done, or that no length of the step was safe."""
        step = {"contributions": self.contributions, **details.get("solves", {}), **taken.record}
        told: dict[str, Any] = {"source": "trajectory", "curvature_samples": self.stay.samples}
        told |= {name: value for name, value in details.items() if name != "solves"}
        told |= {"steps": [step], **taken.repairs}
        if taken.length is None:
            return unsafe("retrace", self.state, cost, told)
        warnings = (*away_warnings(self.state, self.parties), *shortened(taken, tau))
        return Outcome("retrace", self.state.moved(taken.model, taken.memory), cost, details=told, warnings=warnings)


def retrace(engine: Engine, state: ServerState, request: Request, options: RetraceOptions) -> Outcome:
    """Forget clients by their kept pull, filtered layer by layer in one message, and repaired.

    Args:
        engine: reaches the clients that stay; the leaving ones need not be there.
        state: the trained model with its schedule and memory; it is left untouched.
        request: which clients are to be forgotten.
        options: filter, trust region, what follows.
    """
    ready, schedule = _ready(engine, state, request, options), state.schedule
    damping = options.damping_of(state) if options.filter != "rounds" else None
    sharper = ("blend",) if schedule is not None else ()  # which needs to know the rounds
    kinds = (*sharper, "damped") if options.filter == "auto" else (options.filter,)
    filters = {kind: filter_named(kind, damping, schedule) for kind in kinds}
    with measured(engine) as cost:
        curvature = ready.stay.factors(state.model, options.min_logit_scale)
        steps = {kind: curvature.apply(left, ready.pull) for kind, left in filters.items()}
        repairs, corrects = (lambda _: ready.recovery), False
        if schedule is not None and options.may_correct:
            repairs, corrects = _corrections(engine, state.model, curvature, schedule, options), True
        following = ready.following(repairs, may_cost_more=corrects or bool(ready.recovery))
        taken = take(ready.stay, state.model, steps, options.tau, options.lengths, following)
    return ready.outcome(taken, cost, options.tau, {"solver": "kronecker", "damping": damping})


def retrace_krylov(engine: Engine, state: ServerState, request: Request, options: RetraceKrylovOptions) -> Outcome:
    """Forget clients by their kept pull, filtered through k products of the retained curvature.

    Args: as those of ``retrace``.
    """
    ready = _ready(engine, state, request, options)
    damping = options.damping_of(state) if options.filter in ("damped", "blend") else None
    if options.filter in ("rounds", "blend"):
        filter_named(options.filter, damping, state.schedule)  # refused early
    with measured(engine) as cost:
        step, solves = ready.pull, dict[str, Any]()
        if options.filter != "none":
            step, solves = _by_krylov(ready.stay, state, ready.pull, damping, options)
        following = ready.following(
            lambda _: ready.recovery, may_cost_more=bool(ready.recovery) and options.filter != "none"
        )
        taken = take(ready.stay, state.model, {options.filter: step}, options.tau, options.lengths, following)
    return ready.outcome(taken, cost, options.tau, {"solver": "krylov", "damping": damping, "solves": solves})


def is_long(remembers: Snapshot, model: Snapshot, ratio: float) -> bool:
    """Whether the step between the two is longer than this share of the model's own length.

    Example:
        >>> start = Snapshot(torch.tensor([3.0, 4.0]), {})
        >>> [is_long(start, start.moved(start.parameters + torch.tensor([0.0, step])), 0.1) for step in (0.4, 0.6)]
        [False, True]
    """
    step, whole = (torch.linalg.vector_norm(v) for v in (model.parameters - remembers.parameters, remembers.parameters))
    return bool(step > ratio * whole)


def _ready(engine: Engine, state: ServerState, request: Request, options: StepOptions) -> _Ready:
    """Everything that can be refused is refused here, before any work."""
    parties = prepared(engine, state, request, leave_out=options.missing == "leave-out")
    if parties.partly:
        raise RequestError("Retrace forgets whole clients only: use hf-kcu for samples.")
    if state.memory is None:
        reason = "There are no vectors here" if state.lost else "No vectors were kept while training"
        told = (f"{reason}, so retrace has nothing to take back: use hf-kcu.", *state.lost)
        raise RequestError(" ".join(told))
    if state.memory.size not in (None, state.model.parameters.numel()):
        raise RequestError("The memory was recorded with another model: its vectors have another length.")
    recovery = options.recovery
    repairs = {"recovery": RecoveryRound(recovery.plan(state), recovery.lengths)} if recovery is not None else {}
    require_single_replies(engine, state, asks_for_them=recovery is not None)
    stay = Retained.of(engine, state, parties)
    stay = replace(stay, samples=options.samples(sum(stay.left.values())), seed=options.seed)
    pull = state.memory.influence(parties.leaving).to(state.model.parameters)
    norms = dict(zip(parties.leaving, state.memory.norms(parties.leaving), strict=True))
    return _Ready(state, parties, stay, pull, norms, repairs)


def _corrections(
    engine: Engine, remembers: Snapshot, curvature: KroneckerCurvature, schedule: Schedule, options: RetraceOptions
) -> Callable[[Snapshot], Mapping[str, Repair]]:
    """A correction, and after a long step a short round before it; by where the step ended."""
    tau = 0.0 if options.tau is None else options.tau
    correction: dict[str, Repair] = {"correction": Correction(curvature, schedule, tau, options.correction_lengths)}
    both: dict[str, Repair] = {"short_round": ShortRound(schedule, options.round_lengths), **correction}

    def repairs(model: Snapshot) -> Mapping[str, Repair]:
        # A client's own local training is no sum, and would bring batch-norm statistics of its own.
        can_train = not engine.sums_only and not has_statistics(model)
        return both if can_train and is_long(remembers, model, options.long_step_ratio) else correction

    return repairs


def _by_krylov(
    stay: Retained, state: ServerState, pull: Tensor, damping: float | None, options: RetraceKrylovOptions
) -> tuple[Tensor, dict[str, Any]]:
    """``f(G) A`` through products: the damped filter by conjugate gradient, any other by Lanczos."""
    product = stay.product(state.model)
    if damping is None or options.filter != "damped":
        return lanczos(product, pull, options.iterations).apply(
            filter_named(options.filter, damping, state.schedule)
        ), {}
    right_side = damping * pull
    solution = conjugate_gradient(
        product,
        right_side,
        iterations=options.iterations,
        damping=damping,
        tolerance=options.tolerance,
        start=pull,  # only the curved part has to be found, and it stays defined at lambda = 0
        preconditioner=sketched(product, right_side, damping, rank=options.preconditioner_rank, seed=options.seed),
    )
    return solution.vector, {"solves": {"server": solution.diagnosis()}}


def _estimate(options: RetraceOptions, size: Size) -> Estimate:
    """What it costs at most: factors once, losses on draws, and what follows; two filters may be tried."""
    tries = 2 if options.tau is not None else 1
    work = drawn(options, size) + tries * (searched(options, size) + recovered(options, size))
    if options.may_correct:
        gradient, short_round = drawn(options, size), size.samples / PART + size.clients
        lengths = len(options.correction_lengths) + len(options.round_lengths)
        work += tries * (gradient + short_round + lengths * FORWARD_COST * looked_at(options, size))
    follows = 2 if options.recovery or options.may_correct else 0
    renewed = renewing(options, size)
    messages = options.expected_rounds + renewed
    down = (1 + 2 * tries + 2 * tries * follows + 2 * renewed) * size.vector + small_change(messages)
    up = size.factors + (tries * follows + renewed) * size.vector + small_change(messages)
    return Estimate(messages, down * size.clients, up * size.clients, work)


def _estimate_krylov(options: RetraceKrylovOptions, size: Size) -> Estimate:
    """What it costs at most: k products and losses on draws, and what follows."""
    products = 0 if options.filter == "none" else 1 + options.iterations + options.preconditioner_rank
    work = products * PRODUCT_COST * drawn(options, size) + 2 * searched(options, size) + 2 * recovered(options, size)
    follows = 4 if options.recovery else 0
    renewed = renewing(options, size)
    messages = options.expected_rounds + renewed
    down = (3 + products + 2 * follows + 2 * renewed) * size.vector + small_change(messages)
    up = (products + follows + renewed) * size.vector + small_change(messages)
    return Estimate(messages, down * size.clients, up * size.clients, work)


register(
    Method(
        "retrace",
        retrace,
        RetraceOptions(),
        "our default: the pull kept while training, filtered layer by layer, taken back, repaired",
        needs="vectors",
        estimate=_estimate,
    ),
    recovery=True,
)
register(
    Method(
        "retrace-krylov",
        retrace_krylov,
        RetraceKrylovOptions(),
        "the same pull, filtered through Krylov products; a message each",
        needs="vectors",
        estimate=_estimate_krylov,
    ),
    recovery=True,
)
register(
    Method(
        "unfiltered+recovery",
        retrace_krylov,
        RetraceKrylovOptions(filter="none", tau=0.5, recovery=Recovery()),
        "a control: the pull kept while training, unfiltered; then a recovery round",
        needs="vectors",
        estimate=_estimate_krylov,
    )
)
