"""HF-KCU: Hessian-free Krylov causal unlearning (Algorithm 1), as printed and corrected.

One algorithm, whose presets are option objects. With D_u the data to forget, w_u its share of all samples, G_r the
curvature of the clients that stay, lambda the damping and ``filter(x) = lambda (G_r + lambda)^-1 x``,

    theta' = theta - t filter(influence)

    gradient     influence = -w_u/(1-w_u) grad L_u(theta) / lambda     needs the data to forget, once
    trajectory   influence = A_u, kept while training (memory.py)      needs neither the client nor its data
    paper        the printed update: each owner's own Hessian, the opposite sign, alpha_i and w_i in front; it
                 moves away from the retrained optimum, and hardly at all

Why one filter serves both: retraining without u differs from training, to first order, by each round's missing
pull, worn down by what the others trained afterwards: kept in directions flat for G_r, gone in curved ones.

The filter needs G_r. Krylov sees it through k products, each a message to all clients; the default, for the trajectory
source, takes it apart layer by layer instead (core/kronecker.py): one message, and any function of it is exact. Then
those who stay repair what a step of first order misses: by one of theirs, or a short round (repair.py).

Where it fails: the gradient source sees nothing where the forgotten data is fitted perfectly, and is wrong where
several local steps keep FedAvg from a stationary point; the trajectory source assumes plain averaging on the server.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expunge.core.kronecker import KroneckerCurvature
from expunge.core.krylov import Solution
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.engine import Engine, ask_each, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import LocalSolve, Solved
from expunge.unlearning.hf_kcu_options import GRADIENT, PAPER, TRAJECTORY, UNFILTERED, HfKcuOptions
from expunge.unlearning.influence import (
    Influence,
    apply_filter,
    contribution_factors,
    curvature_product,
    forgotten_gradient,
    kronecker_curvature,
    owners_gradients,
    require_reachable,
    retained_gradient,
    spread,
    survives,
)
from expunge.unlearning.preparation import away, memory_warnings, prepared
from expunge.unlearning.recovery import has_statistics, refreshed_buffers
from expunge.unlearning.registry import Need, Outcome, register
from expunge.unlearning.repair import FOLLOWING, followed, is_repaired, tries
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.scaling import adaptive_scale, trust_region

AUTO_SAMPLES = {"krylov": (10, 100, 1000), "kronecker": (1, 1, 2000)}
"""What ``samples="auto"`` is: one in so many of the retained, but at least and at most."""


def hf_kcu(engine: Engine, state: ServerState, request: Request, options: HfKcuOptions) -> Outcome:
    """Forget clients or samples.

    Args:
        engine: reaches the clients; the leaving ones need not be there for the trajectory source.
        state: the trained model with its schedule and memory; it is left untouched.
        request: what is to be forgotten.
        options: ``PAPER``, ``GRADIENT``, ``TRAJECTORY`` or any other setting.
    """
    options, parties = _prepared(engine, state, request, options)
    damping = _damping(state, options)
    chosen = {name: getattr(options, name) for name in ("source", "solver", "samples")}
    details: dict[str, Any] = {**chosen, "damping": damping, "steps": []}
    model, warnings = state.model, _warnings_beforehand(state, parties, options)
    memory, reason = state.memory, ""
    with measured(engine) as cost:
        for number in range(options.steps):
            # Lines 2 to 16: the influence of the data to forget, filtered by k Krylov steps.
            if options.curvature_of == "owners":
                steps, curvature, record = _solve_at_owners(engine, model, parties, damping, options)
            else:
                steps, curvature, record = _solve_on_server(engine, state, model, parties, damping, options, number)
            last = number == options.steps - 1
            for used, allowed, lengths in tries(
                steps, options, repaired=last and is_repaired(state, curvature, options)
            ):
                for name in FOLLOWING:  # of a try that was given up
                    details.pop(name, None)
                # Lines 17, 18, 23 and 24: adaptive scaling, and the update.
                length, moved, losses = _moved(engine, state, model, steps[used], parties, options, allowed, lengths)
                if length is None:
                    continue
                if not last:
                    break
                # Not in the paper: what follows the step may repair what it has cost.
                moved, memory, left = followed(engine, state, moved, curvature, parties, options, losses, details)
                if left <= options.tau:
                    break
            norm = float(steps[used].norm())
            details["steps"].append({**record, **losses, "filter": used, "length": length, "norm": norm})
            if length is None:
                reason = "No length of the step keeps the retained loss within tau: the model is left as it was."
                break
            if length < 1 and options.scaling == "trust-region":
                warnings.append(
                    f"Only {length:.0%} of the predicted step was safe for the retained clients (tau {options.tau:g}): "
                    "something of the data may be left; look at it beside a retrained model."
                )
            model = moved
    if reason:
        return Outcome(options.label, state, cost, succeeded=False, details=details, warnings=(reason,))
    warnings.extend(memory_warnings(parties, memory))
    return Outcome(options.label, state.moved(model, memory), cost, details=details, warnings=tuple(warnings))


def _prepared(
    engine: Engine, state: ServerState, request: Request, options: HfKcuOptions
) -> tuple[HfKcuOptions, Parties]:
    """Everything that can be refused is refused here, before any work."""
    parties = prepared(engine, state, request, leave_out=options.missing == "leave-out")
    if options.source == "auto":
        remembered = state.memory.clients if state.memory is not None else ()
        kept = not parties.partly and all(name in remembered for name in parties.leaving)
        options = replace(options, source="trajectory" if kept else "gradient")
    if options.source == "gradient":
        require_reachable(parties)
    elif parties.partly:
        raise RequestError("The trajectory source forgets whole clients only: use the gradient source for samples.")
    elif state.memory is None:
        raise RequestError("No vectors were kept while training, so only the gradient source can be used.")
    elif state.memory.size not in (None, state.model.parameters.numel()):
        raise RequestError("The memory was recorded with another model: its vectors have another length.")
    if options.recovery is not None:
        options.recovery.plan(state)
    if engine.sums_only and (options.recovery or options.curvature_of == "owners" or has_statistics(state.model)):
        raise RequestError(
            "Where only sums of the clients' replies are seen there is no recovery, no printed update and no model "
            "with batch norm: their replies are not sums."
        )
    options = _chosen(options, state, parties)
    if options.filter in ("rounds", "between") and state.schedule is None:
        raise RequestError("The filter of the rounds needs the training's learning rate, local steps and rounds.")
    return options, parties


def _chosen(options: HfKcuOptions, state: ServerState, parties: Parties) -> HfKcuOptions:
    """The options with everything that was left to us decided."""
    if options.solver == "auto":
        factored = options.has_factors and options.source == "trajectory" and state.model.layout is not None
        options = replace(options, solver="kronecker" if factored else "krylov")
    if options.filter == "auto" and (options.solver == "krylov" or state.schedule is None):
        options = replace(options, filter="damped")
    if options.samples == "auto":
        left = sum(parties.counts[name] - len(left_out) for name, left_out in parties.retained.items())
        share, least, most = AUTO_SAMPLES[options.solver]
        options = replace(options, samples=min(max(left // share, least), most))
    return options


def _warnings_beforehand(state: ServerState, parties: Parties, options: HfKcuOptions) -> list[str]:
    """What the person who asked should know whatever comes out."""
    warnings = []
    if missing := away(state, parties):
        warnings.append(f"Left out, since they cannot be reached: {', '.join(missing)}.")
    if state.memory is not None and options.source == "gradient":
        never = [name for name in parties.leaving if name not in state.memory.clients]
        if never:
            warnings.append(f"No vector of {', '.join(never)} was kept, so the gradient source was used.")
    return warnings


def _damping(state: ServerState, options: HfKcuOptions) -> float:
    if options.damping is not None:
        return options.damping
    if state.schedule is None:
        raise RequestError("Give a damping, or the training's learning rate, local steps and rounds to derive it from.")
    return state.schedule.damping


def _solve_at_owners(
    engine: Engine, model: Snapshot, parties: Parties, damping: float, options: HfKcuOptions
) -> tuple[dict[str, Tensor], None, dict[str, Any]]:
    """As printed: each owner solves with its own curvature, and sends ``alpha_i scale_i v_i``; the others send zero."""
    raws, norms, solves = _owners_solutions(engine, model, parties, damping, options)
    factors = contribution_factors(options, parties, norms)
    step = torch.zeros_like(model.parameters)
    contributions = dict.fromkeys(parties.counts, 0.0)
    for name, raw in raws.items():
        scale = adaptive_scale(raw, model.parameters, options.beta) if options.scaling == "norm" else 1.0
        sent = factors[name] * scale * raw
        contributions[name] = float(torch.linalg.vector_norm(sent))
        step += sent
    return {options.filter: step}, None, {"contributions": contributions, "solves": solves}


def _owners_solutions(
    engine: Engine, model: Snapshot, parties: Parties, damping: float, options: HfKcuOptions
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Any]]:
    """Each owner's v_k, the norm of its gradient, and its solver's diagnosis."""
    if not options.influence_decay:
        gradients = owners_gradients(engine, model, parties)
        norms = {name: float(torch.linalg.vector_norm(gradient)) for name, gradient in gradients.items()}
        return {name: gradient / damping for name, gradient in gradients.items()}, norms, {}
    tasks = {
        name: LocalSolve(model, options.iterations, damping, options.curvature, options.negative_curvature, indices)
        for name, indices in parties.owners.items()
    }
    replies = ask_each(engine, tasks, Solved)
    return (
        {name: reply.solution.vector for name, reply in replies.items()},
        {name: reply.gradient_norm for name, reply in replies.items()},
        {name: _diagnosis(reply.solution) for name, reply in replies.items()},
    )


def _solve_on_server(
    engine: Engine,
    state: ServerState,
    model: Snapshot,
    parties: Parties,
    damping: float,
    options: HfKcuOptions,
    number: int,
) -> tuple[dict[str, Tensor], KroneckerCurvature | None, dict[str, Any]]:
    """Corrected: the filter on the server, with the curvature of the clients that stay; gentler steps come later."""
    if options.source == "trajectory":
        assert state.memory is not None
        known = state.memory.influence(parties.leaving).to(model.parameters)
        contributions = dict(zip(parties.leaving, state.memory.norms(parties.leaving), strict=True))
        influence = Influence(damping * known, contributions, known)
    elif options.gradient_of == "retained" or number > 0:
        influence = retained_gradient(engine, model, parties)
    else:
        influence = forgotten_gradient(engine, model, parties, options)
    clients = parties.retained if options.curvature_of == "retained" else dict.fromkeys(parties.counts, ())
    record: dict[str, Any] = {"contributions": influence.contributions}
    if not options.influence_decay:
        return {"none": influence.unfiltered(damping)}, None, record
    if options.solver == "kronecker":
        kinds = ("between", "damped") if options.filter == "auto" else (options.filter,)
        survived = {kind: survives(kind, damping, state.schedule) for kind in kinds}
        curvature = kronecker_curvature(engine, model, clients, parties.counts, options)
        unfiltered = influence.unfiltered(damping)
        return {kind: curvature.apply(survived[kind], unfiltered) for kind in kinds}, curvature, record
    product = curvature_product(engine, model, clients, parties.counts, options)
    step, solution = apply_filter(product, influence, damping, state.schedule, options)
    if solution is not None:
        record["solves"] = {"server": _diagnosis(solution)}
    return {options.filter: step}, None, record


def _moved(
    engine: Engine,
    state: ServerState,
    model: Snapshot,
    step: Tensor,
    parties: Parties,
    options: HfKcuOptions,
    allowed: float,
    lengths: tuple[tuple[float, ...], ...],
) -> tuple[float | None, Snapshot, dict[str, float]]:
    """The step's length t, by the chosen kind of adaptive scaling, and the model after it."""
    if not bool(torch.isfinite(step).all()):
        raise NumericalError("The step has a NaN or infinite value: the model is left as it was.")
    # Batch-norm statistics remember, too. They are estimated on as many samples as the curvature, in whole batches.
    draws = spread(options, parties.retained, parties.counts)
    anew = partial(refreshed_buffers, engine, state=state, parties=parties, draws=draws)
    if options.scaling == "trust-region":
        refreshed = anew if has_statistics(model) else None
        return trust_region(engine, model, step, parties, options, allowed, lengths, refreshed)
    length = 1.0
    if options.scaling == "norm" and options.curvature_of != "owners":
        length = adaptive_scale(step, model.parameters, options.beta)
    return length, anew(model.moved(model.parameters - length * step)), {}


def _diagnosis(solution: Solution) -> dict[str, Any]:
    """What CG learned, without the vector."""
    return {name: value for name, value in asdict(replace(solution, vector=torch.empty(0))).items() if name != "vector"}


for _options, _summary in (
    (HfKcuOptions(), "the default: trajectory, filtered layer by layer and corrected; gradient without vectors"),
    (PAPER, "the paper's update as printed: wrong sign, hardly any step"),
    (GRADIENT, "one gradient of the data to forget, filtered"),
    (TRAJECTORY, "the vector kept while training, filtered; needs nothing of the leaver"),
):
    _needs: Need | None = None if _options.source == "gradient" else "vectors"
    _recovering = _options.with_recovery()
    _forgets = _options is not PAPER
    register(_options.label, hf_kcu, _options, _summary, _needs, forgets=_forgets)
    register(_recovering.label, hf_kcu, _recovering, f"{_summary}; then a recovery round", _needs, forgets=_forgets)
register(
    "unfiltered+recovery",
    hf_kcu,
    UNFILTERED,
    "a control: the vector kept while training, unfiltered; then a recovery round",
    "vectors",
)
