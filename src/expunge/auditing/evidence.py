"""What can be said without any retrained model, which production does not have: evidence, never proof.

- The forgotten samples beside held-out ones with the leaver's labels: a model that never saw either cannot tell them
  apart, except where they differ in more than membership.
- The loss of the clients that stay: forgetting should cost them little.
- The residual of conjugate gradient and the bound that follows: how far the step is from the one that was asked for.
- The retained gradient ``||grad F_r||``: zero at a retrained optimum, so it should not grow.

Each of these is passed by some model that forgot nothing; together they are a reason to look closer, or not to. What
supports forgetting is in checks.py and statement.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from expunge.auditing.intervals import Interval
from expunge.auditing.membership import Attack, matched_weights, measure_attack
from expunge.auditing.signals import loss
from expunge.core.vectors import Snapshot
from expunge.errors import DataError
from expunge.federation.engines.engine import Engine, ask_mean
from expunge.federation.messages.tasks import Gradient, Losses
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request

Leaning = Literal["for", "against", "neither"]
"""What a piece of evidence speaks for: that the data was forgotten, that it was not, or nothing."""

TOLERATED = 0.05
"""A rise of the retained loss up to this many nats is no sign of damage: the trust region's own tau."""

TOLERATED_PART = 0.2
"""The same of a loss in another unit, as a part of it."""


@dataclass(frozen=True)
class Evidence:
    """One piece of evidence.

    Attributes:
        what: its name.
        leaning: what it speaks for.
        sentence: for a reader.
        values: the numbers behind it.
    """

    what: str
    leaning: Leaning
    sentence: str
    values: dict[str, float]


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model answers for the forgotten and for the held-out samples."""

    forgotten: Tensor
    held_out: Tensor


def held_out_evidence(
    before: Outputs, after: Outputs, forgotten_labels: Tensor, held_out_labels: Tensor, level: float = 0.95
) -> Evidence:
    """Are the forgotten samples still told from held-out ones with the same labels, by their loss?

    Args:
        before: the trained model's outputs.
        after: those of the model that is said to have forgotten.
        forgotten_labels: as the leaver had them.
        held_out_labels: of samples that nobody trained on; they are weighted to the leaver's mix of labels.
        level: of the intervals.

    Example:
        >>> labels, spread = torch.zeros(40, dtype=torch.int64), torch.linspace(0, 3, 40)[:, None]
        >>> hard = torch.cat([spread, torch.zeros(40, 1)], dim=1)
        >>> easy = hard + torch.tensor([2.0, 0.0])
        >>> held_out_evidence(Outputs(easy, hard), Outputs(hard, hard), labels, labels).leaning
        'for'
        >>> held_out_evidence(Outputs(easy, hard), Outputs(easy, hard), labels, labels).leaning
        'against'
    """
    known = torch.isin(forgotten_labels, held_out_labels)
    if not bool(known.any()):
        raise DataError("No held-out sample has a label of the leaver's: give some with its labels.")
    first, second = (
        _told_apart(outputs, known, forgotten_labels, held_out_labels, level).auc for outputs in (before, after)
    )
    values = {"auc_before": first.value, "auc_after": second.value, "low": second.low, "high": second.high}
    numbers = f"membership AUC {_shown(second)}, before {_shown(first)}"
    if second.low > 0.5:
        text = f"The forgotten samples are fitted better than held-out ones with the same labels ({numbers})"
        return Evidence("held-out data", "against", f"{text}: a sign that the model knows them.", values)
    if second.high < 0.5:
        text = f"The forgotten samples are fitted worse than held-out ones with the same labels ({numbers})"
        more = "poisoned or odd data would be by a model that never saw it, and by one that was pushed too far"
        return Evidence("held-out data", "neither", f"{text}: {more}.", values)
    if first.covers(0.5):
        text = f"The forgotten samples looked like held-out ones before, too ({numbers}): this says nothing."
        return Evidence("held-out data", "neither", text, values)
    text = f"The forgotten samples look like held-out ones with the same labels now ({numbers})"
    return Evidence("held-out data", "for", f"{text}: as if never seen, which is no proof.", values)


def retained_loss_evidence(was: float, is_now: float, *, in_nats: bool = True) -> Evidence:
    """What forgetting cost those who stay, on the data that they trained with: their mean loss before and after.

    A loss that is no cross-entropy has a unit of its own, and may rise by a part of what it was.

    Example:
        >>> retained_loss_evidence(0.1, 0.3).leaning, retained_loss_evidence(0.1, 0.12).leaning
        ('against', 'neither')
        >>> retained_loss_evidence(0.1, 0.13, in_nats=False).leaning
        'against'
    """
    values = {"before": was, "after": is_now}
    numbers = f"from {was:.4f} to {is_now:.4f} nats" if in_nats else f"from {was:.4g} to {is_now:.4g}"
    if not is_now - was <= (TOLERATED if in_nats else TOLERATED_PART * abs(was)):  # a NaN is a rise
        text = f"The retained loss rose {numbers}: what the others know was damaged."
        return Evidence("retained loss", "against", text, values)
    text = f"The retained loss went {numbers}: nothing speaks for damage, and nothing follows about forgetting."
    return Evidence("retained loss", "neither", text, values)


def gradient_evidence(was: float, is_now: float) -> Evidence:
    """``||grad F_r||`` before and after: a model retrained to its end has none, and many others have little.

    Example:
        >>> gradient_evidence(0.4, 0.1).leaning, gradient_evidence(0.4, 1.0).leaning
        ('neither', 'against')
    """
    values = {"before": was, "after": is_now}
    text = f"The gradient of the retained loss went from {was:.3g} to {is_now:.3g}"
    if is_now < was:
        more = "nearer to a point where training without the data would rest, of which there are many"
        return Evidence("retained gradient", "neither", f"{text}: {more}.", values)
    more = "no nearer to a point where training without the data would rest"
    return Evidence("retained gradient", "neither" if is_now <= 2 * was else "against", f"{text}: {more}.", values)


def solver_evidence(details: dict[str, Any]) -> Evidence:
    """How well the linear system behind the step was solved, from an outcome's details."""
    solves = [
        solve for step in _steps(details) for solve in step.get("solves", {}).values() if "residual_norms" in solve
    ]
    if not solves:
        return Evidence("solver", "neither", "No linear system was solved, so there is no residual to look at.", {})
    worst = max(solves, key=_relative_residual)
    relative, bound = _relative_residual(worst), worst.get("error_bound")
    values = {"relative_residual": relative, "iterations": float(worst["iterations"])}
    text = f"Conjugate gradient left {relative:.1%} of its first residual after {worst['iterations']} iterations"
    if bound is not None:
        values["error_bound"] = float(bound)
        text += f"; the step is within {bound:.3g} of the exact one"
    if worst.get("status") == "negative-curvature":
        return Evidence("solver", "against", f"{text}; it met negative curvature and stopped early.", values)
    leaning: Leaning = "against" if relative >= 1 else "neither"
    return Evidence("solver", leaning, f"{text}: about the computation, not about what was forgotten.", values)


