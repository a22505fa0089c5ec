"""Certified removal for strongly convex models (after Guo et al. 2020), with the residual that was measured.

Let F_r be the mean loss over what is retained, strongly convex with mu (convexity.py), theta_u the unlearned model, and
theta_r a model retrained until ``||grad F_r(theta_r)|| <= tau``. Strong convexity and Cauchy-Schwarz give

    mu ||theta_u - theta_r||^2 <= (grad F_r(theta_u) - grad F_r(theta_r))' (theta_u - theta_r)
    ||theta_u - theta_r|| <= (||grad F_r(theta_u)|| + tau) / mu =: Delta.

The gradient is asked of the retained clients, over all their samples: no retraining, no worst case over data or
solvers; whatever made theta_u, it is a bound. It is at most ``kappa = L/mu`` times too large. A reference theta' nearer
the optimum (a Newton step further) makes it sharper: ``||theta_u - theta'|| + (||grad F_r(theta')|| + tau) / mu``.

Released is ``theta_u + sigma z``. The claim: all releases on one budget (budget.py) are (epsilon, delta)-
indistinguishable from ``theta_r + sigma z`` at the same moments. So what is released after a client has left tells no
more of it than models would that never had its data. This is about one federation and its requests: it is not
differential privacy.

Where it fails: clients that lie about their gradients or train another objective; an observer who learns the noise's
seed, or sees the models before the noise (clients do, in every round); frozen features that were learned from the data
to forget. Publish the claimed epsilon; residual, distance and spent epsilon depend on the data: for the auditor only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from expunge.auditing.budget import Budget
from expunge.auditing.convexity import strong_convexity
from expunge.auditing.gaussian import gaussian_epsilon
from expunge.auditing.residual import retained_residual
from expunge.core.losses import Loss
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.engine import Engine
from expunge.federation.messages.tasks import Indices

COVERS = "the final weights as released with noise on this budget, all seen together, beside noisy retrained models"
NOT_COVERED = "what clients saw in rounds of training and unlearning, earlier releases, frozen layers and buffers"


@dataclass(frozen=True)
class Certificate:
    """What may be said of one unlearned model.

    Attributes:
        holds: whether it may be released on the budget.
        model: digest of the model before the noise.
        distance_bound: Delta, on the distance to the retrained model.
        residual: of the full retained gradient at the model.
        rounding: allowance for rounding in it.
        retraining_tolerance: tau, the gradient norm of the retrained model.
        mu: strong convexity, from the L2 term.
        clients: how many are retained.
        release_epsilon: of this release alone, at the budget's delta.
        budget: with this release charged, where it holds; else as it was.
        advice: what to do, in one sentence.
    """

    holds: bool
    model: str
    distance_bound: float
    residual: float
    rounding: float
    retraining_tolerance: float
    mu: float
    clients: int
    release_epsilon: float
    budget: Budget
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the budget's claim beside the measurements, and what is covered and what is not."""
        own = {name: value for name, value in vars(self).items() if name != "budget"}
        return {**own, **self.budget.as_dict(), "covers": COVERS, "not_covered": NOT_COVERED}


