"""HF-KCU as printed: Algorithm 1 of the paper, line by line, faults included.

    for each owner i of data to forget                                       (in parallel, at the clients)
        g_i     = grad L(D_u in D_i; theta)                                  line 4
        v_i     = k steps of conjugate gradient on (H_i + lambda I) v = g_i  lines 5 to 15, H_i its own Hessian
        alpha_i = ||g_i|| / sum_j ||g_j||                                    line 16, causal weight; 0 for all others
        scale_i = min(1, beta ||theta|| / ||v_i||)                           line 17, adaptive scaling
    theta' = theta - sum_i w_i alpha_i scale_i v_i,   w_i = |D_i| / |D|      lines 18 to 25

Where it fails: the sign is that of *adding* data (Koh & Liang's influence of up-weighting), the curvature must be that
of the clients that stay, and beta and w_i leave next to nothing of the step. hf_kcu.py has it corrected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expunge.core.krylov import conjugate_gradient
from expunge.core.vectors import Snapshot, weighted_sum
from expunge.federation.engines.engine import Engine, ask_each, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import LocalSolve, Solved
from expunge.unlearning.hf_kcu_paper_options import HfKcuPaperOptions, estimate
from expunge.unlearning.owners import causal_weights, owners_gradients
from expunge.unlearning.preparation import (
    forgotten_memory,
    memory_warnings,
    prepared,
    require_finite,
    require_reachable,
    require_single_replies,
)
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.repair import Moved, RecoveryRound, repaired
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import Retained


def hf_kcu_paper(engine: Engine, state: ServerState, request: Request, options: HfKcuPaperOptions) -> Outcome:
    """Forget clients or samples by the printed update.

    Args:
        engine: reaches the owners of the data to forget.
        state: the trained model; it is left untouched.
        request: what is to be forgotten.
        options: what the paper's tables vary.
    """
    parties = prepared(engine, state, request)
    require_reachable(parties)
    require_single_replies(engine, state, asks_for_them=True)
    repairs = {}
    if options.recovery is not None:
        repairs["recovery"] = RecoveryRound(options.recovery.plan(state), options.recovery.lengths)
    stay, model = Retained.of(engine, state, parties), state.model
    with measured(engine) as cost:
        if options.causal_weights == "none":
            step, record = _same_for_all(engine, model, parties, stay, options)
        else:
            step, record = _weighted_by_cause(engine, model, parties, options)
        require_finite(step)
        updated = stay.statistics(model.moved(model.parameters - step))  # lines 24 and 25
        memory = forgotten_memory(state, parties)
        moved, records = repaired(stay, Moved(model, updated, memory), repairs)
    details = {"damping": options.damping, "steps": [{**record, "length": 1.0, "norm": float(step.norm())}], **records}
    warnings = memory_warnings(parties, memory)
    return Outcome("hf-kcu-paper", state.moved(moved.model, memory), cost, details=details, warnings=warnings)


def _weighted_by_cause(
    engine: Engine, model: Snapshot, parties: Parties, options: HfKcuPaperOptions
) -> tuple[Tensor, dict[str, Any]]:
    """Lines 2 to 23: each owner sends ``alpha_i scale_i v_i``, weighed by w_i; all others send zero."""
    if options.influence_decay:
        tasks = {
            name: LocalSolve(model, options.iterations, options.damping, "hessian", "ignore", indices)
            for name, indices in parties.owners.items()
        }
        replies = ask_each(engine, tasks, Solved)
        norms = {name: reply.gradient_norm for name, reply in replies.items()}
        raws = {name: reply.solution.vector for name, reply in replies.items()}
        solves = {name: reply.solution.diagnosis() for name, reply in replies.items()}
    else:
        gradients, norms = owners_gradients(engine, model, parties)
        raws, solves = {name: gradient / options.damping for name, gradient in gradients.items()}, {}
    alphas = causal_weights(options.causal_weights, parties, norms)
    everyone = sum(parties.counts.values())
    step, contributions = torch.zeros_like(model.parameters), dict.fromkeys(parties.counts, 0.0)
    for name, raw in raws.items():
        sent = (
            alphas[name] * parties.counts[name] / everyone * adaptive_scale(raw, model.parameters, options.beta) * raw
        )
        contributions[name] = float(torch.linalg.vector_norm(sent))
        step += sent
    return step, {"contributions": contributions, "solves": solves}


def _same_for_all(
    engine: Engine, model: Snapshot, parties: Parties, stay: Retained, options: HfKcuPaperOptions
) -> tuple[Tensor, dict[str, Any]]:
    """Without causal weighting: the mean gradient over D_u, everyone's Hessian, and a step that all clients apply."""
    gradients, norms = owners_gradients(engine, model, parties)
    shares = causal_weights("share", parties, {})
    right_side = weighted_sum(gradients.values(), (shares[name] for name in gradients))
    record: dict[str, Any] = {
        "contributions": {name: shares[name] * norms[name] if name in norms else 0.0 for name in parties.counts}
    }
    raw = right_side / options.damping if not options.influence_decay else None
    if raw is None:
        product = stay.with_everyone().product(model, "hessian")
        solution = conjugate_gradient(
            product,
            right_side,
            iterations=options.iterations,
            damping=options.damping,
            negative_curvature="ignore",
        )
        raw, record["solves"] = solution.vector, {"server": solution.diagnosis()}
    return adaptive_scale(raw, model.parameters, options.beta) * raw, record


def adaptive_scale(raw: Tensor, parameters: Tensor, beta: float | None) -> float:
    """Line 17: ``min(1, beta ||theta|| / ||v||)``; 1 without adaptive scaling.

    Example:
        >>> adaptive_scale(torch.tensor([4.0]), torch.tensor([10.0]), beta=0.1)
        0.25
    """
    norm = float(torch.linalg.vector_norm(raw))
    return min(1.0, beta * float(torch.linalg.vector_norm(parameters)) / norm) if norm and beta is not None else 1.0


register(
    Method(
        "hf-kcu-paper",
        hf_kcu_paper,
        HfKcuPaperOptions(),
        "the paper's update as printed: wrong sign, hardly any step",
        asks_owners=True,
        forgets=False,
        estimate=estimate,
    ),
    recovery=True,
)
