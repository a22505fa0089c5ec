"""The correction after the filtered step, beside dense algebra; its samples, its length and its cost."""

import dataclasses
import math

import pytest
import torch

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.messages.tasks import Draw, Gradient, Losses, Train
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.lengths import RetainedLoss, shortest
from expunge.unlearning.repair import CORRECTION_LENGTHS, Correction, Moved
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from federation.masking import MaskedEngine
from federation.small import clients, mlp
from unlearning.convex import ridge_closed_form
from unlearning.presets import CORRECTED, KRYLOV, RETRACE, forgotten, recovering
from unlearning.test_kronecker_filter import LEAVER, RESPONSE, many

PLAN = TrainingPlan(rounds=4, epochs=2, batch_size=4, learning_rate=0.3)
DATA = clients(ada=60, bob=72, cyd=48, dan=40)


class WatchedEngine(LocalEngine):
    """Remembers who was asked what."""

    def ask(self, tasks):
        self.__dict__.setdefault("log", []).append(dict(tasks))
        return super().ask(tasks)


def ridge_problem():
    federation, state = many(copies=100)
    engine = federation.engine()
    parties = LEAVER.parties(engine.clients())
    stay = Retained(engine, parties.retained, parties.counts)
    return federation, state, stay, stay.factors(state.model)


def corrected(stay, remembers, model, curvature, tau=0.0, risen=0.0):
    """The model after the correction, and how far it went."""
    found = Correction(curvature, RESPONSE, tau)(stay, Moved(remembers, model, None, risen))
    return found.model, found.record


def test_on_ridge_it_is_the_damped_newton_step_of_dense_algebra():
    federation, state, stay, curvature = ridge_problem()
    inputs, targets = federation.pooled({"client-0": None})
    theta = state.model.parameters
    exact = torch.func.grad(federation.value)(theta, inputs, targets)
    gradient = stay.gradient(state.model)
    torch.testing.assert_close(gradient, exact)
    way = Correction(curvature, RESPONSE, 0.0).way(gradient, torch.zeros_like(theta))
    matrix = torch.kron(torch.eye(3).double(), inputs.T @ inputs / len(inputs)) + 0.05 * torch.eye(18)
    dense = torch.linalg.solve(matrix + 1 / (0.1 * 0.1 * 5) * torch.eye(18), exact)
    assert float((way - dense).norm() / dense.norm()) < 0.02


def test_on_ridge_it_moves_towards_the_retrained_optimum():
    federation, state, stay, curvature = ridge_problem()
    truth = ridge_closed_form(federation, {"client-0": None})
    far = state.model.moved(-truth)  # the model that remembers lies on the other side
    distances, model = [float((state.model.parameters - truth).norm())], state.model
    for _ in range(3):
        model, record = corrected(stay, far, model, curvature)
        assert record["length"] == 1.0  # with exact curvature and tau = 0 all of it
        assert record["retained_loss_after"] < record["retained_loss_before"]
        distances.append(float((model.parameters - truth).norm()))
    assert sorted(distances, reverse=True) == distances
    assert distances[-1] < 0.9 * distances[0]
    # At the optimum there is nothing to be won.
    there, record = corrected(stay, far, state.model.moved(truth), curvature)
    assert float((there.parameters - truth).norm()) < 1e-6


def test_it_does_not_lead_back():
    _, state, stay, curvature = ridge_problem()
    gradient = stay.gradient(state.model)
    free = Correction(curvature, RESPONSE, 0.0).way(gradient, torch.zeros_like(gradient))
    towards = -free + 0.1 * torch.arange(18.0).double()  # those who stay would go there
    assert float(torch.dot(-free, towards)) > 0
    stripped = Correction(curvature, RESPONSE, 0.0).way(gradient, towards)
    assert abs(float(torch.dot(stripped, towards))) < 1e-9 * float(towards.norm() * free.norm())
    torch.testing.assert_close(Correction(curvature, RESPONSE, 0.0).way(gradient, -towards), free)


