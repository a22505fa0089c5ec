"""The bound must never be below the truth; where it must be tight it must; and what cannot be certified is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from auditing.certificate_cases import LEAVER, WIDE, certified, conditioned, retrained, unlearned
from expunge.auditing.budget import Budget
from expunge.auditing.certificate import certify, release
from expunge.auditing.convexity import no_certificate, strong_convexity
from expunge.auditing.residual import retained_residual
from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.models.linear import SoftmaxRegression
from expunge.unlearning.request import Request

KINDS = st.sampled_from(["ridge", "softmax"])
SEEDS = st.integers(0, 10_000)


def candidates(federation, truth: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Models that someone might want certified: unlearned well and badly, not at all, or anything."""
    trained = retrained(federation, {})
    anywhere = torch.randn(len(truth), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "nothing done": trained,
        "one iteration": unlearned(federation, trained, iterations=1),
        "five iterations": unlearned(federation, trained, iterations=5),
        "a Newton step": unlearned(federation, trained),
        "two Newton steps": unlearned(federation, trained, steps=2),
        "anything": truth + anywhere,
    }


@settings(max_examples=12)
@given(KINDS, SEEDS, st.floats(1.5, 10.0))
def test_up_to_a_condition_of_10_the_bound_is_right_and_at_most_5_times_too_large(kind, seed, kappa):
    federation = conditioned(kind, seed, kappa)
    truth = retrained(federation)
    for name, model in candidates(federation, truth, seed).items():
        distance = float((model - truth).norm())
        plain, sharp = certified(federation, model), certified(federation, model, sharp=True)
        assert distance <= sharp.distance_bound <= plain.distance_bound, name
        if distance > 1e-10:  # below, rounding is all there is
            assert plain.distance_bound <= 1.001 * kappa * distance, name
            assert sharp.distance_bound <= 5 * distance, name


@settings(max_examples=12)
@given(KINDS, SEEDS, st.floats(1.0, 6.0))
def test_at_any_condition_the_bound_is_never_below_the_distance(kind, seed, exponent):
    federation = conditioned(kind, seed, kappa=10**exponent)
    truth = retrained(federation)
    for name, model in candidates(federation, truth, seed).items():
        distance = float((model - truth).norm())
        for sharp in (False, True):
            assert distance <= certified(federation, model, sharp=sharp).distance_bound, name


@settings(max_examples=12)
@given(KINDS, SEEDS, st.floats(1.0, 6.0))
def test_the_allowance_for_rounding_covers_what_float32_does_to_the_gradient(kind, seed, exponent):
    federation = conditioned(kind, seed, kappa=10**exponent)
    single = {name: (x.float(), y.float() if kind == "ridge" else y) for name, (x, y) in federation.datasets.items()}
    double = {name: (x.double(), y.double() if kind == "ridge" else y) for name, (x, y) in single.items()}
    model = retrained(federation).float()
    retained = {name: () for name in single if name != LEAVER}
    rough = LocalEngine(nn.Linear(6, 3, bias=False), federation.loss, single)
    exact = LocalEngine(nn.Linear(6, 3, bias=False).double(), federation.loss, double)
    found = retained_residual(rough, Snapshot(model, {}), retained)
    truth = retained_residual(exact, Snapshot(model.double(), {}), retained)
    assert abs(found.norm - truth.norm) <= found.rounding
    assert truth.norm <= found.total


def test_both_models_residuals_count():
    """A retraining that stops at a gradient of norm tau may be tau/mu away from the optimum."""
    federation = conditioned("ridge", seed=0, kappa=5.0)
    truth, engine = retrained(federation), federation.engine()
    retained = Request.of(LEAVER).parties(engine.clients()).retained
    model = Snapshot(unlearned(federation, retrained(federation, {}), iterations=2), {})
    stopped = truth - 0.3 * (model.parameters - truth)  # on the far side
    tolerance = retained_residual(engine, Snapshot(stopped, {}), retained).total
    arguments = (engine, federation.model, federation.loss, model, retained, WIDE)
    own = certify(*arguments)
    both = certify(*arguments, retraining_tolerance=tolerance)
    assert both.distance_bound == pytest.approx(own.distance_bound + tolerance / federation.loss.l2)
    assert float((model.parameters - stopped).norm()) <= both.distance_bound


def test_samples_that_are_forgotten_are_left_out_of_the_residual():
    federation = conditioned("ridge", seed=1, kappa=5.0)
    engine = federation.engine()
    request = Request.of(samples={"client-2": [0, 3]})
    truth = Snapshot(retrained(federation, {"client-2": [0, 3]}), {})
    arguments = (federation.model, federation.loss, truth)
    assert certify(engine, *arguments, request.parties(engine.clients()).retained, WIDE).distance_bound < 1e-10
    assert certify(engine, *arguments, dict.fromkeys(engine.clients(), ()), WIDE).distance_bound > 1e-3