def engine_evidence(engine: Engine, before: Snapshot, outcome: Outcome, request: Request) -> list[Evidence]:
    """What those who stay, and the method's own records, can say.

    Args:
        engine: reaches the clients that stay.
        before: the trained model.
        outcome: what a method made of it.
        request: what was to be forgotten.
    """
    models = before, outcome.state.model
    losses = [_retained_loss(engine, model, request) for model in models]
    gradients = [_retained_gradient(engine, model, request) for model in models]
    return [retained_loss_evidence(*losses), gradient_evidence(*gradients), solver_evidence(outcome.details)]


def _told_apart(
    outputs: Outputs, known: Tensor, forgotten_labels: Tensor, held_out_labels: Tensor, level: float
) -> Attack:
    weights = matched_weights(forgotten_labels[known], held_out_labels)
    used = weights > 0
    members = -loss(outputs.forgotten[known], forgotten_labels[known])
    others = -loss(outputs.held_out[used], held_out_labels[used])
    return measure_attack(members, others, weights[used], level)


def _retained_loss(engine: Engine, model: Snapshot, request: Request) -> float:
    retained = request.parties(engine.clients()).retained
    nowhere = torch.zeros_like(model.parameters)
    tasks = {name: Losses(model, nowhere, (0.0,), exclude=left_out) for name, left_out in retained.items()}
    return float(ask_mean(engine, tasks)[0])


def _retained_gradient(engine: Engine, model: Snapshot, request: Request) -> float:
    retained = request.parties(engine.clients()).retained
    tasks = {name: Gradient(model, exclude=left_out) for name, left_out in retained.items()}
    return float(torch.linalg.vector_norm(ask_mean(engine, tasks)))


def _steps(details: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of HF-KCU's steps; other methods keep other things under this name."""
    steps = details.get("steps", [])
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _relative_residual(solve: dict[str, Any]) -> float:
    norms = solve["residual_norms"]
    return float(norms[-1] / norms[0]) if norms and norms[0] else 0.0


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