def certify(
    engine: Engine,
    model: nn.Module,
    loss: Loss,
    unlearned: Snapshot,
    retained: Mapping[str, Indices],
    budget: Budget,
    *,
    retraining_tolerance: float = 0.0,
    reference: Snapshot | None = None,
) -> Certificate:
    """Measure how far an unlearned model can be from the retrained one, and whether noise hides it.

    Costs two gradients of the retained clients, and two more with a reference.

    Args:
        engine: reaches the clients; they must train ``model`` under ``loss``.
        model: the architecture.
        loss: the clients' objective; its L2 term is mu.
        unlearned: the model to release.
        retained: the clients that stay, each with the samples it no longer uses, after *all* deletions so far:
            ``request.parties(engine.clients()).retained``.
        budget: noise and claim, with the releases made so far.
        retraining_tolerance: tau; 0 compares with the retrained optimum itself.
        reference: another model, nearer the optimum, for a sharper bound where the unlearned one must be released as it
            is: ``newton_reference(engine, unlearned, retained)``.

    Example:
        >>> from expunge.core.losses import SquaredError
        >>> from expunge.federation.engines.local import LocalEngine
        >>> layer, loss = nn.Linear(1, 1, bias=False), SquaredError(l2=1.0)
        >>> data = {"ada": (torch.ones(4, 1), torch.ones(4, 1)), "bob": (torch.ones(4, 1), torch.zeros(4, 1))}
        >>> engine = LocalEngine(layer, loss, data)
        >>> unlearned = Snapshot(torch.tensor([0.51]), {})  # retrained without bob it is 0.5
        >>> certificate = certify(engine, layer, loss, unlearned, {"ada": ()}, Budget(0.1, 1.0, 1e-5))
        >>> certificate.holds, round(certificate.distance_bound, 4)
        (True, 0.02)
        >>> released = release(unlearned, certificate, seed=7)
    """
    mu = strong_convexity(model, loss)
    if not (retraining_tolerance >= 0 and math.isfinite(retraining_tolerance)):
        raise RequestError(f"The retraining tolerance must be a number of at least 0, not {retraining_tolerance}.")
    for snapshot in (unlearned, reference) if reference is not None else (unlearned,):
        _require_fitting(model, snapshot)
    own = retained_residual(engine, unlearned, retained)
    distance = (own.total + retraining_tolerance) / mu
    if reference is not None:
        apart = float(torch.linalg.vector_norm(unlearned.parameters.double() - reference.parameters.double()))
        beyond = retained_residual(engine, reference, retained).total + retraining_tolerance
        distance = min(distance, apart + beyond / mu)
    holds = budget.fits(distance)
    return Certificate(
        holds=holds,
        model=unlearned.digest,
        distance_bound=distance,
        residual=own.norm,
        rounding=own.rounding,
        retraining_tolerance=retraining_tolerance,
        mu=mu,
        clients=len(retained),
        release_epsilon=gaussian_epsilon(distance / budget.sigma, budget.delta),
        budget=budget.charged(distance) if holds else budget,
        advice=_advice(budget, distance, holds),
    )


def release(unlearned: Snapshot, certificate: Certificate, seed: int) -> Snapshot:
    """The certified model with its noise, once: a second release would have to be charged, too.

    The noise follows from the seed and the model's digest, so that it is never the same for two models. The seed is a
    secret (``secrets.randbits(62)``): whoever knows it can take the noise off. Go on unlearning from the model without
    noise, and keep that one to yourself.
    """
    if unlearned.digest != certificate.model:
        raise ModelError("The certificate is of another model: certify the one that is to be released.")
    if not certificate.holds:
        raise RequestError(f"This model cannot be released on its budget. {certificate.advice}")
    chance = torch.Generator().manual_seed(derived_seed(seed, certificate.model, "release"))
    noise = torch.randn(unlearned.parameters.numel(), generator=chance, dtype=torch.float64)
    exact = unlearned.parameters.double() + certificate.budget.sigma * noise.to(unlearned.parameters.device)
    return unlearned.moved(exact.to(unlearned.parameters.dtype))


def _require_fitting(model: nn.Module, snapshot: Snapshot) -> None:
    size, given = Layout.of(model).size, snapshot.parameters.numel()
    if given != size:
        raise ModelError(f"The snapshot has {given} parameters where the model has {size}: it is of another shape.")
    if snapshot.parameters.dtype not in (torch.float32, torch.float64):
        raise ModelError(f"A certificate needs float32 or float64 weights, not {snapshot.parameters.dtype}.")
    snapshot.require_finite()


def _advice(budget: Budget, distance: float, holds: bool) -> str:
    if not holds:
        return (
            f"Retrain, or take more Newton steps: the distance may be {distance:.3g}, and only {budget.allowed:.3g} "
            "can be released."
        )
    left = budget.charged(distance).releases_left(distance)
    return "Release it; " + ("any number more" if left is None else f"{left} more") + " at this distance fit."