def test_a_certificate_is_ready_for_json_and_says_what_it_covers():
    federation = conditioned("softmax", seed=0, kappa=5.0)
    certificate = certified(federation, retrained(federation), Budget(sigma=0.1, epsilon=1.0, delta=1e-5))
    record = json.loads(json.dumps(certificate.as_dict()))
    assert record["holds"] is True
    assert (record["epsilon"], record["delta"], record["sigma"]) == (1.0, 1e-5, 0.1)
    assert record["releases"] == 1
    assert record["mu"] == federation.loss.l2
    assert "final weights" in record["covers"]
    assert "what clients saw in rounds" in record["not_covered"]


def test_what_does_not_fit_is_not_released_and_costs_nothing():
    federation = conditioned("ridge", seed=0, kappa=5.0)
    trained = retrained(federation, {})
    budget = Budget(sigma=1e-3, epsilon=1.0, delta=1e-5)
    certificate = certified(federation, trained, budget)
    assert not certificate.holds
    assert certificate.budget == budget
    assert certificate.advice.startswith("Retrain")
    assert certificate.release_epsilon > 1.0
    with pytest.raises(RequestError, match="cannot be released"):
        release(Snapshot(trained, {}), certificate, seed=0)


def test_noise_is_fresh_for_each_model_the_same_for_each_seed_and_of_the_size_that_was_fixed():
    federation = conditioned("ridge", seed=0, kappa=5.0)
    truth = retrained(federation)
    models = [Snapshot(truth + shift, {}) for shift in (0.0, 1e-12)]
    budget = Budget(sigma=0.5, epsilon=1.0, delta=1e-5)
    certificates = [certified(federation, model.parameters, budget) for model in models]
    pairs = list(zip(models, certificates, strict=True))
    first, second = (release(model, certificate, seed=3).parameters for model, certificate in pairs)
    assert torch.equal(first, release(*pairs[0], seed=3).parameters)
    assert float((first - second).norm()) > 0.1
    noise = torch.cat([release(*pairs[0], seed=seed).parameters - truth for seed in range(500)])
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(noise.mean())) < 0.02
    with pytest.raises(ModelError, match="of another model"):
        release(models[1], certificates[0], seed=3)


FROZEN = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()).requires_grad_(False)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 2),
        SoftmaxRegression(4, 2),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(FROZEN, nn.Linear(144, 10)),
        nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Tanh(), nn.Sequential(nn.Dropout(), nn.Linear(8, 2))),
    ],
)
def test_linear_heads_on_frozen_features_can_be_certified(model):
    assert no_certificate(model, CrossEntropy(l2=0.25)) is None
    assert strong_convexity(model, SquaredError(l2=0.25)) == 0.25


class Squared(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) ** 2


TIED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "layer 0 .* is trained"),
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "ends in a ReLU"),
        (nn.Sequential(TIED, nn.Tanh(), TIED), "layer 0 .* is trained"),
        (nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)), "follow the clients' data"),
        (Squared(4, 2), "is a Squared"),
        (nn.Sequential(), "not known to be convex"),
    ],
)
def test_no_certificate_for_models_that_are_not_convex_and_why(model, reason):
    with pytest.raises(ModelError, match=rf"^No certificate: .*{reason}.*\.$"):
        strong_convexity(model, CrossEntropy(l2=0.1))


class Hinge(CrossEntropy):
    pass


@pytest.mark.parametrize(
    ("loss", "reason"), [(CrossEntropy(), "without an L2 term"), (Hinge(l2=0.1), "the loss Hinge is not known")]
)
def test_no_certificate_without_a_strongly_convex_loss(loss, reason):
    with pytest.raises(ModelError, match=reason):
        strong_convexity(nn.Linear(2, 2), loss)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"retained": {}}, RequestError, "Nobody is retained"),
        ({"retained": {"nobody": ()}}, RequestError, "No client 'nobody'"),
        ({"unlearned": Snapshot(torch.zeros(5, dtype=torch.float64), {})}, ModelError, "5 parameters .* 18"),
        ({"reference": Snapshot(torch.zeros(5, dtype=torch.float64), {})}, ModelError, "of another shape"),
        ({"unlearned": Snapshot(torch.full((18,), torch.nan), {})}, ModelError, "NaN"),
        ({"unlearned": Snapshot(torch.zeros(18, dtype=torch.float16), {})}, ModelError, "float32 or float64"),
        ({"loss": SquaredError()}, ModelError, "No certificate"),
        ({"retraining_tolerance": -1.0}, RequestError, "tolerance"),
    ],
)
def test_bad_input_is_refused_with_one_sentence_before_any_work(changes, error, sentence):
    federation = conditioned("ridge", seed=0, kappa=5.0)
    engine = federation.engine()
    arguments = {
        "model": federation.model,
        "loss": federation.loss,
        "unlearned": Snapshot(torch.zeros(18, dtype=torch.float64), {}),
        "retained": {"client-1": ()},
        "budget": WIDE,
    }
    with pytest.raises(error, match=sentence) as caught:
        certify(engine, **{**arguments, **changes})
    assert "\n" not in str(caught.value)
    assert engine.cost.rounds == 0
