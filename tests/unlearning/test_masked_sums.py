"""HF-KCU where the server sees only masked sums: the same step, no reply to be seen, nobody to be named."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.engine import MASKED, ask_mean
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Gradient, Losses, Train
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from federation.lying import LyingEngine
from federation.masking import MaskedEngine
from unlearning.convex import digits_softmax, ridge, ridge_closed_form
from unlearning.presets import CORRECTED, KRYLOV, PAPER, forgotten, recovering

LEAVER = "client-0"
REQUEST = Request.of(LEAVER)


class Watched(LocalEngine):
    """Remembers what clients really replied, which the server must not know."""

    def ask(self, tasks):
        replies = super().ask(tasks)
        self.__dict__.setdefault("truth", []).append((dict(tasks), replies))
        return replies


@cache
def digits(dtype=torch.float64):
    federation = digits_softmax(0.001, others=4)
    datasets = {name: (inputs.to(dtype), labels) for name, (inputs, labels) in federation.datasets.items()}
    state = ServerState(Snapshot.of(federation.model.to(dtype)), Schedule(0.1, 5, 20))
    moved = state.model.moved(federation.optimum().to(dtype))
    return federation, datasets, dataclasses.replace(state, model=moved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("more", [{}, {"gradient_of": "retained"}, {"steps": 2}], ids=str)
def test_the_step_is_that_of_single_replies(dtype, more):
    federation, datasets, state = digits(dtype)
    options = dataclasses.replace(CORRECTED, **more)
    plain = forgotten(LocalEngine(federation.model, federation.loss, datasets), state, REQUEST, options)
    engine = MaskedEngine(Watched(federation.model, federation.loss, datasets), (LEAVER,))
    masked = forgotten(engine, state, REQUEST, options)
    steps = [outcome.state.model.parameters - state.model.parameters for outcome in (plain, masked)]
    assert float((steps[1] - steps[0]).norm()) < 1e-5 * float(steps[0].norm()) > 0
    assert masked.succeeded
    assert masked.details["steps"][0]["length"] == plain.details["steps"][0]["length"]
    assert masked.cost.sample_gradients == plain.cost.sample_gradients


def test_the_masked_step_is_that_of_dense_algebra():
    """Ridge has a closed form: removal by one exact solve is retraining."""
    federation = ridge(3)
    state = federation.state(ridge_closed_form(federation, {}))
    options = dataclasses.replace(
        CORRECTED, curvature_samples=None, iterations=100, tolerance=1e-12, damping=0.0, tau=None
    )
    outcome = forgotten(MaskedEngine(federation.engine(), (LEAVER,)), state, REQUEST, options)
    truth = ridge_closed_form(federation, {LEAVER: None})
    assert float((outcome.state.model.parameters - truth).norm() / truth.norm()) < 1e-7


def test_no_single_reply_of_those_who_stay_is_to_be_seen():
    """Neither any masked reply nor any sum of fewer than all goes with the truth."""
    federation, datasets, state = digits()
    honest = Watched(federation.model, federation.loss, datasets)
    engine = MaskedEngine(honest, (LEAVER,))
    forgotten(engine, state, REQUEST, CORRECTED)
    truth = [(tasks, replies) for tasks, replies in honest.truth if set(tasks) != {LEAVER}]
    assert len(truth) == len(engine.seen) >= CORRECTED.iterations + 1
    checked = 0
    for (tasks, replies), seen in zip(truth, engine.seen, strict=True):
        assert set(seen) == set(tasks) == set(datasets) - {LEAVER}
        for name, sent in seen.items():
            own = replies[name].total.reshape(-1).numpy()
            if len(own) < 100:  # losses: a dozen numbers have any correlation
                continue
            for view in (sent, sum(other for them, other in seen.items() if them != name)):
                correlation = np.corrcoef(view.view(np.int64).astype(float), own)[0, 1]
                assert abs(correlation) < 5 / np.sqrt(len(own))
                checked += 1
    assert checked >= 8
    assert [set(tasks) for tasks, _ in honest.truth if LEAVER in tasks] == [{LEAVER}]  # its gradient, in clear


def test_a_leavers_gradient_is_disclosed_either_way():
    federation, datasets, state = digits()
    engine = MaskedEngine(LocalEngine(federation.model, federation.loss, datasets), (LEAVER,))
    clear = engine.ask({LEAVER: Gradient(state.model)})
    assert set(clear) == {LEAVER}
    inputs, labels = datasets[LEAVER]
    dense = torch.func.grad(federation.value)(state.model.parameters, inputs, labels)
    torch.testing.assert_close(clear[LEAVER].total / clear[LEAVER].count, dense)


def test_what_is_no_sum_is_refused_before_any_work():
    federation, datasets, state = digits()
    engine = MaskedEngine(LocalEngine(federation.model, federation.loss, datasets), (LEAVER,))
    with pytest.raises(RequestError, match="No vectors were kept"):
        forgotten(engine, state, REQUEST, KRYLOV)
    for options in (recovering(CORRECTED), PAPER):
        with pytest.raises(RequestError, match="only sums") as caught:
            forgotten(engine, state, REQUEST, options)
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="summed under masks"):
        train(engine, state.model, TrainingPlan(rounds=1))
    with pytest.raises(RequestError, match="its own reply"):
        ask_mean(engine, {"client-1": Gradient(state.model)})
    with pytest.raises(RequestError, match="its own reply"):  # the leaver could subtract itself
        ask_mean(engine, {"client-1": Gradient(state.model), LEAVER: Gradient(state.model)})
    assert engine.cost.rounds == 0
    assert method("auto")(engine, state, REQUEST).details["source"] == "gradient"


def test_batch_norm_is_refused_before_any_work():
    model = nn.Sequential(nn.Linear(17, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10)).double()
    _, datasets, _ = digits()
    engine = MaskedEngine(LocalEngine(model, CrossEntropy(), datasets), (LEAVER,))
    with pytest.raises(RequestError, match="batch norm"):
        forgotten(engine, ServerState(Snapshot.of(model), Schedule(0.1, 5, 20)), REQUEST, CORRECTED)
    assert engine.cost.rounds == 0


def test_a_liar_under_a_mask_is_not_named_and_does_not_pass_the_servers_own_data():
    federation, datasets, state = digits()
    last = "client-4"
    held_out, rest = datasets["client-3"], {name: data for name, data in datasets.items() if name != "client-3"}
    engine = LyingEngine(federation.model, federation.loss, rest, validation=held_out)

    def lie(task, reply):
        if isinstance(task, Losses):
            return dataclasses.replace(reply, total=0 * reply.total)
        return dataclasses.replace(reply, total=-1e5 * reply.total) if isinstance(task, Gradient) else reply

    def risen(outcome):
        return federation.value(outcome.state.model.parameters, *held_out) - federation.value(
            state.model.parameters, *held_out
        )

    engine.lies = {last: lie}
    options = dataclasses.replace(CORRECTED, gradient_of="retained")
    outcome = forgotten(MaskedEngine(engine, (LEAVER,)), state, REQUEST, options)
    assert risen(outcome) <= options.tau
    assert not any(last in warning for warning in outcome.warnings)
    with pytest.raises(NumericalError, match=last):  # in clear it is
        forgotten(engine, state, REQUEST, options)
    engine.validation = None
    fooled = forgotten(MaskedEngine(engine, (LEAVER,)), state, REQUEST, dataclasses.replace(options, tau=None))
    assert risen(fooled) > options.tau  # the step is a bad one: it was the belt that held


def test_a_sum_of_the_wrong_shape_or_with_a_nan_accuses_nobody():
    federation, datasets, state = digits()

    class Broken(MaskedEngine):
        def ask(self, tasks):
            replies = super().ask(tasks)
            return {MASKED: dataclasses.replace(replies[MASKED], total=self.change(replies[MASKED].total))}

    engine = Broken(LocalEngine(federation.model, federation.loss, datasets))
    tasks = {name: Gradient(state.model) for name in datasets}
    for change, match in (
        (lambda t: t * float("nan"), "One of the clients replied a NaN"),
        (lambda t: t[:-1], "One of the clients replied .* of shape"),
    ):
        engine.change = change
        with pytest.raises(NumericalError, match=match):
            ask_mean(engine, tasks)
    engine.change = lambda t: t
    with pytest.raises(RequestError):
        engine.ask({name: Train(state.model, 1, 4, 0.1, 0) for name in datasets})
