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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.krylov import conjugate_gradient, lanczos
from expunge.core.preconditioner import sketched
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.engines.engine import Cost, Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.plan import Schedule
from expunge.unlearning.filters import filter_named
from expunge.unlearning.options import StepOptions
from expunge.unlearning.preparation import away_warnings, forgotten_memory, prepared, require_single_replies
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.repair import Correction, RecoveryRound, Repair, ShortRound
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained, has_statistics
from expunge.unlearning.retrace_options import RetraceKrylovOptions, RetraceOptions, estimate, estimate_krylov
from expunge.unlearning.trust_region import Following, Taken, shortened, take, unsafe


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


register(
    Method(
        "retrace",
        retrace,
        RetraceOptions(),
        "our default: the pull kept while training, filtered layer by layer, taken back, repaired",
        needs="vectors",
        estimate=estimate,
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
        estimate=estimate_krylov,
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
        estimate=estimate_krylov,
    )
)