@pytest.mark.parametrize(
    ("rises", "allowed", "length"),
    [
        ((0.0, -0.1, -0.2, 0.5), 0.05, 0.5),
        ((0.0, -0.1, -0.2, 0.5), 0.1001, 0.25),
        ((0.0, -0.1, -0.2, 0.5), 0.3, 0.0),
        ((0.0, 0.1, 0.2, 0.5), 0.0, 0.0),
        ((0.0, math.inf, -0.2, math.inf), 0.0, 0.5),
        ((math.inf,) * 4, 1.0, 0.0),
        ((math.nan,) * 4, 1.0, 0.0),
    ],
)
def test_the_shortest_length_that_leaves_little_to_be_won(rises, allowed, length):
    assert shortest(RetainedLoss(rises, rises), (0.0, 0.25, 0.5, 1.0), allowed) == length


@pytest.mark.parametrize("left_out", [(), (0, 5, 6)])
def test_a_gradient_of_a_draw_counts_for_all_samples_that_it_was_drawn_from(left_out):
    """One step of gradient descent on a draw is the gradient of the samples that were drawn."""
    engine, model = LocalEngine(mlp(), CrossEntropy(), DATA), Snapshot.of(mlp())
    for from_back in (False, True):
        draw = Draw(9, 4, from_back)
        step = engine.ask({"ada": Train(model, 1, 100, 1.0, 0, left_out, draw)})["ada"].update
        reply = engine.ask({"ada": Gradient(model, exclude=left_out, draw=draw)})["ada"]
        assert (reply.count, reply.sample_gradients) == (60 - len(left_out), 9)
        torch.testing.assert_close(step, -reply.total / reply.count)


def trained(build=mlp):
    engine = WatchedEngine(build(), CrossEntropy(), DATA)
    state = train(engine, Snapshot.of(build()), PLAN)
    engine.log.clear()
    return engine, state


EAGER = dataclasses.replace(RETRACE, curvature_samples=40, tau=0.06, long_step_ratio=math.inf)  # no step is long


def test_gradient_and_length_come_from_other_samples_and_nobody_else_is_asked():
    engine, state = trained()
    forgotten(engine, state, Request.of("ada"), EAGER)
    gradients, losses = engine.log[-2:]
    assert set(gradients) == set(losses) == {"bob", "cyd", "dan"}
    draws = Retained(engine, dict.fromkeys(gradients, ()), engine.clients(), samples=40).draws()
    for name, task in gradients.items():
        assert isinstance(task, Gradient)
        assert task.draw == draws[name]
        assert isinstance(losses[name], Losses)
        other = losses[name].draw
        assert (other.seed, other.from_back, task.draw.from_back) == (task.draw.seed, True, False)
        assert task.draw.size + other.size <= len(DATA[name][1])


def test_it_is_counted_and_never_raises_the_retained_loss():
    engine, state = trained()
    plain = forgotten(
        engine, state, Request.of("ada"), dataclasses.replace(EAGER, correction=False, long_step_ratio=0.1)
    )
    outcome = forgotten(engine, state, Request.of("ada"), EAGER)
    assert "correction" not in plain.details
    assert outcome.cost.rounds == plain.cost.rounds + 2 <= EAGER.expected_rounds
    used = sum(task.draw.size for task in engine.log[-2].values())
    looked = sum(task.draw.size for task in engine.log[-1].values())
    assert 40 <= used <= 43
    assert 20 <= looked <= 23
    expected = used + looked * len(CORRECTION_LENGTHS) / 3
    assert outcome.cost.sample_gradients - plain.cost.sample_gradients == pytest.approx(expected)
    record = outcome.details["correction"]
    assert record["retained_loss_after"] <= record["retained_loss_before"]
    walked = outcome.state.model.parameters - plain.state.model.parameters
    assert (float(walked.norm()) > 0) == (record["length"] > 0)
    again = forgotten(engine, state, Request.of("ada"), EAGER)
    assert torch.equal(again.state.model.parameters, outcome.state.model.parameters)


def test_it_is_taken_as_far_as_much_can_be_won():
    federation, state, stay, curvature = ridge_problem()
    far = state.model.moved(-ridge_closed_form(federation, {"client-0": None}))

    def taken(tau: float) -> tuple[Snapshot, dict[str, float]]:
        return corrected(stay, far, state.model, curvature, tau)

    _, whole = taken(0.0)
    won = whole["retained_loss_before"] - whole["retained_loss_after"]
    assert whole["length"] == 1.0
    assert won > 0
    moved, half = taken(won)  # half of tau, so half of what is to be won, may be left
    assert 0.25 <= half["length"] <= 0.5
    assert half["retained_loss_after"] <= whole["retained_loss_after"] + won / 2
    full, _ = taken(0.0)
    step = full.parameters - state.model.parameters
    torch.testing.assert_close(moved.parameters - state.model.parameters, half["length"] * step)
    unmoved, nothing = taken(2.1 * won)
    assert nothing["length"] == 0.0
    assert unmoved is state.model


def test_masked_sums_give_the_same_correction():
    engine, state = trained()
    plain = forgotten(engine, state, Request.of("ada"), EAGER)
    masked = forgotten(
        MaskedEngine(LocalEngine(mlp(), CrossEntropy(), DATA), ("ada",)), state, Request.of("ada"), EAGER
    )
    assert masked.details["correction"] == pytest.approx(plain.details["correction"], rel=1e-5)
    torch.testing.assert_close(masked.state.model.parameters, plain.state.model.parameters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "build"),
    [
        (recovering(RETRACE), mlp),
        (dataclasses.replace(RETRACE, tau=None), mlp),
        (dataclasses.replace(RETRACE, correction=False), mlp),
        (KRYLOV, mlp),
        (CORRECTED, mlp),
    ],
)
def test_where_there_is_none(options, build):
    engine, state = trained(build)
    outcome = forgotten(engine, state, Request.of("ada"), options)
    assert "correction" not in outcome.details
    if build is mlp:
        assert outcome.cost.rounds <= options.expected_rounds


def test_the_gradient_is_taken_where_the_step_ended_and_the_way_back_is_stripped():
    federation, state, stay, curvature = ridge_problem()
    here, exact = state.model.parameters, torch.func.grad(federation.value)
    gradient = exact(here, *federation.pooled({"client-0": None}))
    free = Correction(curvature, RESPONSE, 0.0).way(gradient, torch.zeros_like(here))
    remembers = state.model.moved(here - 5 * free + 0.1 * torch.arange(18.0).double())  # those who stay would go there
    back = remembers.parameters - here
    moved, record = corrected(stay, remembers, state.model, curvature)
    walked = moved.parameters - here
    assert record["length"] > 0
    assert abs(float(torch.dot(walked, back))) < 1e-9 < float(torch.dot(-free, back))
    torch.testing.assert_close(walked, -record["length"] * Correction(curvature, RESPONSE, 0.0).way(gradient, back))


def test_it_goes_on_until_no_more_than_tau_is_left_of_what_the_step_has_cost():
    federation, state, stay, curvature = ridge_problem()
    far = state.model.moved(-ridge_closed_form(federation, {"client-0": None}))

    def record(tau, risen=0.0):
        return corrected(stay, far, state.model, curvature, tau, risen)[1]

    won = -record(0.0)["retained_rise"]
    tau = 2.1 * won
    assert record(tau)["length"] == 0.0
    assert 0 < record(tau, risen=tau + 0.5 * won)["length"] < 1
    assert record(tau, risen=tau + 0.5 * won)["retained_rise"] <= -0.5 * won
    assert record(tau, risen=9 * tau)["length"] == 1.0  # as far as it goes, where that is not enough
